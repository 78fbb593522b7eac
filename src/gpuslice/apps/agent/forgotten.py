"""Containers that run and that kubelet does not know any more: it lost its checkpoint under them.

kubelet then takes their device ids for free. What they hold is known from their folders: a folder's owner is
written when its container starts. kubelet lists which of them it still knows, so they are sorted out once for
each kubelet that follows the device list; a container that it stops listing later has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.grant import units_per_card
from gpuslice.core.model import ContainerKind, Node, Pod, Refusal

NEWS_AFTER_S = 60.0
"""So long there may be no news of a pod that runs; one that is still unknown then is gone."""


@dataclass(frozen=True, slots=True)
class RunningContainer:
    """A container that was started since the machine was: its folder, and what it was given.

    `uid` is its pod's, "" where there was no news of that when it started: known is kubelet's name for it.
    """

    folder: str
    uid: str
    assignment: DeviceAssignment  # as kubelet would list it

    @property
    def name(self) -> tuple[str, str]:
        """Its pod's uid and its own name."""
        return self.uid, self.assignment.container


class ForgottenContainers:
    """Who is to be kept from harm. `certain` once kubelet was asked after it came."""

    def __init__(self) -> None:
        self.certain = True
        self.containers: tuple[RunningContainer, ...] = ()
        self._since_s = 0.0

    def kubelet_came(self, running: Iterable[RunningContainer], now_s: float) -> None:
        """Another kubelet, or this one anew: until its assignments are read, everybody may be forgotten."""
        self.containers, self._since_s, self.certain = tuple(running), now_s, False

    def assignments_read(
        self,
        assignments: Iterable[DeviceAssignment],
        asked_at_s: float,
        now_s: float,
        living_pod: Callable[[RunningContainer], Pod | None],
    ) -> None:
        """Whom kubelet lists is not forgotten. `living_pod`: a container's pod, None where none is known."""
        if asked_at_s < self._since_s:
            return
        listed: dict[str, set[str]] = {}
        for each in assignments:
            listed.setdefault(each.pod_key, set()).add(each.container)

        def unlisted(container: RunningContainer) -> bool:
            name = container.assignment.container
            pod, names = living_pod(container), listed.get(container.assignment.pod_key, set())
            if pod is None:  # one that was ever known is gone
                late = not container.uid and now_s - self._since_s < NEWS_AFTER_S
                return late and name not in names
            requests = pod.request.containers if pod.request else ()
            listable = any(each.name == name and each.kind is not ContainerKind.INIT for each in requests)
            # kubelet lists no ordinary init containers: they are known where their pod is
            return name not in names if listable else not names

        self.containers = tuple(each for each in self.containers if unlisted(each))
        self.certain = True


def no_room_beside(
    forgotten: Sequence[RunningContainer], ids: frozenset[str], held: frozenset[str], node: Node
) -> Refusal | None:
    """Why nobody may use `ids`: with what kubelet forgot it is too much for a card. `held`: what it knows."""
    known = units_per_card(ids | held)
    unknown = units_per_card(frozenset[str]().union(*(one.assignment.ids for one in forgotten)))
    for card in node.cards:
        if card.uuid in units_per_card(ids) and known[card.uuid] + unknown.get(card.uuid, 0) > card.units:
            pods = {each.assignment.pod_key for each in forgotten}
            return Refusal(
                f"card {card.index} of node {node.name} has no room left beside "
                f"{unknown.get(card.uuid, 0)} of its {card.units} units of {node.names.memory} "
                f"in running containers that kubelet has forgotten ({', '.join(sorted(pods))}); "
                f"delete those pods, so that they are recreated, or this one"
            )
    return None
