"""Who sees what on the console, judged by a real API server: tokens, TokenReview, RBAC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.resources import DICT, NAMESPACES, NODES, PODS, Resource
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.apps.console.main import Console
from gpuslice.apps.console.settings import ConsoleSettings
from tests import HANG_S
from tests.builders import api_pod
from tests.e2e.control_plane import api_server
from tests.e2e.marks import ON_A_CONTROL_PLANE
from tests.integration.console_rig import V100, node

pytestmark = ON_A_CONTROL_PLANE
RBAC = "rbac.authorization.k8s.io/v1"
ROLES = Resource(RBAC, "clusterroles", "ClusterRole", DICT, namespaced=False)
CLUSTER_BINDINGS = Resource(RBAC, "clusterrolebindings", "ClusterRoleBinding", DICT, namespaced=False)
BINDINGS = Resource(RBAC, "rolebindings", "RoleBinding", DICT)
ACCOUNTS = Resource("v1", "serviceaccounts", "ServiceAccount", DICT)
LISTS_PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}
LISTS_NODES = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["list"]}


async def token_of(client: KubeClient, name: str) -> str:
    """A token of a new service account of team-a, as `kubectl create token` gets it."""
    await client.create(ACCOUNTS, {"metadata": {"name": name, "namespace": "team-a"}})
    asked = Resource("v1", f"serviceaccounts/{name}/token", "TokenRequest", DICT)
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    found = await client.create(asked, request, "team-a")
    return str(found["status"]["token"])


async def allow(client: KubeClient, account: str, rule: dict[str, Any], namespace: str = "") -> None:
    """Let a service account of team-a do what the rule says, in one namespace or everywhere."""
    name = f"{account}-{rule['resources'][0]}"
    await client.create(ROLES, {"metadata": {"name": name}, "rules": [rule]})
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    subject = {"kind": "ServiceAccount", "name": account, "namespace": "team-a"}
    binding = {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]}
    await client.create(BINDINGS if namespace else CLUSTER_BINDINGS, binding, namespace)


@contextlib.asynccontextmanager
async def console(kubeconfig: Path) -> AsyncIterator[tuple[str, KubeClient]]:
    """The address of a console as it runs in a cluster, and an administrator's client."""
    settings = ConsoleSettings(access="token", exporters="off", log_level="error")
    async with HttpTransport(connect({}, kubeconfig=str(kubeconfig)), connections=40) as transport:
        made, stopped = Console(settings, transport), asyncio.Event()
        url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(made.run(_set(stopped), url.set_result))
        try:
            yield await url, KubeClient(transport)
        finally:
            stopped.set()
            await task


async def _set(event: asyncio.Event) -> None:
    await event.wait()


async def test_what_a_token_may_not_list_its_bearer_does_not_see(tmp_path: Path) -> None:
    with api_server(tmp_path) as plane:
        async with console(plane.kubeconfig) as (url, client), aiohttp.ClientSession() as http:
            described = node("n1", 2, V100)
            await client.create(NODES, described)
            await client.patch_status(NODES, "n1", described["status"])
            for namespace in ("team-a", "team-b"):
                await client.create(NAMESPACES, {"metadata": {"name": namespace}})
                pod = api_pod("waits", "40", namespace=namespace)
                await client.create(PODS, {"metadata": pod["metadata"], "spec": pod["spec"]})
            tokens = {name: await token_of(client, name) for name in ("nobody", "member", "operator")}
            await allow(client, "member", LISTS_PODS, "team-a")
            await allow(client, "operator", LISTS_PODS)
            await allow(client, "operator", LISTS_NODES)

            async def ask(path: str, token: str) -> tuple[int, dict[str, Any]]:
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                async with http.get(f"{url}api/v1/{path}", headers=headers) as answer:
                    return answer.status, await answer.json(content_type=None)

            async with asyncio.timeout(HANG_S):
                while len((await ask("cluster", tokens["operator"]))[1].get("waiting", ())) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)  # rights spread

            assert (await ask("cluster", ""))[0] == 401
            assert (await ask("cluster", "made-up"))[0] == 401
            _, whole = await ask("cluster", tokens["operator"])
            assert whole["cluster"]["viewer"] == "system:serviceaccount:team-a:operator"
            assert {row["namespace"] for row in whole["pods"]} == {"team-a", "team-b"}
            assert [row["name"] for row in whole["nodes"]] == ["n1"]

            _, own = await ask("cluster", tokens["member"])
            assert {row["namespace"] for row in own["pods"]} == {"team-a"}
            assert not own.keys() & {"nodes", "waiting"}
            assert (await ask("pod?namespace=team-a&name=waits", tokens["member"]))[0] == 200
            assert (await ask("pod?namespace=team-b&name=waits", tokens["member"]))[0] == 404
            assert "team-b" not in str(await ask("health", tokens["member"]))
            assert (await ask("simulation", tokens["member"]))[1] == {}

            _, nothing = await ask("cluster", tokens["nobody"])
            assert not nothing.keys() & {"nodes", "pods", "waiting"}
