"""Shapes are ranked once, when their first pod comes."""

from __future__ import annotations

from gpuslice.core.policy.prewarmer import REMEMBERED_SHAPES, RankPrewarmer
from gpuslice.core.shape import Shape


class Counter:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def arrived(self, shape: Shape) -> None:
        self.heard.append("arrived")

    def placed(self, shape: Shape) -> None:
        self.heard.append("placed")

    def departed(self, shape: Shape) -> None:
        self.heard.append("departed")


def test_each_shape_is_offered_once_the_latest_first() -> None:
    policy = Counter()
    prewarmer = RankPrewarmer(policy)
    for units in (1, 2, 1):
        prewarmer.arrived(Shape(units))
    prewarmer.arrived(Shape(0, 0, 500))  # without cards: nobody will ask where it goes
    assert [prewarmer.next_unranked() for _ in range(3)] == [Shape(2), Shape(1), None]
    prewarmer.arrived(Shape(1))
    assert prewarmer.next_unranked() is None
    prewarmer.placed(Shape(1))
    prewarmer.departed(Shape(1))
    assert policy.heard == ["arrived"] * 5 + ["placed", "departed"]


def test_only_so_many_shapes_are_remembered() -> None:
    prewarmer = RankPrewarmer(Counter())
    for units in range(1, 3 * REMEMBERED_SHAPES):
        prewarmer.arrived(Shape(units))
    offered = []
    while (shape := prewarmer.next_unranked()) is not None:
        offered.append(shape.units)
    assert offered == list(range(3 * REMEMBERED_SHAPES - 1, 2 * REMEMBERED_SHAPES - 1, -1))
