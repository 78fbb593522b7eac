"""Pods without cards on nodes with cards: what they take of CPU and memory, cards there cannot have.

A policy learns of those that come and go, as of all pods, so that it expects more of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuslice.core.model import Pod
from gpuslice.core.shape import Shape

if TYPE_CHECKING:
    from gpuslice.core.ledger import Listener


class Guests:
    """Tells a listener of each once."""

    def __init__(self) -> None:
        self._shapes: dict[str, Shape] = {}  # by uid

    def came(self, pod: Pod, listener: Listener | None) -> None:
        """To a node with cards. Who comes with each node is left out: more pods bring no more of them."""
        if listener is None or not pod.host or pod.comes_with_node or pod.uid in self._shapes:
            return
        self._shapes[pod.uid] = shape = Shape(0, 0, pod.host.cpu_milli, pod.host.memory_mib)
        listener.arrived(shape)
        listener.placed(shape)

    def went(self, uid: str, listener: Listener | None) -> None:
        """Gone for good; who is no guest is fine."""
        shape = self._shapes.pop(uid, None)
        if shape is not None and listener is not None:
            listener.departed(shape)
