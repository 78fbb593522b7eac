"""The common values: cards, nodes, requests, placements, refusals, pods.

All are frozen; a change creates a new one. Units are steps of ``aliyun.com/gpu-mem`` (see `units`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum

from gpuslice.core.card_links import CardLinks
from gpuslice.core.contract import VENDOR_NAMES, ResourceNames
from gpuslice.core.host_resources import NO_HOST_RESOURCES, HostResources
from gpuslice.core.pod_group import PodGroup


@dataclass(frozen=True, slots=True)
class Card:
    """One physical card. `index` is its minor number, which is the same everywhere and may have gaps.

    If only the node status shows the cards, `uuid` is "" and `memory_mib` 0, for unknown.
    """

    index: int
    uuid: str
    memory_mib: int
    units: int
    model: str = ""


class Tier(IntEnum):
    """What enforces a node's limits; a higher tier is harder to bypass."""

    NONE = 0
    WATCHDOG = 1  # the agent, which acts within seconds when the driver's figures exceed the limit
    LIBRARY = 2  # libgpuslice in every program that the loader starts, and the watchdog
    DRIVER = (
        3  # the driver itself (R615 and later), whatever runs in the container; see agent/driver_limits.py
    )

    @property
    def word(self) -> str:
        return self.name.lower()


TIERS = {tier.word: tier for tier in Tier}
"""By the words used in annotations and labels."""


class NodeMode(StrEnum):
    """How the cards of a node are given out."""

    EXCLUSIVE = "exclusive"
    SHARED = "shared"
    SHARED_WITHOUT_ISOLATION = "shared-without-isolation"
    CLAIMS = "claims"  # parts of cards, only by claims of dynamic resource allocation


@dataclass(frozen=True, slots=True)
class CardSlice:
    """A part of one card."""

    card: int
    units: int
    compute_percent: int = 0


@dataclass(frozen=True, slots=True)
class Orphan:
    """What containers still hold of a node's cards although their pod is gone from the API server.

    `pod`: namespace/name of what was their pod.
    """

    pod: str
    slices: tuple[CardSlice, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A node as placement sees it: its cards in index order, and which of them must not be used.

    `shared`: false if its labels say that cards are given out whole; none is used then, and pods that hold a
    part of one keep it. `problem`: what could not be read of the node, in words; its cards are those that
    could.
    """

    name: str
    cards: tuple[Card, ...]
    unhealthy: frozenset[int] = frozenset()
    shared: bool = True
    packing: str = ""  # binpack or spread if the node's label says so; otherwise the policy decides
    compute_percent: int = 0  # of each card; 0 if the node does not divide compute
    compute_required: bool = False  # every pod here must ask for compute as well as memory
    avoided: bool = False  # a taint asks pods to go elsewhere if they can
    zone: str = ""
    host: HostResources = NO_HOST_RESOURCES  # CPU and memory of the node
    problem: str = ""
    names: ResourceNames = VENDOR_NAMES  # the names under which it offers its cards
    tier: Tier = Tier.NONE  # what enforces the limits of containers that start there
    links: CardLinks = ()  # between its cards, if they differ
    orphans: tuple[Orphan, ...] = ()  # they hold until the agent says that they have ended
    kubelet_away: bool = False  # none of its cards may be used until kubelet is back

    @property
    def divides_cards(self) -> bool:
        """Whether parts of cards are available here at all."""
        return self.shared and bool(self.cards)

    @property
    def is_described(self) -> bool:
        """Whether an agent of ours reports its cards, and so the pods that got some."""
        return bool(self.cards) and bool(self.cards[0].uuid)


class ContainerKind(StrEnum):
    """kubelet counts the three kinds differently, see `request`."""

    APP = "app"
    INIT = "init"
    SIDECAR = "sidecar"


@dataclass(frozen=True, slots=True)
class ContainerRequest:
    """What one container asks for. `index` is its position in its own list of the pod spec.

    `added`: the part of `units` that its pod's spec does not say, granted while it runs (`core.resize`).
    `limit`: units that it may have while nobody requests them (`core.lending`), 0 for no more than `units`.
    """

    name: str
    index: int
    units: int
    compute_percent: int = 0
    kind: ContainerKind = ContainerKind.APP
    added: int = 0
    limit: int = 0

    @property
    def borrowable(self) -> int:
        """Units that it may have beyond those that are its own."""
        return max(0, self.limit - self.units)

    @property
    def devices(self) -> int:
        """How many device ids kubelet gives it."""
        return self.units - self.added


@dataclass(frozen=True, slots=True)
class Request:
    """What a pod holds at its peak: `units` in total, spread evenly over `card_count` cards of one node."""

    units: int
    card_count: int = 1
    compute_percent: int = 0
    containers: tuple[ContainerRequest, ...] = ()  # those that ask for units, in starting order
    app_containers: int = 1  # the number of app containers, whether they ask or not
    host: HostResources = NO_HOST_RESOURCES  # CPU and memory in addition
    names: ResourceNames = VENDOR_NAMES  # the names that it uses: a node that offers others cannot hold it
    min_tier: Tier = Tier.NONE  # the weakest tier that its owner accepts

    @property
    def units_per_card(self) -> int:
        return self.units // self.card_count


@dataclass(frozen=True, slots=True)
class Placement:
    """Cards chosen for one request on one node."""

    node: str
    slices: tuple[CardSlice, ...]

    @property
    def units(self) -> int:
        return sum(part.units for part in self.slices)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a node cannot hold a request.

    `reason` is the vendor's short text, equal on all nodes so that kube-scheduler can count them; `detail`
    says what was asked of this node and the most that would fit. `never`: not even an empty node holds it.
    """

    reason: str
    never: bool = False
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod as the ledger sees it.

    `placement` is what its annotations say, None if they say nothing; `problem` is why they cannot be read.
    `finished`: phase Succeeded or Failed, so its containers are gone. `terminating` pods still hold memory.
    `request` is None for a pod that asks for nothing of ours, and for one whose request is wrong (`problem`).
    `wanted`: what its author wants it to hold instead, if it was ever changed while it runs (`core.resize`).
    """

    uid: str
    namespace: str
    name: str
    node: str = ""
    request: Request | None = None
    placement: Placement | None = None
    wanted: Request | None = None
    assigned: bool = False
    assume_time_ns: int = 0
    finished: bool = False
    terminating: bool = False
    problem: str = ""
    priority: int = 0  # kube-scheduler's: a higher one may evict a lower one
    group: PodGroup | None = None  # by its labels; not kube-scheduler's own pod groups
    gates: tuple[str, ...] = ()  # scheduling gates that are still on it
    host: HostResources = NO_HOST_RESOURCES  # CPU and memory that it asks for, even without cards
    stale: tuple[str, ...] = ()  # annotations of another placement that a Binding would not overwrite
    nominated: str = ""  # the node that its scheduler tries first (status.nominatedNodeName)
    replica_of: str = ""  # uid of the owner whose pods its scheduler spreads over nodes
    comes_with_node: bool = False  # such as a DaemonSet's: nobody chose the node
    version: int = 0  # resourceVersion as a number, 0 if it is not one: a smaller one is older

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    def container(self, name: str) -> ContainerRequest | None:
        """Of those that ask for a part of a card."""
        asking = self.request.containers if self.request is not None else ()
        return next((each for each in asking if each.name == name), None)

    @property
    def resource_version(self) -> str:
        """The version for a conditional write; "" if unknown, which makes it unconditional."""
        return str(self.version) if self.version else ""
