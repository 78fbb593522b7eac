"""The vendor's own metrics, for dashboards made for them; each set has its own switch.

``DCGM_CUSTOM_*`` is the set of its exporter 2.0, the six ``nvidia_gpu_*`` gauges that of 1.0 (port 9445).
Units are theirs: percent, MiB, milliwatts.
"""

from __future__ import annotations

from collections.abc import Callable

from gpuslice.adapters.web.exposition import Family, MetricKind, labels
from gpuslice.apps.exporter.card_snapshot import CardSnapshot, NodeSnapshot
from gpuslice.apps.exporter.device_grants import ShareMode
from gpuslice.core.attribution import ContainerKey, Owner, ProcessReading
from gpuslice.core.units import MIB

_CUSTOM = {
    "DCGM_CUSTOM_PROCESS_SM_UTIL": "SM utilization of a process in percent.",
    "DCGM_CUSTOM_PROCESS_MEM_COPY_UTIL": "Memory bandwidth utilization of a process in percent.",
    "DCGM_CUSTOM_PROCESS_ENCODE_UTIL": "Encoder utilization of a process in percent.",
    "DCGM_CUSTOM_PROCESS_DECODE_UTIL": "Decoder utilization of a process in percent.",
    "DCGM_CUSTOM_PROCESS_MEM_USED": "Memory used by a process in MiB.",
    "DCGM_CUSTOM_CONTAINER_MEM_ALLOCATED": "Memory allocated to a container in MiB.",
    "DCGM_CUSTOM_CONTAINER_CP_ALLOCATED": "Compute share allocated to a container; 0 without a limit.",
    "DCGM_CUSTOM_DEV_FB_TOTAL": "Memory of the card in MiB.",
    "DCGM_CUSTOM_DEV_FB_ALLOCATED": "Part of the card's memory that is allocated.",
    "DCGM_CUSTOM_ALLOCATE_MODE": "How the node's cards are given out: 0 not, 1 whole, 2 shared.",
    "DCGM_CUSTOM_ILLEGAL_PROCESS_SM_UTIL": "SM utilization of a process without an allocation in percent.",
    "DCGM_CUSTOM_ILLEGAL_PROCESS_MEM_COPY_UTIL": "Memory bandwidth utilization of such a process in percent.",
    "DCGM_CUSTOM_ILLEGAL_PROCESS_ENCODE_UTIL": "Encoder utilization of such a process in percent.",
    "DCGM_CUSTOM_ILLEGAL_PROCESS_DECODE_UTIL": "Decoder utilization of such a process in percent.",
    "DCGM_CUSTOM_ILLEGAL_PROCESS_MEM_USED": "Memory used by such a process in MiB.",
}
LEGACY = {
    "nvidia_gpu_duty_cycle": "Percent of time over the past sample period during which one or more kernels "
    "were executing on the GPU device",
    "nvidia_gpu_memory_total_bytes": "Total memory of the GPU device",
    "nvidia_gpu_memory_used_bytes": "Memory used by the GPU device",
    "nvidia_gpu_num_devices": "Number of GPU devices",
    "nvidia_gpu_power_usage_milliwatts": "Power usage of the GPU device in watts",
    "nvidia_gpu_temperature_celsius": "Temperature of the GPU device in celsius",
}
_MODES = {ShareMode.EXCLUSIVE: 1, ShareMode.SHARE: 2, ShareMode.MIG: 2}


def _families(words: dict[str, str]) -> dict[str, Family]:
    return {name: Family(name, MetricKind.GAUGE, about) for name, about in words.items()}


# -- exporter 2.0 ------------------------------------------------------------------------------------------


def custom_families(
    snapshot: NodeSnapshot,
    node: str,
    pool: str = "",
    *,
    name_of: Callable[[int], str] = lambda _: "",
) -> list[Family]:
    """The ``DCGM_CUSTOM_*`` set. `name_of`: pid → name of the program."""
    found = _families(_CUSTOM)
    at_node = {"NodeName": node, "NodePoolId": pool, "PodSource": "gpuslice"}
    modes = [_MODES[mode] for card in snapshot.cards for mode in card.modes]
    found["DCGM_CUSTOM_ALLOCATE_MODE"].add(max(modes, default=0), labels(at_node))
    for card in snapshot.cards:
        sample = card.sample
        device = at_node | {
            "UUID": sample.uuid,
            "device": f"nvidia{sample.index}",
            "gpu": str(sample.index),
            "modelName": sample.model,
        }
        # a board that asks for it shows the card's DCGM_FI_* series
        support = "true" if sample.fields else "false"
        at = labels(device | {"DriverVersion": snapshot.driver_version, "SupportDCGM": support})
        if sample.total_bytes:
            found["DCGM_CUSTOM_DEV_FB_TOTAL"].add(sample.total_bytes / MIB, at)
            if card.allocated_bytes is not None:
                share = card.allocated_bytes / sample.total_bytes
                found["DCGM_CUSTOM_DEV_FB_ALLOCATED"].add(share, at)
        for key, each in card.containers.items():
            if each.allocated_bytes is not None:
                at = labels(device | _pod(card, key))
                found["DCGM_CUSTOM_CONTAINER_MEM_ALLOCATED"].add(each.allocated_bytes / MIB, at)
                found["DCGM_CUSTOM_CONTAINER_CP_ALLOCATED"].add(each.share_ratio or 0.0, at)
        for process in sample.processes or ():
            named = device | {"ProcessName": name_of(process.pid)}
            _process(found, card, process, snapshot.owners.get(process.pid), named)
    return list(found.values())


