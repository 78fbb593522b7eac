"""One card at one moment as the page shows it: readings, owners and promises brought together. No I/O.

For every card the containers' memory and the unattributed rest add up to the card's used memory. What could
not be read is None here, absent on the page, and counted in `CardPicture.missing` with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from gpuslice.adapters.gpu.telemetry import CardSample
from gpuslice.adapters.region.reader import CardUsage as Counted
from gpuslice.apps.exporter.book import Book, Held, Promise, ShareMode, allocated_bytes, mig_bytes
from gpuslice.apps.exporter.isolation import Isolation
from gpuslice.core.attribution import CardUsage, ContainerKey, Owner, Stranger, Usage, divide

NO_PROCESS_LIST = "process list not readable"
HIDDEN_PROCESSES = "driver lists no processes although containers use the card"
NO_MEMORY = "driver does not tell memory of processes"
NO_UTILIZATION = "driver does not tell utilization of processes"
MIG_UTILIZATION = "driver does not tell utilization of processes on a card with MIG"


class ContainerPicture(msgspec.Struct, frozen=True, gc=False):
    """One container on one card; None is unknown. Thousands are made each second, so not a dataclass."""

    used_bytes: int | None
    sm_ratio: float | None
    processes: int | None
    promise: Promise | None = None
    allocated_bytes: int | None = None
    limit_bytes: int | None = None
    share_ratio: float | None = None
    peak_bytes: int | None = None
    refused: int | None = None
    throttled_s: float | None = None


@dataclass(frozen=True, slots=True)
class CardPicture:
    """One card. `missing`: (what, reason) → how many series are absent for it."""

    sample: CardSample
    containers: Mapping[ContainerKey, ContainerPicture]
    strangers: Mapping[Stranger, Usage]
    allocated_bytes: int | None
    missing: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def modes(self) -> set[ShareMode]:
        promises = (each.promise for each in self.containers.values())
        return {promise.mode for promise in promises if promise is not None}

    @property
    def attributed(self) -> bool:
        return not any(what == "attribution" for what, _ in self.missing)


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What is known beside the cards' readings. `obstacle`: why processes have no containers."""

    owners: Mapping[int, Owner]
    book: Book
    isolation: Isolation
    memory_unit: str = "GiB"
    obstacle: str = ""


class Drawer:
    """Draws cards again and again; one of which nothing changed since the last time is not thought over."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[CardPicture, tuple[object, ...]]] = {}

    def draw(self, sample: CardSample, known: Knowledge) -> CardPicture:
        last, made_of = self._last.get(sample.uuid, (None, ()))
        if last is not None and made_of == _made_of(sample, known, last.containers):
            return replace(last, sample=sample)
        picture = draw(sample, known)
        self._last[sample.uuid] = picture, _made_of(sample, known, picture.containers)
        return picture


def _made_of(sample: CardSample, known: Knowledge, containers: Iterable[ContainerKey]) -> tuple[object, ...]:
    """All that `draw` looks at. The containers follow from the processes' owners and the book."""
    return (
        sample.used_bytes,
        sample.total_bytes,
        sample.processes,
        sample.mig,
        sample.mig_enabled,
        sample.index,
        known.book,
        known.memory_unit,
        known.obstacle,
        [known.owners.get(process.pid) for process in sample.processes or ()],
        [known.isolation.containers.get(key) for key in containers],
    )


def draw(sample: CardSample, known: Knowledge) -> CardPicture:
    """Everything about one card."""
    promises = known.book.of(sample)
    counted = {key: found for key in promises if (found := known.isolation.counted(key, sample.uuid))}
    obstacle = known.obstacle or _obstacle(sample, counted.values())
    usage = _unattributed(sample, promises, known) if obstacle else _divided(sample, promises, known)
    containers = {
        key: _container(key, use, promises.get(key), sample, known, obstacle)
        for key, use in usage.owners.items()
    }
    missing = _missing(sample, containers, obstacle)
    given = [each.allocated_bytes for each in containers.values() if each.promise is not None]
    allocated = None if None in given else sum(each for each in given if each is not None)
    if any(each.promise is not None and each.promise.whole for each in containers.values()):
        allocated = sample.total_bytes  # time slices of a whole card are the card, however many
    return CardPicture(sample, containers, _strangers(sample, containers, usage), allocated, missing)


def _strangers(
    sample: CardSample, containers: Mapping[ContainerKey, ContainerPicture], usage: CardUsage
) -> dict[Stranger, Usage]:
    """Those that `usage` has, with the rest such that everything adds up to the card's figure."""
    rest_of = Stranger.UNKNOWN if Stranger.UNKNOWN in usage.strangers else Stranger.DRIVER
    strangers = {kind: use for kind, use in usage.strangers.items() if kind is not rest_of}
    if sample.used_bytes is not None:
        parts = [each.used_bytes or 0 for each in containers.values()]
        parts += [use.memory_bytes or 0 for use in strangers.values()]
        strangers[rest_of] = Usage(sample.used_bytes - sum(parts), None, 0)
    return strangers


