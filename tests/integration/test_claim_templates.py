"""The controller of claim templates on a simulated API server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.resources import EVENTS, PODS, RESOURCE_CLAIM_TEMPLATES
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.apps.claims.main import TemplateController
from gpuslice.apps.claims.settings import ClaimsSettings
from gpuslice.core.contract import LABEL_CLAIMED
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster
from simcluster.cluster.faults import Fault
from tests.builders import api_pod
from tests.integration.agent_bench import eventually
from tests.unit.kube_wire import VirtualTime


@dataclass
class Rig:
    cluster: Cluster
    client: KubeClient
    time: VirtualTime
    controllers: list[TemplateController]

    async def pod(self, name: str, template: str, namespace: str = "default") -> None:
        """A pod as the policy leaves it."""
        document = api_pod(name, "0")
        del document["metadata"]["uid"]
        document["metadata"]["namespace"] = namespace
        document["metadata"]["labels"] = {LABEL_CLAIMED: "true"}
        claims = [{"name": "gpuslice", "resourceClaimTemplateName": template}]
        document["spec"]["resourceClaims"] = claims
        await self.client.create(PODS.as_dict(), document)

    async def templates(self) -> dict[str, Any]:
        found = await self.client.list(RESOURCE_CLAIM_TEMPLATES)
        return {each["metadata"]["name"]: each["spec"] for each in found.items or ()}

    async def has(self, *names: str) -> dict[str, Any]:
        async def ask() -> dict[str, Any] | None:
            found = await self.templates()
            return found if found.keys() == set(names) else None

        return await eventually(ask, f"templates {names}") if names else await self._none()

    async def _none(self) -> dict[str, Any]:
        async def ask() -> bool:
            return not await self.templates()

        await eventually(ask, "no template")
        return {}


@contextlib.asynccontextmanager
async def controllers(count: int = 1, **settings: Any) -> AsyncIterator[Rig]:
    async with contextlib.AsyncExitStack() as stack:
        cluster = Cluster()
        server = await stack.enter_async_context(ApiServer(cluster))
        connection = Connection(server=server.url)
        client = KubeClient(await stack.enter_async_context(HttpTransport(connection, timeout_s=5)))
        rig = Rig(cluster, client, VirtualTime(), [])
        chosen = ClaimsSettings(port=0, host="127.0.0.1", **settings)
        for _ in range(count):
            controller = TemplateController(chosen, client, rig.time.clock)
            stopped = asyncio.Event()
            task = asyncio.create_task(controller.run(stopped.wait()))
            stack.push_async_callback(asyncio.wait_for, task, 30)
            stack.callback(stopped.set)
            rig.controllers.append(controller)
        await eventually(lambda: not any(each.problem for each in rig.controllers), "ready")
        yield rig


async def test_a_template_is_made_for_each_shape_and_shared_by_pods() -> None:
    async with controllers(2) as rig:
        for name, template in (("a", "gpuslice-4"), ("b", "gpuslice-4"), ("c", "gpuslice-8-x2")):
            await rig.pod(name, template)
        found = await rig.has("gpuslice-4", "gpuslice-8-x2")
        (request,) = found["gpuslice-8-x2"]["spec"]["devices"]["requests"]
        assert request["exactly"]["count"] == 2
        assert sum(each.made for each in rig.controllers) == 2  # replicas do not mind each other


async def test_what_nobody_needs_goes_after_a_while_and_comes_back() -> None:
    async with controllers(keep_s=600) as rig:
        await rig.pod("a", "gpuslice-4")
        await rig.has("gpuslice-4")
        await rig.client.delete(PODS, "a", "default", grace_s=0)
        (controller,) = rig.controllers
        await eventually(lambda: not controller._pods.objects, "the pod is gone")
        await controller.step()
        assert await rig.templates()
        rig.time.now_s += 601
        await controller.step()
        assert not await rig.templates()
        await rig.pod("b", "gpuslice-4")
        await rig.has("gpuslice-4")


async def test_others_templates_are_left_alone() -> None:
    async with controllers(keep_s=0) as rig:
        document = {
            "metadata": {"name": "theirs", "namespace": "default"},
            "spec": {"spec": {"devices": {"requests": []}}},
        }
        await rig.client.create(RESOURCE_CLAIM_TEMPLATES, document)
        await rig.pod("a", "theirs")
        await rig.pod("b", "gpuslice-2")
        await rig.has("theirs", "gpuslice-2")
        await rig.controllers[0].step()
        assert "theirs" in await rig.templates()


async def test_a_pod_whose_request_can_never_be_given_is_told_once() -> None:
    async with controllers() as rig:
        await rig.pod("odd", "gpuslice-5-x2")

        async def told() -> list[str]:
            found = await rig.client.list(EVENTS, "default")
            return [each.message for each in found.items or () if each.reason == "GPUClaimImpossible"]

        (message,) = await eventually(told, "an event")
        assert "must be a multiple of 2" in message
        await rig.controllers[0].step()
        assert len(await told()) == 1
        assert not await rig.templates()


async def test_a_namespace_in_which_nothing_may_be_made_keeps_no_other_from_its_templates() -> None:
    """One that is going, say, and never gone for the finalizer of a pod in it."""
    async with controllers() as rig:
        (controller,) = rig.controllers
        forbids = Fault(method="POST", path=".*/default/resourceclaimtemplates", code=403)
        rig.cluster.add_fault(forbids)
        for number in range(1, 9):
            await rig.pod(f"stuck-{number}", f"gpuslice-{number}")
        await rig.pod("elsewhere", "gpuslice-4", namespace="kube-public")
        await rig.has("gpuslice-4")
        assert "403" in await eventually(lambda: controller.problem, "what is wrong is said")
        rig.cluster.faults.clear()
        await rig.has(*(f"gpuslice-{number}" for number in range(1, 9)))
