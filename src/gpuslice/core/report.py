"""Who has what: the figures behind every table of allocations.

Nodes and pods of the API in, plain numbers out. What is *allocated* is what annotations say; what is *used*
on a card is measured elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gpuslice.core.contract import EXCLUSIVE_GPU
from gpuslice.core.model import Card, Pod
from gpuslice.core.quantity import whole_number
from gpuslice.core.request import WHOLE_CORE_PERCENT
from gpuslice.core.units import MIB, UNIT_MIB, card_units
from gpuslice.core.views import names_offered, node_of

_NOTHING: Mapping[str, str] = {}
GONE = "Gone"  # for the state of a pod that the API server does not have any more
_MOST_GIB = 100  # the vendor's tools take a card with more units than this for one that is counted in MiB


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a report reads of a node. `address` is its first InternalIP, empty when it has none."""

    name: str
    address: str = ""
    ready: bool = True
    schedulable: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    capacity: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, str] = field(default_factory=dict)

    def amount(self, resource: str) -> int:
        """How much of `resource` pods may take here."""
        return whole_number(self.allocatable.get(resource)) or 0

    def built_in(self, resource: str) -> int:
        """How much of `resource` there is, what is out of use included."""
        return whole_number(self.capacity.get(resource)) or 0

    @property
    def units(self) -> int:
        """How much memory of cards pods may take here."""
        return self.amount(names_offered(self.allocatable).memory)


@dataclass(frozen=True, slots=True)
class PodFacts:
    """What a report reads of a pod beside its core values.

    `status`: kubectl's word for its state, which says more than the phase. `exclusive_gpus`: whole cards.
    """

    pod: Pod
    phase: str = ""
    status: str = ""
    exclusive_gpus: int = 0


@dataclass(frozen=True, slots=True)
class PodUse:
    """What one pod holds of a node: units by card. Without a card in its annotations it is `pending`."""

    namespace: str
    name: str
    phase: str
    status: str
    units: int
    by_card: Mapping[int, int]
    compute_by_card: Mapping[int, int]

    @property
    def pending(self) -> bool:
        return not self.by_card


@dataclass(frozen=True, slots=True)
class CardUse:
    """One card. `total` is 0 for a card that pods still name though the node has it no more."""

    index: int
    allocated: int
    total: int
    compute_percent: int = 0
    gpu: Card | None = None


@dataclass(frozen=True, slots=True)
class NodeUse:
    """One node that shares cards. `problem`: what of it could not be read."""

    facts: NodeFacts
    total: int
    cards: tuple[CardUse, ...]
    pods: tuple[PodUse, ...]
    problem: str = ""

    @property
    def name(self) -> str:
        return self.facts.name

    @property
    def pending(self) -> int:
        """Units of pods that are on the node but on none of its cards."""
        return sum(pod.units for pod in self.pods if pod.pending)

    @property
    def allocated(self) -> int:
        return sum(card.allocated for card in self.cards) + self.pending

    @property
    def card_count(self) -> int:
        return sum(card.gpu is not None for card in self.cards)

    @property
    def cards_in_use(self) -> int:
        return sum(card.allocated > 0 for card in self.cards)


