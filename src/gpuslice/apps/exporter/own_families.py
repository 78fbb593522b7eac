"""Our own families: the snapshot as Prometheus sees it. Device series have no pod; container series do."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import gpuslice
from gpuslice.adapters.gpu.mig import MigSample
from gpuslice.adapters.web.exposition import Family, labels
from gpuslice.apps.exporter import catalogue as c
from gpuslice.apps.exporter.card_history import XidCounts
from gpuslice.apps.exporter.card_snapshot import CardSnapshot, NodeSnapshot
from gpuslice.apps.exporter.container_rows import COLUMNS, Rows
from gpuslice.apps.exporter.counters import CounterKind
from gpuslice.apps.exporter.dcgm import XID_FIELD
from gpuslice.apps.exporter.device_grants import ShareMode
from gpuslice.apps.exporter.fields import NVLINK, PCIE, RECOVERY, THROTTLE
from gpuslice.apps.exporter.node_pods import NodePods
from gpuslice.apps.exporter.node_state import NodeState

_MODES = {ShareMode.EXCLUSIVE: 1, ShareMode.SHARE: 2, ShareMode.MIG: 2}
_MILLI = 1e-3


class Families:
    """Families by metric, in the order of their first use."""

    def __init__(self) -> None:
        self._found: dict[str, Family] = {}

    def of(self, metric: c.Metric) -> Family:
        family = self._found.get(metric.name)
        if family is None:
            family = self._found[metric.name] = metric.family()
        return family

    def add(self, metric: c.Metric, label_text: str, value: float | None) -> None:
        """Add one sample; nothing if the value is unknown."""
        if value is not None:
            self.of(metric).samples.append((label_text, value))

    def all(self) -> list[Family]:
        return list(self._found.values())


@dataclass(frozen=True, slots=True)
class PageContext:
    """What the page needs besides the snapshot."""

    node: str
    pods: NodePods
    xids: XidCounts
    max_series: int = 100_000
    rows: Rows = field(init=False)  # kept from page to page

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", Rows(self.node, self.pods))


def card_labels(node: str, index: int, uuid: str, **more: str) -> str:
    return labels({"node": node, "gpu": str(index), "gpu_uuid": uuid, **more})


def families(snapshot: NodeSnapshot, context: PageContext) -> list[Family]:
    """Cards, containers and what belongs to nobody."""
    found, node = Families(), context.node
    for lost in snapshot.lost:
        found.add(c.GPU_UP, card_labels(node, lost.index, lost.uuid), 0)
        at = card_labels(node, lost.index, lost.uuid, what="card", reason=lost.reason)
        found.add(c.UNAVAILABLE, at, 1)
        if lost.uuid:
            _xids(found, lost.index, lost.uuid, context)
    for card in snapshot.cards:
        _card(found, card, snapshot, context)

    context.rows.keep({(card.sample.uuid, card.sample.index) for card in snapshot.cards})
    room = context.max_series
    for card in snapshot.cards:
        index, uuid = card.sample.index, card.sample.uuid
        fit = min(len(card.containers), room // len(COLUMNS))
        left_out = len(card.containers) - fit
        if left_out:
            at = card_labels(node, index, uuid, what="containers", reason="more series than max_series")
            found.add(c.UNAVAILABLE, at, left_out)
        room = 0 if left_out else room - fit * len(COLUMNS)
        for chunk in context.rows.pieces(card, islice(card.containers, fit), snapshot):
            for metric, piece in zip(COLUMNS, chunk, strict=True):
                found.of(metric).pieces.append(piece)
        for kind, use in card.strangers.items():
            at = card_labels(node, index, uuid, reason=kind)
            found.add(c.UNATTRIBUTED_MEMORY, at, use.memory_bytes)
            found.add(c.UNATTRIBUTED_SM, at, use.sm_ratio)
            if use.processes:
                found.add(c.UNATTRIBUTED_PROCESSES, at, use.processes)
        for (what, reason), count in card.missing.items():
            found.add(c.UNAVAILABLE, card_labels(node, index, uuid, what=what, reason=reason), count)
    return found.all()


def _card(found: Families, card: CardSnapshot, snapshot: NodeSnapshot, context: PageContext) -> None:
    sample, fields = card.sample, card.sample.fields
    node, index, uuid = context.node, sample.index, sample.uuid
    at = card_labels(node, index, uuid)
    about = {
        "model": sample.model,
        "pci_bus_id": sample.pci_bus_id,
        "driver_version": snapshot.driver_version,
    }
    found.add(c.GPU_UP, at, 1)
    found.add(c.GPU_INFO, card_labels(node, index, uuid, **about), 1)
    found.add(c.GPU_MEMORY_TOTAL, at, sample.total_bytes)
    found.add(c.GPU_MEMORY_USED, at, sample.used_bytes)
    found.add(c.GPU_MEMORY_RESERVED, at, sample.reserved_bytes)
    found.add(c.GPU_MEMORY_ALLOCATED, at, card.allocated_bytes)
    found.add(c.GPU_ALLOCATE_MODE, at, max((_MODES[mode] for mode in card.modes), default=0))
    found.add(c.GPU_UTILIZATION, at, _scaled(fields.get(203), 0.01))
    found.add(c.GPU_TEMPERATURE, at, _scaled(fields.get(150), 1))
    limit_c, now_c = fields.get(158), fields.get(150)
    margin_c = limit_c - now_c if isinstance(limit_c, float) and isinstance(now_c, float) else None
    found.add(c.GPU_TEMPERATURE_MARGIN, at, margin_c)
    found.add(c.GPU_POWER, at, _scaled(fields.get(155), 1))
    found.add(c.GPU_POWER_LIMIT, at, _scaled(fields.get(164), 1))
    found.add(c.GPU_ENERGY, at, _scaled(fields.get(156), _MILLI))
    found.add(c.GPU_RECOVERY, at, _scaled(fields.get(RECOVERY), 1))
    found.add(c.GPU_UNCORRECTED, at, _scaled(fields.get(311), 1))
    found.add(c.GPU_REMAP_FAILED, at, _scaled(fields.get(395), 1))
    for metric, name, parts in (
        (c.GPU_THROTTLED, "reason", THROTTLE),
        (c.GPU_PCIE, "direction", PCIE),
        (c.GPU_NVLINK, "direction", NVLINK),
    ):
        for word, (number, factor) in parts.items():
            if number in fields:
                value = _scaled(fields[number], factor)
                found.add(metric, card_labels(node, index, uuid, **{name: word}), value)
    for device in sample.mig:
        _mig(found, card, device, node)
    _xids(found, index, uuid, context)


def _mig(found: Families, card: CardSnapshot, device: MigSample, node: str) -> None:
    sample = card.sample
    at = card_labels(node, sample.index, sample.uuid, mig_uuid=device.uuid)
    about = {
        "mig_profile": device.profile,
        "gpu_instance": str(device.gpu_instance),
        "compute_instance": str(device.compute_instance),
    }
    found.add(c.MIG_INFO, card_labels(node, sample.index, sample.uuid, mig_uuid=device.uuid, **about), 1)
    found.add(c.MIG_MEMORY_TOTAL, at, device.total_bytes)
    found.add(c.MIG_MEMORY_USED, at, device.used_bytes)
    for metric, number in ((c.MIG_BUSY, 1001), (c.MIG_SM_BUSY, 1002)):
        found.add(metric, at, _scaled(device.fields.get(number), 1))
    for key, each in card.containers.items():
        if each.grant is not None and device.uuid in each.grant.mig:
            who = {"namespace": key.namespace, "pod": key.pod, "container": key.container}
            held = card_labels(node, sample.index, sample.uuid, **who, mig_uuid=device.uuid)
            found.add(c.CONTAINER_MIG, held, 1)


def _xids(found: Families, index: int, uuid: str, context: PageContext) -> None:
    for xid, tally in context.xids.of(uuid).items():
        at = card_labels(context.node, index, uuid, xid=str(xid))
        found.add(c.XID_ERRORS, at, tally.count)
        found.add(c.XID_LAST, at, tally.last_s or None)


def pod_label_family(
    pods: NodePods, snapshot: NodeSnapshot, node: str, patterns: Sequence[re.Pattern[str]]
) -> Family:
    """Labels of the pods with a card, under names that Prometheus takes."""
    family = c.POD_LABELS.family()
    keys = {(key.namespace, key.pod) for card in snapshot.cards for key in card.containers}
    for namespace, name in sorted(keys):
        pod = pods.pod(namespace, name)
        shown = pod.shown_labels(patterns, "label_") if pod is not None else {}
        if shown:
            family.add(1, labels({"node": node, "namespace": namespace, "pod": name, **shown}))
    return family


# -- the exporter itself -----------------------------------------------------------------------------------


def self_families(state: NodeState, snapshot: NodeSnapshot, series: int, *, kubernetes: bool) -> list[Family]:
    """How the exporter is doing at the moment of a scrape. `snapshot`: what is shown, with `series`."""
    found, cards = Families(), snapshot.cards
    at = labels({"node": state.node})
    found.add(c.BUILD_INFO, labels({"version": gpuslice.__version__}), 1)
    for name, reading in sorted(state.collectors.readings.items()):
        which = labels({"node": state.node, "collector": name})
        found.add(c.COLLECTOR_SUCCESS, which, int(reading.success))
        found.add(c.COLLECTOR_DURATION, which, round(reading.took_s, 6))
        found.add(c.COLLECTOR_ERRORS, which, reading.errors)
    found.add(c.TIME, at, round(time.time(), 3))
    if taken_at_s := state.snapshot.taken_at_s:
        found.add(c.SAMPLE_AGE, at, round(time.monotonic() - taken_at_s, 3))
    if kubernetes and cards:
        found.add(c.ATTRIBUTION, at, int(all(card.attributed for card in cards)))
    found.add(c.DEVICES, at, len(cards) if snapshot.taken_at_s else None)
    found.add(c.DEVICES_EXPECTED, at, state.expected_cards)
    counters = state.counters
    given = {number for card in cards for number in card.sample.fields} | {XID_FIELD}
    given |= {number for card in cards for device in card.sample.mig for number in device.fields}
    for counter in counters.file.counters if cards else ():  # while no card answers, nobody knows
        if counter.field is not None and counter.kind is not CounterKind.LABEL:
            which = labels({"node": state.node, "field": counter.name})
            found.add(c.FIELD_SUPPORTED, which, int(counter.field.id in given))
    found.add(c.CONFIG_SUCCESS, at, int(counters.ok))
    found.add(c.CONFIG_PROBLEMS, at, len(counters.file.problems))
    found.add(c.SERIES, at, series)
    return found.all()


def _scaled(value: float | str | None, factor: float) -> float | None:
    return None if value is None or isinstance(value, str) else value * factor
