"""CPU and memory that pods ask for and nodes have, besides cards.

Used only by policies: cards on a node without free CPU are worth nothing, so a pod should not take the last
cores next to free cards. Whether CPU and memory suffice is for kube-scheduler to say; nothing is refused for
lack of them here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import msgspec

from gpuslice.core.quantity import scaled
from gpuslice.core.units import MIB


class HostResources(msgspec.Struct, frozen=True, gc=False):
    """Amounts of CPU and memory; 0 if nothing is asked for or known."""

    cpu_milli: int = 0
    memory_mib: int = 0

    def __bool__(self) -> bool:
        return bool(self.cpu_milli or self.memory_mib)

    def holds(
        self, host_used: HostResources, coming: Iterable[HostResources], going: Iterable[HostResources]
    ) -> bool:
        """Whether this suffices after some pods have come and others gone; unknown amounts suffice."""
        cpu, memory = host_used.cpu_milli, host_used.memory_mib
        for sign, amounts in ((1, coming), (-1, going)):
            for each in amounts:
                cpu += sign * each.cpu_milli
                memory += sign * each.memory_mib
        return not (
            (self.cpu_milli and cpu > self.cpu_milli) or (self.memory_mib and memory > self.memory_mib)
        )


NO_HOST_RESOURCES = HostResources()


class ResourcesLike(Protocol):
    @property
    def limits(self) -> Mapping[str, object] | None: ...
    @property
    def requests(self) -> Mapping[str, str | int | float] | None: ...


class ContainerLike(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def resources(self) -> ResourcesLike | None: ...
    @property
    def restart_policy(self) -> str | None: ...


class PodSpecLike(Protocol):
    """A pod spec, decoded by any adapter, with at least these fields."""

    @property
    def containers(self) -> Sequence[ContainerLike]: ...
    @property
    def init_containers(self) -> Sequence[ContainerLike] | None: ...
    @property
    def resources(self) -> ResourcesLike | None: ...
    @property
    def overhead(self) -> Mapping[str, str | int | float] | None: ...


def pod_host_resources(spec: PodSpecLike) -> HostResources:
    """What a pod asks for, as kube-scheduler counts it (``PodRequests`` of k8s.io/component-helpers).

    A request of the whole pod wins over the sum of its containers; its runtime class may add some overhead.
    """
    if len(spec.containers) == 1 and not spec.init_containers:  # like most pods
        asked = _asked(spec.containers[0])
    else:  # at their peak: apps next to sidecars, or an init container next to the sidecars before it
        apps = sidecars = largest = NO_HOST_RESOURCES
        for each in spec.containers:
            apps = _plus(apps, _asked(each))
        for each in spec.init_containers or ():
            if each.restart_policy == "Always":
                sidecars = _plus(sidecars, _asked(each))
            else:
                largest = _most(largest, _plus(sidecars, _asked(each)))
        asked = _most(_plus(apps, sidecars), largest)
    whole = spec.resources.requests if spec.resources is not None else None
    if whole:
        limit = _host_amounts(whole.get("cpu", 0), whole.get("memory", 0))
        asked = HostResources(
            limit.cpu_milli if "cpu" in whole else asked.cpu_milli,
            limit.memory_mib if "memory" in whole else asked.memory_mib,
        )
    if not spec.overhead:
        return asked
    return _plus(asked, _host_amounts(spec.overhead.get("cpu", 0), spec.overhead.get("memory", 0)))


def pod_amounts(spec: PodSpecLike) -> dict[str, int]:
    """Everything that a pod asks for, by the same rules; CPU in thousandths, all else in base units."""
    running: Counter[str] = Counter()
    largest: Counter[str] = Counter()
    for each in spec.init_containers or ():
        asked = Counter(_amounts(each.resources))
        if each.restart_policy == "Always":
            running += asked
        largest |= running if each.restart_policy == "Always" else running + asked
    for each in spec.containers:
        running += Counter(_amounts(each.resources))
    whole = _amounts(spec.resources)
    of_pod = {name: whole[name] for name in whole if name in WHOLE_POD or name.startswith("hugepages-")}
    return Counter({**(running | largest), **of_pod}) + Counter(amounts(spec.overhead))


WHOLE_POD = ("cpu", "memory")  # besides huge pages, what `spec.resources` may ask for


def _amounts(resources: ResourcesLike | None) -> dict[str, int]:
    """A limit is a request where no other is given."""
    return (
        amounts({**(resources.limits or {}), **(resources.requests or {})}) if resources is not None else {}
    )


def amounts(given: Mapping[str, object] | None) -> dict[str, int]:
    """Quantities of the API as numbers, fractions rounded up as in kube-scheduler."""
    return {
        name: -(-(scaled(value, factor * 10**9) or 0) // 10**9)
        for name, value in (given or {}).items()
        for factor in [1000 if name == "cpu" else 1]
    }


def node_host_resources(allocatable: Mapping[str, str | int | float] | None) -> HostResources:
    """What a node can give."""
    return _host_amounts((allocatable or {}).get("cpu", 0), (allocatable or {}).get("memory", 0))


NOWHERE = ("", NO_HOST_RESOURCES)


class HostUsage:
    """How much CPU and memory of which node each pod uses."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[str, HostResources]] = {}
        self._used: dict[str, tuple[int, int, int]] = {}  # by node: CPU, memory, number of pods

    def put(self, uid: str, node: str, host: HostResources) -> set[str]:
        """Count a pod on `node` alone from now on, nowhere if that is ""; the nodes that this changes."""
        before, after = self._of.get(uid, NOWHERE), (node, host) if node and host else NOWHERE
        if before == after:
            return set()
        if before is not NOWHERE:
            self._add(*before, -1)
            del self._of[uid]
        if after is not NOWHERE:
            self._add(*after, 1)
            self._of[uid] = after
        return {before[0], after[0]} - {""}

    def _add(self, node: str, host: HostResources, pods: int) -> None:
        cpu, memory, number = self._used.pop(node, (0, 0, 0))
        if number + pods:
            self._used[node] = (cpu + pods * host.cpu_milli, memory + pods * host.memory_mib, number + pods)

    def used(self, node: str) -> HostResources:
        cpu, memory, _ = self._used.get(node, (0, 0, 0))
        return HostResources(cpu, memory)


def _asked(container: ContainerLike) -> HostResources:
    requests = container.resources.requests if container.resources is not None else None
    if not requests:
        return NO_HOST_RESOURCES
    return _host_amounts(requests.get("cpu", 0), requests.get("memory", 0))


@lru_cache(maxsize=4096)  # clusters have few different amounts, in very many pods
def _host_amounts(cpu: str | int | float, memory: str | int | float) -> HostResources:
    return HostResources(scaled(cpu, 1000) or 0, (scaled(memory, 1) or 0) // MIB)


def _plus(one: HostResources, other: HostResources) -> HostResources:
    if not one or not other:
        return one or other
    return HostResources(one.cpu_milli + other.cpu_milli, one.memory_mib + other.memory_mib)


def _most(one: HostResources, other: HostResources) -> HostResources:
    if not one or not other:
        return one or other
    return HostResources(max(one.cpu_milli, other.cpu_milli), max(one.memory_mib, other.memory_mib))
