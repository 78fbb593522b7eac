"""The pods of this node as the agent sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.resources import Resource
from gpuslice.adapters.kube.views import pod_view
from gpuslice.core.annotations import PLACEMENT_ANNOTATIONS, decode_meant, decode_tiers
from gpuslice.core.container_files import hiding_mount
from gpuslice.core.contract import (
    ANN_INDEX,
    ANN_LATENCY_CLASS,
    ANN_MEANT,
    ANN_SHOWN_MEMORY,
    ANN_TRACEPARENT,
    ANN_VISIBLE,
    ENV_NO_ISOLATION,
    EXCLUSIVE_GPU,
)
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.mode import Rules
from gpuslice.core.model import ContainerRequest, Placement, Pod, Tier
from gpuslice.core.parking import Amounts, Order, WhenIdle, order, parked, when_idle
from gpuslice.core.quantity import whole_number

T = TypeVar("T")


class EnvVar(objects._Object):  # the base of all partial objects
    name: str = ""
    value: str = ""
    value_from: dict[str, Any] | None = None


class AgentContainer(objects.Container):
    env: list[EnvVar] | None = None
    volume_mounts: list[dict[str, Any]] | None = None
    volume_devices: list[dict[str, Any]] | None = None
    termination_message_path: str = ""


class AgentPodSpec(objects.PodSpec):
    containers: list[AgentContainer] = []  # type: ignore[assignment]  # noqa: RUF012
    init_containers: list[AgentContainer] | None = None  # type: ignore[assignment]


class AgentPod(objects.Pod):
    """A pod with its containers' environment and mounts, which only the agent needs: for one node's pods."""

    spec: AgentPodSpec = msgspec.field(default_factory=AgentPodSpec)


NODE_PODS: Resource[Any] = Resource("v1", "pods", "Pod", AgentPod)


@dataclass(frozen=True, slots=True)
class NodePod:
    """A pod of this node. kubelet admits pods by `created` (RFC 3339) after its own restart, else by `came`.

    `came` is the version with which the pod was first seen here. `unlimited` names the containers that turn
    isolation off for themselves by ``CGPU_DISABLE``; `reading` those whose environment comes from the pod's
    placement annotations; `hiding` those with part of a card that mount something over what enforces their
    limits, with what is wrong about it; `running` those that run; `completed` the init containers that ended
    well, which kubelet does not start again. `container_ids` are the runtime's, with the containers' names.
    `whole`: it asks for whole cards, which another plugin gave it. `interactive`: small work that somebody
    waits for. `shows_request`: its programs see no more than its own as the size of a card. `said` are its
    placement annotations as they are, since others read them without our care, and `lost` the names of those
    that it had before. `meant_for`: the card kept for it after it was taken off its own. `tiers`: recorded
    for containers whose limits are enforced by something else than the node's. `traceparent`: where its trace
    continues. `when_idle` is its author's wish, `order` what somebody asks the agent to do with it now, and
    `parked` what the agent recorded to have taken off its cards.
    """

    view: Pod
    created: str = ""
    came: int = 0
    unlimited: frozenset[str] = frozenset()
    reading: frozenset[str] = frozenset()
    hiding: Mapping[str, str] = field(default_factory=dict)
    running: frozenset[str] = frozenset()
    completed: frozenset[str] = frozenset()
    container_ids: Mapping[str, str] = field(default_factory=dict)
    whole: bool = False
    interactive: bool = False
    shows_request: bool = False
    said: Mapping[str, str] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    meant_for: Placement | None = None
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    traceparent: str = ""
    when_idle: WhenIdle = field(default_factory=WhenIdle)
    order: Order | None = None
    parked: Amounts = field(default_factory=dict)

    def tier(self, container: str, rules: Rules, *, allow_cgpu_disable: bool) -> Tier:
        """What enforces the container's limits, if the library is loaded into all of its programs."""
        exempt = allow_cgpu_disable and container in self.unlimited
        return Tier.LIBRARY if rules.isolation and not exempt else Tier.NONE

    @property
    def holds_slices(self) -> bool:
        """Whether it asks for parts of cards and has not ended."""
        return self.view.request is not None and not self.view.finished

    @property
    def taken_off(self) -> bool:
        """Whether the agent took it off its card, because the card is another pod's."""
        return ANN_MEANT in self.said

    @property
    def meant(self) -> Placement | None:
        """Where its annotations say that it is or should be."""
        return self.view.placement or self.meant_for


@dataclass(frozen=True, slots=True)
class Holder:
    """The container that device ids belong to. `exact`: kubelet lists it with exactly these ids."""

    pod: NodePod
    container: ContainerRequest | None
    exact: bool


def hiding_in(container: AgentContainer) -> str:
    """What is wrong about its mounts: one hides what enforces its limits; "" if none does."""
    of = container
    return hiding_mount(of.name, of.volume_mounts, of.volume_devices, of.termination_message_path)


def _read(what: Callable[[Mapping[str, str]], T], annotations: Mapping[str, str]) -> T | None:
    """None for what admission would have refused."""
    try:
        return what(annotations)
    except InvalidRequestError:
        return None


def node_pod(pod: AgentPod) -> NodePod:
    annotations, spec, status = pod.metadata.annotations or {}, pod.spec, pod.status
    view = pod_view(pod)
    containers = [*(spec.init_containers or ()), *spec.containers]
    asking = {each.name for each in view.request.containers} if view.request else set()
    statuses = [*(status.init_container_statuses or ()), *(status.container_statuses or ())]

    placement_paths = {f"metadata.annotations['{name}']" for name in (ANN_VISIBLE, ANN_INDEX)}

    def having(has: Callable[[EnvVar], bool]) -> frozenset[str]:
        """The containers that have such a variable."""
        return frozenset(each.name for each in containers if any(map(has, each.env or ())))

    return NodePod(
        view,
        pod.metadata.creation_timestamp or "",
        unlimited=having(lambda one: one.name == ENV_NO_ISOLATION and one.value.lower() in {"true", "1"}),
        reading=having(
            lambda one: ((one.value_from or {}).get("fieldRef") or {}).get("fieldPath", "") in placement_paths
        ),
        hiding={
            each.name: wrong for each in containers if each.name in asking and (wrong := hiding_in(each))
        },
        running=frozenset(each.name for each in statuses if "running" in (each.state or {})),
        completed=frozenset(
            each.name
            for each in status.init_container_statuses or ()
            if (each.state or {}).get("terminated", {}).get("exitCode") == 0
        ),
        container_ids={each.container_id.rpartition("/")[2]: each.name for each in statuses},
        interactive=annotations.get(ANN_LATENCY_CLASS) == "interactive",
        shows_request=annotations.get(ANN_SHOWN_MEMORY) == "request",
        whole=any(
            whole_number(((each.resources and each.resources.limits) or {}).get(EXCLUSIVE_GPU))
            for each in containers
        ),
        said={name: text for name, text in annotations.items() if name in PLACEMENT_ANNOTATIONS},
        meant_for=decode_meant(annotations, view.node, view.request) if view.request else None,
        tiers=decode_tiers(annotations),
        traceparent=annotations.get(ANN_TRACEPARENT, ""),
        when_idle=_read(when_idle, annotations) or WhenIdle(),
        order=_read(order, annotations),
        parked=parked(annotations),
    )