def _process(
    found: dict[str, Family],
    card: CardSnapshot,
    process: ProcessReading,
    owner: Owner | None,
    device: dict[str, str],
) -> None:
    """A process of a container with an allocation is legal; any other is not."""
    legal = isinstance(owner, ContainerKey) and card.containers[owner].grant is not None
    prefix = "DCGM_CUSTOM_PROCESS_" if legal else "DCGM_CUSTOM_ILLEGAL_PROCESS_"
    key = owner if isinstance(owner, ContainerKey) else ContainerKey("", "", "")
    about = {"ProcessId": str(process.pid), "ProcessType": "C"}
    at = labels(device | _pod(card, key) | about)
    if process.memory_bytes is not None:
        found[prefix + "MEM_USED"].add(process.memory_bytes / MIB, at)
    if process.sm_ratio is not None:
        found[prefix + "SM_UTIL"].add(process.sm_ratio * 100, at)
    for name, ratio in (
        ("MEM_COPY_UTIL", process.memory_ratio),
        ("ENCODE_UTIL", process.encoder_ratio),
        ("DECODE_UTIL", process.decoder_ratio),
    ):
        if ratio is not None:
            found[prefix + name].add(ratio * 100, at)


def _pod(card: CardSnapshot, key: ContainerKey) -> dict[str, str]:
    each = card.containers.get(key)
    mode = ""
    if each is not None and each.grant is not None:  # it knows no third
        mode = "exclusive" if each.grant.mode is ShareMode.EXCLUSIVE else "share"
    return {
        "AllocateMode": mode,
        "ContainerName": key.container,
        "NamespaceName": key.namespace,
        "PodName": key.pod,
    }


# -- exporter 1.0 ------------------------------------------------------------------------------------------


def legacy_families(snapshot: NodeSnapshot, node: str) -> list[Family]:
    """Six gauges: one series per card if it is whole or idle, one per container if it is shared."""
    found = _families(LEGACY)
    found["nvidia_gpu_num_devices"].add(len(snapshot.cards), labels({"node_name": node}))
    for card in snapshot.cards:
        sample, fields = card.sample, card.sample.fields
        about_card = {
            "minor_number": str(sample.index),
            "name": sample.model,
            "node_name": node,
            "uuid": sample.uuid,
        }
        duty = _times(fields.get(203), 1)
        shown: list[tuple[dict[str, str], float | None, float | None]] = []  # holder, bytes used, duty cycle
        for key, each in card.containers.items():
            if each.grant is not None and each.grant.mode is ShareMode.EXCLUSIVE:
                shown.append((_legacy_pod(key, "exclusive"), sample.used_bytes, duty))
            elif each.grant is not None:
                shown.append((_legacy_pod(key, "share"), each.used_bytes, _times(each.sm_ratio, 100)))
        for holder, used, busy in shown or [(_legacy_pod(None, ""), sample.used_bytes, duty)]:
            at = labels(about_card | holder)
            values = {
                "nvidia_gpu_duty_cycle": busy,
                "nvidia_gpu_memory_total_bytes": sample.total_bytes,
                "nvidia_gpu_memory_used_bytes": used,
                "nvidia_gpu_power_usage_milliwatts": _times(fields.get(155), 1000),
                "nvidia_gpu_temperature_celsius": _times(fields.get(150), 1),
            }
            for name, value in values.items():
                if value is not None:
                    found[name].add(value, at)
    return list(found.values())


def _legacy_pod(key: ContainerKey | None, mode: str) -> dict[str, str]:
    return {
        "allocate_mode": mode,
        "container_name": key.container if key else "",
        "namespace_name": key.namespace if key else "",
        "pod_name": key.pod if key else "",
    }


def _times(value: float | str | None, factor: float) -> float | None:
    return value * factor if isinstance(value, (int, float)) else None
