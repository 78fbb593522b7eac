"""ResourceQuotas, as far as they count pods: how many there are, their total requests and limits.

Quotas with scopes are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from simcluster.cluster.amounts import Amounts, amounts_of, pod_limits, pod_requests, total
from simcluster.cluster.errors import forbidden
from simcluster.cluster.quantity import canonical_quantity
from simcluster.cluster.resources import Resource
from simcluster.cluster.store import Store
from simcluster.cluster.validation_pods import is_extended

Object = Mapping[str, Any]

_FINISHED = ("Succeeded", "Failed")
_REQUESTS, _LIMITS = "requests.", "limits."
_HOST = ("cpu", "memory", "ephemeral-storage")
_COUNTS = ("pods", "count/pods")
_NEEDED = ("cpu", "memory")  # where a quota limits them, every container must say how much


def limited(quota: Object) -> Amounts:
    """The limits on everything that is counted here, by the name that the quota uses.

    Of a resource of a device plugin only `requests.` is counted: it may not be over-committed. Any other
    qualified name is a valid key of a quota, and nothing is counted under it.
    """
    spec = quota["spec"]
    if spec.get("scopes") or spec.get("scopeSelector"):
        return {}
    return {
        name: amounts_of({_counted(name): value})[_counted(name)]
        for name, value in (spec.get("hard") or {}).items()
        if name in _COUNTS
        or _counted(name) in _HOST
        or _counted(name).startswith("hugepages-")
        or (name.startswith(_REQUESTS) and is_extended(_counted(name)))
    }


def used(quota: Object, pods: Iterable[Object]) -> Amounts:
    """What pods of its namespace use of it; those that have ended use nothing."""
    living = [pod for pod in pods if (pod.get("status") or {}).get("phase") not in _FINISHED]
    requests, limits = total(map(pod_requests, living)), total(map(pod_limits, living))
    return {
        name: len(living)
        if name in _COUNTS
        else (limits if name.startswith(_LIMITS) else requests).get(_counted(name), 0)
        for name in limited(quota)
    }


def written(amounts: Amounts) -> dict[str, str]:
    """In the API's format: CPU is counted in thousandths."""
    return {
        name: canonical_quantity(f"{amount}m" if _counted(name) == "cpu" else str(amount))
        for name, amount in amounts.items()
    }


def check_quotas(store: Store, resource: Resource, obj: Object) -> None:
    """ApiError if a new pod would exceed what is left to its namespace."""
    if resource.store != "pods":
        return
    namespace = obj["metadata"]["namespace"]
    for entry in store.shelf("resourcequotas").items.values():
        if entry.key[0] != namespace:
            continue
        pods = [each.obj for each in store.shelf("pods").items.values() if each.key[0] == namespace]
        if missing := _unsaid(entry.obj, obj):
            why = f"failed quota: {entry.key[1]}: must specify {missing}"
            raise forbidden("pods", "", obj["metadata"]["name"], why)
        hard, held, asked = limited(entry.obj), used(entry.obj, pods), used(entry.obj, [obj])
        over = sorted(name for name in hard if asked[name] and held[name] + asked[name] > hard[name])
        if over:
            said = ", ".join(
                f"{word}: " + ",".join(f"{name}={written(amounts)[name]}" for name in over)
                for word, amounts in (("requested", asked), ("used", held), ("limited", hard))
            )
            why = f"exceeded quota: {entry.key[1]}, {said}"
            raise forbidden("pods", "", obj["metadata"]["name"], why)


def _unsaid(quota: Object, pod: Object) -> str:
    """What containers must say because the quota limits it, and do not: ``limits.cpu for: main``."""
    found = []
    for name in sorted(limited(quota)):
        part = "limits" if name.startswith(_LIMITS) else "requests"
        if _counted(name) in _NEEDED:
            spec = pod["spec"]
            silent = [
                each["name"]
                for each in (*(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
                if _counted(name) not in ((each.get("resources") or {}).get(part) or {})
            ]
            found += [f"{name} for: {','.join(sorted(silent))}"] if silent else []
    return "; ".join(found)


def _counted(name: str) -> str:
    return name.removeprefix(_REQUESTS).removeprefix(_LIMITS)
