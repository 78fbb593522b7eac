"""Disruption budgets, as far as evictions need them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import NotFoundError
from gpuslice.adapters.kube.label_selector import LabelSelector
from gpuslice.adapters.kube.objects import Metadata
from gpuslice.adapters.kube.resources import Resource
from gpuslice.adapters.kube.slim import SLIM_PODS
from gpuslice.core.preemption import Budget


class _Spec(msgspec.Struct):
    selector: LabelSelector | None = None


class _Status(msgspec.Struct, rename="camel"):
    disruptions_allowed: int = 0
    disrupted_pods: dict[str, Any] | None = None


class PodDisruptionBudget(msgspec.Struct):
    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)


BUDGETS = Resource("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget", PodDisruptionBudget)


async def protects_any(client: KubeClient, namespaces: Collection[str]) -> bool:
    """Whether a budget may apply to pods in these namespaces. Raises `KubeError`."""
    return bool(await _listed(client, namespaces))


async def read_budgets(client: KubeClient, namespaces: Collection[str]) -> list[Budget]:
    """The budgets in these namespaces. Raises `KubeError`.

    kube-scheduler takes an empty selector to match nothing; in policy/v1 it matches every pod, which protects
    more and is what users mean.
    """
    budgets = []
    for budget in await _listed(client, namespaces):
        if budget.spec.selector is not None:
            selector, on_their_way = str(budget.spec.selector), budget.status.disrupted_pods or {}
            pods = await client.list(SLIM_PODS, budget.metadata.namespace, labels=selector)
            uids = (pod.metadata.uid for pod in pods.items or () if pod.metadata.name not in on_their_way)
            budgets.append(Budget(budget.status.disruptions_allowed, frozenset(uids)))
    return budgets


async def _listed(client: KubeClient, namespaces: Collection[str]) -> list[PodDisruptionBudget]:
    try:
        found = (await client.list(BUDGETS)).items or ()
    except NotFoundError:  # a cluster without the policy API
        return []
    return [budget for budget in found if budget.metadata.namespace in namespaces]
