"""The cards at one moment as the page shows them: readings, owners and grants combined. No I/O.

For every card the containers' memory and the unattributed rest add up to the card's used memory. What could
not be read is None here, absent on the page, and counted in `CardSnapshot.missing` with its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from gpuslice.adapters.gpu.telemetry import CardSample
from gpuslice.apps.exporter.device_grants import CardGrants, DeviceGrant, DeviceGrants, ShareMode
from gpuslice.apps.exporter.isolation import Isolation
from gpuslice.core.attribution import CardUsage, ContainerKey, Owner, Stranger, Usage, divide
from gpuslice.core.device_time import TimeAccount

NO_PROCESS_LIST = "process list not readable"
HIDDEN_PROCESSES = "driver lists no processes although containers use the card"
NO_MEMORY = "driver does not tell memory of processes"
NO_UTILIZATION = "driver does not tell utilization of processes"
MIG_UTILIZATION = "driver does not tell utilization of processes on a card with MIG"


class ContainerSnapshot(msgspec.Struct, frozen=True, gc=False):
    """One container on one card; None is unknown. Thousands are made each second: no dataclass.

    `sm_ratio` as built is the driver's of its processes; `with_device_time` makes it the time they had.
    """

    used_bytes: int | None
    sm_ratio: float | None
    processes: int | None
    grant: DeviceGrant | None = None
    allocated_bytes: int | None = None
    limit_bytes: int | None = None
    borrowed_bytes: int | None = None
    share_ratio: float | None = None
    peak_bytes: int | None = None
    refused: int | None = None
    throttled_s: float | None = None


class Active(msgspec.Struct, frozen=True, gc=False):
    """When a container last computed on a card, in seconds since the epoch by the node's clock, and the most
    that it held there since it was first seen."""

    pod_uid: str
    last_s: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class CardSnapshot:
    """One card. `missing`: (what, reason) → how many series are absent for it."""

    sample: CardSample
    containers: Mapping[ContainerKey, ContainerSnapshot]
    strangers: Mapping[Stranger, Usage]
    allocated_bytes: int | None
    missing: Mapping[tuple[str, str], int] = field(default_factory=dict)

    @property
    def modes(self) -> set[ShareMode]:
        grants = (each.grant for each in self.containers.values())
        return {grant.mode for grant in grants if grant is not None}

    @property
    def attributed(self) -> bool:
        return not any(what == "attribution" for what, _ in self.missing)


@dataclass(frozen=True, slots=True)
class LostCard:
    """A card that does not answer. `index` and `uuid` are its last ones, "" if it never answered."""

    position: int
    reason: str
    index: int
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """All cards at one moment; `taken_at_s` is monotonic, 0 before the first sample."""

    cards: tuple[CardSnapshot, ...] = ()
    lost: tuple[LostCard, ...] = ()
    driver_version: str = ""
    taken_at_s: float = 0.0
    sm_seconds: Mapping[tuple[str, ContainerKey], float] = field(default_factory=dict)
    active: Mapping[tuple[str, ContainerKey], Active] = field(default_factory=dict)
    owners: Mapping[int, Owner] = field(default_factory=dict)  # pid → its owner
    peers: Mapping[tuple[int, int], int] = field(default_factory=dict)  # card numbers → NVLink status


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What is known besides the cards' readings. `obstacle`: why processes cannot be attributed."""

    owners: Mapping[int, Owner]
    grants: DeviceGrants
    isolation: Isolation
    memory_unit: str = "GiB"
    obstacle: str = ""


