"""What can be read of a card: DCGM's field catalogue, and NVML field values under numbers of our own.

DCGM's: every name that a counter file may use, in old and new spelling. The table next to this file lists id,
name since DCGM 4.6, older names, and the corresponding NVML field value from DCGM's own table. Source: the
field list of DCGM 4.6.0.

Our own: what our own families need and DCGM has no field for. A number is the NVML field's, negated. Source:
nvml.h, ``NVML_FI_*``; times are nanoseconds, NVLink counts KiB.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

from gpuslice.adapters.gpu.gpm import TOTALS


@dataclass(frozen=True, slots=True)
class Field:
    """One DCGM field. `nvml_field` is the name of an ``NVML_FI_*`` constant, "" if there is none."""

    id: int
    name: str
    older_names: tuple[str, ...] = ()
    nvml_field: str = ""
    kind: str = "number"


# The 1.x names of dcgm-exporter, for counter files that are still written in them.
FIRST_NAMES = {
    "dcgm_sm_clock": 100,
    "dcgm_memory_clock": 101,
    "dcgm_memory_temp": 140,
    "dcgm_gpu_temp": 150,
    "dcgm_power_usage": 155,
    "dcgm_total_energy_consumption": 156,
    "dcgm_pcie_replay_counter": 202,
    "dcgm_gpu_utilization": 203,
    "dcgm_mem_copy_utilization": 204,
    "dcgm_enc_utilization": 206,
    "dcgm_dec_utilization": 207,
    "dcgm_xid_errors": 230,
    "dcgm_fb_free": 251,
    "dcgm_fb_used": 252,
    "dcgm_nvlink_bandwidth_total": 449,
}


def load() -> dict[str, Field]:
    """Every field under each of its names."""
    text = resources.files(__package__).joinpath("dcgm_fields.csv").read_text()
    fields = [
        Field(
            id=int(row["id"]),
            name=row["name"],
            older_names=tuple(row["older_names"].split()),
            nvml_field=row["nvml_field"],
            kind=row["kind"],
        )
        for row in csv.DictReader(text.splitlines())
    ]
    by_id = {field.id: field for field in fields}
    catalogue = {name: field for field in fields for name in (field.name, *field.older_names)}
    catalogue |= {name: by_id[number] for name, number in FIRST_NAMES.items()}
    return catalogue


_NS = 1e-9
_KIB = 1024

EXTRA_FIELDS: Mapping[int, str] = {
    **dict.fromkeys(TOTALS, ""),
    -74: "NVML_FI_DEV_PERF_POLICY_POWER",
    -76: "NVML_FI_DEV_PERF_POLICY_SYNC_BOOST",
    -138: "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX",
    -139: "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX",
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
PCIE: Mapping[str, tuple[int, float]] = {"tx": (-1009, 1), "rx": (-1010, 1)}
NVLINK: Mapping[str, tuple[int, float]] = {"tx": (-138, _KIB), "rx": (-139, _KIB)}
RECOVERY = -230

OWN_FIELDS = (112, 150, 155, 156, 158, 164, 203, 311, 395)
"""DCGM fields from which our own families are made, whatever the counter file asks for."""
