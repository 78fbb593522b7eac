"""Which container kubelet asks for, and which device ids it gets.

kubelet does not say for whom it asks. But it admits one pod at a time and its containers in order, and the
extender recorded when it placed each pod, so the next request can be predicted from what was granted before.
A wrong guess is harmless: it can only swap containers of equal amounts, and the annotations are corrected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

from gpuslice.apps.agent.pods import NodePod
from gpuslice.core.contract import DEVICE_ID_SEPARATOR, card_of_device_id
from gpuslice.core.device_assignment import DeviceAssignment, Receiver
from gpuslice.core.grant import GrantError, units_per_card
from gpuslice.core.model import ContainerKind, ContainerRequest, Node, Placement, Refusal, Request
from gpuslice.core.words import counted

FreeIds = Mapping[int, Sequence[str]]
"""Ids that kubelet can give, by card index and in unit order."""

NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class PendingContainer:
    """A container that waits for devices. `cards`: where its pod was placed, () if nobody placed it.

    `next_of_pod`: kubelet will ask for it before the pod's others; `begun`: the pod already has some devices.
    """

    pod: NodePod
    request: Request
    container: ContainerRequest
    cards: tuple[int, ...]
    next_of_pod: bool
    begun: bool

    @property
    def units(self) -> int:
        return self.container.devices

    @property
    def first(self) -> bool:
        """Whether it is its pod's next one and the pod has nothing yet."""
        return self.next_of_pod and not self.begun

    @property
    def never_listed(self) -> bool:
        """Whether kubelet will not list it even with devices: its pod has only ordinary init containers."""
        return all(each.kind is ContainerKind.INIT for each in self.request.containers)


@dataclass(frozen=True, slots=True)
class TentativeGrant:
    """Device ids that were granted, and the container for which they probably are."""

    uid: str
    container: str
    ids: frozenset[str]
    at_s: float
    never_listed: bool = False


class GrantRecord(NamedTuple):
    """When some ids were granted, to whom, and the uids of the pods that had theirs already then."""

    at_s: float
    receiver: Receiver | None
    had_theirs: frozenset[str]


@dataclass(frozen=True, slots=True)
class Proposal:
    """Ids for one container, and for whom they were chosen (None: for nobody in particular)."""

    ids: tuple[str, ...]
    pending: PendingContainer | None


@dataclass(frozen=True, slots=True)
class Recipient:
    """The container for which ids probably are; None if they are for a pod that nobody placed.

    `again`: the same ids were granted to this container before.
    """

    pending: PendingContainer | None = None
    again: TentativeGrant | None = None

    @property
    def uid(self) -> str:
        """The pod's uid; "" if it is not known."""
        if self.pending is not None:
            return self.pending.pod.view.uid
        return self.again.uid if self.again else ""


# -- who is next -----------------------------------------------------------------------------------------
def pending_containers(
    pods: Iterable[NodePod], served: Set[tuple[str, str]], targets: Mapping[str, Placement]
) -> list[PendingContainer]:
    """Every container without devices, most probable first.

    `served` has (pod uid, container name) of those with devices; `targets`, by pod uid, override annotations.
    """
    found = []
    for pod in pods:
        view = pod.view
        if view.request is None or view.finished or view.terminating:
            continue
        containers = view.request.containers
        # kubelet serves containers in order, so those before a served container have been served
        done = [place for place, each in enumerate(containers) if (view.uid, each.name) in served]
        begun = max(done, default=-1) + 1
        placement = target_of(pod, targets)
        cards = tuple(part.card for part in placement.slices) if placement else ()
        found += [
            PendingContainer(pod, view.request, each, cards, next_of_pod=place == begun, begun=begun > 0)
            for place, each in enumerate(containers)
            if place >= begun
        ]
    return sorted(found, key=_likelihood)


def _likelihood(pending: PendingContainer) -> tuple[bool, bool, bool, str, int, int, str]:
    """A partly admitted pod comes first, then pods in the order of their binding.

    kubelet admits pods in the order in which the API server shows them. Binds are in flight concurrently, so
    that the times of their decisions do not give that order, but the pods' versions do. They do so even if we
    have not seen the pod yet that kubelet asks for, because those before it have been served. A pod that had
    its devices once (assigned) asks again only after kubelet lost its checkpoint or the machine restarted;
    then kubelet goes by creation time.
    """
    pod, came = pending.pod.view, pending.pod.came
    created = pending.pod.created if pod.assigned else ""
    order = (created, came, pod.assume_time_ns, pod.uid)
    return (not pending.begun, not pending.next_of_pod, pod.assigned, *order)


def target_of(pod: NodePod, targets: Mapping[str, Placement]) -> Placement | None:
    """Where the pod is meant to be."""
    return targets.get(pod.view.uid, pod.meant)


