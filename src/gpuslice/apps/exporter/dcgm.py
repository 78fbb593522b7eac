"""dcgm-exporter's families: the fields of the counter file with device labels, in the order of the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gpuslice.adapters.web.exposition import Family, MetricKind, labels
from gpuslice.apps.exporter.counters import Counter, CounterKind
from gpuslice.apps.exporter.directory import Directory
from gpuslice.apps.exporter.picture import CardPicture
from gpuslice.apps.exporter.sampler import Snapshot
from gpuslice.apps.exporter.xids import Xids
from gpuslice.core.attribution import ContainerKey

XID_FIELD = 230
# Written as counters in the files that go around, and none: a rate, a state, and counts over a window.
NOT_COUNTERS = frozenset({449, 392})

CLOCK_EVENTS = {
    0x1: "gpu_idle",
    0x2: "clocks_setting",
    0x4: "power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
XID_WORDS = {
    0: "No Error",
    13: "Graphics Engine Exception",
    31: "GPU memory page fault",
    43: "GPU stopped processing",
    45: "Preemptive cleanup, due to previous errors",
    48: "Double Bit ECC Error",
    62: "Internal micro-controller halt",
    63: "ECC page retirement or row remapping recording event",
    64: "ECC page retirement or row remapper recording failure",
    74: "NVLINK Error",
    79: "GPU has fallen off the bus",
    92: "High single-bit ECC error rate",
    94: "Contained ECC error",
    95: "Uncontained ECC error",
    119: "GSP RPC Timeout",
    120: "GSP Error",
}


@dataclass(frozen=True, slots=True)
class DcgmStyle:
    """How the series are to look."""

    hostname: str  # "" leaves the label out
    old_labels: bool = False
    join_model: bool = False
    upstream_types: bool = False
    pod_labels: bool = False
    pod_uid: bool = False
    xid_window_ms: int = 300_000
    clock_window_ms: int = 300_000


@dataclass(frozen=True, slots=True)
class DcgmInputs:
    """What the page is made of beside the style. `clock_windows`: uuid → reason → samples that showed it."""

    counters: tuple[Counter, ...]
    snapshot: Snapshot
    xids: Xids
    directory: Directory
    clock_windows: Mapping[str, Mapping[str, int]]
    now_s: float
    style: DcgmStyle


def families(inputs: DcgmInputs) -> list[Family]:
    """One family for each counter of the file that any card gives."""
    label_counters = [each for each in inputs.counters if each.kind is CounterKind.LABEL]
    cards = [(card, _labels(card, label_counters, inputs)) for card in inputs.snapshot.cards]
    found = []
    for counter in inputs.counters:
        if counter.kind is CounterKind.LABEL:
            continue
        family = Family(counter.name, _kind(counter, inputs.style), counter.help)
        for card, own in cards:
            _add(family, counter, card, own, inputs)
        found.append(family)
    return found


def _kind(counter: Counter, style: DcgmStyle) -> MetricKind:
    wrong = counter.field is None or counter.field.id in NOT_COUNTERS
    if wrong and not style.upstream_types:
        return MetricKind.GAUGE
    return MetricKind(str(counter.kind))


def _add(
    family: Family,
    counter: Counter,
    card: CardPicture,
    own: Mapping[str, str],
    inputs: DcgmInputs,
) -> None:
    if counter.field is None:
        _add_derived(family, counter.name, card.sample.uuid, own, inputs)
    elif counter.field.id == XID_FIELD:
        code = inputs.xids.newest(card.sample.uuid)
        words = XID_WORDS.get(code, "Unknown Error")
        family.add(code, labels({**own, "err_code": str(code), "err_msg": words}))
    else:
        value = card.sample.fields.get(counter.field.id)
        if isinstance(value, (int, float)):
            family.add(value, labels(own))


def _add_derived(family: Family, name: str, uuid: str, own: Mapping[str, str], inputs: DcgmInputs) -> None:
    """Counts over a window. Health and peer status would need DCGM's host engine and stay absent."""
    style = inputs.style
    if name == "DCGM_EXP_XID_ERRORS_COUNT":
        window = {"window_size_in_ms": str(style.xid_window_ms)}
        seen = inputs.xids.within(uuid, inputs.now_s - style.xid_window_ms / 1000)
        if not seen:
            family.add(0, labels({**own, **window}))
        for xid, count in sorted(seen.items()):
            family.add(count, labels({**own, **window, "xid": str(xid)}))
    elif name == "DCGM_EXP_CLOCK_EVENTS_COUNT":
        window = {"window_size_in_ms": str(style.clock_window_ms)}
        for event, count in inputs.clock_windows.get(uuid, {}).items():
            family.add(count, labels({**own, "clock_event": event, **window}))


def _labels(card: CardPicture, label_counters: list[Counter], inputs: DcgmInputs) -> dict[str, str]:
    """Device labels in dcgm-exporter's order."""
    sample, style = card.sample, inputs.style
    found = {
        "gpu": str(sample.index),
        "uuid" if style.old_labels else "UUID": sample.uuid,
        "pci_bus_id": sample.pci_bus_id,
        "device": f"nvidia{sample.index}",
        "modelName": sample.model.replace(" ", "-") if style.join_model else sample.model,
    }
    if style.hostname:
        found["hostname"] = style.hostname
    for counter in label_counters:
        value = sample.fields.get(counter.field.id) if counter.field is not None else None
        if value is not None:
            found[counter.name] = value if isinstance(value, str) else f"{value:g}"
    holders = list(card.containers)
    if style.pod_labels and len(holders) == 1:
        found |= _pod_labels(holders[0], inputs.directory, style)
    return found


def _pod_labels(key: ContainerKey, directory: Directory, style: DcgmStyle) -> dict[str, str]:
    names = (
        ("pod_name", "pod_namespace", "container_name")
        if style.old_labels
        else ("pod", "namespace", "container")
    )
    found = dict(zip(names, (key.pod, key.namespace, key.container), strict=True))
    if style.pod_uid:
        pod = directory.pod(key.namespace, key.pod)
        found["pod_uid"] = pod.uid if pod is not None else ""
    return found
