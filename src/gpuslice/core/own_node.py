"""What the account of a node's agent may write: its own part of its own node's objects.

From Kubernetes 1.30 on the chart's policy `gpuslice-agent-own-node` says the same; before, tokens do not name
their node, and the webhook judges. ``tests/contract/test_chart_policy.py`` asks both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuslice.core.contract import (
    AGENT,
    AGENT_COMPONENT,
    CONDITION_PARKED,
    LABEL_OTHER_PLUGIN,
    NODE_AMOUNTS_OF_AGENT,
    NODE_ANNOTATION_WRITERS,
    POD_ANNOTATION_WRITERS,
    SYSTEM_NAMESPACE,
    UNHEALTHY_CONFIGMAP_PREFIX,
)
from gpuslice.core.form import without

Document = Mapping[str, Any]
WITHOUT_A_NODE = "the agent's token does not say on which node the agent runs"
_KEPT_BY_THE_SERVER = ("generation", "managedFields", "resourceVersion")


@dataclass(frozen=True, slots=True)
class Write:
    """`what`: the resource, with its subresource behind a slash. `old`: empty at creation."""

    what: str
    namespace: str = ""
    name: str = ""
    old: Document = field(default_factory=dict)
    new: Document = field(default_factory=dict)


def denial(write: Write, node: str) -> str:
    """Why the agent of `node` ("" if nobody knows where it runs) may not do it, "" if it may."""
    what, versions = write.what, [each for each in (write.old, write.new) if each]
    if not node:
        return WITHOUT_A_NODE
    match what:
        case "nodes" | "nodes/status":
            own = write.name == node
        case "pods" | "pods/status":
            own = (write.old.get("spec") or {}).get("nodeName") == node
        case "configmaps":
            its = (SYSTEM_NAMESPACE, UNHEALTHY_CONFIGMAP_PREFIX + node)
            own = (write.namespace, write.name) == its
        case "events":
            own = all(_reported_by(each) == (AGENT_COMPONENT, node) for each in versions)
        case _:
            own = False
    if not own:
        return f"an agent writes {what} of its own node only"
    if what in ("configmaps", "events"):
        return ""
    # the way back to whole cards switches NVIDIA's plugin on; nobody takes its switch away
    labels = set[str]()
    if not what.startswith("pods"):
        labels = {LABEL_OTHER_PLUGIN} & (_metadata(write.new).get("labels") or {}).keys()
    if _of_others(what, write.old, labels) != _of_others(what, write.new, labels):
        more = "whether they are parked" if what.startswith("pods") else "the amounts of shared cards"
        return f"of {what} an agent writes its own annotations and {more} only"
    return ""


def _reported_by(event: Document) -> tuple[str, str] | None:
    """The component and host of an event; None if its newer fields name others."""
    source = event.get("source") or {}
    found = source.get("component", ""), source.get("host", "")
    newer = event.get("reportingComponent"), event.get("reportingInstance")
    return found if all(not name or name == own for name, own in zip(newer, found, strict=True)) else None


def _of_others(what: str, document: Document, labels: Iterable[str]) -> Document:
    """All of a node or pod that is not the agent's to write."""
    writers = POD_ANNOTATION_WRITERS if what.startswith("pods") else NODE_ANNOTATION_WRITERS
    own = {
        "annotations": [name for name, who in writers.items() if AGENT in who],
        "labels": labels,
        "capacity": NODE_AMOUNTS_OF_AGENT,
        "allocatable": NODE_AMOUNTS_OF_AGENT,
    }

    def rest(part: Document) -> Document:
        return {**part, **{name: without(part.get(name) or {}, names) for name, names in own.items()}}

    metadata, status = without(_metadata(document), _KEPT_BY_THE_SERVER), dict(document.get("status") or {})
    if what == "pods/status":
        conditions = status.get("conditions") or []
        status["conditions"] = [each for each in conditions if each.get("type") != CONDITION_PARKED]
    return {**document, "metadata": rest(metadata), "status": rest(status)}


def _metadata(document: Document) -> Document:
    return document.get("metadata") or {}
