"""Placeholders of nodes that are to be added: an autoscaler takes them for pods which only a new node holds.

CapacityBuffers (autoscaling.x-k8s.io), of which an autoscaler makes such pods for itself alone, or, where
those are not served, pods that belong to no scheduler and never run.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import AlreadyExistsError, NotFoundError
from gpuslice.adapters.kube.resources import DICT, PODS, Resource
from gpuslice.core.contract import LABEL_PLACEHOLDER, NAME_SETS, PLACEHOLDER_SCHEDULER, VENDOR_NAMES
from gpuslice.core.node_filters import Taint
from gpuslice.core.node_group import NodeGroup
from gpuslice.core.policy.fleet import FleetNode

GROUP = "autoscaling.x-k8s.io"
POD_TEMPLATES = Resource("v1", "podtemplates", "PodTemplate", DICT)
IMAGE = "registry.k8s.io/pause:3.10"  # never pulled
LONGEST_NAME = 40


@dataclass(frozen=True, slots=True)
class NewNodes:
    """How many nodes of a group are asked for, and how such a node is."""

    count: int
    node: FleetNode
    taints: tuple[Taint, ...] = ()


Wanted = Mapping[NodeGroup, NewNodes]


class Placeholders(Protocol):
    async def show(self, wanted: Wanted) -> None:
        """Ask for these nodes and no others. Raises `KubeError`; what was not written is tried again."""

    def forget(self) -> None:
        """Read what is shown before the next change: another replica may have written."""


async def served_version(client: KubeClient) -> str:
    """Of CapacityBuffers. Raises `NotFoundError` where there are none."""
    found = json.loads(await client.read(f"/apis/{GROUP}"))
    for version in (found["preferredVersion"]["version"], *(each["version"] for each in found["versions"])):
        kinds = json.loads(await client.read(f"/apis/{GROUP}/{version}"))
        if any(each["name"] == "capacitybuffers" for each in kinds["resources"]):
            return str(version)
    raise NotFoundError(f"{GROUP} has no capacitybuffers")


class CapacityBuffers:
    """One buffer for each group, which cluster-autoscaler keeps filled with pods of the template."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client, self._namespace = client, namespace
        self._buffers: Resource[dict[str, Any]] | None = None
        self._shown: dict[str, int] | None = None

    def forget(self) -> None:
        self._shown = None

    async def show(self, wanted: Wanted) -> None:
        if self._buffers is None:
            version = await served_version(self._client)
            self._buffers = Resource(f"{GROUP}/{version}", "capacitybuffers", "CapacityBuffer", DICT)
        if self._shown is None:
            found = await self._client.all(self._buffers, self._namespace, labels=LABEL_PLACEHOLDER)
            self._shown = {each["metadata"]["name"]: each["spec"].get("replicas", 0) for each in found}
        named = {name_of(group): (group, new) for group, new in wanted.items()}
        for name in [each for each in self._shown if each not in named]:
            for kind in (self._buffers, POD_TEMPLATES):
                with suppress(NotFoundError):
                    await self._client.delete(kind, name, self._namespace)
            del self._shown[name]
        for name, (group, new) in named.items():
            if self._shown.get(name) == new.count:
                continue
            await self._put(POD_TEMPLATES, name, {"template": _template(group, new)})
            spec = {"podTemplateRef": {"name": name}, "replicas": new.count}
            await self._put(self._buffers, name, {"spec": spec})
            self._shown[name] = new.count

    async def _put(self, kind: Resource[dict[str, Any]], name: str, document: dict[str, Any]) -> None:
        metadata = {"name": name, "labels": {LABEL_PLACEHOLDER: "true"}}
        try:
            await self._client.create(kind, {"metadata": metadata, **document}, self._namespace)
        except AlreadyExistsError:
            await self._client.merge_patch(kind, name, document, self._namespace)


class PlaceholderPods:
    """Pods that no scheduler takes up; autoscalers go by their condition alone."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client, self._namespace = client, namespace
        self._shown: set[str] | None = None

    def forget(self) -> None:
        self._shown = None

    async def show(self, wanted: Wanted) -> None:
        if self._shown is None:
            found = await self._client.all(PODS, self._namespace, labels=LABEL_PLACEHOLDER)
            self._shown = {each.metadata.name for each in found}
        named = {
            f"{name_of(group)}-{number}": (group, new)
            for group, new in wanted.items()
            for number in range(new.count)
        }
        for name in self._shown - named.keys():
            with suppress(NotFoundError):
                await self._client.delete(PODS, name, self._namespace, grace_s=0)
            self._shown.discard(name)
        for name in named.keys() - self._shown:
            template = _template(*named[name])
            labels = {**template["metadata"]["labels"], LABEL_PLACEHOLDER: "true"}
            pod = {"metadata": {"name": name, "labels": labels}, "spec": template["spec"]}
            with suppress(AlreadyExistsError):
                await self._client.create(PODS, pod, self._namespace)
            condition = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": f"stands for a node of {named[name][0].name}, which waiting pods need; never runs",
            }
            await self._client.add_condition(PODS, name, condition, self._namespace)
            self._shown.add(name)


def name_of(group: NodeGroup) -> str:
    """The name of what stands for its nodes."""
    readable = re.sub(r"[^a-z0-9]+", "-", group.name.lower()).strip("-")[:LONGEST_NAME].strip("-")
    return f"gpuslice-node-{readable}-{zlib.crc32(repr(group.selector).encode()):08x}"


def _template(group: NodeGroup, new: NewNodes) -> dict[str, Any]:
    """A pod as large as all cards of a node: it fits on no node on which another pod has a part of one.

    It tolerates the taints of its group alone, not those of a node that is leaving.
    """
    node = new.node
    names = next((each for each in NAME_SETS.values() if each.memory == node.names), VENDOR_NAMES)
    cards, units = sum(size > 0 for size in node.size), sum(node.size)
    amounts = {names.memory: str(units)}
    return {
        "metadata": {"labels": {names.cards: str(cards)} if cards > 1 and units % cards == 0 else {}},
        "spec": {
            "schedulerName": PLACEHOLDER_SCHEDULER,
            "nodeSelector": dict(group.selector),
            "tolerations": [
                {"key": each.key, "operator": "Equal", "value": each.value, "effect": each.effect}
                for each in new.taints
            ],
            "containers": [{"name": "node", "image": IMAGE, "resources": {"limits": amounts}}],
        },
    }
