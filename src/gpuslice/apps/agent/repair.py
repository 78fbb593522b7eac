"""What must be written so that pods' annotations say what kubelet's book says.

kubelet's book is the truth about cards: it gave the ids. Where a pod got another card than it was meant for,
its annotation follows. And where that card was meant for a pod that still waits, the two exchange their
wishes, so that the sums per card stay what the extender reckoned with. In which order: see `moves`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.wants import Want, wished
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
from gpuslice.core.model import CardSlice, ContainerKind, Node, Placement, Request
from gpuslice.core.placement import on_cards
from gpuslice.core.request import held_at_peak

Table = dict[str, dict[int, int]]
"""Units by container key and card index."""

Size = tuple[int, int]
"""Units of a pod and the number of cards that they are on: pods of one size can take each other's place."""

Cards = tuple[int, ...]
"""Card indices in order."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Annotations to write on one pod, None for one to take away, and why in a few words.

    `target`: the cards that they place it on, None when they place it on none or say nothing of cards.
    `promise`: kubelet has not given these yet.
    """

    pod: NodePod
    annotations: Mapping[str, str | None]
    reason: str
    target: Placement | None = None
    promise: bool = False

    @property
    def of_cards(self) -> bool:
        """Whether it says where the pod is, or is not any more."""
        return ANN_INDEX in self.annotations


@dataclass(frozen=True, slots=True)
class Truth:
    """Where a pod really sits, by kubelet's book."""

    pod: NodePod
    placement: Placement
    table: Table


def truths(pods: Iterable[NodePod], assignments: Iterable[DeviceAssignment], node: Node) -> list[Truth]:
    """The pods whose devices kubelet's book shows completely and without contradiction."""
    books: dict[str, list[DeviceAssignment]] = defaultdict(list)
    for assignment in assignments:
        books[assignment.pod_key].append(assignment)
    found = (_truth(pod, books.get(pod.view.key, []), node) for pod in pods)
    return [truth for truth in found if truth is not None]


def repairs(found: Iterable[Truth], node: Node, now_ns: int) -> list[Repair]:
    """One repair for each pod whose annotations do not say the truth yet."""
    made = (_repair(truth, node, now_ns) for truth in found)
    return [repair for repair in made if repair is not None]


def exchanges(
    found: Iterable[Truth], waiting: Iterable[Want], wishes: Mapping[str, Placement], node: Node
) -> Iterator[tuple[str, Placement]]:
    """New wishes, as (pod uid, placement): pods that wait take over the cards of those who got theirs.

    Only what pods of one size have not settled among themselves is left to those who wait. Whoever got
    another card is answered too, so that one exchange is not found twice.
    """
    came, left = defaultdict[Size, list[Cards]](list), defaultdict[Size, list[Cards]](list)
    for truth in found:
        meant = wished(truth.pod, wishes)
        if meant is not None and wished_cards(meant) != wished_cards(truth.placement):
            yield truth.pod.view.uid, truth.placement
            size = _size(truth.pod)
            came[size].append(cards_of(truth.placement))
            left[size].append(cards_of(meant))
    whole = [want for want in waiting if want.first]
    for size in came:  # those who wait where more came than left go where more left than came
        free = [*(Counter(left[size]) - Counter(came[size])).elements()]
        for cards in (Counter(came[size]) - Counter(left[size])).elements():
            other = next((want for want in whole if _waits_for(want, cards, size, wishes)), None)
            if other is not None:
                whole.remove(other)
                yield other.pod.view.uid, on_cards(node.name, free.pop(0), other.request)


def _waits_for(want: Want, cards: Cards, size: Size, wishes: Mapping[str, Placement]) -> bool:
    meant = wished(want.pod, wishes)
    return meant is not None and _size(want.pod) == size and cards_of(meant) == cards


def wish_repairs(wishes: Mapping[str, Placement], waiting: Iterable[Want], node: Node) -> list[Repair]:
    """Wishes of pods that still wait and whose annotations say something else."""
    made, cards = [], {gpu.index for gpu in node.cards}
    for want in waiting:
        pod, wish = want.pod, wished(want.pod, wishes)
        if not want.first or wish is None or pod.view.placement == wish:
            continue
        if cards.issuperset(wished_cards(wish)):
            told = placement_annotations(wish, want.request, node, pod.view.assume_time_ns)
            written: dict[str, str | None] = {**dict.fromkeys(pod.said), **told}
            made.append(Repair(pod, written, "its card went to another pod", wish, promise=True))
    return made


