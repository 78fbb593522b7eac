"""Running containers that kubelet no longer knows because it lost its checkpoint.

kubelet then considers their device ids free. What they hold is known from their folders, whose owner is
written when the container starts. kubelet lists the containers that it still knows, so forgotten ones are
determined once for each kubelet that connects; a container that is no longer listed after that has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.grant import units_per_card
from gpuslice.core.model import ContainerKind, Node, Pod, Refusal


@dataclass(frozen=True, slots=True)
class RunningContainer:
    """A container that was started since the machine booted: its folder, and what it was given.

    `uid` is its pod's; "" if the pod was not known when it started, and then kubelet's name for it is.
    """

    folder: str
    uid: str
    assignment: DeviceAssignment  # as kubelet would list it

    @property
    def name(self) -> tuple[str, str]:
        """Its pod's uid and its own name."""
        return self.uid, self.assignment.container


class ForgottenContainers:
    """The containers that must be protected. `certain` once the current kubelet has been queried."""

    def __init__(self) -> None:
        self.certain = True
        self.containers: tuple[RunningContainer, ...] = ()
        self._since_s = 0.0

    def kubelet_came(self, running: Iterable[RunningContainer], now_s: float) -> None:
        """Another or a restarted kubelet: until its assignments are read, any container may be forgotten."""
        self.containers, self._since_s, self.certain = tuple(running), now_s, False

    def assignments_read(
        self,
        assignments: Iterable[DeviceAssignment],
        asked_at_s: float,
        living_pod: Callable[[RunningContainer], Pod | None],
    ) -> None:
        """What kubelet lists is not forgotten. `living_pod`: a container's pod, None if unknown.

        A container whose pod is unknown stays until the pod is known, or until `pod_is_gone`.
        """
        if asked_at_s < self._since_s:
            return
        listed: dict[str, set[str]] = {}
        for each in assignments:
            listed.setdefault(each.pod_key, set()).add(each.container)

        def unlisted(container: RunningContainer) -> bool:
            name = container.assignment.container
            pod, names = living_pod(container), listed.get(container.assignment.pod_key, set())
            if pod is None:  # the pod of one that was ever known is gone
                return not container.uid and name not in names
            requests = pod.request.containers if pod.request else ()
            listable = any(each.name == name and each.kind is not ContainerKind.INIT for each in requests)
            # kubelet does not list ordinary init containers: they are known if their pod is
            return name not in names if listable else not names

        self.containers = tuple(each for each in self.containers if unlisted(each))
        self.certain = True

    def pod_is_gone(self, of: RunningContainer) -> None:
        """The API server does not have the pod. A kubelet that came meanwhile may have found the container's
        folder again, with another pod's container of the same name: that one stays."""
        self.containers = tuple(each for each in self.containers if each is not of)


def no_room_beside(
    forgotten: Sequence[RunningContainer], ids: frozenset[str], held: frozenset[str], node: Node
) -> Refusal | None:
    """Why nobody may use `ids`: with the forgotten ones it is too much for a card. `held`: listed ids."""
    known = units_per_card(ids | held)
    unknown = units_per_card(frozenset[str]().union(*(one.assignment.ids for one in forgotten)))
    for card in node.cards:
        if card.uuid in units_per_card(ids) and known[card.uuid] + unknown.get(card.uuid, 0) > card.units:
            pods = {each.assignment.pod_key for each in forgotten}
            return Refusal(
                f"card {card.index} of node {node.name} has no room left beside "
                f"{unknown.get(card.uuid, 0)} of its {card.units} units of {node.names.memory} "
                f"in running containers that kubelet has forgotten ({', '.join(sorted(pods))}); "
                f"delete those pods, so that they are recreated, or this one; if they are gone, end their "
                f"processes or restart the machine"
            )
    return None
