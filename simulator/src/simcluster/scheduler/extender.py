"""Calls an extender exactly as kube-scheduler's HTTPExtender does (pkg/scheduler/extender.go, 1.36).

The outer keys are Go field names; a status other than 200 is an error; nothing is repeated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from simcluster.cluster.amounts import Object
from simcluster.scheduler.configuration import ExtenderConfig
from simcluster.scheduler.nodes import NodeInfo

SCORE_FACTOR = 10  # MaxNodeScore / MaxExtenderPriority


class ExtenderError(Exception):
    """The extender could not be called, or returned an error; the text goes into the pod's event."""


@dataclass(frozen=True, slots=True)
class Filtered:
    """Preemption may help with `failed`, but not with `never`; both map a node to the reason."""

    nodes: tuple[str, ...]
    failed: Mapping[str, str]
    never: Mapping[str, str]


class HttpExtender:
    """One extender of the configuration. The session belongs to the caller."""

    def __init__(self, config: ExtenderConfig, session: aiohttp.ClientSession) -> None:
        self.config = config
        self._session = session

    @property
    def binds(self) -> bool:
        return bool(self.config.bind_verb)

    def is_interested(self, pod: Object) -> bool:
        """Without managed resources every pod; otherwise those whose containers request such a resource."""
        if not self.config.managed:
            return True
        return not self.config.managed.isdisjoint(resource_names(pod))

    async def filter(self, pod: Object, nodes: Sequence[NodeInfo]) -> Filtered:
        if not self.config.filter_verb:
            return Filtered(tuple(node.name for node in nodes), {}, {})
        answer = _lower(await self._post("filter", self.config.filter_verb, self._arguments(pod, nodes)))
        if answer.get("error"):
            raise ExtenderError(answer["error"])
        names = self._names(answer)
        sent = {node.name for node in nodes}
        for name in names:
            if name not in sent:
                raise ExtenderError(
                    f'extender "{self.config.url_prefix}" claims a filtered node "{name}" '
                    "which is not found in the input node list"
                )
        never = answer.get("failedandunresolvablenodes") or {}
        return Filtered(tuple(names), answer.get("failednodes") or {}, never)

    async def prioritize(self, pod: Object, nodes: Sequence[NodeInfo]) -> dict[str, int]:
        """Scores to add to the in-tree ones, already weighted; empty if the extender has no say."""
        if not self.config.prioritize_verb:
            return {}
        hosts = await self._post("prioritize", self.config.prioritize_verb, self._arguments(pod, nodes))
        factor = self.config.weight * SCORE_FACTOR
        return {one["host"]: one["score"] * factor for one in map(_lower, hosts or ())}

    async def bind(self, pod: Object, node: str) -> None:
        metadata = pod["metadata"]
        arguments = {
            "PodName": metadata["name"],
            "PodNamespace": metadata["namespace"],
            "PodUID": metadata["uid"],
            "Node": node,
        }
        answer = _lower(await self._post("bind", self.config.bind_verb, arguments))
        if answer.get("error"):
            raise ExtenderError(answer["error"])

    def _arguments(self, pod: Object, nodes: Sequence[NodeInfo]) -> dict[str, Any]:
        if self.config.node_cache_capable:
            return {"Pod": pod, "Nodes": None, "NodeNames": [node.name for node in nodes]}
        whole = {"metadata": {}, "items": [node.node for node in nodes]}
        return {"Pod": pod, "Nodes": whole, "NodeNames": None}

    def _names(self, answer: Mapping[str, Any]) -> list[str]:
        """Null names together with null nodes silently mean that every node was filtered out."""
        if self.config.node_cache_capable and answer.get("nodenames") is not None:
            return list(answer["nodenames"])
        nodes = answer.get("nodes") or {}
        return [node["metadata"]["name"] for node in nodes.get("items") or ()]

    async def _post(self, action: str, verb: str, arguments: Mapping[str, Any]) -> Any:
        url = f"{self.config.url_prefix}/{verb}"
        timeout = aiohttp.ClientTimeout(total=self.config.timeout_s)
        try:
            async with self._session.post(
                url, json=arguments, timeout=timeout, ssl=self.config.tls or True
            ) as response:
                if response.status != 200:
                    raise ExtenderError(f"failed {action} with extender at URL {url}, code {response.status}")
                return await response.json(content_type=None)
        except TimeoutError as error:
            raise ExtenderError(
                f'Post "{url}": context deadline exceeded (Client.Timeout exceeded while awaiting headers)'
            ) from error
        except aiohttp.ClientConnectorError as error:
            why = os.strerror(error.os_error.errno or 0).lower()
            raise ExtenderError(
                f'Post "{url}": dial tcp {error.host}:{error.port}: connect: {why}'
            ) from error
        except (aiohttp.ClientError, ValueError) as error:
            raise ExtenderError(f'Post "{url}": {error}') from error


def resource_names(pod: Object) -> set[str]:
    spec = pod.get("spec", {})
    return {
        name
        for container in [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
        for amounts in (container.get("resources") or {}).values()
        if isinstance(amounts, dict)
        for name in amounts
    }


def _lower(answer: Any) -> dict[str, Any]:
    """Go matches keys case-insensitively."""
    if not isinstance(answer, dict):
        raise ValueError(f"json: cannot unmarshal {type(answer).__name__}")
    return {key.lower(): value for key, value in answer.items()}
