"""The clusters that things go wrong in: kinds of nodes that people have, small enough for pods to meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpuslice.core.contract import GPU_COUNT
from tests.builders import api_container
from tests.integration.interleaving_node import CARDS, Fleet


@dataclass(frozen=True)
class Ask:
    """What a pod asks for: units of each app container, and of what starts before them."""

    apps: tuple[int, ...]
    cards: int = 1
    init: int = 0
    sidecar: int = 0

    def fields(self) -> dict[str, Any]:
        """Of the pod, as `api_pod` takes them."""
        names = ("main", *(f"app-{number}" for number in range(1, len(self.apps))))
        apps = [api_container(str(units), name) for name, units in zip(names, self.apps, strict=True)]
        first = [api_container(str(self.init), "init")] if self.init else []
        if self.sidecar:
            first.append(api_container(str(self.sidecar), "sidecar") | {"restartPolicy": "Always"})
        labels = {GPU_COUNT: str(self.cards)} if self.cards > 1 else {}
        return {"labels": labels, "containers": apps, **({"initContainers": first} if first else {})}


def of_one(*units: int) -> Iterator[Ask]:
    """Pods of one container on one card."""
    return (Ask((each,)) for each in units)


@dataclass(frozen=True)
class ChaosFleet(Fleet):
    """`asks`: what pods ask for. `pods`: how many there are at most. `priorities`: those that they have."""

    asks: tuple[Ask, ...] = ()
    pods: int = 8
    priorities: tuple[int, ...] = (0,)


FLEETS = {
    "two nodes": ChaosFleet(CARDS, asks=(*of_one(1, 1, 2, 2, 3, 4),)),
    "one card": ChaosFleet({"n1": (4,)}, asks=(*of_one(1, 2, 3, 4),), pods=5),
    "odd sizes": ChaosFleet(
        {"n1": (1, 9, 4), "n2": (15, 2)},
        asks=(*of_one(1, 2, 4, 7, 9), Ask((4,), 2), Ask((3,), 3)),
        pods=9,
    ),
    "sixteen cards": ChaosFleet(
        dict.fromkeys(("n1", "n2", "n3"), (3,) * 16),
        asks=(*of_one(1, 2, 3), Ask((4,), 2), Ask((12,), 4), Ask((24,), 8), Ask((16,), 16)),
        pods=32,
    ),
    "MiB": ChaosFleet({"n1": (130, 110)}, unit_mib=1, asks=(*of_one(1, 40, 64, 110), Ask((128,), 2))),
    "several containers": ChaosFleet(
        {"n1": (6, 4), "n2": (8,)},
        asks=(
            *of_one(1, 2, 4),
            Ask((1, 1)),
            Ask((2, 1, 1)),
            Ask((2,), init=4),
            Ask((1, 1), init=1, sidecar=2),
            Ask((2, 2), 2),
            Ask((2,), 2, init=4),
        ),
        pods=9,
    ),
    "priorities": ChaosFleet(  # so few pods that often a node's sum would do for one that fits on no card
        {"n1": (4, 4, 4)},
        asks=(*of_one(2, 3, 3, 4), Ask((1, 2)), Ask((6,), 2)),
        pods=5,
        priorities=(0, 0, 0, 10, 100),
    ),
}
