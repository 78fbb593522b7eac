"""From the plain values of an API object to the core's values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from gpuslice.core.annotations import (
    MOST_CARDS,
    NOT_ALWAYS_WRITTEN,
    check_room,
    decode_assume_time,
    decode_cards,
    decode_orphans,
    decode_placement,
)
from gpuslice.core.card_links import CardLinks, decode_links
from gpuslice.core.contract import (
    AMOUNT_NAMES,
    ANN_ASSIGNED,
    ANN_GRANTED,
    ANN_LIMIT,
    ANN_REQUEST,
    CARDS_NAMES,
    LABEL_MIN_TIER,
    LABEL_PLACEMENT,
    LABEL_SCHEDULE,
    LABEL_ZONE,
    NAME_SETS,
    NODE_GPUS,
    NODE_KUBELET_AWAY,
    NODE_LINKS,
    NODE_ORPHANS,
    NODE_TIER,
    VENDOR_NAMES,
    ResourceNames,
)
from gpuslice.core.errors import ContractError, InvalidRequestError
from gpuslice.core.host_resources import (
    ContainerLike,
    HostResources,
    PodSpecLike,
    node_host_resources,
    pod_host_resources,
)
from gpuslice.core.mode import CORE_MEM, rules_of
from gpuslice.core.model import TIERS, Card, ContainerKind, Node, Orphan, Pod, Request, Tier
from gpuslice.core.pod_group import PodGroup
from gpuslice.core.quantity import whole_number
from gpuslice.core.request import WHOLE_CORE_PERCENT, ContainerSpec, held_request, pod_request
from gpuslice.core.resize import granted, wanted, with_limits
from gpuslice.core.units import MOST_UNITS

FINISHED_PHASES = frozenset({"Succeeded", "Failed"})
_NOTHING: Mapping[str, str] = {}


class PodRequests(NamedTuple):
    """What a pod asks for: cards, if any, and CPU and memory. `problem`: why it can never be given."""

    request: Request | None
    host: HostResources
    problem: str = ""


def pod_requests(spec: PodSpecLike, labels: Mapping[str, str] | None, *, bound: bool = False) -> PodRequests:
    """What the containers ask for. A pod that is `bound` holds its amount even if the rest is invalid."""
    host = pod_host_resources(spec)
    inits, apps = _limits(spec.init_containers or ()), _limits(spec.containers)
    if not any(limits for *_, limits in (*inits, *apps)):  # like most pods of most clusters
        return PodRequests(None, host)
    said = tuple([(name, labels[name]) for name in _REQUEST_LABELS if name in labels]) if labels else ()
    return _pod_requests(inits, apps, said, host, bound)


def names_our_resources(spec: PodSpecLike) -> bool:
    """Whether limits name a resource of ours, even with zero: kube-scheduler asks us about those."""
    containers = (*(spec.init_containers or ()), *spec.containers)
    return any(limits for *_, limits in _limits(containers))


_REQUEST_LABELS = (*CARDS_NAMES, LABEL_MIN_TIER)


Limits = tuple[str, str | None, tuple[tuple[str, object], ...]]
"""Name and restart policy of a container, and its limits of our resources."""


def _limits(containers: Sequence[ContainerLike]) -> tuple[Limits, ...]:
    found: list[Limits] = []
    for each in containers:
        limits = each.resources.limits if each.resources is not None else None
        ours = tuple([(name, limits[name]) for name in AMOUNT_NAMES if name in limits]) if limits else ()
        found.append((each.name, each.restart_policy, ours))
    return tuple(found)


@lru_cache(maxsize=4096)  # the pods of a cluster are similar, and share results
def _pod_requests(
    inits: tuple[Limits, ...],
    apps: tuple[Limits, ...],
    said: tuple[tuple[str, str], ...],
    host: HostResources,
    bound: bool,
) -> PodRequests:
    specs = []
    for index, (name, restart_policy, limits) in enumerate(inits):
        kind = ContainerKind.SIDECAR if restart_policy == "Always" else ContainerKind.INIT
        specs.append(ContainerSpec(name, index, dict(limits), kind))
    specs += [ContainerSpec(name, index, dict(limits)) for index, (name, _, limits) in enumerate(apps)]
    request, problem = None, ""
    try:
        request = pod_request(specs, dict(said))
    except InvalidRequestError as error:
        problem = str(error)
        if bound:  # the memory is gone either way
            request = held_request(specs, dict(said))
    return PodRequests(None if request is None else replace(request, host=host), host, problem)


def pod_of(
    *,
    uid: str,
    namespace: str,
    name: str,
    node: str,
    phase: str,
    terminating: bool,
    version: str,
    priority: int | None = None,
    nominated: str = "",
    replica_of: str = "",
    comes_with_node: bool = False,
    gates: Iterable[str] = (),
    group: PodGroup | None = None,
    requests: PodRequests,
    annotations: Mapping[str, str] | None,
) -> Pod:
    """A pod of the API. What cannot be read is its `problem`, not raised: one bad pod stops nobody.

    A pod that asks for nothing of ours holds nothing, whatever its annotations say, since anybody may write
    them.
    """
    annotations = annotations or _NOTHING
    if requests.request is not None and not node:
        try:
            check_room(annotations, requests.request)
        except InvalidRequestError as error:
            requests = requests._replace(request=None, problem=str(error))
    request, wish, misread = _resized(requests.request if node else None, annotations)
    placement, request = None, request or requests.request
    if request is not None or requests.problem:
        try:
            placement = decode_placement(annotations, node, request)
        except ContractError as error:
            misread = str(error)
    return Pod(
        uid=uid,
        namespace=namespace,
        name=name,
        node=node,
        request=request,
        placement=placement,
        wanted=wish,
        assigned=annotations.get(ANN_ASSIGNED) == "true",
        assume_time_ns=decode_assume_time(annotations),
        finished=phase in FINISHED_PHASES,
        terminating=terminating,
        problem=requests.problem or misread,
        priority=priority or 0,
        stale=() if node else tuple([name for name in NOT_ALWAYS_WRITTEN if name in annotations]),
        nominated=nominated,
        replica_of=replica_of,
        comes_with_node=comes_with_node,
        gates=tuple(gates),
        group=group,
        host=requests.host,
        version=version_number(version),
    )


def _resized(
    request: Request | None, annotations: Mapping[str, str]
) -> tuple[Request | None, Request | None, str]:
    """What a bound pod holds whose spec says `request`, what is wanted instead, and why that is not known."""
    if request is None or annotations.keys().isdisjoint((ANN_GRANTED, ANN_REQUEST, ANN_LIMIT)):
        return request, None, ""
    try:
        request = with_limits(annotations, request)
        resized = ANN_GRANTED in annotations or ANN_REQUEST in annotations
        return granted(annotations, request), wanted(annotations, request) if resized else None, ""
    except InvalidRequestError as error:
        return granted(annotations, request), None, str(error)


def node_of(
    *,
    name: str,
    labels: Mapping[str, str] | None,
    annotations: Mapping[str, str] | None,
    capacity: Mapping[str, object] | None,
    allocatable: Mapping[str, str] | None = None,
    unhealthy: frozenset[int] = frozenset(),
    avoided: bool = False,
) -> Node:
    """A node of the API: without cards if it shares none (its capacity has no memory of cards)."""
    labels, annotations, capacity = labels or _NOTHING, annotations or _NOTHING, capacity or {}
    names = names_offered(capacity)
    cards, problem = _cards(annotations, capacity, names)
    links: CardLinks = ()
    try:
        links = decode_links(annotations.get(NODE_LINKS, ""), len(cards)) if cards else ()
    except ContractError as error:
        problem = problem or str(error)
    orphans: tuple[Orphan, ...] = ()
    try:
        orphans = (
            decode_orphans(annotations[NODE_ORPHANS], cards) if cards and NODE_ORPHANS in annotations else ()
        )
    except ContractError as error:
        problem = problem or str(error)
    node = Node(
        name=name,
        cards=cards,
        shared=rules_of(labels).shared,
        packing=labels.get(LABEL_PLACEMENT, ""),
        compute_percent=WHOLE_CORE_PERCENT if whole_number(capacity.get(names.compute)) else 0,
        compute_required=labels.get(LABEL_SCHEDULE) == CORE_MEM,
        avoided=avoided,
        zone=labels.get(LABEL_ZONE, ""),
        host=node_host_resources(allocatable),
        problem=problem,
        names=names,
        tier=TIERS.get(annotations.get(NODE_TIER, ""), Tier.NONE),
        links=links,
        orphans=orphans,
        kubelet_away=annotations.get(NODE_KUBELET_AWAY) == "true",
    )
    return with_unhealthy(node, unhealthy)


def names_offered(amounts: Mapping[str, object]) -> ResourceNames:
    """The set of names in which a node's capacity or allocatable offers cards; the vendor's if there is none.

    kubelet keeps a resource that nobody offers any more, with an amount of 0.
    """
    found = (names for names in NAME_SETS.values() if whole_number(amounts.get(names.memory)))
    return next(found, VENDOR_NAMES)


def with_unhealthy(node: Node, unhealthy: frozenset[int]) -> Node:
    """The node with these cards out of use; all of them if it shares none or its kubelet is away."""
    if not node.shared or node.kubelet_away:
        unhealthy = frozenset(card.index for card in node.cards)
    return replace(node, unhealthy=unhealthy)


def version_number(resource_version: str) -> int:
    """A resourceVersion as a number, 0 if it is not one; larger is newer (KEP-5504)."""
    return int(resource_version) if resource_version.isascii() and resource_version.isdecimal() else 0


def cards_of_capacity(
    capacity: Mapping[str, object], names: ResourceNames = VENDOR_NAMES
) -> tuple[Card, ...]:
    """Equal cards by node status alone, the total divided by the count, as in the open-source gpushare.

    Raises `ContractError` for amounts that no node has.
    """
    units = whole_number(capacity.get(names.memory)) or 0
    count = whole_number(capacity.get(names.cards)) or 0
    if units <= 0 or count <= 0:
        return ()
    if count > MOST_CARDS:
        raise ContractError(f'capacity "{names.cards}"', count, f"at most {MOST_CARDS} cards")
    if units // count > MOST_UNITS:
        raise ContractError(f'capacity "{names.memory}"', units, f"at most {MOST_UNITS} for each card")
    return tuple(Card(index, uuid="", memory_mib=0, units=units // count) for index in range(count))


def _cards(
    annotations: Mapping[str, str], capacity: Mapping[str, object], names: ResourceNames
) -> tuple[tuple[Card, ...], str]:
    if not whole_number(capacity.get(names.memory)):
        return (), ""
    problem = ""
    if NODE_GPUS in annotations:
        try:
            return decode_cards(annotations[NODE_GPUS]), ""
        except ContractError as error:
            problem = str(error)
    try:
        return cards_of_capacity(capacity, names), problem
    except ContractError as error:
        return (), problem or str(error)
