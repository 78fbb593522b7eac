"""What pods request and nodes offer, as whole numbers: CPU in thousandths, everything else in base units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from simcluster.cluster.quantity import parse_quantity

Amounts = dict[str, int]
Object = Mapping[str, Any]


def amounts_of(quantities: Mapping[str, Any] | None) -> Amounts:
    """A resource list of the API as numbers, fractions rounded up as Kubernetes does."""
    return {
        name: int(
            (parse_quantity(str(value)) * (1000 if name == "cpu" else 1)).to_integral_value("ROUND_CEILING")
        )
        for name, value in (quantities or {}).items()
    }


def pod_requests(pod: Object) -> Amounts:
    """The most a pod needs at once: its app containers and sidecars together, or one init container with the
    sidecars started before it; plus its overhead."""
    return _peak(pod, container_requests)


def pod_limits(pod: Object) -> Amounts:
    """The same of its limits."""
    return _peak(pod, lambda container: amounts_of((container.get("resources") or {}).get("limits")))


def _peak(pod: Object, asked: Callable[[Object], Amounts]) -> Amounts:
    spec = pod.get("spec", {})
    running: Amounts = {}
    peak: Amounts = {}
    for container in spec.get("initContainers") or ():
        if container.get("restartPolicy") == "Always":
            running = add(running, asked(container))
            peak = highest(peak, running)
        else:
            peak = highest(peak, add(running, asked(container)))
    for container in spec.get("containers") or ():
        running = add(running, asked(container))
    return add(highest(peak, running), amounts_of(spec.get("overhead")))


def container_requests(container: Object) -> Amounts:
    resources = container.get("resources") or {}
    limits, requests = amounts_of(resources.get("limits")), amounts_of(resources.get("requests"))
    return {**limits, **requests}


def add(left: Mapping[str, int], right: Mapping[str, int]) -> Amounts:
    return {name: left.get(name, 0) + right.get(name, 0) for name in [*left, *(set(right) - set(left))]}


def highest(left: Mapping[str, int], right: Mapping[str, int]) -> Amounts:
    return {name: max(left.get(name, 0), right.get(name, 0)) for name in [*left, *(set(right) - set(left))]}


def total(many: Iterable[Mapping[str, int]]) -> Amounts:
    result: Amounts = {}
    for one in many:
        result = add(result, one)
    return result


def quality(spec: Object) -> str:
    """A pod's class, Guaranteed, Burstable or BestEffort, from cpu and memory alone."""
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    resources = [container.get("resources") or {} for container in containers]
    pairs = [
        ((item.get("requests") or {}).get(name), (item.get("limits") or {}).get(name))
        for item in resources
        for name in ("cpu", "memory")
    ]
    if not any(request or limit for request, limit in pairs):
        return "BestEffort"
    return "Guaranteed" if all(limit and request == limit for request, limit in pairs) else "Burstable"
