"""Shapes ranked before anybody asks for them."""

from __future__ import annotations

from collections import OrderedDict

from gpuslice.core.shape import Listener, Shape

REMEMBERED_SHAPES = 64


class RankPrewarmer:
    """Passes pods' shapes on to the policy, and remembers those that are not ranked yet.

    A shape that is new to the policy requires a look at every node, a few milliseconds in a large cluster.
    Pods are usually seen when they are created, which leaves time to rank their shape between two requests.
    """

    def __init__(self, policy: Listener) -> None:
        self._policy = policy
        self._seen: OrderedDict[Shape, None] = OrderedDict()
        self._unranked: OrderedDict[Shape, None] = OrderedDict()

    def arrived(self, shape: Shape) -> None:
        self._policy.arrived(shape)
        if not shape.cards:
            return  # nobody asks about it
        if shape not in self._seen:
            self._unranked[shape] = None
        self._seen[shape] = None
        self._seen.move_to_end(shape)
        while len(self._seen) > REMEMBERED_SHAPES:
            self._unranked.pop(self._seen.popitem(last=False)[0], None)

    def placed(self, shape: Shape) -> None:
        self._policy.placed(shape)

    def departed(self, shape: Shape) -> None:
        self._policy.departed(shape)

    def next_unranked(self) -> Shape | None:
        """A shape that has arrived and has not been ranked, the latest first."""
        return self._unranked.popitem()[0] if self._unranked else None
