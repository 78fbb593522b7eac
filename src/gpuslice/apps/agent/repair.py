"""What must be written so that pods' annotations say which cards kubelet gave them.

kubelet's device assignments are the truth about cards, since it gave the ids. If a pod got another card than
it was meant for, its annotation follows. And if that card was meant for a pod that still waits, the two
exchange their targets, so that the sums per card stay as the extender counted them. For the order of writes
see `repair_order`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpuslice.apps.agent.pending import PendingContainer, target_of
from gpuslice.apps.agent.pods import NodePod
from gpuslice.core.annotations import container_key, encode_table, per_card, placement_annotations
from gpuslice.core.contract import (
    ANN_ALLOCATION,
    ANN_ASSIGNED,
    ANN_ASSUME_TIME,
    ANN_CORE,
    ANN_INDEX,
    ANN_POD_UNITS,
    ANN_VISIBLE,
)
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.errors import ContractError
from gpuslice.core.grant import GrantError, units_per_card
from gpuslice.core.model import CardSlice, ContainerKind, Node, Placement
from gpuslice.core.placement import on_cards
from gpuslice.core.request import held_at_peak

Table = dict[str, dict[int, int]]
"""Units by container key and card index."""

Size = tuple[int, int]
"""A pod's units and on how many cards they are: pods of one size can take each other's place."""

Cards = tuple[int, ...]
"""Card indices in order."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Annotations to write on one pod (None removes one), and the reason in a few words.

    `target`: the cards that they place it on; None if they place it on none or say nothing about cards.
    `ahead`: kubelet has not given these yet.
    """

    pod: NodePod
    annotations: Mapping[str, str | None]
    reason: str
    target: Placement | None = None
    ahead: bool = False

    @property
    def of_cards(self) -> bool:
        """Whether it says on which cards the pod is, or that it is on none."""
        return ANN_INDEX in self.annotations


@dataclass(frozen=True, slots=True)
class ActualPlacement:
    """Where a pod really is, by kubelet's device assignments."""

    pod: NodePod
    placement: Placement
    table: Table


# -- where pods are --------------------------------------------------------------------------------------
def actual_placements(
    pods: Iterable[NodePod],
    assignments: Iterable[DeviceAssignment],
    node: Node,
    ours: Sequence[frozenset[str]],
) -> list[ActualPlacement]:
    """Of the pods whose devices kubelet lists completely and without contradiction.

    `ours`: what an agent granted, the latest last. Another plugin's ids may be of more cards than the pod's.
    """
    by_pod: dict[str, list[DeviceAssignment]] = defaultdict(list)
    for each in assignments:
        by_pod[each.pod_key].append(each)
    found = (_actual_placement(pod, by_pod.get(pod.view.key, []), node, ours) for pod in pods)
    return [each for each in found if each is not None]


def _actual_placement(
    pod: NodePod,
    assignments: list[DeviceAssignment],
    node: Node,
    ours: Sequence[frozenset[str]],
) -> ActualPlacement | None:
    request = pod.view.request
    if not assignments or request is None or pod.view.finished:
        return None
    held = {each.container: each for each in assignments}
    asked = {each.name: each.devices for each in request.containers if each.kind is not ContainerKind.INIT}
    if len(held) != len(assignments) or {name: len(each.ids) for name, each in held.items()} != asked:
        return None  # two pods of one name, or a pod of that name that is gone
    index_of = {card.uuid: card.index for card in node.cards}
    table: Table = {}
    mine = frozenset[str]().union(*(each.ids for each in assignments))
    held_on: Counter[int] = Counter()  # units by card
    try:
        for container, units in held_at_peak(request):
            key = container_key(container, request.app_containers)
            if (assignment := held.get(container.name)) is not None:
                counts, added = units_per_card(assignment.ids), container.added
                table[key] = {
                    index_of[uuid]: count + added // len(counts) for uuid, count in sorted(counts.items())
                }
                held_on.update(table[key])
            else:
                # an init container, which kubelet does not list: others of its pod have some of its devices;
                # so may a grant to an earlier pod, perhaps on more cards
                grants = (ids for ids in reversed(ours) if len(ids) == container.devices and ids & mine)
                grants = (ids for ids in grants if len(units_per_card(ids)) <= request.card_count)
                left = next((ids - mine for ids in grants if len(ids - mine) == units), ())
                left_on = Counter({index_of[uuid]: count for uuid, count in units_per_card(left).items()})
                table[key] = dict(left_on or _promised_beyond(held_on, units, pod))
    except (GrantError, KeyError):
        return None
    scattered = any(len(each) > request.card_count for each in table.values())
    if scattered and not all(each.ids in ours for each in assignments):
        return None  # another plugin gave ids away without regard to their cards
    sums = Counter[int]()
    for each in table.values():
        sums.update(each)
    compute = request.compute_percent // len(sums)
    slices = tuple(CardSlice(card, units, compute) for card, units in sorted(sums.items()))
    return ActualPlacement(pod, Placement(node.name, slices), table)


