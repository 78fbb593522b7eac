"""Before Kubernetes 1.30, without policies or nodes in tokens, the webhook refuses what policies would."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.http import ApiRequest
from gpuslice.adapters.kube.requests import APPLY_PATCH, JSON, JSON_PATCH, MERGE_PATCH, STRATEGIC_PATCH
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.apps.webhook.agents import Agents
from gpuslice.core.contract import AGENT, NODE_ANNOTATION_WRITERS, POD_ANNOTATION_WRITERS
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster
from simcluster.cluster.users import token_of
from tests.builders import api_pod
from tests.integration.agent_bench import eventually
from tests.integration.extender_rig import Api
from tests.integration.guarded_cluster import RELEASE_NAMESPACE, GuardedCluster, grants_of, rendered
from tests.integration.test_webhook import Certificates, webhook

OBJECTS = rendered("webhook.enabled=true", version="1.29.0")
ACCOUNT = "gpushare-device-plugin"
WRITERS = (f"system:serviceaccount:{RELEASE_NAMESPACE}:{ACCOUNT}",)
POD = "/api/v1/namespaces/default/pods/on-n1"
CORE = "/api/v1"
ADMISSION = "/apis/admissionregistration.k8s.io/v1"


@dataclass
class World:
    api: Api
    server: str
    tokens: dict[str, str]

    async def write(
        self, who: str, method: str, path: str, document: Any, kind: str = MERGE_PATCH
    ) -> tuple[int, str]:
        query = {"fieldManager": "x", "force": "true"} if kind == APPLY_PATCH else {}
        headers = {"Content-Type": kind, "Authorization": f"Bearer {self.tokens[who]}"}
        async with HttpTransport(Connection(self.server)) as transport:
            body = msgspec.json.encode(document)
            answer = await transport.request(ApiRequest(method, path, query, headers, body))
        return answer.status, str(msgspec.json.decode(answer.body).get("message", ""))


@contextlib.asynccontextmanager
async def cluster_of_1_29(folder: Path, cluster: Cluster | None = None) -> AsyncIterator[World]:
    certificates = Certificates(folder, trustme.CA())
    certificates.renew()
    api = Api(cluster or Cluster())
    tokens = {
        "tenant": token_of("default", "tenant"),
        "agent without a pod": token_of(RELEASE_NAMESPACE, ACCOUNT),
    }
    for node in ("n1", "n2"):
        api.add_node(node)
        api.add_pod(f"on-{node}", node=node)
        pod = api_pod(f"agent-{node}", "0", node=node)
        pod["metadata"]["namespace"] = RELEASE_NAMESPACE
        pod["spec"]["serviceAccountName"] = ACCOUNT
        made = api.call("POST", f"{CORE}/namespaces/{RELEASE_NAMESPACE}/pods", pod)
        uid = made["metadata"]["uid"]
        tokens[f"agent of {node}"] = token_of(RELEASE_NAMESPACE, ACCOUNT, f"agent-{node}", uid=uid)
    tokens["agent of a pod that is gone"] = token_of(RELEASE_NAMESPACE, ACCOUNT, "agent-n1", uid="another")
    async with (
        ApiServer(api.cluster) as server,
        HttpTransport(Connection(server.url, headers={"Impersonate-User": "gpuslice-webhook"})) as transport,
    ):
        agents = Agents(KubeClient(transport), WRITERS[0])
        async with webhook(certificates, agents, annotation_writers=WRITERS) as port:
            api.call("POST", f"{ADMISSION}/validatingwebhookconfigurations", guard(port, certificates.bundle))
            yield World(api, server.url, tokens)


def guard(port: int, bundle: str) -> dict[str, Any]:
    """What the chart installs, pointed at a port of this machine."""
    (found,) = (each for each in OBJECTS if each["metadata"]["name"] == "gpuslice-guard")
    hooks = [
        each | {"clientConfig": {"url": f"https://127.0.0.1:{port}/validate", "caBundle": bundle}}
        for each in found["webhooks"]
        if each["clientConfig"]["service"]["path"] == "/validate"
    ]
    return found | {"webhooks": hooks}


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with cluster_of_1_29(tmp_path) as made:
        yield made


def ways(path: str, name: str, value: str) -> dict[str, tuple[str, str, Any, str]]:
    """Each way to write an annotation of a pod or node."""
    kind, own = ("Pod" if "/pods/" in path else "Node"), path.rpartition("/")[2]
    change = {"metadata": {"annotations": {name: value}}}
    whole = {"apiVersion": "v1", "kind": kind, "metadata": {"name": own, "annotations": {name: value}}}
    operation = {"op": "add", "path": "/metadata/annotations", "value": {name: value}}
    return {
        "merge": ("PATCH", path, change, MERGE_PATCH),
        "strategic": ("PATCH", path, change, STRATEGIC_PATCH),
        "json": ("PATCH", path, [operation], JSON_PATCH),
        "apply": ("PATCH", path, whole, APPLY_PATCH),
        "status": ("PATCH", f"{path}/status", change, MERGE_PATCH),
    }


async def test_an_agent_writes_its_own_and_another_nodes_agent_does_not(world: World) -> None:
    for path, writers in ((POD, POD_ANNOTATION_WRITERS), (f"{CORE}/nodes/n1", NODE_ANNOTATION_WRITERS)):
        for name, who in writers.items():
            for way, request in ways(path, name, "x").items():
                status, said = await world.write("agent of n2", *request)
                assert status == 422, (name, way, said)
                assert "of its own node only" in said
                if AGENT in who and way != "status":
                    status, said = await world.write("agent of n1", *request)
                    assert status == 200, (name, way, said)


@pytest.mark.parametrize("who", ["agent without a pod", "agent of a pod that is gone"])
async def test_who_runs_nowhere_writes_nothing(world: World, who: str) -> None:
    for request in ways(f"{CORE}/nodes/n1", "gpuslice.io/tier", "none").values():
        status, said = await world.write(who, *request)
        assert status == 422
        assert "does not say on which node" in said


async def test_a_tenant_writes_no_record_in_any_way(world: World) -> None:
    target = {"apiVersion": "v1", "kind": "Node", "name": "n1"}
    pods = POD.rpartition("/")[0]
    for number, name in enumerate(POD_ANNOTATION_WRITERS):
        for way, request in ways(POD, name, "x").items():
            assert (await world.write("tenant", *request))[0] == 422, (name, way)
        world.api.add_pod(f"waiting{number}")
        meta: dict[str, Any] = {"name": f"waiting{number}", "annotations": {name: "x"}}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": meta, "target": target}
        for path in (f"{pods}/{meta['name']}/binding", f"{pods.removesuffix('pods')}bindings"):
            assert (await world.write("tenant", "POST", path, binding, JSON))[0] == 422, (name, path)
        made = api_pod("made", "0", annotations={name: "x"})
        assert (await world.write("tenant", "POST", pods, made, JSON))[0] == 422, name
        del meta["annotations"]
        assert (await world.write("tenant", "POST", f"{pods}/{meta['name']}/binding", binding, JSON))[
            0
        ] == 201
    assert (await world.write("tenant", *ways(POD, "theirs", "x")["merge"]))[0] == 200


async def test_an_agent_that_comes_is_known(world: World) -> None:
    pod = api_pod("late", "0", node="n2")
    pod["metadata"]["namespace"] = RELEASE_NAMESPACE
    pod["spec"]["serviceAccountName"] = ACCOUNT
    made = world.api.call("POST", f"{CORE}/namespaces/{RELEASE_NAMESPACE}/pods", pod)
    world.tokens["late"] = token_of(RELEASE_NAMESPACE, ACCOUNT, "late", uid=made["metadata"]["uid"])

    async def written() -> bool:
        request = ways(f"{CORE}/nodes/n2", "gpuslice.io/tier", "none")["merge"]
        return (await world.write("late", *request))[0] == 200

    await eventually(written, "its node is known")


async def test_the_webhook_uses_all_its_rights_and_needs_no_other(tmp_path: Path) -> None:
    cluster = GuardedCluster(grants := grants_of(OBJECTS))
    async with cluster_of_1_29(tmp_path, cluster) as world:
        request = ways(POD, "gpuslice.io/tiers", "x")["merge"]
        assert (await world.write("agent of n1", *request))[0] == 200

        async def all_used() -> bool:
            return cluster.used["gpuslice-webhook"] == grants["gpuslice-webhook"]

        await eventually(all_used, "its rights")
    assert cluster.refused["gpuslice-webhook"] == set()


@pytest.mark.parametrize("version", ["1.27.0", "1.30.0"])
def test_where_policies_are_or_no_conditions_the_webhook_reads_nothing(version: str) -> None:
    objects = rendered("webhook.enabled=true", version=version)
    assert "gpuslice-guard" not in {each["metadata"]["name"] for each in objects}
    assert "gpuslice-webhook" not in grants_of(objects)
