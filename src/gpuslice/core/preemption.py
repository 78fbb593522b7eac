"""Whom to evict so that a pod fits on the cards of a node.

kube-scheduler picks victims until the node's *sum* of units suffices; evicting half of two cards makes no
room on either. Here victims are picked card by card, by kube-scheduler's own rule: as many pods as possible
stay, those of high priority first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from gpuslice.core.book import Holding, NodeBook
from gpuslice.core.model import Gpu, Request

Cost = tuple[int, int, int]
"""Highest priority among the victims, how many there are, units they lose: the less the better."""


def victims(book: NodeBook, request: Request, priority: int, proposed: Collection[str]) -> set[str] | None:
    """The uids of the pods to evict from a node so that `request` fits; None when no eviction helps.

    `proposed` is kube-scheduler's own choice. It stands if it helps on the cards too, and among equal choices
    its pods go first. Where it holds pods that have no share of a card, they are in the way of something else
    than GPU memory: then all of it is kept, and what the cards need comes on top.
    """
    going = set(proposed)
    if _fits(book, request, going):
        return going
    keep: set[str] = going if going - set(book.holdings) else set()
    evictable = [
        holding
        for holding in book.holdings.values()
        if holding.pod.priority < priority and holding.pod.uid not in keep and not holding.pod.terminating
    ]
    evictable.sort(key=lambda each: (-each.pod.priority, each.pod.uid in going, each.pod.uid))
    sets = [_on_card(book, gpu, request, evictable, keep) for gpu in _usable(book)]
    found = sorted((each for each in sets if each is not None), key=lambda each: _cost(book, each, going))
    if len(found) < request.gpu_count:
        return None
    return keep.union(*found[: request.gpu_count])


def _on_card(
    book: NodeBook, gpu: Gpu, request: Request, evictable: Iterable[Holding], keep: set[str]
) -> set[str] | None:
    """The fewest victims that make room on one card, None when all of them would not."""
    here = [holding for holding in evictable if _units_on(holding, gpu.index)]
    gone = {holding.pod.uid for holding in here}
    if not _card_fits(book, gpu, request, gone | keep):
        return None
    for holding in here:
        if _card_fits(book, gpu, request, (gone - {holding.pod.uid}) | keep):
            gone.discard(holding.pod.uid)  # this one may stay
    return gone


def _cost(book: NodeBook, uids: set[str], proposed: Collection[str]) -> tuple[Cost, int]:
    holdings = [book.holdings[uid] for uid in uids]
    units = sum(holding.placement.units for holding in holdings if holding.placement)
    cost = (max((holding.pod.priority for holding in holdings), default=-(1 << 31)), len(uids), units)
    return cost, len(uids - set(proposed))


def _fits(book: NodeBook, request: Request, gone: Collection[str]) -> bool:
    roomy = [gpu for gpu in _usable(book) if _card_fits(book, gpu, request, gone)]
    return len(roomy) >= request.gpu_count


def _card_fits(book: NodeBook, gpu: Gpu, request: Request, gone: Collection[str]) -> bool:
    staying = [holding for uid, holding in book.holdings.items() if uid not in gone]
    units = sum(_units_on(holding, gpu.index) + holding.unplaced_units for holding in staying)
    core = sum(
        share.core_percent
        for holding in staying
        for share in (holding.placement.shares if holding.placement else ())
        if share.gpu == gpu.index
    )
    core_left = max(0, (book.node.core_percent if book.node else 0) - core)
    return gpu.units - units >= request.units_per_gpu and core_left >= request.core_percent


def _usable(book: NodeBook) -> list[Gpu]:
    return [gpu for gpu in book.node.gpus if gpu.index not in book.node.unhealthy] if book.node else []


def _units_on(holding: Holding, card: int) -> int:
    shares = holding.placement.shares if holding.placement else ()
    return sum(share.units for share in shares if share.gpu == card)