class SnapshotBuilder:
    """Builds cards repeatedly; a card for which nothing has changed is reused."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[CardSnapshot, tuple[object, ...]]] = {}

    def build(self, sample: CardSample, facts: NodeFacts) -> CardSnapshot:
        last, made_of = self._last.get(sample.uuid, (None, ()))
        if last is not None and made_of == _ingredients(sample, facts, last.containers):
            return replace(last, sample=sample)
        card = build_card(sample, facts)
        self._last[sample.uuid] = card, _ingredients(sample, facts, card.containers)
        return card


UTILIZATION_FIELD = 203


def with_device_time(
    card: CardSnapshot, account: TimeAccount, isolation: Isolation, step_s: float
) -> CardSnapshot:
    """The card with the time that each user had of it, instead of the driver's samples of processes."""
    sampled: dict[Owner, float] = {
        key: each.sm_ratio for key, each in card.containers.items() if each.sm_ratio
    }
    sampled |= {kind: use.sm_ratio for kind, use in card.strangers.items() if use.sm_ratio}
    if not (sampled or account.sampled):
        return card
    percent = card.sample.fields.get(UTILIZATION_FIELD)
    # a process that had work, or waited for its turn, did so while the card worked
    busiest = max((process.sm_ratio or 0.0 for process in card.sample.processes or ()), default=0.0)
    card_ratio = max(percent / 100, busiest) if isinstance(percent, (int, float)) else 1.0
    uuid = card.sample.uuid
    counted = {key: isolation.counted(key, uuid) for key in sampled if isinstance(key, ContainerKey)}
    charged_ns: dict[Owner, int] = {key: each.charged_ns for key, each in counted.items() if each is not None}
    had = account.divide(card_ratio, sampled, charged_ns, step_s)
    if had == sampled:
        return card
    containers, strangers = dict(card.containers), dict(card.strangers)
    for user, ratio in had.items():
        if isinstance(user, ContainerKey):
            containers[user] = msgspec.structs.replace(containers[user], sm_ratio=round(ratio, 4))
        else:
            strangers[user] = strangers[user]._replace(sm_ratio=round(ratio, 4))
    return replace(card, containers=containers, strangers=strangers)


def _ingredients(
    sample: CardSample, facts: NodeFacts, containers: Iterable[ContainerKey]
) -> tuple[object, ...]:
    """Everything that `build_card` reads. The containers follow from the processes' owners and the grants."""
    return (
        sample.used_bytes,
        sample.total_bytes,
        sample.processes,
        sample.mig,
        sample.mig_enabled,
        sample.index,
        facts.grants,
        facts.memory_unit,
        facts.obstacle,
        [facts.owners.get(process.pid) for process in sample.processes or ()],
        [facts.isolation.containers.get(key) for key in containers],
    )


def build_card(sample: CardSample, facts: NodeFacts) -> CardSnapshot:
    """Everything about one card."""
    grants = facts.grants.of(sample)
    obstacle = facts.obstacle
    if not obstacle and sample.processes is None:
        obstacle = NO_PROCESS_LIST
    elif not obstacle and not sample.processes:
        counted = (facts.isolation.counted(key, sample.uuid) for key in grants)
        obstacle = HIDDEN_PROCESSES if any(each and each.used_bytes for each in counted) else ""
    if obstacle:
        usage = _usage_without_processes(sample, grants, facts.isolation)
    else:
        usage = divide(sample.uuid, sample.used_bytes, sample.processes or (), facts.owners, grants)

    containers = {
        key: _container(key, use, grants.get(key), sample, facts, obstacle)
        for key, use in usage.owners.items()
    }
    # the rest is what makes the sum equal to the card's value
    rest_of = Stranger.UNKNOWN if Stranger.UNKNOWN in usage.strangers else Stranger.DRIVER
    strangers = {kind: use for kind, use in usage.strangers.items() if kind is not rest_of}
    if sample.used_bytes is not None:
        parts = [each.used_bytes or 0 for each in containers.values()]
        parts += [use.memory_bytes or 0 for use in strangers.values()]
        strangers[rest_of] = Usage(sample.used_bytes - sum(parts), None, 0)

    missing: Counter[tuple[str, str]] = Counter()
    if obstacle:
        missing["attribution", obstacle] = 1
    for each in containers.values():
        if each.used_bytes is None:
            missing["memory_used", obstacle or NO_MEMORY] += 1
        if each.sm_ratio is None:
            no_figure = MIG_UTILIZATION if sample.mig_enabled else NO_UTILIZATION
            missing["sm_utilization", obstacle or no_figure] += 1
    if sample.used_bytes is None:
        missing["card_memory", "driver does not tell"] += 1
    return CardSnapshot(sample, containers, strangers, _allocated(sample, grants, facts.memory_unit), missing)


