"""How close the cards of one node are to each other, and which of them belong together.

A pod with several cards uses all of them at once, and its slowest link sets the pace. So it gets cards that
are joined as well as possible; among equally good ones the usual rules decide. If all cards are alike, there
is nothing to choose, and nothing is written, stored or computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from itertools import combinations
from typing import TypeAlias

from gpuslice.core.contract import NODE_LINKS
from gpuslice.core.errors import ContractError


class Link(IntEnum):
    """How two cards reach each other; a higher value is faster. With the words of ``nvidia-smi topo -m``."""

    SYSTEM = 0  # SYS: through both CPUs
    NUMA = 1  # NODE, PHB: through one CPU
    SWITCH = 2  # PXB, PIX: only through PCI switches
    NVLINK = 3  # NV#

    @property
    def word(self) -> str:
        return _WORDS[self]


_WORDS = {
    Link.SYSTEM: "the CPUs",
    Link.NUMA: "one CPU",
    Link.SWITCH: "a PCI switch",
    Link.NVLINK: "NVLink",
}

CardLinks: TypeAlias = tuple[tuple[int, ...], ...]
"""The link of each card to each, in index order; `NVLINK` to itself. Empty if all are alike or unknown."""


def card_links(pairs: Sequence[Sequence[Link]]) -> CardLinks:
    """From the links of each card to those after it; empty if all are alike."""
    count = len(pairs) + 1
    if len({link for row in pairs for link in row}) <= 1:
        return ()
    rows = [[int(Link.NVLINK)] * count for _ in range(count)]
    for first, row in enumerate(pairs):
        for offset, link in enumerate(row):
            rows[first][first + 1 + offset] = rows[first + 1 + offset][first] = int(link)
    return tuple(map(tuple, rows))


def encode_links(links: CardLinks) -> str:
    """The node annotation ``gpuslice.io/links``: ``311,11,3`` is 0-1 and 2-3 by NVLink, else one CPU."""
    return ",".join("".join(map(str, row[first + 1 :])) for first, row in enumerate(links[:-1]))


def decode_links(text: str, count: int) -> CardLinks:
    """The reverse, for a node with this many cards. Raises `ContractError`."""
    rows = text.split(",") if text else []
    digits = {str(int(link)) for link in Link}
    lengths = [len(row) for row in rows]
    if rows and (lengths != list(range(count - 1, 0, -1)) or not digits.issuperset("".join(rows))):
        must_be = f"for each of {count} cards but the last one digit from 0 to 3 for each card after it"
        raise ContractError(f'annotation "{NODE_LINKS}"', text, must_be)
    return card_links([[Link(int(digit)) for digit in row] for row in rows])


def closest(links: CardLinks, slots: Sequence[int], count: int) -> list[int]:
    """`count` of these cards, the best joined; of equally good sets the one whose last card comes first.

    Grown from each card in turn by the card nearest to all that are taken. Where links form nested groups, as
    switches and CPUs do, this is as good as examining all combinations.
    """
    if not links or not 1 < count < len(slots):
        return list(slots[:count])
    best: tuple[int, int, list[int]] | None = None
    for first in range(len(slots)):
        taken = [first]
        while len(taken) < count:
            rest = (place for place in range(len(slots)) if place not in taken)
            reach = {place: [links[slots[place]][slots[other]] for other in taken] for place in rest}
            taken.append(max(reach, key=lambda place: (min(reach[place]), sum(reach[place]), -place)))
        weakest, total = _quality(links, [slots[place] for place in taken])
        candidate = (-weakest, -total, sorted(taken, reverse=True))
        best = candidate if best is None else min(best, candidate)
    assert best is not None
    return [slots[place] for place in reversed(best[2])]


def _quality(links: CardLinks, slots: Sequence[int]) -> tuple[int, int]:
    each = [links[one][other] for one, other in combinations(slots, 2)]
    return min(each), sum(each)


def weakest_link(links: CardLinks, slots: Sequence[int]) -> Link | None:
    """The slowest link among these cards; None if there is only one, or no difference."""
    return Link(_quality(links, slots)[0]) if links and len(slots) > 1 else None


@lru_cache(maxsize=1 << 16)  # nodes are of few kinds and have few cards
def links_lost(links: CardLinks, fitting: int, count: int) -> int:
    """How much slower the weakest link is on the cards that are set in `fitting` than on an empty node."""
    slots = [slot for slot in range(len(links)) if fitting >> slot & 1]
    if count > len(slots):
        return 0
    here, _ = _quality(links, closest(links, slots, count))
    empty, _ = _quality(links, closest(links, range(len(links)), count))
    return max(0, empty - here)
