"""ResourceQuotas, as far as they count pods: how many there are, and their total requests.

Quotas with scopes are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from simcluster.cluster.amounts import Amounts, amounts_of, pod_requests, total
from simcluster.cluster.errors import forbidden
from simcluster.cluster.quantity import canonical_quantity
from simcluster.cluster.resources import Resource

if TYPE_CHECKING:
    from simcluster.cluster.cluster import Cluster

Object = Mapping[str, Any]

_FINISHED = ("Succeeded", "Failed")
_REQUESTS = "requests."
_BARE = ("cpu", "memory")  # a quota on `cpu` is one on `requests.cpu`


def limited(quota: Object) -> Amounts:
    """The limits on everything that is counted here, by the name that the quota uses."""
    spec = quota["spec"]
    if spec.get("scopes") or spec.get("scopeSelector"):
        return {}
    hard = spec.get("hard") or {}
    return {
        name: amounts_of({_counted(name): value})[_counted(name)]
        for name, value in hard.items()
        if name == "pods" or name in _BARE or name.startswith(_REQUESTS)
    }


def used(quota: Object, pods: Iterable[Object]) -> Amounts:
    """What pods of its namespace use of it; those that have ended use nothing."""
    living = [pod for pod in pods if (pod.get("status") or {}).get("phase") not in _FINISHED]
    requested = {**total(pod_requests(pod) for pod in living), "pods": len(living)}
    return {name: requested.get(_counted(name), 0) for name in limited(quota)}


def written(amounts: Amounts) -> dict[str, str]:
    """In the API's format: CPU is counted in thousandths."""
    return {
        name: canonical_quantity(f"{amount}m" if _counted(name) == "cpu" else str(amount))
        for name, amount in amounts.items()
    }


def check_quotas(cluster: Cluster, resource: Resource, obj: Object) -> None:
    """ApiError if a new pod would exceed what is left to its namespace."""
    if resource.store != "pods":
        return
    namespace = obj["metadata"]["namespace"]
    for entry in cluster.store.shelf("resourcequotas").items.values():
        if entry.key[0] != namespace:
            continue
        pods = [each.obj for each in cluster.store.shelf("pods").items.values() if each.key[0] == namespace]
        hard, held, asked = limited(entry.obj), used(entry.obj, pods), used(entry.obj, [obj])
        over = sorted(name for name in hard if asked[name] and held[name] + asked[name] > hard[name])
        if over:
            said = ", ".join(
                f"{word}: " + ",".join(f"{name}={written(amounts)[name]}" for name in over)
                for word, amounts in (("requested", asked), ("used", held), ("limited", hard))
            )
            why = f"exceeded quota: {entry.key[1]}, {said}"
            raise forbidden("pods", "", obj["metadata"]["name"], why)


def _counted(name: str) -> str:
    return name.removeprefix(_REQUESTS)