@dataclass(frozen=True, slots=True)
class ExclusiveUse:
    """One node that gives out whole cards, or none."""

    facts: NodeFacts
    total: int
    allocatable: int
    allocated: int
    pods: tuple[PodFacts, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """All nodes asked about, by name. `unit` is "GiB" or "MiB", empty where no node shares a card."""

    shared: tuple[NodeUse, ...]
    others: tuple[ExclusiveUse, ...]
    unit: str

    @property
    def allocated(self) -> int:
        return sum(node.allocated for node in self.shared)

    @property
    def total(self) -> int:
        return sum(node.total for node in self.shared)

    @property
    def unit_bytes(self) -> int:
        return UNIT_MIB.get(self.unit, 0) * MIB


def percent(part: int, whole: int) -> int:
    """The share in whole percent, cut off and not rounded: 8 of 15 are 53, 12 of 14 are 85."""
    return part * 100 // whole if whole > 0 else 0


def report(nodes: Iterable[NodeFacts], pods: Iterable[PodFacts]) -> Report:
    """What is allocated where. Finished pods hold nothing; pending and terminating ones do."""
    by_node: dict[str, list[PodFacts]] = defaultdict(list)
    for each in pods:
        if each.pod.node and not each.pod.finished:
            by_node[each.pod.node].append(each)
    ordered = sorted(nodes, key=lambda node: node.name)
    shared = tuple(_node_use(node, by_node.get(node.name, [])) for node in ordered if node.units > 0)
    others = tuple(_exclusive_use(node, by_node.get(node.name, [])) for node in ordered if node.units <= 0)
    # what the first node's cards are counted in: their true size tells, else the number of units hints
    unit = ""
    first = next((card.gpu for node in shared for card in node.cards if card.gpu is not None), None)
    if first is not None:
        most_gib = card_units(first.memory_mib, "GiB") if first.memory_mib else _MOST_GIB
        unit = "MiB" if first.units > most_gib else "GiB"
    return Report(shared, others, unit)


def roles(labels: Mapping[str, str]) -> list[str]:
    """The roles in a node's labels, as kubectl finds them."""
    prefix = "node-role.kubernetes.io/"
    found = {name.removeprefix(prefix) for name in labels if name.startswith(prefix)}
    return sorted(role for role in found | {labels.get("kubernetes.io/role", "")} if role)


def _node_use(facts: NodeFacts, pods: Sequence[PodFacts]) -> NodeUse:
    node = node_of(
        name=facts.name,
        labels=facts.labels,
        annotations=facts.annotations,
        capacity=facts.allocatable,  # the vendor's tools show what can be given out, not what is built in
    )
    uses = []
    for each in (each for each in pods if each.pod.request is not None):
        pod = each.pod
        slices = pod.placement.slices if pod.placement is not None else ()
        asked = pod.request.units if pod.request is not None else 0
        uses.append(
            PodUse(
                namespace=pod.namespace,
                name=pod.name,
                phase=each.phase,
                status=each.status,
                units=sum(part.units for part in slices) if slices else asked,
                by_card={part.card: part.units for part in slices},
                compute_by_card={part.card: part.compute_percent for part in slices if part.compute_percent},
            )
        )
    for orphan in node.orphans:
        namespace, _, name = orphan.pod.partition("/")
        by_card = {part.card: part.units for part in orphan.slices}
        units = sum(by_card.values())
        uses.append(PodUse(namespace, f"{name} (gone)", GONE, GONE, units, by_card, compute_by_card={}))
    uses.sort(key=lambda use: (use.pending, min(use.by_card, default=0), use.namespace, use.name))
    known = {card.index: card for card in node.cards}
    named = {index for use in uses for index in use.by_card}
    cards = tuple(
        CardUse(
            index=index,
            allocated=sum(use.by_card.get(index, 0) for use in uses),
            total=known[index].units if index in known else 0,
            compute_percent=sum(use.compute_by_card.get(index, 0) for use in uses),
            gpu=known.get(index),
        )
        for index in sorted(known.keys() | named)
    )
    return NodeUse(facts, facts.units, cards, tuple(uses), node.problem)


def _exclusive_use(facts: NodeFacts, pods: Sequence[PodFacts]) -> ExclusiveUse:
    takers = tuple(sorted((p for p in pods if p.exclusive_gpus), key=lambda p: p.pod.key))
    return ExclusiveUse(
        facts=facts,
        total=facts.built_in(EXCLUSIVE_GPU),
        allocatable=facts.amount(EXCLUSIVE_GPU),
        allocated=sum(each.exclusive_gpus for each in takers),
        pods=takers,
    )


def compute_total(facts: NodeFacts, cards: int) -> int:
    """Percent of compute of all cards together; 0 where the node does not divide compute."""
    return cards * WHOLE_CORE_PERCENT if facts.amount(names_offered(facts.allocatable).compute) else 0
