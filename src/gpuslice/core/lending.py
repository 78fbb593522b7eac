"""Memory of a card that nobody requested, lent to containers that may have more than their request.

Who borrows is never promised more than what it requested: a lease is called back when the memory is
requested. What is left then goes to those that keep what they borrowed, in this order: the highest priority,
the least beyond its request, the oldest. So the first to lose are of the lowest priority, then with the most
beyond their request, then the youngest; and nobody loses more than what is missing.
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

    `came`: larger for a younger one.
    """

    name: Name
    used_bytes: int
    most_bytes: int
    priority: int = 0
    came: int = 0


def leases(borrowers: Iterable[Borrower], free_bytes: int) -> dict[Name, int]:
    """Bytes beyond its request for each: first what they use, then the rest evenly.

    What a borrower gets less than it uses is called back.
    """
    keeping = sorted(borrowers, key=lambda each: (-each.priority, each.used_bytes, each.came, each.name))
    found, left = dict[Name, int](), max(0, free_bytes)
    for each in keeping:
        found[each.name] = min(each.used_bytes, each.most_bytes, left)
        left -= found[each.name]
    wanting = sorted(keeping, key=lambda each: each.most_bytes - found[each.name])
    for place, each in enumerate(
        wanting
    ):  # whoever may have the least more first: the rest is for the others
        more = min(each.most_bytes - found[each.name], left // (len(wanting) - place))
        if found[each.name] >= each.used_bytes:
            found[each.name] += max(0, more)
            left -= max(0, more)
    return found


def kept(now: Mapping[Name, int], borrowers: Iterable[Borrower], free_bytes: int) -> dict[Name, int]:
    """The leases that there are, as long as they suffice; else others.

    They suffice if they are of the same borrowers, together no more than what is free, and nobody could have
    more without loss to another, or is near the end of its own while another could spare some.
    """
    others, asking = leases(found := list(borrowers), free_bytes), {each.name: each for each in found}
    if now.keys() != asking.keys() or sum(now.values()) > max(0, free_bytes):
        return others
    if any(now[name] > each.most_bytes for name, each in asking.items()):
        return others
    more = [name for name in now if others[name] > now[name] + LEAST_STEP]
    costless = all(others[name] >= lease for name, lease in now.items())
    pressed = any(asking[name].used_bytes >= now[name] - now[name] // 8 for name in more)
    return others if more and (costless or pressed) else dict(now)