# -- the truth of one pod --------------------------------------------------------------------------------
def _truth(pod: NodePod, book: list[DeviceAssignment], node: Node) -> Truth | None:
    view = pod.view
    if not book or view.request is None or view.finished:
        return None
    held = {each.container: each for each in book}
    if len(held) != len(book) or not _complete(view.request, held):
        return None  # two pods of one name, or a pod of that name that is no more
    try:
        table = _table(view.request, held, node)
    except (GrantError, KeyError):
        return None
    if any(len(cards) > view.request.card_count for cards in table.values()):
        return None  # no grant of ours: another plugin gave ids away without a thought of their cards
    return Truth(pod, _placement(table, view.request, node), table)


def _complete(request: Request, held: Mapping[str, DeviceAssignment]) -> bool:
    wanted = {each.name: each.units for each in request.containers if each.kind is not ContainerKind.INIT}
    return {name: len(each.ids) for name, each in held.items()} == wanted


def _table(request: Request, held: Mapping[str, DeviceAssignment], node: Node) -> Table:
    """Units by container and card. What an init container holds beyond the rest is on the first cards."""
    index_of = {gpu.uuid: gpu.index for gpu in node.cards}
    table: Table = {}
    cards: list[int] = []
    for container, units in held_at_peak(request):
        key = container_key(container, request.app_containers)
        assignment = held.get(container.name)
        if assignment is not None:
            counts = units_per_card(assignment.ids)
            table[key] = {index_of[uuid]: count for uuid, count in sorted(counts.items())}
            cards = sorted({*cards, *table[key]})
        else:
            on = cards[: request.card_count]
            table[key] = {card: units // len(on) for card in on}
    return table


def _placement(table: Table, request: Request, node: Node) -> Placement:
    sums: dict[int, int] = defaultdict(int)
    for cards in table.values():
        for card, units in cards.items():
            sums[card] += units
    core = request.compute_percent // len(sums)
    return Placement(node.name, tuple(CardSlice(card, units, core) for card, units in sorted(sums.items())))


# -- writing it ------------------------------------------------------------------------------------------
def _repair(truth: Truth, node: Node, now_ns: int) -> Repair | None:
    pod = truth.pod.view
    assert pod.request is not None
    said = truth.pod.said
    true = placement_annotations(truth.placement, pod.request, node, now_ns)
    true[ANN_ALLOCATION] = encode_table(_named(truth.table))
    true[ANN_ASSIGNED] = "true"
    written = {**dict.fromkeys(said), **true}
    if pod.placement is None or wished_cards(pod.placement) != wished_cards(truth.placement):
        meant = ",".join(str(part.card) for part in pod.placement.slices) if pod.placement else "none"
        reason = f"annotated card {meant}, kubelet gave card {written[ANN_INDEX]}"
        return Repair(truth.pod, written, reason, truth.placement)
    if wrong := _misleading(said, true):
        reason = f"{wrong} said something else than kubelet's book"
        return Repair(truth.pod, written, reason, truth.placement)
    if not pod.assigned:
        return Repair(truth.pod, {ANN_ASSIGNED: "true", ANN_ASSUME_TIME: str(now_ns)}, "assigned")
    return None


def _misleading(said: Mapping[str, str], true: Mapping[str, str]) -> str:
    """The annotation that tells those who go by it alone something else; "" when none does.

    Where two disagree, `Pod.placement` is of the more exact one, and others read the other. What was never
    written is not missed: not every extender writes all of them.
    """
    names = (ANN_INDEX, ANN_POD_UNITS, ANN_ALLOCATION, ANN_CORE, ANN_VISIBLE)
    return next((name for name in names if name in said and not _same(name, said[name], true)), "")


def _same(name: str, text: str, true: Mapping[str, str]) -> bool:
    if name in {ANN_ALLOCATION, ANN_CORE}:
        try:
            return name in true and per_card(name, text) == per_card(name, true[name])
        except ContractError:
            return False
    return name in true and sorted(text.split(",")) == sorted(true[name].split(","))


def _named(table: Table) -> dict[str, dict[str, int]]:
    return {key: {str(card): units for card, units in cards.items()} for key, cards in table.items()}


def _size(pod: NodePod) -> Size:
    request = pod.view.request
    assert request is not None
    return request.units, request.card_count


def cards_of(placement: Placement) -> Cards:
    return tuple(sorted(part.card for part in placement.slices))


def wished_cards(placement: Placement | None) -> dict[int, int]:
    """Units by card."""
    return {part.card: part.units for part in placement.slices} if placement is not None else {}
