"""LimitRanges: what containers that say nothing get, and what no pod may pass (plugin LimitRanger)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal

from simcluster.cluster.errors import forbidden
from simcluster.cluster.quantity import canonical_quantity, parse_quantity
from simcluster.cluster.request import Object
from simcluster.cluster.store import Store

_SET = "kubernetes.io/limit-ranger"
Quantities = Mapping[str, str]


def complete_limits(limits: Object) -> None:
    """Of a container's limits in a LimitRange, what the API server adds: `max` alone is a default as well."""
    if limits.get("type") != "Container":
        return
    for name, value in (limits.get("max") or {}).items():
        limits.setdefault("default", {}).setdefault(name, value)
    for field in ("default", "min"):
        for name, value in (limits.get(field) or {}).items():
            limits.setdefault("defaultRequest", {}).setdefault(name, value)


def give_defaults(store: Store, pod: Object) -> None:
    """Limits and requests of every container that leaves them open, in place."""
    said = []
    for limits in _limits(store, pod, "Container"):
        for container in _containers(pod):
            resources = container.setdefault("resources", {})
            for source, part in (("defaultRequest", "requests"), ("default", "limits")):
                given = resources.get(part) or {}
                missing = {key: each for key, each in (limits.get(source) or {}).items() if key not in given}
                if missing:
                    resources[part] = {**given, **missing}
                    words = part.removesuffix("s")
                    said.append(f"{', '.join(sorted(missing))} {words} for container {container['name']}")
    if said:
        annotations = pod["metadata"].setdefault("annotations", {})
        annotations[_SET] = f"LimitRanger plugin set: {'; '.join(said)}"


def check_limit_ranges(store: Store, pod: Object) -> None:
    """ApiError if a container or the pod is outside the limits of its namespace."""
    problems: list[str] = []
    for limits in _limits(store, pod, "Container"):
        for container in _containers(pod):
            resources = container.get("resources") or {}
            asked = resources.get("requests") or {}, resources.get("limits") or {}
            problems += _problems(limits, "Container", *asked)
    for limits in _limits(store, pod, "Pod"):
        problems += _problems(limits, "Pod", _of_pod(pod, "requests"), _of_pod(pod, "limits"))
    if problems:
        why = problems[0] if len(problems) == 1 else f"[{', '.join(problems)}]"
        raise forbidden("pods", "", pod["metadata"]["name"], why)


def _limits(store: Store, pod: Object, kind: str) -> Iterator[Object]:
    for entry in store.shelf("limitranges").items.values():
        if entry.key[0] == pod["metadata"]["namespace"]:
            yield from (each for each in entry.obj["spec"].get("limits") or () if each.get("type") == kind)


def _containers(pod: Object) -> list[Object]:
    spec = pod["spec"]
    return [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]


def _of_pod(pod: Object, part: str) -> Quantities:
    """The sum of its containers, or the most of one init container."""
    sums: dict[str, Decimal] = {}
    for container in pod["spec"].get("containers") or ():
        for name, value in ((container.get("resources") or {}).get(part) or {}).items():
            sums[name] = sums.get(name, Decimal(0)) + parse_quantity(value)
    for container in pod["spec"].get("initContainers") or ():
        for name, value in ((container.get("resources") or {}).get(part) or {}).items():
            sums[name] = max(sums.get(name, Decimal(0)), parse_quantity(value))
    return {name: f"{value:f}" for name, value in sums.items()}


def _problems(limits: Object, kind: str, requests: Quantities, most: Quantities) -> Iterator[str]:
    for name, value in (limits.get("min") or {}).items():
        if name not in requests:
            yield f"minimum {name} usage per {kind} is {value}.  No request is specified"
        for part, given in (("request", requests.get(name)), ("limit", most.get(name))):
            if given is not None and parse_quantity(given) < parse_quantity(value):
                yield f"minimum {name} usage per {kind} is {value}, but {part} is {canonical_quantity(given)}"
                break
    for name, value in (limits.get("max") or {}).items():
        if name not in most:
            yield f"maximum {name} usage per {kind} is {value}.  No limit is specified"
        for part, given in (("limit", most.get(name)), ("request", requests.get(name))):
            if given is not None and parse_quantity(given) > parse_quantity(value):
                yield f"maximum {name} usage per {kind} is {value}, but {part} is {canonical_quantity(given)}"
                break
    for name, value in (limits.get("maxLimitRequestRatio") or {}).items():
        what = f"{name} max limit to request ratio per {kind} is {value}"
        asked, limit = _number(requests.get(name)), _number(most.get(name))
        if not asked:
            yield f"{what}, but no request is specified or request is 0"
        elif not limit:
            yield f"{what}, but no limit is specified or limit is 0"
        elif limit / asked > parse_quantity(value):
            yield f"{what}, but provided ratio is {float(limit / asked):f}"


def _number(quantity: str | None) -> Decimal:
    return parse_quantity(quantity or "0")
