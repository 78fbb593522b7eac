"""Which nodes a DaemonSet's pod may run on: selector, required affinity, taints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpuslice.sim.controllers.ownership import labels_of

Object = Mapping[str, Any]
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def node_takes(spec: Object, node: Object) -> bool:
    """Whether a pod with this spec is meant for the node and tolerates what would drive it away."""
    labels = labels_of(node)
    if any(labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
        return False
    return _meets_affinity(spec, node) and _tolerates_all(spec, node)


def pinned_node(pod: Object) -> str:
    """The node a pod runs on or is pinned to by its affinity; empty if any will do."""
    if name := pod["spec"].get("nodeName"):
        return str(name)
    for term in _terms(pod["spec"]):
        for field in term.get("matchFields") or []:
            if field["key"] == "metadata.name" and field["operator"] == "In":
                return str(field["values"][0])
    return ""


def _terms(spec: Object) -> Sequence[Object]:
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms: Sequence[Object] = (affinity.get(_REQUIRED) or {}).get("nodeSelectorTerms") or []
    return terms


def _meets_affinity(spec: Object, node: Object) -> bool:
    terms = _terms(spec)
    return not terms or any(_meets_term(term, node) for term in terms)


def _meets_term(term: Object, node: Object) -> bool:
    fields = {"metadata.name": node["metadata"]["name"]}
    expressions = [(item, labels_of(node)) for item in term.get("matchExpressions") or []]
    expressions += [(item, fields) for item in term.get("matchFields") or []]
    return bool(expressions) and all(_holds(item, values) for item, values in expressions)


def _holds(requirement: Object, values: Mapping[str, str]) -> bool:  # noqa: PLR0911 - one case an operator
    value, wanted = values.get(requirement["key"]), requirement.get("values") or []
    match requirement["operator"]:
        case "In":
            return value in wanted
        case "NotIn":
            return value not in wanted
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and int(value) > int(wanted[0])
        case "Lt":
            return value is not None and int(value) < int(wanted[0])
    return False


def _tolerates_all(spec: Object, node: Object) -> bool:
    taints = (node.get("spec") or {}).get("taints") or []
    driving = [taint for taint in taints if taint["effect"] in ("NoSchedule", "NoExecute")]
    return all(any(tolerates(item, taint) for item in spec.get("tolerations") or []) for taint in driving)


def tolerates(toleration: Object, taint: Object) -> bool:
    """Whether one toleration covers one taint."""
    if toleration.get("effect") and toleration["effect"] != taint["effect"]:
        return False
    if toleration.get("key") and toleration["key"] != taint["key"]:
        return False
    if toleration.get("operator") == "Exists":
        return True
    return bool(toleration.get("key")) and toleration.get("value", "") == taint.get("value", "")
