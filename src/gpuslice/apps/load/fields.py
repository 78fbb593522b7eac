"""What each field id means as a load: the kernel, the words in the report, and its metric."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """One kind of load. `field`: its metric; `exact`: the metric should show the requested level."""

    number: int
    title: str
    kind: str
    field: str
    exact: bool = False
    moved: str = ""  # our counter of the bytes moved, and its direction
    direction: str = ""


_PCIE, _NVLINK = "gpuslice_gpu_pcie_bytes_total", "gpuslice_gpu_nvlink_bytes_total"
MOVING = frozenset({"to_host", "to_device", "to_peer", "from_peer"})
"""Kinds of work that are measured in bytes."""
BETWEEN_CARDS = frozenset({"to_peer", "from_peer"})
"""Kinds of work that need a second card."""

WORKS = {
    work.number: work
    for work in (
        Work(1001, "GrActivity", "busy", "DCGM_FI_PROF_GR_ENGINE_ACTIVE", exact=True),
        Work(1002, "SmActivity", "busy", "DCGM_FI_PROF_SM_ACTIVE", exact=True),
        Work(1003, "SmOccupancy", "busy", "DCGM_FI_PROF_SM_OCCUPANCY"),
        Work(1004, "TensorEngineActive", "tensor", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"),
        Work(1005, "DramUtil", "memory", "DCGM_FI_PROF_DRAM_ACTIVE"),
        Work(1006, "Fp64EngineActive", "fp64", "DCGM_FI_PROF_PIPE_FP64_ACTIVE"),
        Work(1007, "Fp32EngineActive", "fp32", "DCGM_FI_PROF_PIPE_FP32_ACTIVE"),
        Work(1008, "Fp16EngineActive", "fp16", "DCGM_FI_PROF_PIPE_FP16_ACTIVE"),
        Work(1009, "PcieTxBytes", "to_host", "DCGM_FI_PROF_PCIE_TX_BYTES", False, _PCIE, "tx"),
        Work(1010, "PcieRxBytes", "to_device", "DCGM_FI_PROF_PCIE_RX_BYTES", False, _PCIE, "rx"),
        Work(1011, "NvLinkTxBytes", "to_peer", "DCGM_FI_PROF_NVLINK_TX_BYTES", False, _NVLINK, "tx"),
        Work(1012, "NvLinkRxBytes", "from_peer", "DCGM_FI_PROF_NVLINK_RX_BYTES", False, _NVLINK, "rx"),
    )
}
