"""Each right that the chart gives is used by the process that has it, and none is missing.

The processes play their stories against an API server that refuses what the chart's roles do not grant. What
they asked for is compared with the roles, in both directions, verb by verb.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.errors import ForbiddenError
from gpuslice.adapters.kube.events import EventRecorder, pod_reference
from gpuslice.adapters.kube.resources import NODES, RESOURCE_CLAIMS, RESOURCE_SLICES
from gpuslice.adapters.kube.reviews import PathReviews
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.kubelet.podresources import Claimed
from gpuslice.adapters.limits import LIMITS
from gpuslice.adapters.turns import Asker
from gpuslice.apps.agent.keep_off import keep_off
from gpuslice.apps.agent.settings import KeepOffSettings
from gpuslice.apps.agent.writer import Writer
from gpuslice.apps.claims.main import TemplateController
from gpuslice.apps.claims.settings import ClaimsSettings
from gpuslice.apps.console.main import Console
from gpuslice.apps.console.settings import ConsoleSettings
from gpuslice.apps.exporter.collectors import CollectorHealth
from gpuslice.apps.exporter.device_grants import NVIDIA_DRIVER, DeviceSlices
from gpuslice.apps.exporter.node_pods import NodePods, follow_api
from gpuslice.apps.extender.autoscaling.placeholders import CapacityBuffers, NewNodes, PlaceholderPods
from gpuslice.core.contract import (
    ANN_ASSIGNED,
    ANN_INDEX,
    ANN_REQUEST,
    LABEL_CLAIMED,
    LABEL_LEADER,
    LABEL_MODE,
)
from gpuslice.core.model import Pod
from gpuslice.core.node_group import NodeGroup
from gpuslice.core.policy import FleetNode
from gpuslice.diagnosis.doctor import plugins as doctor_plugins
from gpuslice.diagnosis.doctor.facts import Facts, read_facts
from gpuslice.diagnosis.doctor.rights import CLAIM_RIGHTS, PLUGIN_RIGHTS
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster
from simcluster.cluster.resources import with_capacity_buffers
from tests.builders import api_pod
from tests.integration.agent_bench import NODE, Bench, eventually, uuid
from tests.integration.claims_rig import claim_node, result
from tests.integration.extender_rig import Api, rig, until
from tests.integration.guarded_cluster import (
    IMPERSONATE,
    RELEASE_NAMESPACE,
    Grant,
    GuardedCluster,
    grants_of,
    rendered,
)

EXTENDER, AGENT, CLAIMS = "gpushare-schd-extender", "gpushare-device-plugin", "gpuslice-claims"
EXPORTER, CONSOLE, KEEP_OFF = "gpuslice-exporter", "gpuslice-console", "gpuslice-keep-off"
INSTALLER, TEST = "gpushare-installer", "gpuslice-test"
VALUES = (
    "webhook.enabled=true", "exporter.enabled=true", "console.enabled=true", "dra.enabled=true",
    "installers.enabled=true", "scheduler.enabled=true", "wholeCards.daemonSet=nvidia/plugin",
    "extender.autoscaling=buffers",
    "devicePlugin.parkingHostMemoryMiB=1",
)  # fmt: skip
Grants = dict[str, set[Grant]]


@pytest.fixture(scope="module")
def grants() -> Grants:
    return grants_of(rendered(*VALUES))


def as_account(name: str) -> dict[str, str]:
    return {IMPERSONATE: name}


@contextlib.asynccontextmanager
async def client_of(account: str, cluster: Cluster) -> AsyncIterator[KubeClient]:
    async with ApiServer(cluster) as server:
        connection = Connection(server=server.url, headers=as_account(account))
        async with HttpTransport(connection, timeout_s=5) as transport:
            yield KubeClient(transport)


def judge(cluster: GuardedCluster, account: str, granted: set[Grant]) -> None:
    assert cluster.refused[account] == set(), "asked for without a right to it"
    assert granted - cluster.used[account] == set(), "a right that nothing uses"


async def test_the_extender_uses_all_its_rights_and_needs_no_other(grants: Grants) -> None:
    cluster = GuardedCluster(grants)
    cluster.catalog = with_capacity_buffers(cluster.catalog)
    api = Api(cluster)
    api.add_node("n1", 30, 2)
    for name, leads in (("replica", {}), ("before", {LABEL_LEADER: "true"})):
        pod = api_pod(name, "0", labels=leads)
        pod["metadata"] |= {"namespace": "kube-system", "uid": None}
        api.call("POST", "/api/v1/namespaces/kube-system/pods", pod)
    who = {"lease_namespace": "kube-system", "lease_identity": "replica"}
    more: dict[str, Any] = {"leader_elect": True, "label_leader": True, **who}
    async with rig(api, headers=as_account(EXTENDER), **more) as extender:
        for name in ("a", "b"):
            lies = {ANN_INDEX: "7"} if name == "b" else {}  # which are taken off before it is bound
            await extender.add_and_bind(name, "8", annotations=lies)
        wants_more = {ANN_ASSIGNED: "true", ANN_REQUEST: "9"}
        api.patch("/api/v1/namespaces/default/pods/a", {"metadata": {"annotations": wants_more}})
        await until(lambda: Grant("", "resourcequotas", "list") in cluster.used[EXTENDER])
        huge = api.add_pod("huge", "100")
        await extender.caught_up()
        await extender.filter(huge, "n1")
        high = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}}
        api.call("POST", "/apis/scheduling.k8s.io/v1/priorityclasses", high | {"value": 100})
        pod = api.add_pod("high", "10", priorityClassName="high")
        await extender.caught_up()
        await extender.filter(pod, "n1")
        await until(lambda: bool(cluster.used[EXTENDER] & {Grant("", "pods", "delete")}))
        api.set_unhealthy("n1", "1")
        await until(lambda: Grant("", "nodes", "patch") in cluster.used[EXTENDER])
    async with client_of(EXTENDER, cluster) as client:  # it says the same again after a minute only
        recorder = EventRecorder(client, EXTENDER)
        assert await PathReviews(client, LIMITS).allows("an operator's token", "/debug/state", Asker())
        group, node = NodeGroup((("karpenter.sh/nodepool", "a"),)), FleetNode("n", (16,), (16,))
        for count in (1, 2, 0):
            buffers = CapacityBuffers(client, RELEASE_NAMESPACE)  # as another replica wrote them
            await buffers.show({group: NewNodes(count, node)} if count else {})
        for _ in range(2):
            await recorder.create_event(pod_reference("default", "huge", ""), "InsufficientGPU", "as before")
    judge(cluster, EXTENDER, grants[EXTENDER])


async def test_placeholder_pods_need_no_other_right_than_the_chart_gives_for_them() -> None:
    values = ("extender.autoscaling=pods", "extender.preemption=false", "extender.nominate=false")
    grants = grants_of(rendered(*values))
    cluster = GuardedCluster(grants)
    group, node = NodeGroup((("karpenter.sh/nodepool", "a"),)), FleetNode("n", (16,), (16,))
    async with client_of(EXTENDER, cluster) as client:
        for count in (1, 2, 0):
            pods = PlaceholderPods(client, RELEASE_NAMESPACE)
            await pods.show({group: NewNodes(count, node)} if count else {})
    assert cluster.refused[EXTENDER] == set()
    added = grants[EXTENDER] - grants_of(rendered(*values[1:]))[EXTENDER]
    assert added == cluster.used[EXTENDER] - {Grant("", "pods", "list")}


async def _out_of_use(node: Bench, cards: str) -> bool:
    return await node.unhealthy() == cards


async def test_an_agent_uses_all_its_rights_and_needs_no_other(grants: Grants, tmp_path: Path) -> None:
    own = {grant for grant in grants[AGENT] if grant.group != "resource.k8s.io"}
    cluster = GuardedCluster(grants)
    settings = {"node_label": "gpushare"}
    labels = {"gpushare": "true"}
    bench = Bench(
        tmp_path, {0: 16130, 1: 16130}, labels, settings, cluster=cluster, headers=as_account(AGENT)
    )
    async with bench.running() as node:
        pod = await node.place("p", 4, 1)
        await node.kubelet.admit(pod)
        await node.kubelet.start_container(pod)
        await node.annotated("p", ASSIGNED="true")
        node.record({0: 16130, 1: 16130}, events=[{"xid": 79, "uuid": uuid(1)}])
        await eventually(node.unhealthy, "the ConfigMap")
        (tmp_path / "unhealthyDevices.json").write_text('{"index":[0],"uuid":[]}')
        await eventually(lambda: _out_of_use(node, "0,1"), "both cards in the ConfigMap")
        writer = Writer(node.agents_client, NODE)
        meta = pod["metadata"]
        view = Pod(meta["uid"], meta["namespace"], meta["name"])
        assert await writer.pod(view) is not None  # as after a conflict
        for _ in range(2):
            writer.pod_event(view, "GPUMemoryRefused", "the same again")
        await writer.events.write_waiting()
        await writer.parked_condition(view, "1 MiB")
        await node.client.merge_patch(NODES, NODE, {"metadata": {"labels": {"gpushare": "false"}}})
    judge(cluster, AGENT, own)


async def test_a_driver_of_claims_uses_all_its_rights_and_needs_no_other(
    grants: Grants, tmp_path: Path
) -> None:
    synthetic = {grant for grant in grants[AGENT] if grant.resource == "resourceclaims/driver"}
    own = {grant for grant in grants[AGENT] if grant.group == "resource.k8s.io"} - synthetic
    cluster = GuardedCluster(grants)
    async with claim_node(tmp_path, cluster=cluster, headers=as_account(AGENT)) as bench:
        await bench.offered("gpu-0")
        (found,) = await bench.slices()
        found["spec"]["devices"][0]["capacity"]["memory"]["value"] = "99Gi"
        await bench.node.client.replace(RESOURCE_SLICES, found)
        claim = await bench.claim("c", result())
        assert not (await bench.prepare(claim)).error
        await bench.unprepare(claim)
        await bench.node.client.delete(RESOURCE_CLAIMS, "c", "default")
        await bench.node.stop_agent()
        await bench.node.client.merge_patch(NODES, NODE, {"metadata": {"labels": {LABEL_MODE: None}}})
        await bench.node.start_agent()
        await eventually(lambda: own <= cluster.used[AGENT], "all of it")
    judge(cluster, AGENT, own)
    # what the API server asks of a driver that writes a claim's status by such a request, and of no object
    status = {grant.verb for grant in own if grant.resource == "resourceclaims/status"}
    assert {grant.verb for grant in synthetic} == {f"associated-node:{verb}" for verb in status}


async def test_the_controller_of_claims_uses_all_its_rights_and_needs_no_other(grants: Grants) -> None:
    cluster = GuardedCluster(grants)
    async with client_of(CLAIMS, cluster) as client:
        now = [0.0]
        controller = TemplateController(ClaimsSettings(port=0, host="127.0.0.1"), client, lambda: now[0])
        stopped = asyncio.Event()
        running = asyncio.create_task(controller.run(stopped.wait()))
        api = Api(cluster)
        for name, template in (("a", "gpuslice-4"), ("b", "gpuslice-0")):
            claims = [{"name": "gpuslice", "resourceClaimTemplateName": template}]
            api.add_pod(name, "0", labels={LABEL_CLAIMED: "true"}, resourceClaims=claims)
        await eventually(lambda: controller.made == 1 and bool(api.events("GPUClaimImpossible")), "both")
        api.delete_pod("a")
        await eventually(lambda: not any(pod["metadata"]["name"] == "a" for pod in api.pods()), "gone")

        async def removed() -> bool:
            await controller.step()
            now[0] += 1e6
            return Grant("resource.k8s.io", "resourceclaimtemplates", "delete") in cluster.used[CLAIMS]

        await eventually(removed, "the template is taken away")
        stopped.set()
        await running
    judge(cluster, CLAIMS, grants[CLAIMS])


async def test_an_exporter_uses_all_its_rights_and_needs_no_other(grants: Grants) -> None:
    cluster = GuardedCluster(grants)
    api = Api(cluster)
    made_by = api.owned_by("apps/v1", "ReplicaSet", "web-5d9c7b8f6", "Deployment", "web")
    api.add_pod("web-5d9c7b8f6-abcde", node=NODE, owners=[made_by])
    made_by = api.owned_by("batch/v1", "Job", "night-29", "CronJob", "night")
    api.add_pod("night-29-x2x2x", node=NODE, owners=[made_by])
    api.add_pod("orphan", node=NODE, owners=[{**made_by, "name": "gone", "uid": "gone"}])
    async with client_of(EXPORTER, cluster) as client:
        pods = NodePods()
        following = asyncio.create_task(follow_api(client, NODE, pods, CollectorHealth()))
        await DeviceSlices(client, NODE).of(
            [Claimed("default", "p", "main", "c", "default", NVIDIA_DRIVER, "n1", "gpu-0")]
        )
        watch = Grant("", "pods", "watch")
        await eventually(lambda: pods.known and watch in cluster.used[EXPORTER], "it follows the pods")
        owners = {"web-5d9c7b8f6-abcde": ("Deployment", "web"), "night-29-x2x2x": ("CronJob", "night")}
        for name, workload in {**owners, "orphan": ("Job", "gone")}.items():
            await eventually(
                lambda: (pod := pods.pod("default", name)) is not None and pod.workload == workload,  # noqa: B023
                f"{name} is {workload}'s",
            )
        following.cancel()
    judge(cluster, EXPORTER, grants[EXPORTER])


async def test_a_console_uses_all_its_rights_and_needs_no_other(grants: Grants) -> None:
    cluster = GuardedCluster(grants)
    api = Api(cluster)
    api.add_node("n1")
    api.add_node("n2", labels={LABEL_MODE: "claims"})
    api.add_pod("p")
    settings = ConsoleSettings(host="127.0.0.1", port=0, access="token", exporters="direct")
    async with ApiServer(cluster) as server:
        connection = Connection(server=server.url, headers=as_account(CONSOLE))
        async with HttpTransport(connection, connections=40) as transport:
            made = Console(settings, transport)
            stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            running = asyncio.create_task(made.run(stopped, url.set_result))
            async with aiohttp.ClientSession(headers={"Authorization": "Bearer any"}) as http:
                for page in ("cluster", "health", "pod?namespace=default&name=p"):
                    async with http.get(f"{await url}api/v1/{page}") as answer:
                        assert answer.status == 200, await answer.text()
            await eventually(lambda: grants[CONSOLE] <= cluster.used[CONSOLE], "all of it")
            stopped.set_result(None)
            await running
    judge(cluster, CONSOLE, grants[CONSOLE])


async def test_what_keeps_another_plugin_off_uses_all_its_rights(grants: Grants) -> None:
    cluster = GuardedCluster(grants)
    api = Api(cluster)
    api.call("POST", "/api/v1/namespaces", {"metadata": {"name": "nvidia"}})
    labels = {"name": "plugin"}
    plugin = {
        "metadata": {"name": "plugin", "namespace": "nvidia"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "c", "image": "plugin"}]},
            },
        },
    }
    api.call("POST", "/apis/apps/v1/namespaces/nvidia/daemonsets", plugin)
    async with client_of(KEEP_OFF, cluster) as client:
        await keep_off(client, KeepOffSettings(daemon_set="nvidia/plugin"))
        with pytest.raises(ForbiddenError):
            await keep_off(client, KeepOffSettings(daemon_set="nvidia/another"))
    cluster.refused[KEEP_OFF].clear()
    judge(cluster, KEEP_OFF, grants[KEEP_OFF])


async def test_helm_test_uses_all_its_rights(grants: Grants) -> None:
    cluster = GuardedCluster(grants)
    api = Api(cluster)
    api.add_node("n1")
    service = {"metadata": {"name": EXTENDER, "namespace": "kube-system"}, "spec": {"ports": [{"port": 1}]}}
    api.call("POST", "/api/v1/namespaces/kube-system/services", service)
    add_plugin(api)
    await looked_at(cluster, TEST)
    judge(cluster, TEST, grants[TEST])


def add_plugin(api: Api, node: str = "n1") -> None:
    pod = api_pod(f"plugin-{node}", "0", node=node, labels={"name": "gpushare-device-plugin-ds"})
    pod["metadata"]["namespace"] = RELEASE_NAMESPACE
    pod["spec"]["serviceAccountName"] = AGENT
    api.call("POST", f"/api/v1/namespaces/{RELEASE_NAMESPACE}/pods", pod)


async def looked_at(cluster: Cluster, account: str = "") -> Facts:
    async with ApiServer(cluster) as server:
        headers = as_account(account) if account else {}
        async with HttpTransport(Connection(server=server.url, headers=headers)) as transport:
            return await read_facts(KubeClient(transport))


async def test_doctor_finds_what_a_device_plugin_may_not_do(grants: Grants) -> None:
    cluster = GuardedCluster(grants | {AGENT: grants[AGENT] - {Grant("", "nodes/status", "patch")}})
    whole = GuardedCluster(grants)
    for each in (cluster, whole):
        api = Api(each)
        api.add_node("n1")
        add_plugin(api)
    (found,) = doctor_plugins.rights(await looked_at(cluster))
    assert found.where == f"account kube-system/{AGENT}"
    assert found.what == "runs the device plugin and may not patch nodes/status"
    assert list(doctor_plugins.rights(await looked_at(whole))) == []
    granted = {
        (each.resource, each.verb, each.namespace, each.group, each.name)
        for each in grants[AGENT]
        if each.group in ("", "resource.k8s.io")
    }
    condition = ("pods/status", "patch", "", "", "")  # of parked pods: for people, nothing depends on it
    assert granted - {condition} == {*PLUGIN_RIGHTS, *CLAIM_RIGHTS}, "doctor asks for what the chart grants"


async def test_doctor_asks_for_the_rights_of_claims_where_cards_are_shared_by_claims(grants: Grants) -> None:
    cluster = GuardedCluster({AGENT: {each for each in grants[AGENT] if not each.group}})
    api = Api(cluster)
    api.add_node("n1", labels={"gpuslice.io/mode": "claims"})
    api.add_node("n2")
    add_plugin(api, "n2")
    assert list(doctor_plugins.rights(await looked_at(cluster))) == []
    add_plugin(api, "n1")
    (found,) = doctor_plugins.rights(await looked_at(cluster))
    assert "may not list resourceslices.resource.k8s.io, " in found.what
    assert found.what.endswith(", associated-node:patch resourceclaims/driver.resource.k8s.io")


def test_these_are_all_who_have_rights(grants: Grants) -> None:
    judged = {EXTENDER, AGENT, CLAIMS, EXPORTER, CONSOLE, KEEP_OFF, TEST}
    others = {INSTALLER, "gpuslice-scheduler"}  # it reads one pod; it is kube-scheduler itself
    assert grants.keys() == judged | others
