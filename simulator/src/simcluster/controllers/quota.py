"""ResourceQuotas: their status, with what the namespace's pods use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from simcluster.cluster.quota import used, written
from simcluster.controllers.actions import Action, patch_status

Object = Mapping[str, Any]


def reconcile(quota: Object, pods: Iterable[Object]) -> list[Action]:
    """`pods` are those of its namespace."""
    counted = written(used(quota, pods))
    return patch_status("ResourceQuota", quota, {"hard": quota["spec"].get("hard"), "used": counted})
