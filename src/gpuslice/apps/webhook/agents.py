"""On which node each agent runs: before Kubernetes 1.30 a token names its pod, and not the node of that.

It is followed and not asked for, so that no forged review makes the API server work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.objects import Metadata
from gpuslice.adapters.kube.resources import Resource
from gpuslice.adapters.kube.watch import Reflector

_CLAIM = "authentication.kubernetes.io/"


class _Spec(msgspec.Struct, gc=False, rename="camel"):
    node_name: str = ""


class _AgentPod(msgspec.Struct, gc=False):
    metadata: Metadata
    spec: _Spec


AGENT_PODS = Resource("v1", "pods", "Pod", _AgentPod)


class Agents:
    """The pods of `account`, as the API server names it: ``system:serviceaccount:<namespace>:<name>``."""

    def __init__(self, client: KubeClient, account: str) -> None:
        self.account = account
        *_, self._namespace, name = account.split(":")
        self._pods: Reflector[_AgentPod] = Reflector(
            client,
            AGENT_PODS,
            lambda _: None,
            namespace=self._namespace,
            fields=f"spec.serviceAccountName={name}",
        )

    async def run(self) -> None:
        await self._pods.run()

    def not_ready(self) -> str:
        return "" if self._pods.synced.is_set() else "the agents are not known yet"

    def node_of(self, claims: Mapping[str, Sequence[str]]) -> str:
        """The node of who has a token with these `claims` (a user's ``extra``); "" if they do not say."""
        node, pod, uid = (
            claims.get(f"{_CLAIM}{each}") or [""] for each in ("node-name", "pod-name", "pod-uid")
        )
        if node[0]:
            return node[0]
        found = self._pods.objects.get((self._namespace, pod[0]))
        return found.spec.node_name if found is not None and found.metadata.uid == uid[0] else ""
