"""The clusters that things go wrong in: kinds of nodes that people have, small enough for pods to meet."""

from __future__ import annotations

from dataclasses import dataclass

from tests.integration.interleaving_node import CARDS, Fleet


@dataclass(frozen=True)
class ChaosFleet(Fleet):
    """`asks`: what pods ask for, as units in all and cards. `pods`: how many there are at most."""

    asks: tuple[tuple[int, int], ...] = ()
    pods: int = 8


FLEETS = {
    "two nodes": ChaosFleet(CARDS, asks=((1, 1), (1, 1), (2, 1), (2, 1), (3, 1), (4, 1))),
    "one card": ChaosFleet({"n1": (4,)}, asks=((1, 1), (2, 1), (3, 1), (4, 1)), pods=5),
    "odd sizes": ChaosFleet(
        {"n1": (1, 9, 4), "n2": (15, 2)},
        asks=((1, 1), (2, 1), (4, 1), (4, 2), (7, 1), (9, 1), (3, 3)),
        pods=9,
    ),
    "sixteen cards": ChaosFleet(
        dict.fromkeys(("n1", "n2", "n3"), (3,) * 16),
        asks=((1, 1), (2, 1), (3, 1), (4, 2), (12, 4), (24, 8), (16, 16)),
        pods=32,
    ),
    "MiB": ChaosFleet({"n1": (130, 110)}, unit_mib=1, asks=((1, 1), (40, 1), (64, 1), (128, 2), (110, 1))),
}
