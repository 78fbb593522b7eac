"""Which containers kubelet has still to give devices to, in the order in which it will probably ask.

kubelet does not say for whom it asks. But it admits one pod at a time and its containers in order, and the
extender wrote down when it placed each pod; so the next request can be told from what was granted before. A
wrong guess is harmless: it can only swap containers of equal amounts, and annotations follow kubelet's book.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from gpuslice.apps.agent.pods import NodePod
from gpuslice.core.model import ContainerKind, ContainerRequest, Placement, Pod, Request


@dataclass(frozen=True, slots=True)
class Guess:
    """Device ids that were granted, and the container that they are believed to be for."""

    uid: str
    container: str
    ids: frozenset[str]
    at_s: float
    lasting: bool = False  # kubelet's book will never show it: the pod has init containers only


@dataclass(frozen=True, slots=True)
class Want:
    """A container that waits for devices. `cards`: where its pod was placed, () when nobody placed it.

    `in_turn`: it is the pod's next one; `begun`: an earlier one of the pod has its devices already.
    """

    pod: NodePod
    request: Request
    container: ContainerRequest
    cards: tuple[int, ...]
    in_turn: bool
    begun: bool

    @property
    def units(self) -> int:
        return self.container.units

    @property
    def first(self) -> bool:
        """Whether it is its pod's next one and the pod has nothing yet."""
        return self.in_turn and not self.begun


def outstanding(
    pods: Iterable[NodePod], served: Set[tuple[str, str]], wishes: Mapping[str, Placement]
) -> list[Want]:
    """Every container without devices, most probable first.

    `served` has (pod uid, container name) of those with devices; `wishes` overrule annotations, by pod uid.
    """
    wants = [want for pod in pods if _may_want(pod.view) for want in _wants_of(pod, served, wishes)]
    return sorted(wants, key=_turn)


def wished(pod: NodePod, wishes: Mapping[str, Placement]) -> Placement | None:
    """Where the pod is meant to be."""
    return wishes.get(pod.view.uid, pod.meant)


def _may_want(pod: Pod) -> bool:
    return pod.request is not None and not pod.finished and not pod.terminating


def _wants_of(pod: NodePod, served: Set[tuple[str, str]], wishes: Mapping[str, Placement]) -> Iterable[Want]:
    """kubelet gives in order, so whatever comes before a served container has been served."""
    view = pod.view
    assert view.request is not None
    containers = view.request.containers
    done = [place for place, each in enumerate(containers) if (view.uid, each.name) in served]
    first = max(done, default=-1) + 1
    placement = wished(pod, wishes)
    cards = tuple(part.card for part in placement.slices) if placement else ()
    for place, container in enumerate(containers[first:]):
        yield Want(pod, view.request, container, cards, in_turn=place == 0, begun=first > 0)


def _turn(want: Want) -> tuple[bool, bool, bool, str, int, str]:
    """A pod that is half admitted comes first, then what waits longest.

    A pod that had its devices once (assigned) asks again only after kubelet lost its checkpoint or the
    machine was started anew; then kubelet goes by creation time.
    """
    pod = want.pod.view
    order = want.pod.created if pod.assigned else ""
    return (not want.begun, not want.in_turn, pod.assigned, order, pod.assume_time_ns, pod.uid)


def only_init_containers(request: Request) -> bool:
    """Whether the pod's amount is of ordinary init containers alone, which kubelet's book never shows."""
    return all(each.kind is ContainerKind.INIT for each in request.containers)