def _promised_beyond(held_on: Counter[int], units: int, pod: NodePod) -> Mapping[int, int]:
    """The cards of `units` beyond those that the pod's listed containers have: an init container's.

    The annotations tell, if they do not contradict kubelet's list; else it is on the others' first card.
    """
    said = pod.view.placement.slices if pod.view.placement is not None else ()
    promised = Counter({part.card: part.units for part in said})
    beyond = promised - held_on
    return beyond if held_on <= promised and beyond.total() == units else {min(held_on): units}


# -- what annotations should say -------------------------------------------------------------------------
def repairs(actual: Iterable[ActualPlacement], node: Node, now_ns: int) -> list[Repair]:
    """One repair for each pod whose annotations do not say where it is yet."""
    found = []
    for each in actual:
        pod, said = each.pod.view, each.pod.said
        assert pod.request is not None
        true = placement_annotations(each.placement, pod.request, node, now_ns)
        true[ANN_ALLOCATION] = encode_table(
            {key: {str(card): units for card, units in cards.items()} for key, cards in each.table.items()}
        )
        true[ANN_ASSIGNED] = "true"
        # If two annotations disagree, `Pod.placement` is from the more exact one, and others read the other.
        # An annotation that was never written is not missing: not every extender writes all, as ours does.
        ours = ANN_VISIBLE in said
        missing = [name for name in true if name not in said and (ours or name in each.pod.lost)]
        names = (ANN_INDEX, ANN_POD_UNITS, ANN_ALLOCATION, ANN_CORE, ANN_VISIBLE)
        wrong = [name for name in names if name in said and not _agree(name, said[name], true.get(name))]
        reason = ""
        wrong += [name for name in missing if name != ANN_ASSIGNED]
        if pod.placement is None or units_by_card(pod.placement) != units_by_card(each.placement):
            meant = ",".join(str(part.card) for part in pod.placement.slices) if pod.placement else "none"
            reason = f"annotated card {meant}, kubelet gave card {true[ANN_INDEX]}"
        elif wrong:
            reason = f"{wrong[0]} does not say what kubelet's device assignments do"
        if reason:
            found.append(Repair(each.pod, {**dict.fromkeys(said), **true}, reason, each.placement))
        elif not pod.assigned:
            changed = {ANN_ASSIGNED: "true", ANN_ASSUME_TIME: str(now_ns)}
            found.append(Repair(each.pod, changed, "assigned"))
    return found


def _agree(name: str, text: str, true: str | None) -> bool:
    if true is None:
        return False
    if name in {ANN_ALLOCATION, ANN_CORE}:
        try:
            return per_card(name, text) == per_card(name, true)
        except ContractError:
            return False
    return sorted(text.split(",")) == sorted(true.split(","))


def target_repairs(
    targets: Mapping[str, Placement], waiting: Iterable[PendingContainer], node: Node
) -> list[Repair]:
    """For waiting pods whose annotations name other cards than their target."""
    made, cards = [], {card.index for card in node.cards}
    for each in waiting:
        pod, target = each.pod, target_of(each.pod, targets)
        if not each.first or target is None or pod.view.placement == target:
            continue
        if cards.issuperset(units_by_card(target)):
            true = placement_annotations(target, each.request, node, pod.view.assume_time_ns)
            written: dict[str, str | None] = {**dict.fromkeys(pod.said), **true}
            made.append(Repair(pod, written, "its card went to another pod", target, ahead=True))
    return made


# -- exchanging targets ----------------------------------------------------------------------------------
def exchanges(
    actual: Iterable[ActualPlacement],
    waiting: Iterable[PendingContainer],
    targets: Mapping[str, Placement],
    node: Node,
) -> Iterator[tuple[str, Placement]]:
    """New targets, as (pod uid, placement): waiting pods take over the cards of those that got theirs.

    Only what pods of one size have not settled among themselves is left to those that wait. A pod that got
    another card is included, so that the same exchange is not found twice.
    """

    def size(pod: NodePod) -> Size:
        assert pod.view.request is not None
        return pod.view.request.units, pod.view.request.card_count

    came, left = defaultdict[Size, list[Cards]](list), defaultdict[Size, list[Cards]](list)
    for each in actual:
        meant = target_of(each.pod, targets)
        if meant is not None and units_by_card(meant) != units_by_card(each.placement):
            yield each.pod.view.uid, each.placement
            came[size(each.pod)].append(_cards(each.placement))
            left[size(each.pod)].append(_cards(meant))
    meant_for = [
        (each, size(each.pod), _cards(target))
        for each in waiting
        if each.first and (target := target_of(each.pod, targets)) is not None
    ]
    for of_size in came:  # waiting pods go from cards with more arrivals to those with more departures
        free = [*(Counter(left[of_size]) - Counter(came[of_size])).elements()]
        for cards in (Counter(came[of_size]) - Counter(left[of_size])).elements():
            other = next((each for each in meant_for if each[1:] == (of_size, cards)), None)
            if other is not None:
                meant_for.remove(other)
                yield other[0].pod.view.uid, on_cards(node.name, free.pop(0), other[0].request)


def _cards(placement: Placement) -> Cards:
    return tuple(sorted(part.card for part in placement.slices))


def units_by_card(placement: Placement | None) -> dict[int, int]:
    return {part.card: part.units for part in placement.slices} if placement is not None else {}