def _obstacle(sample: CardSample, counted: Iterable[Counted]) -> str:
    if sample.processes is None:
        return NO_PROCESS_LIST
    used = any(each.used_bytes for each in counted)
    return HIDDEN_PROCESSES if used and not sample.processes else ""


def _divided(sample: CardSample, promises: Held, known: Knowledge) -> CardUsage:
    return divide(sample.uuid, sample.used_bytes, sample.processes or (), known.owners, promises)


def _unattributed(sample: CardSample, promises: Held, known: Knowledge) -> CardUsage:
    """No process can be given to anybody: the interposer's count is what is left, where there is one."""
    owners = {
        key: Usage(_told_bytes(promise, key, sample, promises, known.isolation), None, 0)
        for key, promise in promises.items()
    }
    return CardUsage(sample.uuid, owners, {Stranger.UNKNOWN: Usage(None, None, 0)})


def _told_bytes(
    promise: Promise, key: ContainerKey, sample: CardSample, promises: Held, isolation: Isolation
) -> int | None:
    """What is known without the processes: all of a MIG device is its only holder's."""
    others = {uuid for other, held in promises.items() if other != key for uuid in held.mig}
    if promise.mode is not ShareMode.MIG or others.intersection(promise.mig):
        return _counted_bytes(isolation, key, sample.uuid)
    used = {each.gpu_instance: each.used_bytes for each in sample.mig if each.uuid in promise.mig}
    shared = {each.gpu_instance for each in sample.mig if each.uuid not in promise.mig} & used.keys()
    return None if shared else sum(used.values())


def _counted_bytes(isolation: Isolation, key: ContainerKey, uuid: str) -> int | None:
    """What the interposer counts; 0 where it is in force and nobody has called CUDA yet."""
    counted = isolation.counted(key, uuid)
    if counted is not None:
        return counted.used_bytes
    return 0 if isolation.limit(key, uuid) is not None else None


def _container(  # noqa: PLR0917 — one caller
    key: ContainerKey,
    use: Usage,
    promise: Promise | None,
    sample: CardSample,
    known: Knowledge,
    obstacle: str,
) -> ContainerPicture:
    limit, counted = known.isolation.limit(key, sample.uuid), known.isolation.counted(key, sample.uuid)
    counts = known.isolation.counts(key, sample.uuid)
    used = use.memory_bytes
    if used is None and counted is not None:
        used = counted.used_bytes
    return ContainerPicture(
        used_bytes=used,
        sm_ratio=use.sm_ratio,
        processes=None if obstacle else use.processes,
        promise=promise,
        allocated_bytes=_allocated(promise, sample, known.memory_unit),
        limit_bytes=limit.memory_bytes if limit is not None else _hardware_limit(promise, sample),
        share_ratio=limit.compute_percent / 100 if limit is not None and limit.compute_percent else None,
        peak_bytes=counted.peak_bytes if counted is not None else None,
        refused=counts.refused if counts is not None else None,
        throttled_s=counts.throttled_ns / 1e9 if counts is not None else None,
    )


def _allocated(promise: Promise | None, sample: CardSample, unit: str) -> int | None:
    if promise is None:
        return None
    if promise.mode is ShareMode.MIG:
        return mig_bytes(promise, sample.mig)
    return allocated_bytes(promise, sample.total_bytes, unit)


def _hardware_limit(promise: Promise | None, sample: CardSample) -> int | None:
    """What nobody needs to enforce: the size of a card, or of MIG devices, that one container has alone."""
    if promise is None or promise.mode is ShareMode.SHARE:
        return None
    return mig_bytes(promise, sample.mig) if promise.mode is ShareMode.MIG else sample.total_bytes


def _missing(
    sample: CardSample, containers: Mapping[ContainerKey, ContainerPicture], obstacle: str
) -> Mapping[tuple[str, str], int]:
    found: Counter[tuple[str, str]] = Counter()
    if obstacle:
        found["attribution", obstacle] = 1
    for each in containers.values():
        if each.used_bytes is None:
            found["memory_used", obstacle or NO_MEMORY] += 1
        if each.sm_ratio is None:
            no_figure = MIG_UTILIZATION if sample.mig_enabled else NO_UTILIZATION
            found["sm_utilization", obstacle or no_figure] += 1
    if sample.used_bytes is None:
        found["card_memory", "driver does not tell"] += 1
    return found
