"""Workloads from apply to deletion: the real kubectl, our controllers, and a hand that makes pods ready."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from kubectl_rig import Rig, kubectl_rig, rows
from test_apiserver_kubectl import _NODE, _SET

from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kube.watch import Change, ChangeKind, Reflector
from simcluster.controllers.run import Controllers, Settings

pytestmark = pytest.mark.asyncio(loop_scope="module")

_RUNNING = {
    "phase": "Running",
    "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2024-01-01T00:00:00Z"}],
}


class Hand:
    """Does what scheduler and kubelet would: binds each pod, says it runs, lets it go."""

    def __init__(self, rig: Rig) -> None:
        self._client = rig.client
        self._todo: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def run(self) -> None:
        reflector = Reflector(self._client, PODS.as_dict(), self._changed)
        async with asyncio.TaskGroup() as group:
            group.create_task(reflector.run())
            group.create_task(self._work())

    def _changed(self, change: Change[dict[str, Any]]) -> None:
        if change.object is not None and change.kind is not ChangeKind.DELETED:
            self._todo.put_nowait(change.object)

    async def _work(self) -> None:
        while True:
            pod = await self._todo.get()
            with contextlib.suppress(KubeError):
                await self._advance(pod["metadata"], pod)

    async def _advance(self, metadata: dict[str, Any], pod: dict[str, Any]) -> None:
        name, namespace = metadata["name"], metadata["namespace"]
        if "deletionTimestamp" in metadata:
            await self._client.delete(PODS, name, namespace, uid=metadata["uid"], grace_s=0)
        elif "nodeName" not in pod["spec"]:
            await self._client.bind(namespace, name, "cn-hangzhou.192.168.2.167", uid=metadata["uid"])
        elif pod["status"]["phase"] == "Pending":
            done = pod["spec"]["containers"][0]["image"] == "done"
            status = {"phase": "Succeeded", "conditions": []} if done else _RUNNING
            await self._client.patch_status(PODS, name, status, namespace, uid=metadata["uid"])


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with kubectl_rig(Path(tmp_path_factory.mktemp("controllers"))) as made:
        await made.ok("apply", "-f", "-", text=_NODE)
        controllers = Controllers(made.client, Settings(node_grace_s=1))
        tasks = [asyncio.create_task(controllers.run()), asyncio.create_task(Hand(made).run())]
        yield made
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_stateful_set_rolls_out_scales_and_is_replaced_by_name(rig: Rig) -> None:
    await rig.ok("apply", "-f", "-", text=_SET)
    await rig.ok("rollout", "status", "sts/app-3g-v1", "--timeout=120s")
    assert [row[:3] for row in rows(await rig.ok("get", "pods", "-l", "app=app-3g-v1"))] == [
        ["app-3g-v1-0", "0/1", "Running"],
        ["app-3g-v1-1", "0/1", "Running"],
    ]
    before = await _uid(rig, "app-3g-v1-0")
    await rig.ok("delete", "pod", "app-3g-v1-0")
    await rig.ok("wait", "pod", "app-3g-v1-0", "--for=create", "--timeout=120s")
    await rig.ok("rollout", "status", "sts/app-3g-v1", "--timeout=120s")
    assert await _uid(rig, "app-3g-v1-0") != before
    await rig.ok("scale", "sts", "app-3g-v1", "--replicas=1")
    await rig.ok("wait", "pod", "app-3g-v1-1", "--for=delete", "--timeout=120s")
    await rig.ok("rollout", "restart", "sts/app-3g-v1")
    await rig.ok("rollout", "status", "sts/app-3g-v1", "--timeout=120s")
    await rig.ok("rollout", "undo", "sts/app-3g-v1")
    await rig.ok("rollout", "status", "sts/app-3g-v1", "--timeout=120s")
    history = await rig.ok("rollout", "history", "sts/app-3g-v1")
    assert [line.split()[0] for line in history.splitlines()[2:] if line] == ["2", "3"]
    await rig.ok("delete", "sts", "app-3g-v1", "--cascade=foreground")
    assert await rig.ok("get", "pods,controllerrevisions", "-l", "app=app-3g-v1", "-o", "name") == ""


async def test_a_deployment_rolls_forward_and_back(rig: Rig) -> None:
    await rig.ok("create", "deployment", "web", "--image=x:1", "--replicas=3")
    await rig.ok("rollout", "status", "deploy/web", "--timeout=120s")
    await rig.ok("set", "image", "deploy/web", "x=x:2")
    await rig.ok("rollout", "status", "deploy/web", "--timeout=120s")
    await rig.ok("rollout", "undo", "deploy/web")
    await rig.ok("rollout", "status", "deploy/web", "--timeout=120s")
    assert await rig.ok("get", "deploy", "web", "-o", "jsonpath={..image}") == "x:1"
    assert rows(await rig.ok("get", "deploy", "web"))[0][:4] == ["web", "3/3", "3", "3"]
    history = await rig.ok("rollout", "history", "deploy/web")
    assert [line.split()[0] for line in history.splitlines()[2:] if line] == ["2", "3"]
    await rig.ok("delete", "deploy", "web", "--cascade=foreground")
    assert await rig.ok("get", "rs,pods", "-l", "app=web", "-o", "name") == ""


async def test_a_daemon_set_follows_the_nodes_label(rig: Rig) -> None:
    text = """
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: plugin}
spec:
  selector: {matchLabels: {name: plugin}}
  template:
    metadata: {labels: {name: plugin}}
    spec: {nodeSelector: {cgpu: "true"}, containers: [{name: c, image: x:1}]}
