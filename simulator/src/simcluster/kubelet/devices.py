"""kubelet's device manager as a state machine without I/O.

It follows pkg/kubelet/cm/devicemanager of Kubernetes 1.36: which ids a container gets, in which order plugins
are called, and what is forgotten when. `DeviceAssignments.allocate` *yields* its calls to plugins and is sent
their answers, so that the same code runs under gRPC, in property tests and across a crash at any call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuslice.core.model import ContainerKind
from simcluster.kubelet.plugin_calls import (
    AllocateCall,
    Allocation,
    Call,
    PluginError,
    PreferredCall,
    Response,
)
from simcluster.kubelet.topology import (
    Hint,
    Hints,
    NumaNodes,
    Scope,
    TopologyManager,
    by_affinity,
    device_hints,
)

STOP_GRACE_S = 300.0  # how long a resource stays in the node's capacity after its plugin's stream ended


class AdmissionError(Exception):
    """The pod cannot be admitted; the text is what the user reads after "Allocate failed due to"."""


class TopologyAffinityError(AdmissionError):
    """The topology manager's policy does not allow what is free; the text is kubelet's."""

    def __init__(self) -> None:
        super().__init__("Resources cannot be allocated with Topology locality")


@dataclass(frozen=True, slots=True)
class Options:
    """What GetDevicePluginOptions answered; the options inside Register are ignored, as kubelet does."""

    pre_start_required: bool = False
    preferred_allocation: bool = False


@dataclass(frozen=True, slots=True)
class Device:
    identifier: str
    healthy: bool = True
    numa_nodes: tuple[int, ...] = ()
    empty_topology: bool = False  # its plugin names a topology, and no NUMA node in it


@dataclass(frozen=True, slots=True)
class ContainerDemand:
    """One container's limits, in whole devices for each resource name."""

    name: str
    limits: Mapping[str, int]
    kind: ContainerKind = ContainerKind.APP


def _demand(containers: Iterable[ContainerDemand], resource: str) -> int:
    """What they hold at most at the same time."""
    kept, most = 0, 0
    for each in containers:
        units = each.limits.get(resource, 0)
        if each.kind is ContainerKind.INIT:
            most = max(most, kept + units)
        else:
            kept += units
    return max(most, kept)


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """What one container holds of one resource: ids, and the plugin's serialised answer."""

    pod_uid: str
    container: str
    resource: str
    ids: frozenset[str]
    response: bytes


@dataclass(frozen=True, slots=True)
class Capacity:
    """Device resources for the node status. Resources in `removed` are shown as 0, never deleted."""

    capacity: dict[str, int]
    allocatable: dict[str, int]
    removed: frozenset[str]


@dataclass(slots=True)
class _Endpoint:
    generation: int
    options: Options
    stopped_at: float | None = None

    def expired(self, now: float) -> bool:
        return self.stopped_at is not None and now - self.stopped_at > STOP_GRACE_S


