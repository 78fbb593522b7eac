"""Which nodes a DaemonSet's pod may run on: selector, required affinity, taints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpuslice.core.node_affinity import meets, terms_of
from simcluster.controllers.ownership import labels_of

Object = Mapping[str, Any]


def node_takes(spec: Object, node: Object) -> bool:
    """Whether a pod with this spec matches the node and tolerates its taints."""
    labels = labels_of(node)
    if any(labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items()):
        return False
    taints = (node.get("spec") or {}).get("taints") or []
    driving = [taint for taint in taints if taint["effect"] in ("NoSchedule", "NoExecute")]
    tolerations = spec.get("tolerations") or []
    return meets(spec.get("affinity"), node["metadata"]["name"], labels) and all(
        any(tolerates(item, taint) for item in tolerations) for taint in driving
    )


def pinned_node(pod: Object) -> str:
    """The node a pod runs on, or to which its affinity pins it; empty if any will do."""
    if name := pod["spec"].get("nodeName"):
        return str(name)
    for term in terms_of(pod["spec"].get("affinity")) or ():
        for field in term.get("matchFields") or []:
            if field["key"] == "metadata.name" and field["operator"] == "In":
                return str(field["values"][0])
    return ""


def tolerates(toleration: Object, taint: Object) -> bool:
    """Whether one toleration covers one taint."""
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    if toleration.get("key") and toleration["key"] != taint.get("key"):
        return False
    if toleration.get("operator") == "Exists":
        return True
    return bool(toleration.get("key")) and (toleration.get("value") or "") == (taint.get("value") or "")