def _allocated(sample: CardSample, grants: CardGrants, memory_unit: str) -> int | None:
    """Bytes given out by all device plugins: more than the card has if two of them give it out.

    Time slices of a whole card count once, and so do devices of one GPU instance.
    """
    held = {uuid for grant in grants.values() for uuid in grant.mig}
    instances = {each.gpu_instance: each.total_bytes for each in sample.mig if each.uuid in held}
    given = [
        *(sample.total_bytes for _ in {grant.resource for grant in grants.values() if grant.whole}),
        *(grant.memory_bytes(sample, memory_unit) for grant in grants.values() if grant.units),
        *instances.values(),
    ]
    known = [each for each in given if each is not None]
    return sum(known) if len(known) == len(given) else None


def _usage_without_processes(sample: CardSample, grants: CardGrants, isolation: Isolation) -> CardUsage:
    """The usage if no process can be attributed.

    A MIG device's own value remains, which belongs to its only holder, and the interposer's count, which is 0
    if it is in force and no process has called CUDA.
    """
    owners = {}
    for key, grant in grants.items():
        others = {uuid for other, held in grants.items() if other != key for uuid in held.mig}
        used_bytes: int | None
        if grant.mode is ShareMode.MIG and not others.intersection(grant.mig):
            used = {each.gpu_instance: each.used_bytes for each in sample.mig if each.uuid in grant.mig}
            shared = {each.gpu_instance for each in sample.mig if each.uuid not in grant.mig} & used.keys()
            used_bytes = None if shared else sum(used.values())
        elif (counted := isolation.counted(key, sample.uuid)) is not None:
            used_bytes = counted.used_bytes
        else:
            used_bytes = 0 if isolation.uses_nothing(key, sample.uuid) else None
        owners[key] = Usage(used_bytes, None, 0)
    return CardUsage(sample.uuid, owners, {Stranger.UNKNOWN: Usage(None, None, 0)})


def _container(  # noqa: PLR0917 — one caller
    key: ContainerKey,
    use: Usage,
    grant: DeviceGrant | None,
    sample: CardSample,
    facts: NodeFacts,
    obstacle: str,
) -> ContainerSnapshot:
    limit, counted = facts.isolation.limit(key, sample.uuid), facts.isolation.counted(key, sample.uuid)
    counts = facts.isolation.counts(key, sample.uuid)
    used = use.memory_bytes
    if used is None and counted is not None:
        used = counted.used_bytes
    allocated = None if grant is None else grant.memory_bytes(sample, facts.memory_unit)
    if limit is not None:
        limit_bytes: int | None = limit.memory_bytes and max(limit.memory_bytes, limit.request_bytes or 0)
    elif grant is not None and grant.mode is not ShareMode.SHARE:
        limit_bytes = allocated  # a container that has it alone needs no enforced limit
    else:
        limit_bytes = None
    own_bytes = limit.request_bytes if limit is not None else None
    peak_bytes = counted.peak_bytes if counted is not None else None
    if facts.isolation.uses_nothing(key, sample.uuid):
        peak_bytes = 0
    return ContainerSnapshot(
        used_bytes=used,
        sm_ratio=use.sm_ratio,
        processes=None if obstacle else use.processes,
        grant=grant,
        allocated_bytes=allocated,
        limit_bytes=limit_bytes,
        borrowed_bytes=max(0, used - own_bytes) if used is not None and own_bytes is not None else None,
        share_ratio=limit.compute_percent / 100 if limit is not None and limit.compute_percent else None,
        peak_bytes=peak_bytes,
        refused=counts.refused if counts is not None else None,
        throttled_s=counts.throttled_ns / 1e9 if counts is not None else None,
    )