"""
    await rig.ok("apply", "-f", "-", text=text)
    await rig.ok("rollout", "status", "ds/plugin", "--timeout=120s")
    assert rows(await rig.ok("get", "ds"))[0][:7] == ["plugin", "1", "1", "1", "1", "1", "cgpu=true"]
    await rig.ok("set", "image", "ds/plugin", "c=x:2")
    await rig.ok("rollout", "status", "ds/plugin", "--timeout=120s")
    await rig.ok("rollout", "undo", "ds/plugin")
    await rig.ok("rollout", "status", "ds/plugin", "--timeout=120s")
    assert await rig.ok("get", "pods", "-l", "name=plugin", "-o", "jsonpath={..image}") == "x:1"
    await rig.ok("label", "node", "cn-hangzhou.192.168.2.167", "--overwrite", "cgpu=false")
    await rig.ok("wait", "pod", "-l", "name=plugin", "--for=delete", "--timeout=120s")
    await rig.ok("label", "node", "cn-hangzhou.192.168.2.167", "--overwrite", "cgpu=true")
    await rig.ok("wait", "ds/plugin", "--for=jsonpath={.status.numberReady}=1", "--timeout=120s")


async def test_a_job_with_parallelism_alone_completes_as_the_vendor_shows_it(rig: Rig) -> None:
    text = """
apiVersion: batch/v1
kind: Job
metadata: {name: gpushare-installer}
spec:
  parallelism: 3
  template: {spec: {restartPolicy: Never, containers: [{name: c, image: done}]}}
"""
    await rig.ok("apply", "-f", "-", text=text)
    await rig.ok("wait", "job/gpushare-installer", "--for=condition=Complete", "--timeout=120s")
    row = rows(await rig.ok("get", "job"))[0]
    assert " ".join(row[:5]) == "gpushare-installer Complete 3/1 of 3"


async def test_a_service_lists_the_addresses_of_its_ready_pods(rig: Rig) -> None:
    await rig.ok("create", "deployment", "back", "--image=x:1", "--port=80")
    await rig.ok("expose", "deployment", "back", "--port=8080", "--target-port=80")
    await rig.ok("rollout", "status", "deploy/back", "--timeout=120s")
    name = await rig.ok("get", "pods", "-l", "app=back", "-o", "jsonpath={.items[0].metadata.name}")
    status = '{"status":{"podIP":"10.0.0.7"}}'
    await rig.ok("patch", "pod", name, "--subresource=status", "--type=merge", "-p", status)
    filled = "--for=jsonpath={.subsets[0].addresses[0].ip}=10.0.0.7"
    await rig.ok("wait", "endpoints/back", filled, "--timeout=120s")
    assert "10.0.0.7:80" in await rig.ok("describe", "service", "back")


async def test_pods_of_a_node_that_is_gone_go_too(rig: Rig) -> None:
    await rig.ok("create", "-f", "-", text='{"apiVersion":"v1","kind":"Node","metadata":{"name":"brief"}}')
    spec = {"nodeName": "brief", "containers": [{"name": "c", "image": "x:1"}]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranded"}, "spec": spec}
    await rig.ok("create", "-f", "-", text=json.dumps(pod))
    await rig.ok("delete", "node", "brief")
    await rig.ok("wait", "pod", "stranded", "--for=delete", "--timeout=120s")


async def test_a_deployment_deleted_with_orphans_leaves_its_pods(rig: Rig) -> None:
    await rig.ok("create", "deployment", "parent", "--image=x:1")
    await rig.ok("rollout", "status", "deploy/parent", "--timeout=120s")
    await rig.ok("delete", "deploy", "parent", "--cascade=orphan")
    owners = "jsonpath={.items[*].metadata.ownerReferences[*].kind}"
    assert await rig.ok("get", "rs", "-l", "app=parent", "-o", owners) == ""
    await rig.ok("delete", "rs", "-l", "app=parent", "--cascade=foreground")
    assert await rig.ok("get", "pods", "-l", "app=parent", "-o", "name") == ""


async def test_a_namespace_goes_with_all_it_holds(rig: Rig) -> None:
    await rig.ok("create", "namespace", "temporary")
    await rig.ok("-n", "temporary", "create", "deployment", "d", "--image=x:1")
    await rig.ok("-n", "temporary", "rollout", "status", "deploy/d", "--timeout=120s")
    await rig.ok("delete", "namespace", "temporary", "--timeout=120s")
    assert await rig.ok("get", "pods,deploy,sa", "-n", "temporary", "-o", "name") == ""


async def test_dropped_watches_and_forgotten_history_lose_nothing(rig: Rig) -> None:
    rig.cluster.drop_watches()
    await rig.ok("create", "deployment", "late", "--image=x:1")
    rig.cluster.compact()
    rig.cluster.drop_watches()
    await rig.ok("rollout", "status", "deploy/late", "--timeout=120s")


async def _uid(rig: Rig, name: str) -> str:
    return await rig.ok("get", "pod", name, "-o", "jsonpath={.metadata.uid}")
