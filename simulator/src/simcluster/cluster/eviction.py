"""Eviction: a deletion that respects disruption budgets."""

from __future__ import annotations

import math

from simcluster.cluster.body import parse_body
from simcluster.cluster.deletes import delete_entry, parse_options
from simcluster.cluster.errors import Cause, too_many_requests
from simcluster.cluster.reads import find
from simcluster.cluster.request import Object, Request, Response, json_response
from simcluster.cluster.route import Target
from simcluster.cluster.selector import selects
from simcluster.cluster.state import ApiState
from simcluster.cluster.store import Entry

_EVICTED: Object = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}


def evict(api: ApiState, target: Target, request: Request) -> Response:
    """Deletes the pod unless a budget forbids it (ApiError 429)."""
    body = parse_body(api.schema, request)
    options = parse_options(body.get("deleteOptions") or {})
    if "All" in request.query.get("dryRun", ""):
        options.dry_run = ["All"]
    entry = find(api.store, target)
    if _counts(entry):
        labels = entry.obj["metadata"].get("labels") or {}
        budgets = api.store.shelf("poddisruptionbudgets.policy").items.values()
        for budget in [
            budget.obj
            for budget in budgets
            if budget.key[0] == entry.key[0] and selects(budget.obj["spec"].get("selector"), labels)
        ]:
            _check(api, budget)
    delete_entry(api, target.resource, entry, options)
    return json_response(_EVICTED, 201)


def _counts(pod: Entry) -> bool:
    """Evicting pods that are finished, being deleted or not placed yet disrupts nothing."""
    phase = (pod.obj.get("status") or {}).get("phase")
    return phase == "Running" and not pod.obj["metadata"].get("deletionTimestamp")


def _check(api: ApiState, budget: Object) -> None:
    spec, namespace = budget["spec"], budget["metadata"]["namespace"]
    pods = [
        entry
        for entry in api.store.shelf("pods").items.values()
        if entry.key[0] == namespace
        and selects(spec.get("selector"), entry.obj["metadata"].get("labels") or {})
    ]
    healthy = sum(_is_ready(entry.obj) and _counts(entry) for entry in pods)
    if "maxUnavailable" in spec:
        needed = len(pods) - _amount(spec["maxUnavailable"], len(pods))
    else:
        needed = _amount(spec.get("minAvailable", 1), len(pods))
    if healthy - 1 < needed:
        name = budget["metadata"]["name"]
        cause = Cause(
            "",
            "DisruptionBudget",
            f"The disruption budget {name} needs {needed} healthy pods and has {healthy} currently",
        )
        message = "Cannot evict pod as it would violate the pod's disruption budget."
        raise too_many_requests(message, [cause])


def _amount(value: int | str, total: int) -> int:
    """A number, or a percentage of ``total`` rounded up."""
    if isinstance(value, int):
        return value
    return math.ceil(int(value.rstrip("%")) * total / 100)


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)
