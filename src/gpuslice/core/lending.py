"""Memory of a card that nobody requested, lent to containers that may have more than their request.

Who borrows is never promised more than what it requested: a lease is called back when the memory is
requested. First what nobody requested is lent; then what lies unused of the requests of those that may borrow
themselves: their lease is then negative. Who loses a lease is decided in one place, `first_to_lose`, and
nobody loses more than what is missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Name = tuple[str, str]
"""A pod's uid and the name of its container."""
LEAST_STEP = 64 << 20
"""A lease is not changed for less: each change is read by all processes of a container."""


@dataclass(frozen=True, slots=True)
class Borrower:
    """A container on one card. Bytes beyond its request: what it uses of them, and the most that it may have.

    `came`: larger for a younger one. `spare_bytes`: of its request, what may be lent. `presses`: it is near
    the end of what it has.
    """

    name: Name
    used_bytes: int
    most_bytes: int
    priority: int = 0
    came: int = 0
    spare_bytes: int = 0
    presses: bool = False


def first_to_lose(borrowers: Iterable[Borrower]) -> list[Borrower]:
    """The lowest priority, then who has the most beyond its request, then the youngest."""

    def order(each: Borrower) -> tuple[int, int, int, Name]:
        return -each.priority, each.used_bytes, each.came, each.name

    return sorted(borrowers, key=order, reverse=True)


def leases(borrowers: Iterable[Borrower], free_bytes: int) -> dict[Name, int]:
    """Bytes beyond its request for each: first what they use, then evenly the rest of what nobody requested.

    What a borrower gets less than it uses is called back. Of requests, no more is lent than those that are
    near their end may have more, and that is taken from those with the most to spare.
    """
    keeping = first_to_lose(borrowers)[::-1]
    found, left = dict[Name, int](), max(0, free_bytes)
    spare = sum(each.spare_bytes for each in keeping)
    for each in keeping:
        found[each.name] = min(each.used_bytes, each.most_bytes, left + spare)
        left -= found[each.name]
    rest, wanting = max(0, left), sorted(keeping, key=lambda each: each.most_bytes - found[each.name])
    for place, each in enumerate(wanting):  # who may have the least more comes first
        more = min(each.most_bytes - found[each.name], rest // (len(wanting) - place))
        if found[each.name] >= each.used_bytes:
            found[each.name] += max(0, more)
            rest -= max(0, more)
    pressing = [each for each in wanting if each.presses and not each.spare_bytes]
    unused = spare + min(0, left)
    for place, each in enumerate(pressing):
        more = min(each.most_bytes - found[each.name], unused // (len(pressing) - place))
        found[each.name] += more
        unused -= more
    lent = sum(found.values()) - max(0, free_bytes)
    for each in sorted(keeping, key=lambda each: -each.spare_bytes):
        if lent > 0:
            given = min(each.spare_bytes, lent)
            found[each.name] -= given
            lent -= given
    return found


def kept(now: Mapping[Name, int], borrowers: Iterable[Borrower], free_bytes: int) -> dict[Name, int]:
    """The leases that there are, as long as they suffice; else others.

    They suffice if they are of the same borrowers, together no more than what is free, and nobody could have
    more without loss to another, or is near the end of its own while another could spare some.
    """
    others, asking = leases(found := list(borrowers), free_bytes), {each.name: each for each in found}
    if now.keys() != asking.keys() or sum(now.values()) > max(0, free_bytes):
        return others
    if any(not -each.spare_bytes <= now[name] <= each.most_bytes for name, each in asking.items()):
        return others
    more = [name for name in now if others[name] > now[name] + LEAST_STEP]
    costless = all(others[name] >= lease for name, lease in now.items())
    pressed = any(
        asking[name].presses or asking[name].used_bytes >= now[name] - now[name] // 8 for name in more
    )
    return others if more and (costless or pressed) else dict(now)
