"""Containers that run and that kubelet does not know any more: it lost its checkpoint under them.

kubelet then takes their device ids for free. What they hold is known from their folders: a folder's owner is
written when its container starts. kubelet's book tells which of them it still knows, so they are sorted out
once for each kubelet that follows the device list; whoever leaves its book later has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.model import ContainerKind, Pod


@dataclass(frozen=True, slots=True)
class Kept:
    """The folder of a container that was started since the machine was, and what it was given."""

    folder: str
    ids: frozenset[str]
    uid: str
    container: str


class Forgotten:
    """Who is to be kept from harm. `certain` once kubelet's book was read after that kubelet came."""

    def __init__(self) -> None:
        self.certain = True
        self._kept: tuple[Kept, ...] = ()
        self._since_s = 0.0

    def kubelet_came(self, kept: Iterable[Kept], now_s: float) -> None:
        """Another kubelet, or this one anew: until it shows its book, everybody may be forgotten."""
        self._kept, self._since_s, self.certain = tuple(kept), now_s, False

    def book_read(
        self, assignments: Iterable[DeviceAssignment], asked_at_s: float, pod_of: Callable[[str], Pod | None]
    ) -> None:
        """Whom the book shows is not forgotten. `pod_of`: a pod that lives by uid, None for others."""
        if asked_at_s < self._since_s:
            return
        shown: dict[str, set[str]] = {}
        for each in assignments:
            shown.setdefault(each.pod_key, set()).add(each.container)
        self._kept = tuple(each for each in self._kept if _hidden(each, pod_of(each.uid), shown))
        self.certain = True

    def living(self, alive: Callable[[str], bool]) -> tuple[Kept, ...]:
        """Those whose pod is still there."""
        return tuple(each for each in self._kept if alive(each.uid))


def owners_by_id(kept: Iterable[Kept]) -> Mapping[str, str]:
    """The pod's uid for each id that somebody holds without kubelet's knowledge."""
    return {identifier: each.uid for each in kept for identifier in each.ids}


def _hidden(kept: Kept, pod: Pod | None, shown: Mapping[str, set[str]]) -> bool:
    """The book never shows ordinary init containers: they are known where their pod is."""
    if pod is None:
        return False
    names = shown.get(pod.key, set())
    apps = pod.request.containers if pod.request else ()
    listed = any(each.name == kept.container and each.kind is not ContainerKind.INIT for each in apps)
    return kept.container not in names if listed else not names
