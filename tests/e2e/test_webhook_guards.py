"""What the webhook refuses where there are no policies, before Kubernetes 1.30: a real API server asks it."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import trustme

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.http import ApiRequest
from gpuslice.adapters.kube.requests import JSON
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.apps.webhook.agents import Agents
from gpuslice.core.contract import AGENT, NODE_ANNOTATION_WRITERS, POD_ANNOTATION_WRITERS
from tests.e2e.control_plane import api_server
from tests.e2e.marks import ON_A_CONTROL_PLANE
from tests.e2e.node import Api
from tests.integration.guarded_cluster import RELEASE_NAMESPACE
from tests.integration.test_webhook import Certificates, webhook
from tests.integration.test_webhook_guards import ACCOUNT, ADMISSION, CORE, POD, WRITERS, guard, ways

pytestmark = ON_A_CONTROL_PLANE

CLAIM = f"Impersonate-Extra-{quote('Authentication.kubernetes.io/', safe='')}"
RBAC = "/apis/rbac.authorization.k8s.io/v1"


def furnish(api: Api) -> dict[str, dict[str, str]]:
    """Two nodes with their agents, and a tenant with more rights than any role; how to be each of them."""
    who = {"tenant": {"Impersonate-User": "tenant"}}
    own = f"{CORE}/namespaces/{RELEASE_NAMESPACE}"
    api.create(f"{own}/serviceaccounts", {"metadata": {"name": ACCOUNT}})
    for node in ("n1", "n2"):
        api.create("nodes", {"metadata": {"name": node}})
        spec: dict[str, Any] = {"nodeName": node, "containers": [{"name": "c", "image": "x"}]}
        api.create("namespaces/default/pods", {"metadata": {"name": f"on-{node}"}, "spec": spec})
        spec |= {"serviceAccountName": ACCOUNT}
        made = api.create(f"{own}/pods", {"metadata": {"name": f"agent-{node}"}, "spec": spec})
        claims = {f"{CLAIM}pod-name": f"agent-{node}", f"{CLAIM}pod-uid": made["metadata"]["uid"]}
        who[f"agent of {node}"] = {"Impersonate-User": WRITERS[0], **claims}
    rules = [{"apiGroups": [""], "resources": ["*"], "verbs": ["*"]}]
    api.create(f"{RBAC}/clusterroles", {"metadata": {"name": "everything"}, "rules": rules})
    for user in ("tenant", WRITERS[0]):
        subject = {"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}
        role = {"kind": "ClusterRole", "name": "everything", "apiGroup": "rbac.authorization.k8s.io"}
        binding = {"metadata": {"name": user}, "roleRef": role, "subjects": [subject]}
        api.create(f"{RBAC}/clusterrolebindings", binding)
    return who


async def test_an_agent_is_held_to_its_node_and_a_tenant_writes_no_record(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path, trustme.CA())
    certificates.renew()
    (tmp_path / "plane").mkdir()
    with api_server(tmp_path / "plane") as plane, closing(Api(plane)) as api:
        who = await asyncio.to_thread(furnish, api)
        async with HttpTransport(connect({}, kubeconfig=str(plane.kubeconfig))) as transport:

            async def write(user: str, method: str, path: str, document: Any, kind: str) -> tuple[int, str]:
                query = {"fieldManager": "x", "force": "true"} if "apply" in kind else {}
                headers = {**who[user], "Impersonate-Group": "system:authenticated", "Content-Type": kind}
                request = ApiRequest(method, path, query, headers, msgspec.json.encode(document))
                answer = await transport.request(request)
                return answer.status, str(msgspec.json.decode(answer.body).get("message", ""))

            agents = Agents(KubeClient(transport), WRITERS[0])
            async with webhook(certificates, agents, annotation_writers=WRITERS) as port:
                await asyncio.to_thread(
                    api.create,
                    f"{ADMISSION}/validatingwebhookconfigurations",
                    guard(port, certificates.bundle),
                )
                node = f"{CORE}/nodes/n1"
                async with asyncio.timeout(60):
                    first = ways(node, "gpuslice.io/tier", "x")["merge"]
                    while (await write("agent of n2", *first))[0] == 200:  # noqa: ASYNC110  # another process
                        await asyncio.sleep(0.2)
                for path, writers in ((POD, POD_ANNOTATION_WRITERS), (node, NODE_ANNOTATION_WRITERS)):
                    for name, owners in writers.items():
                        for way, request in ways(path, name, "y").items():
                            if path == POD and way == "status":  # no role of an agent has it
                                continue
                            status, said = await write("agent of n2", *request)
                            assert status == 422, (name, way, said)
                            assert "of its own node only" in said
                            status, said = await write("agent of n1", *request)
                            assert (status == 200) == (AGENT in owners), (name, way, said)
                for name in POD_ANNOTATION_WRITERS:
                    for way, request in ways(POD, name, "z").items():
                        assert (await write("tenant", *request))[0] == 422, (name, way)
                theirs = ways(POD, "theirs", "z")["merge"]
                assert (await write("tenant", *theirs))[0] == 200
                config = {"metadata": {"name": "unhealthy-gpu-n2"}}
                maps = f"{CORE}/namespaces/{RELEASE_NAMESPACE}/configmaps"
                assert (await write("agent of n1", "POST", maps, config, JSON))[0] == 422
                assert (await write("agent of n2", "POST", maps, config, JSON))[0] == 201
