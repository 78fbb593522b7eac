"""NVML field values that have no DCGM field, under numbers of our own: what our own families need.

A number is the NVML field's, made negative. Source: nvml.h, ``NVML_FI_*``; times are nanoseconds, NVLink
counts KiB.
"""

from __future__ import annotations

from collections.abc import Mapping

_NS = 1e-9
_KIB = 1024

EXTRA_FIELDS: Mapping[int, str] = {
    -74: "NVML_FI_DEV_PERF_POLICY_POWER",
    -76: "NVML_FI_DEV_PERF_POLICY_SYNC_BOOST",
    -138: "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX",
    -139: "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX",
    -197: "NVML_FI_DEV_PCIE_COUNT_TX_BYTES",
    -198: "NVML_FI_DEV_PCIE_COUNT_RX_BYTES",
    -230: "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
    -269: "NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN",
    -270: "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN",
    -271: "NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN",
}

# label value → number, factor to the base unit
THROTTLE: Mapping[str, tuple[int, float]] = {
    "sw_power_cap": (-74, _NS),
    "sync_boost": (-76, _NS),
    "sw_thermal": (-269, _NS),
    "hw_thermal": (-270, _NS),
    "hw_power_brake": (-271, _NS),
}
PCIE: Mapping[str, tuple[int, float]] = {"tx": (-197, 1), "rx": (-198, 1)}
NVLINK: Mapping[str, tuple[int, float]] = {"tx": (-138, _KIB), "rx": (-139, _KIB)}
RECOVERY = -230

OWN_FIELDS = (112, 150, 155, 156, 158, 164, 203, 311, 395)
"""DCGM fields that our own families are made of, whatever the counter file asks for."""
