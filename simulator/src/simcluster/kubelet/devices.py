"""kubelet's device manager as a state machine without I/O.

It follows pkg/kubelet/cm/devicemanager of Kubernetes 1.36: which ids a container gets, in which order plugins
are called, and what is forgotten when. `DeviceAssignments.allocate` *yields* its calls to plugins and is sent
their answers, so that the same code runs under gRPC, in property tests and across a crash at any call.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field

from gpuslice.core.model import ContainerKind

STOP_GRACE_S = 300.0  # how long a resource stays in the node's capacity after its plugin's stream ended


class AdmissionError(Exception):
    """The pod cannot be admitted; the text is what the user reads after "Allocate failed due to"."""


class PluginError(Exception):
    """A plugin answered an error; thrown into `DeviceAssignments.allocate` at the call that failed."""


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


@dataclass(frozen=True, slots=True)
class ContainerDemand:
    """One container's limits, in whole devices for each resource name."""

    name: str
    limits: Mapping[str, int]
    kind: ContainerKind = ContainerKind.APP


@dataclass(frozen=True, slots=True)
class PreferredCall:
    """GetPreferredAllocation; the answer is a collection of ids, of which kubelet uses those that are
    available.
    """

    resource: str
    available: frozenset[str]
    must_include: frozenset[str]
    size: int


@dataclass(frozen=True, slots=True)
class AllocateCall:
    """Allocate with exactly one container request; `ids` are in random order. The answer is that container's
    serialised response."""

    resource: str
    ids: tuple[str, ...]


Call = PreferredCall | AllocateCall
Response = Iterable[str] | bytes
Allocation = Generator[Call, Response, None]


async def carry_out(steps: Allocation, ask: Callable[[Call], Awaitable[Response]]) -> None:
    """Let `ask` answer the calls of one container's allocation; a PluginError is passed to the steps."""
    try:
        call = next(steps)
        while True:
            try:
                answer = await ask(call)
            except PluginError as error:
                call = steps.throw(error)
            else:
                call = steps.send(answer)
    except StopIteration:
        return
    finally:
        steps.close()


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
    """Devices, their holders, and the plugins that serve them. Time is a parameter in monotonic seconds."""

    rng: random.Random = field(default_factory=random.Random)
    devices: dict[str, dict[str, Device]] = field(default_factory=dict)
    allocated: dict[str, set[str]] = field(default_factory=dict)
    _endpoints: dict[str, _Endpoint] = field(default_factory=dict)
    _known: set[str] = field(default_factory=set)  # registered, not expired
    _assignments: dict[tuple[str, str, str], DeviceAssignment] = field(default_factory=dict)
    _reuse: tuple[str, dict[str, set[str]]] = ("", {})
    _generation: int = 0

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
            identifier: Device(identifier, healthy=False, numa_nodes=device.numa_nodes)
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
        """The ids for one container: reusable ones first, then the plugin's preference, then any."""
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
        preferred = yield from self._preferred(resource, available | chosen, chosen, needed)
        wished = [one for one in preferred if one in available]
        rest = self._shuffled(available.difference(wished))
        taken = [*wished, *rest][:missing]
        self.allocated[resource].update(taken)
        return frozenset(chosen.union(taken))

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
