"""What must be written so that pods' annotations say what kubelet's book says.

kubelet's book is the truth about cards: it gave the ids. Where a pod got another card than it was meant for,
its annotation follows. And where that card was meant for a pod that still waits, the two exchange their
wishes, so that the sums per card stay what the extender reckoned with.
"""

from __future__ import annotations

from collections import defaultdict
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
from gpuslice.core.errors import ContractError
from gpuslice.core.grant import GrantError, units_per_card
from gpuslice.core.holding import Holding
from gpuslice.core.model import ContainerKind, Node, Placement, Pod, Request, Share
from gpuslice.core.request import held_at_peak

Table = dict[str, dict[int, int]]
"""Units by container key and card index."""


@dataclass(frozen=True, slots=True)
class Repair:
    """Annotations to write on one pod, None for one to take away, and why in a few words."""

    pod: Pod
    annotations: Mapping[str, str | None]
    reason: str


@dataclass(frozen=True, slots=True)
class Truth:
    """Where a pod really sits, by kubelet's book."""

    pod: NodePod
    placement: Placement
    table: Table


def truths(pods: Iterable[NodePod], holdings: Iterable[Holding], node: Node) -> list[Truth]:
    """The pods whose devices kubelet's book shows completely and without contradiction."""
    books: dict[str, list[Holding]] = defaultdict(list)
    for holding in holdings:
        books[holding.pod_key].append(holding)
    found = (_truth(pod, books.get(pod.view.key, []), node) for pod in pods)
    return [truth for truth in found if truth is not None]


def repairs(found: Iterable[Truth], node: Node, now_ns: int) -> list[Repair]:
    """One repair for each pod whose annotations do not say the truth yet."""
    made = (_repair(truth, node, now_ns) for truth in found)
    return [repair for repair in made if repair is not None]


def exchanges(
    found: Iterable[Truth], waiting: Iterable[Want], wishes: Mapping[str, Placement]
) -> Iterator[tuple[str, Placement]]:
    """New wishes, as (pod uid, placement): a pod that waits takes over the card of the one that got its own.

    Both sides are answered, so that one exchange is not found twice.
    """
    wishes = dict(wishes)
    whole = [want for want in waiting if want.in_turn and not want.begun]
    for truth in found:
        meant = wished(truth.pod.view, wishes)
        if meant is None or wished_cards(meant) == wished_cards(truth.placement):
            continue
        wishes[truth.pod.view.uid] = truth.placement
        yield truth.pod.view.uid, truth.placement
        other = next((want for want in whole if _changes_with(want, truth, wishes)), None)
        if other is not None:
            wishes[other.pod.view.uid] = meant
            yield other.pod.view.uid, meant


def wish_repairs(wishes: Mapping[str, Placement], waiting: Iterable[Want], node: Node) -> list[Repair]:
    """Wishes of pods that still wait and whose annotations say something else."""
    made = []
    for want in waiting:
        pod, wish = want.pod.view, wishes.get(want.pod.view.uid)
        if want.in_turn and not want.begun and wish is not None and pod.placement != wish:
            annotations = placement_annotations(wish, want.request, node, pod.assume_time_ns)
            made.append(Repair(pod, annotations, "its card went to an equal pod"))
    return made


# -- the truth of one pod --------------------------------------------------------------------------------
def _truth(pod: NodePod, book: list[Holding], node: Node) -> Truth | None:
    view = pod.view
    if not book or view.request is None or view.finished or view.terminating:
        return None
    held = {each.container: each for each in book}
    if len(held) != len(book) or not _complete(view.request, held):
        return None  # two pods of one name, or a pod of that name that is no more
    try:
        table = _table(view.request, held, node)
    except (GrantError, KeyError):
        return None
    if any(len(cards) > view.request.gpu_count for cards in table.values()):
        return None  # no grant of ours: another plugin gave ids away without a thought of their cards
    return Truth(pod, _placement(table, view.request, node), table)


def _complete(request: Request, held: Mapping[str, Holding]) -> bool:
    wanted = {each.name: each.units for each in request.containers if each.kind is not ContainerKind.INIT}
    return {name: len(each.ids) for name, each in held.items()} == wanted


def _table(request: Request, held: Mapping[str, Holding], node: Node) -> Table:
    """Units by container and card. What an init container holds beyond the rest is on the first cards."""
    index_of = {gpu.uuid: gpu.index for gpu in node.gpus}
    table: Table = {}
    cards: list[int] = []
    for container, units in held_at_peak(request):
        key = container_key(container, request.app_containers)
        holding = held.get(container.name)
        if holding is not None:
            counts = units_per_card(holding.ids)
            table[key] = {index_of[uuid]: count for uuid, count in sorted(counts.items())}
            cards = sorted({*cards, *table[key]})
        else:
            on = cards[: request.gpu_count]
            table[key] = {card: units // len(on) for card in on}
    return table


def _placement(table: Table, request: Request, node: Node) -> Placement:
    sums: dict[int, int] = defaultdict(int)
    for cards in table.values():
        for card, units in cards.items():
            sums[card] += units
    core = request.core_percent // len(sums)
    return Placement(node.name, tuple(Share(card, units, core) for card, units in sorted(sums.items())))


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
        meant = ",".join(str(share.gpu) for share in pod.placement.shares) if pod.placement else "none"
        return Repair(pod, written, f"annotated card {meant}, kubelet gave card {written[ANN_INDEX]}")
    if wrong := _misleading(said, true):
        return Repair(pod, written, f"{wrong} said something else than kubelet's book")
    if not pod.assigned:
        return Repair(pod, {ANN_ASSIGNED: "true", ANN_ASSUME_TIME: str(now_ns)}, "assigned")
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


def _changes_with(want: Want, truth: Truth, wishes: Mapping[str, Placement]) -> bool:
    """Whether the waiting pod wanted what the other got, and wants as much in every respect."""
    meant = wished(want.pod.view, wishes)
    request = truth.pod.view.request
    return (
        meant is not None
        and request is not None
        and want.pod.view.uid != truth.pod.view.uid
        and wished_cards(meant) == wished_cards(truth.placement)
        and (want.request.units, want.request.gpu_count, want.request.core_percent)
        == (request.units, request.gpu_count, request.core_percent)
    )


def wished_cards(placement: Placement) -> dict[int, int]:
    return {share.gpu: share.units for share in placement.shares}
