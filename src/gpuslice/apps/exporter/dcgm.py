"""dcgm-exporter's families: the fields of the counter file with device labels, in the order of the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from gpuslice.adapters.web.exposition import Family, MetricKind
from gpuslice.apps.exporter.card_history import CardHistory, judge
from gpuslice.apps.exporter.card_snapshot import NodeSnapshot
from gpuslice.apps.exporter.counters import Counter, CounterKind
from gpuslice.apps.exporter.dcgm_entities import DcgmStyle, Entity, entities
from gpuslice.apps.exporter.node_pods import NodePods
from gpuslice.core.units import MIB

XID_FIELD = 230
# Written as counters in the files that go around, and none: a rate, a state, and counts over a window.
NOT_COUNTERS = frozenset({449, 392})
TOTALS = frozenset({"DCGM_EXP_XID_ERRORS_TOTAL", "DCGM_EXP_CLOCK_EVENTS_TOTAL"})
"""The two of what dcgm-exporter derives that only grow."""

_GPU_UTIL, _FB_USED = 203, 252

LINKS = (
    "OK",
    "ChipsetNotSupported",
    "GPUNotSupported",
    "TopologyNotSupported",
    "DisabledByRegKey",
    "NotSupported",
    "Unknown",
)
"""Words for NVML's ``nvmlGpuP2PStatus_t``, from 0."""

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
class DcgmInputs:
    """What the families are made of. `jobs`: card, or ``card.instance`` → a batch scheduler's jobs there."""

    counters: tuple[Counter, ...]
    snapshot: NodeSnapshot
    history: CardHistory
    pods: NodePods
    now_s: float
    style: DcgmStyle
    jobs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def families(inputs: DcgmInputs) -> list[Family]:
    """One family for each counter of the file that any card, or MIG instance, gives."""
    labels_of = [each for each in inputs.counters if each.kind is CounterKind.LABEL]
    shown = [
        entity
        for card in inputs.snapshot.cards
        for entity in entities(card, labels_of, inputs.pods, inputs.style, inputs.jobs)
    ]
    found = []
    for counter in inputs.counters:
        if counter.kind is CounterKind.LABEL:
            continue
        grows = counter.name in TOTALS or (counter.field is not None and counter.field.id not in NOT_COUNTERS)
        gauge = not grows and not inputs.style.upstream_types
        kind = MetricKind.GAUGE if gauge else MetricKind(str(counter.kind))
        family = Family(counter.name, kind, counter.help)
        for entity in shown:
            if counter.field is None:
                for figure, plain in _DERIVED[counter.name](entity, inputs):
                    family.samples += [(text, figure) for text in entity.texts_with(plain)]
            elif counter.field.id == XID_FIELD:
                code = inputs.history.xids.newest(entity.card.sample.uuid)
                words = {"err_code": str(code), "err_msg": XID_WORDS.get(code, "Unknown Error")}
                family.samples += [(text, code) for text in entity.texts_with({}, words)]
            else:
                family.samples += _samples(entity, counter.field.id)
        found.append(family)
    return found


def _samples(entity: Entity, number: int) -> Iterator[tuple[str, float]]:
    """The entity's figure; and each sharing container's own of what can be told apart, where it is known."""
    own = entity.shares if number in {_GPU_UTIL, _FB_USED} else ()
    value = entity.fields.get(number)
    if isinstance(value, (int, float)):
        for text in (entity.device_text,) if own else entity.texts:
            yield text, value
    for each, text in own:
        if number == _FB_USED and each.used_bytes is not None:
            yield text, each.used_bytes // MIB
        elif number == _GPU_UTIL and each.sm_ratio is not None:
            yield text, round(each.sm_ratio * 100, 3)


# -- what dcgm-exporter derives ----------------------------------------------------------------------------

Derived = Iterator[tuple[float, dict[str, str]]]


def _xid_counts(entity: Entity, inputs: DcgmInputs) -> Derived:
    window_ms = inputs.style.xid_window_ms
    window = {"window_size_in_ms": str(window_ms)}
    seen = inputs.history.xids.within(entity.card.sample.uuid, inputs.now_s - window_ms / 1000)
    if not seen:
        yield 0, window
    for xid, count in sorted(seen.items()):
        yield count, {**window, "xid": str(xid)}


def _xid_totals(entity: Entity, inputs: DcgmInputs) -> Derived:
    for xid, tally in inputs.history.xids.of(entity.card.sample.uuid).items():
        yield tally.count, {"xid": str(xid)}


def _clock_totals(entity: Entity, inputs: DcgmInputs) -> Derived:
    for event, count in (inputs.history.clocks.begun(entity.card.sample.uuid) or {}).items():
        yield count, {"clock_event": event}


def _clock_counts(entity: Entity, inputs: DcgmInputs) -> Derived:
    window = {"window_size_in_ms": str(inputs.style.clock_window_ms)}
    counts = inputs.history.clocks.counts(entity.card.sample.uuid)
    if counts is None:  # this card does not tell reasons
        return
    if not counts:
        yield 0, window
    for event, count in counts.items():
        yield count, {"clock_event": event, **window}


def _health(entity: Entity, inputs: DcgmInputs) -> Derived:
    sample = entity.card.sample
    xids = {xid for xid, tally in inputs.history.xids.of(sample.uuid).items() if tally.count}
    for finding in judge(sample.fields, inputs.history.rises.of(sample.uuid), xids):
        yield int(finding.result), {"health_error_code": finding.code, "health_watch": finding.watch}


def _peers(entity: Entity, inputs: DcgmInputs) -> Derived:
    for (one, other), status in inputs.snapshot.peers.items():
        if one == entity.card.sample.index:
            word = LINKS[status] if 0 <= status < len(LINKS) else LINKS[-1]
            yield status, {"link_status": word, "peer_gpu": str(other)}


_DERIVED = {
    "DCGM_EXP_XID_ERRORS_COUNT": _xid_counts,
    "DCGM_EXP_XID_ERRORS_TOTAL": _xid_totals,
    "DCGM_EXP_CLOCK_EVENTS_COUNT": _clock_counts,
    "DCGM_EXP_CLOCK_EVENTS_TOTAL": _clock_totals,
    "DCGM_EXP_GPU_HEALTH_STATUS": _health,
    "DCGM_EXP_P2P_STATUS": _peers,
}
