"""Pods without cards on nodes with cards: the CPU and memory that they take is lost to the cards there.

A policy learns from those that come and go, as from all pods, and so expects more of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuslice.core.model import Pod
from gpuslice.core.shape import Shape

if TYPE_CHECKING:
    from gpuslice.core.ledger import Listener


class Guests:
    """Reports each of them to a listener once."""

    def __init__(self) -> None:
        self._shapes: dict[str, Shape] = {}  # by uid

    def came(self, pod: Pod, listener: Listener | None) -> None:
        """A pod came to a node with cards. Those that come with each node never become more: ignored."""
        if listener is None or not pod.host or pod.comes_with_node or pod.uid in self._shapes:
            return
        self._shapes[pod.uid] = shape = Shape(0, 0, pod.host.cpu_milli, pod.host.memory_mib)
        listener.arrived(shape)
        listener.placed(shape)

    def went(self, uid: str, listener: Listener | None) -> None:
        """A pod is gone for good; others than guests are ignored."""
        shape = self._shapes.pop(uid, None)
        if shape is not None and listener is not None:
            listener.departed(shape)