# -- GetPreferredAllocation ----------------------------------------------------------------------------
def propose(
    available: Iterable[str],
    must_include: Iterable[str],
    size: int,
    waiting: Sequence[PendingContainer],
    node: Node,
    *,
    in_use: Mapping[str, str] = NOTHING,
) -> Proposal | Refusal:
    """`size` ids on the cards of the first container of that size that have room, otherwise on the best fit.

    The answer is always complete: kubelet would complete it from any card. `in_use` are ids that kubelet
    considers free and that somebody holds, with the uid of that pod: they go only to that pod, and last.
    """
    must = frozenset(must_include)
    try:
        free = _free_ids({*available, *must}, must, node)
    except GrantError as error:
        return Refusal(str(error))

    def left_for(uid: str) -> FreeIds:
        return {
            card: [
                *(one for one in ids if one not in in_use),
                *(one for one in ids if in_use.get(one) == uid),
            ]
            for card, ids in free.items()
        }

    fitting = [each for each in waiting if each.units == size]
    for each in fitting:
        if ids := _take(left_for(each.pod.view.uid), must, size, each.cards):
            return Proposal(ids, each)
    card_count = fitting[0].request.card_count if fitting else 1
    units, left = size // card_count, left_for("")
    # the best fit: cards that must be used, then those with the least room
    used = {card for card, ids in left.items() if must & set(ids)}
    roomy = [card for card, ids in left.items() if len(ids) >= units and card not in node.unhealthy]
    best = sorted(roomy, key=lambda card: (card not in used, len(left[card]), card))[:card_count]
    if len(best) == card_count and (ids := _take(left, must, size, best)):
        return Proposal(ids, next((each for each in fitting if not each.cards), None))
    said = {card: "out of use" if card in node.unhealthy else len(ids) for card, ids in left.items()}
    room = ", ".join(f"card {card}: {what}" for card, what in sorted(said.items())) or "no card"
    asked = f"{counted(units, 'unit')} of {node.names.memory} on "
    asked += "one card" if card_count == 1 else f"each of {card_count} cards"
    return Refusal(f"node {node.name} has no room for {asked} (free units: {room})")


def _free_ids(offered: Set[str], must: frozenset[str], node: Node) -> dict[int, list[str]]:
    """By card index, without ids of cards that are gone. Raises `GrantError` if one of those must be used."""
    index_of = {card.uuid: card.index for card in node.cards}
    free: dict[int, list[str]] = {card.index: [] for card in node.cards}
    for identifier in offered:
        try:
            index = index_of.get(card_of_device_id(identifier))
        except ValueError:
            index = None
        if index is not None:
            free[index].append(identifier)
        elif identifier in must:
            raise GrantError(f"kubelet asks for device {identifier}, which is of no card of node {node.name}")

    def order(identifier: str) -> tuple[bool, int]:
        return identifier not in must, int(identifier.rpartition(DEVICE_ID_SEPARATOR)[2])

    return {card: sorted(ids, key=order) for card, ids in free.items()}


def _take(free: FreeIds, must: frozenset[str], size: int, cards: Sequence[int]) -> tuple[str, ...]:
    """As many ids from each of `cards`, including all of `must`; () if that is impossible."""
    if not cards or size % len(cards):
        return ()
    each = size // len(cards)
    taken = tuple(identifier for card in cards for identifier in free.get(card, ())[:each])
    return taken if len(taken) == size and must <= set(taken) else ()


# -- Allocate ------------------------------------------------------------------------------------------
def recipient_of(
    ids: frozenset[str],
    waiting: Sequence[PendingContainer],
    tentative: Sequence[TentativeGrant],
    assignments: Iterable[DeviceAssignment],
    node: Node,
    *,
    unplaced: bool = False,
) -> Recipient | Refusal:
    """For whom these ids are, or why they cannot be granted.

    `unplaced`: accept ids of one card for a pod that no extender placed. Raises `GrantError` for ids that
    belong to no card of the node.
    """
    index_of = {card.uuid: card.index for card in node.cards}
    units = units_per_card(ids)
    if foreign := next((uuid for uuid in units if uuid not in index_of), ""):
        raise GrantError(f"kubelet gave a device of card {foreign}, which node {node.name} does not have")
    cards = {index_of[uuid]: count for uuid, count in units.items()}

    fitting = [each for each in waiting if each.units == len(ids)]
    if len(set(cards.values())) == 1:  # the first pod placed on exactly these cards, otherwise the first
        shaped = [each for each in fitting if each.request.card_count == len(cards)]
        shaped.sort(key=lambda each: set(each.cards) != set(cards))
        if shaped:
            return Recipient(shaped[0])

    repeated = next((each for each in tentative if each.ids == ids), None)
    if repeated is not None or any(each.ids == ids for each in assignments):
        return Recipient(again=repeated)

    # a container that got back ids of its pod's init containers, in any mix of that pod's cards
    for each in fitting:
        if ids <= frozenset[str]().union(*(one.ids for one in tentative if one.uid == each.pod.view.uid)):
            return Recipient(each)

    amount = f"{counted(len(ids), 'unit')} of {node.names.memory}"
    if len(cards) > 1:
        mix = ", ".join(f"{count} of card {card}" for card, count in sorted(cards.items()))
        return Refusal(
            f"kubelet offered {amount} from several cards of node {node.name} ({mix}), and no pod that waits "
            f"here was placed like that"
        )
    if cards and unplaced:
        return Recipient()
    return Refusal(
        f"no pod that waits on node {node.name} was placed with {amount} for a container; a pod gets its "
        f"card from the gpuslice extender, so let the scheduler place it"
    )
