"""What the account of a device plugin may not do and should: asked of the API server as an administrator may.

Where nobody granted it (the chart with ``rbac.create=false``), the plugin runs and offers nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from gpuslice.adapters.kube.objects import Pod
from gpuslice.adapters.kube.resources import ACCESS_REVIEWS
from gpuslice.adapters.kube.sync import SyncClient
from gpuslice.core.contract import SYSTEM_NAMESPACE


class Right(NamedTuple):
    """One verb on one resource of the core group. `namespace`: "" for all."""

    resource: str  # with its subresource behind a slash
    verb: str
    namespace: str = ""

    def __str__(self) -> str:
        where = f" in {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource}{where}"


PLUGIN_RIGHTS = (
    *(Right("nodes", verb) for verb in ("get", "list", "watch", "patch")),
    Right("nodes/status", "patch"),
    *(Right("pods", verb) for verb in ("get", "list", "watch", "patch")),
    *(Right("events", verb) for verb in ("create", "patch")),
    *(Right("configmaps", verb, SYSTEM_NAMESPACE) for verb in ("get", "create", "patch")),
)
"""Of a device plugin, as the chart grants them."""


def missing_rights(client: SyncClient, plugins: Iterable[Pod]) -> Mapping[tuple[str, str], list[Right]]:
    """By namespace and name of each account of a device plugin. Raises `KubeError`."""
    accounts = sorted({(pod.metadata.namespace, pod.spec.service_account_name) for pod in plugins})
    return {
        account: missing
        for account in accounts
        if (missing := [right for right in PLUGIN_RIGHTS if not _may(client, *account, right)])
    }


def _may(client: SyncClient, namespace: str, account: str, right: Right) -> bool:
    resource, _, subresource = right.resource.partition("/")
    attributes = {
        "resource": resource,
        "subresource": subresource,
        "verb": right.verb,
        "namespace": right.namespace,
    }
    spec = {
        "user": f"system:serviceaccount:{namespace}:{account}",
        "groups": ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"],
        "resourceAttributes": {name: value for name, value in attributes.items() if value},
    }
    review: dict[str, Any] = client.create(ACCESS_REVIEWS, {"spec": spec})
    return bool((review.get("status") or {}).get("allowed"))
