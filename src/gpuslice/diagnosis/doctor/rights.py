"""Which permissions the account of a device plugin lacks, checked by the API server for an administrator.

If nobody granted them (the chart with ``rbac.create=false``), the plugin runs and offers nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.objects import Pod
from gpuslice.adapters.kube.resources import ACCESS_REVIEWS
from gpuslice.core.contract import CLAIM_DRIVER, SYSTEM_NAMESPACE


class Right(NamedTuple):
    """One verb on one resource. `namespace`, `name`: "" for all. `group`: "" for the core group."""

    resource: str  # with its subresource behind a slash
    verb: str
    namespace: str = ""
    group: str = ""
    name: str = ""

    def __str__(self) -> str:
        resource = f"{self.resource}.{self.group}" if self.group else self.resource
        where = f" in {self.namespace}" if self.namespace else ""
        return f"{self.verb} {resource}{where}"


PLUGIN_RIGHTS = (
    *(Right("nodes", verb) for verb in ("get", "list", "watch", "patch")),
    Right("nodes/status", "patch"),
    *(Right("pods", verb) for verb in ("get", "list", "watch", "patch")),
    *(Right("events", verb) for verb in ("create", "patch")),
    *(Right("configmaps", verb, SYSTEM_NAMESPACE) for verb in ("list", "watch", "create", "patch")),
)
"""Of a device plugin, as the chart grants them."""
_DRA = "resource.k8s.io"
CLAIM_RIGHTS = (
    *(Right("resourceslices", verb, group=_DRA) for verb in ("list", "watch", "create", "update", "delete")),
    *(Right("resourceclaims", verb, group=_DRA) for verb in ("get", "list")),
    Right("resourceclaims/status", "patch", group=_DRA),
    Right("resourceclaims/driver", "associated-node:patch", group=_DRA, name=CLAIM_DRIVER),
)
"""Beside these, where its node's cards are shared by claims. The last one counts from Kubernetes 1.36 on."""


async def missing_rights(
    client: KubeClient, plugins: Iterable[Pod], by_claims: Set[str] = frozenset()
) -> Mapping[tuple[str, str], list[Right]]:
    """By namespace and name of each account of a device plugin. Raises `KubeError`.

    `by_claims`: the nodes whose cards are shared by claims.
    """
    wanted: dict[tuple[str, str], dict[Right, None]] = {}
    for pod in plugins:
        rights = (*PLUGIN_RIGHTS, *(CLAIM_RIGHTS if pod.spec.node_name in by_claims else ()))
        account = (pod.metadata.namespace, pod.spec.service_account_name)
        wanted.setdefault(account, {}).update(dict.fromkeys(rights))
    return {
        account: missing
        for account, rights in sorted(wanted.items())
        if (missing := [right for right in rights if not await _may(client, *account, right)])
    }


EXCESS_RIGHTS = (
    Right("secrets", "get"),
    Right("configmaps", "get"),
    Right("pods", "create"),
    Right("pods/exec", "create"),
    Right("serviceaccounts/token", "create"),
    Right("serviceaccounts", "impersonate"),
    Right("daemonsets", "create", group="apps"),
    Right("nodes", "delete"),
    Right("nodes/proxy", "get"),
    Right("clusterrolebindings", "create", group="rbac.authorization.k8s.io"),
    Right("validatingadmissionpolicybindings", "delete", group="admissionregistration.k8s.io"),
)
"""None of our processes uses one; with most of them one gets the whole cluster. All roles that come with
Kubernetes have one, `view` included."""
_GRANTED = {"gpushare-schd-extender": {Right("pods", "create")}}
"""By component: the chart's extender makes pods that ask an autoscaler for a node."""
_NOBODY = "gpuslice.io:nobody"


async def excess_rights(client: KubeClient, pods: Iterable[Pod]) -> Mapping[tuple[str, str], list[Right]]:
    """Of the accounts of our pods, in the whole cluster or their namespace alone.

    Of an API server that allows everything to everybody none is said. Raises `KubeError`.
    """
    accounts = {
        (pod.metadata.namespace, pod.spec.service_account_name): (pod.metadata.labels or {}).get(
            "component", ""
        )
        for pod in pods
        if (pod.metadata.labels or {}).get("app") == "gpushare" and pod.spec.service_account_name
    }
    if not accounts or await _allowed(client, {"user": _NOBODY}, EXCESS_RIGHTS[0]):
        return {}
    found: dict[tuple[str, str], list[Right]] = {}
    for account, component in sorted(accounts.items()):
        asked = (each for each in EXCESS_RIGHTS if each not in _GRANTED.get(component, ()))
        wider = [each._replace(namespace=account[0]) for each in asked]
        if rights := [each for each in wider if await _may(client, *account, each)]:
            found[account] = rights
    return found


async def _may(client: KubeClient, namespace: str, account: str, right: Right) -> bool:
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]
    who = {"user": f"system:serviceaccount:{namespace}:{account}", "groups": groups}
    return await _allowed(client, who, right)


async def _allowed(client: KubeClient, who: Mapping[str, Any], right: Right) -> bool:
    resource, _, subresource = right.resource.partition("/")
    attributes = {
        "group": right.group,
        "resource": resource,
        "subresource": subresource,
        "verb": right.verb,
        "namespace": right.namespace,
        "name": right.name,
    }
    spec = {"resourceAttributes": {name: value for name, value in attributes.items() if value}}
    review: dict[str, Any] = await client.create(ACCESS_REVIEWS, {"spec": {**who, **spec}})
    return bool((review.get("status") or {}).get("allowed"))