@dataclass(slots=True)
class DeviceAssignments:
    """Devices, their holders, and the plugins that serve them. Time is a parameter in monotonic seconds.

    `other_hints`: what the managers of CPUs and memory say about a pod's container; "" means the whole pod.
    """

    rng: random.Random = field(default_factory=random.Random)
    topology: TopologyManager = field(default_factory=TopologyManager)
    other_hints: Callable[[str, str], Sequence[Hints]] = lambda pod_uid, container: ()
    devices: dict[str, dict[str, Device]] = field(default_factory=dict)
    allocated: dict[str, set[str]] = field(default_factory=dict)
    _endpoints: dict[str, _Endpoint] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set)  # registered, not expired
    _assignments: dict[tuple[str, str, str], DeviceAssignment] = field(default_factory=dict)
    _reuse: tuple[str, dict[str, set[str]]] = ("", {})
    _generation: int = 0
    _affinity: dict[tuple[str, str], NumaNodes | None] = field(default_factory=dict)  # pod uid, container
    _numa_nodes: NumaNodes | None = None  # the affinity of the container that is being served

    # -- plugins ---------------------------------------------------------------------------------

    def register(self, resource: str, options: Options) -> int:
        """A plugin connected; returns its generation. Updates and the end of an older one no longer count."""
        self._generation += 1
        self._endpoints[resource] = _Endpoint(self._generation, options)
        return self._generation

    def update(self, resource: str, generation: int, devices: Iterable[Device]) -> bool:
        """A ListAndWatch message: the complete list. False if it comes from an older plugin."""
        if not self._is_current(resource, generation):
            return False
        self._known.add(resource)
        self.devices[resource] = {device.identifier: device for device in devices}
        return True

    def stop(self, resource: str, generation: int, now: float) -> bool:
        """The stream ended: every device is unhealthy at once, capacity stays for `STOP_GRACE_S`."""
        if not self._is_current(resource, generation):
            return False
        self._endpoints[resource].stopped_at = now
        self.devices[resource] = {
            identifier: replace(device, healthy=False)
            for identifier, device in self.devices.get(resource, {}).items()
        }
        return True

    def options(self, resource: str) -> Options:
        endpoint = self._endpoints.get(resource)
        return endpoint.options if endpoint else Options()

    def healthy(self, resource: str) -> frozenset[str]:
        return frozenset(one.identifier for one in self.devices.get(resource, {}).values() if one.healthy)

    def registered(self) -> dict[str, frozenset[str]]:
        """Healthy ids by resource, as the checkpoint keeps them."""
        return {resource: self.healthy(resource) for resource in sorted(self._known)}

    def capacity(self, now: float) -> Capacity:
        """What the node status shows. Resources whose plugin is gone for too long are dropped here."""
        removed = frozenset(name for name in self._known if self._gone(name, now))
        for name in removed:
            self._known.discard(name)
            self.devices.pop(name, None)
            self._endpoints.pop(name, None)
        return Capacity(
            capacity={name: len(self.devices.get(name, {})) for name in self._known},
            allocatable={name: len(self.healthy(name)) for name in self._known},
            removed=removed,
        )

    def _gone(self, resource: str, now: float) -> bool:
        endpoint = self._endpoints.get(resource)
        return endpoint is None or endpoint.expired(now)

    def _is_current(self, resource: str, generation: int) -> bool:
        endpoint = self._endpoints.get(resource)
        return endpoint is not None and endpoint.generation == generation

    # -- who holds what --------------------------------------------------------------------------

    def assignments(self) -> list[DeviceAssignment]:
        return list(self._assignments.values())

    def assignments_of(self, pod_uid: str, container: str) -> list[DeviceAssignment]:
        return [
            one for (uid, name, _), one in self._assignments.items() if (uid, name) == (pod_uid, container)
        ]

    def restore(self, assignments: Iterable[DeviceAssignment], resources: Iterable[str], now: float) -> None:
        """Restore a checkpoint: resources exist, but have no device until their plugin is back."""
        self._assignments = {(one.pod_uid, one.container, one.resource): one for one in assignments}
        for resource in resources:
            self._known.add(resource)
            self.devices[resource] = {}
            self._endpoints[resource] = _Endpoint(0, Options(), stopped_at=now)
        self._recount()

    def forget_except(self, active_uids: Iterable[str]) -> bool:
        """Drop what pods that are no longer active hold; True if something was dropped."""
        active = set(active_uids)
        kept = {key: one for key, one in self._assignments.items() if one.pod_uid in active}
        dropped = len(kept) != len(self._assignments)
        self._assignments = kept
        self._recount()
        return dropped

    def _recount(self) -> None:
        self.allocated = {}
        for one in self._assignments.values():
            self.allocated.setdefault(one.resource, set()).update(one.ids)

    # -- admission -------------------------------------------------------------------------------

    def allocate(
        self,
        pod_uid: str,
        container: ContainerDemand,
        active_uids: Iterable[str],
        already_running: bool = False,
    ) -> Allocation:
        """Give `container` its devices; yields the calls that a plugin must answer.

        The caller walks init containers first, then app containers. `already_running` is true for a
        container that a restarted kubelet found running before its pod sources are ready.
        Raises AdmissionError.
        """
        if self._reuse[0] != pod_uid:
            self._reuse = (pod_uid, {})
        reusable = self._reuse[1]
        resources = [name for name in container.limits if name in self._known or name in self.allocated]
        self.rng.shuffle(resources)  # the order of a Go map
        if resources:
            self.forget_except(active_uids)
        if self.topology.scope is Scope.CONTAINER:
            self._align(pod_uid, [container])
        self._numa_nodes = self._affinity.get((pod_uid, container.name))
        for resource in resources:
            held = self._assignments.get((pod_uid, container.name, resource))
            if held is not None:
                self._check_held(held, container.limits[resource], already_running)
                continue
            mine = reusable.setdefault(resource, set())
            yield from self._allocate_resource(pod_uid, container, resource, mine)
        # devices of an init container may be reused; those of a sidecar or app container may not
        for one in self.assignments_of(pod_uid, container.name):
            if container.kind is ContainerKind.INIT:
                reusable.setdefault(one.resource, set()).update(one.ids)
            else:
                reusable.setdefault(one.resource, set()).difference_update(one.ids)

    # -- topology --------------------------------------------------------------------------------

    def align_pod(
        self, pod_uid: str, containers: Sequence[ContainerDemand], active_uids: Iterable[str]
    ) -> None:
        """Choose NUMA nodes for the whole pod, if that is the scope. Raises TopologyAffinityError."""
        if self.topology.scope is Scope.POD:
            self.forget_except(active_uids)
            self._align(pod_uid, containers)

    def _align(self, pod_uid: str, containers: Sequence[ContainerDemand]) -> None:
        of = "" if self.topology.scope is Scope.POD else containers[0].name
        hint = self.topology.merged([self._hints(pod_uid, containers), *self.other_hints(pod_uid, of)])
        if hint is None:
            raise TopologyAffinityError
        self._affinity |= {(pod_uid, each.name): hint.nodes for each in containers}

    def _places(self, resource: str) -> dict[str, tuple[int, ...] | None]:
        """The NUMA nodes that the plugin named for each device; None where it named no topology."""
        return {
            one: device.numa_nodes or (() if device.empty_topology else None)
            for one, device in self.devices.get(resource, {}).items()
        }

    def _hints(self, pod_uid: str, containers: Sequence[ContainerDemand]) -> Hints:
        found: dict[str, list[Hint] | None] = {}
        for resource in {name for each in containers for name in each.limits if name in self._known}:
            places = self._places(resource)
            if all(numa is None for numa in places.values()):
                found[resource] = None
                continue
            needed = _demand(containers, resource)
            held = [one for each in containers for one in self.assignments_of(pod_uid, each.name)]
            mine = frozenset[str]().union(*(one.ids for one in held if one.resource == resource))
            free = self.healthy(resource) - self.allocated.get(resource, set())
            reusable = self._reuse[1].get(resource, set()) if self._reuse[0] == pod_uid else set()
            if mine:
                free, reusable = mine, set()
            if len(mine) not in (0, needed) or len(free | reusable) < needed:
                found[resource] = []
                continue
            found[resource] = device_hints(places, self.topology.numa_nodes, free, reusable, needed)
        return found

    def _allocate_resource(
        self, pod_uid: str, container: ContainerDemand, resource: str, reusable: set[str]
    ) -> Allocation:
        try:
            ids = yield from self._choose(resource, container.limits[resource], reusable)
            if not ids:
                return
            response = yield AllocateCall(resource, self._shuffled(ids))
        except PluginError as error:
            raise AdmissionError(str(error)) from error
        finally:
            self._recount()
        assert isinstance(response, bytes)
        assignment = DeviceAssignment(pod_uid, container.name, resource, ids, response)
        self._assignments[pod_uid, container.name, resource] = assignment
        self._recount()

    def _check_held(self, held: DeviceAssignment, needed: int, already_running: bool) -> None:
        if len(held.ids) != needed:
            raise AdmissionError(
                f'pod "{held.pod_uid}" container "{held.container}" changed request for resource '
                f'"{held.resource}" from {len(held.ids)} to {needed}'
            )
        if already_running:
            return
        healthy = self._require_healthy(held.resource)
        if not held.ids <= healthy:
            raise AdmissionError(
                "previously allocated devices are no longer healthy; "
                f"cannot allocate unhealthy devices {held.resource}"
            )

    def _require_healthy(self, resource: str) -> frozenset[str]:
        if resource not in self._known:
            raise AdmissionError(f"cannot allocate unregistered device {resource}")
        healthy = self.healthy(resource)
        if not healthy:
            raise AdmissionError(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
        return healthy

    def _choose(
        self, resource: str, needed: int, reusable: set[str]
    ) -> Generator[Call, Response, frozenset[str]]:
        """The ids for one container: reusable ones first, then of the right NUMA nodes, then any.

        The plugin is asked what it prefers: of the right NUMA nodes if they have more than enough, otherwise
        of what is missing beyond them.
        """
        healthy = self._require_healthy(resource)
        if needed == 0:
            return frozenset()
        chosen = set(self._shuffled(reusable)[:needed])
        self.allocated.setdefault(resource, set()).update(chosen)
        if len(chosen) == needed:
            return frozenset(chosen)
        available = healthy - self.allocated[resource]
        missing = needed - len(chosen)
        if len(available) < missing:
            raise AdmissionError(
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {missing}, Available: {len(available)}"
            )
        aligned, elsewhere = by_affinity(self._places(resource), self._numa_nodes, available)

        def take(ids: Iterable[str]) -> None:
            taken = [one for one in self._shuffled(ids) if one not in chosen][: needed - len(chosen)]
            chosen.update(taken)
            self.allocated[resource].update(taken)

        offered = aligned if missing < len(aligned) else available
        if offered is available:
            take(aligned)
        if len(chosen) < needed:
            preferred = yield from self._preferred(resource, offered | chosen, chosen, needed)
            take(set(preferred) & offered)
            for rest in (aligned, elsewhere, available):
                take(rest)
        return frozenset(chosen)

    def _preferred(
        self, resource: str, available: frozenset[str], must_include: set[str], size: int
    ) -> Generator[Call, Response, tuple[str, ...]]:
        if not self.options(resource).preferred_allocation:
            return ()
        answer = yield PreferredCall(resource, available, frozenset(must_include), size)
        return self._shuffled(str(one) for one in answer)

    def _shuffled(self, ids: Iterable[str]) -> tuple[str, ...]:
        """Ids in the random order of a Go set (sorted first, so that a seed repeats)."""
        order = sorted(set(ids))
        self.rng.shuffle(order)
        return tuple(order)
