"""What pods request and nodes offer, as whole numbers: CPU in thousandths, everything else in base units."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    spec = pod.get("spec", {})
    running: Amounts = {}
    peak: Amounts = {}
    for container in spec.get("initContainers") or ():
        asked = container_requests(container)
        if container.get("restartPolicy") == "Always":
            running = add(running, asked)
            peak = highest(peak, running)
        else:
            peak = highest(peak, add(running, asked))
    for container in spec.get("containers") or ():
        running = add(running, container_requests(container))
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
