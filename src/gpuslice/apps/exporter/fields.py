"""DCGM's field catalogue: every name that a counter file may use, old and new spelling alike.

The table beside this file lists id, name since DCGM 4.6, older names, and the NVML field value that DCGM's
own table gives for it. Source: the field list of DCGM 4.6.0.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class Field:
    """One DCGM field. `nvml_field` is the name of an ``NVML_FI_*`` constant, "" where there is none."""

    id: int
    name: str
    older_names: tuple[str, ...] = ()
    nvml_field: str = ""
    kind: str = "number"
    entity: str = "GPU"


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
    fields = [_field(row) for row in csv.DictReader(text.splitlines())]
    by_id = {field.id: field for field in fields}
    catalogue = {name: field for field in fields for name in (field.name, *field.older_names)}
    catalogue |= {name: by_id[number] for name, number in FIRST_NAMES.items()}
    return catalogue


def _field(row: dict[str, str]) -> Field:
    return Field(
        id=int(row["id"]),
        name=row["name"],
        older_names=tuple(row["older_names"].split()),
        nvml_field=row["nvml_field"],
        kind=row["kind"],
        entity=row["entity"],
    )
