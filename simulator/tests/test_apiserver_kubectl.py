"""What people type: the real kubectl on objects nobody reconciles."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import yaml
from deadline import HANG_S
from kubectl_rig import Rig, kubectl_rig, rows

pytestmark = pytest.mark.asyncio(loop_scope="module")

_NODE = """
apiVersion: v1
kind: Node
metadata: {name: cn-hangzhou.192.168.2.167, labels: {cgpu: "true", node-role.kubernetes.io/worker: ""}}
status:
  capacity: {cpu: "8", memory: 61Gi, aliyun.com/gpu-mem: "15", pods: "110"}
  addresses: [{type: InternalIP, address: 192.168.2.167}]
  conditions: [{type: Ready, status: "True"}]
  nodeInfo: {kubeletVersion: v1.36.2, osImage: Debian, kernelVersion: "6.1", containerRuntimeVersion: sim://1}
"""
_SET = """
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: app-3g-v1, labels: {app: app-3g-v1}}
spec:
  replicas: 2
  serviceName: "app-3g-v1"
  podManagementPolicy: "Parallel"
  selector: {matchLabels: {app: app-3g-v1}}
  template:
    metadata: {labels: {app: app-3g-v1}}
    spec:
      containers:
      - name: app-3g-v1
        image: registry.example.com/cuda-malloc:3G
        resources: {limits: {aliyun.com/gpu-mem: "4"}}
"""


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async with kubectl_rig(Path(tmp_path_factory.mktemp("kubectl"))) as made:
        await made.ok("apply", "-f", "-", text=_NODE)
        yield made


async def test_it_finds_the_server_and_its_kinds(rig: Rig) -> None:
    assert "Server Version: v1.36" in await rig.ok("version")
    resources = await rig.ok("api-resources", "--no-headers", "-o", "name")
    assert {"pods", "statefulsets.apps", "leases.coordination.k8s.io"} <= set(resources.split())
    assert "policy/v1" in await rig.ok("api-versions")


async def test_nodes_have_kubectls_columns(rig: Rig) -> None:
    (row,) = rows(await rig.ok("get", "nodes", "-o", "wide"))
    assert row[0:3] == ["cn-hangzhou.192.168.2.167", "Ready", "worker"]
    assert row[4:6] == ["v1.36.2", "192.168.2.167"]


async def test_apply_creates_leaves_alone_and_changes(rig: Rig) -> None:
    assert "created" in await rig.ok("apply", "-f", "-", text=_SET)
    assert "unchanged" in await rig.ok("apply", "-f", "-", text=_SET)
    more = _SET.replace("replicas: 2", "replicas: 3")
    difference = await rig.run("diff", "-f", "-", text=more)
    assert (difference.code, "+  replicas: 3" in difference.out) == (1, True)
    assert "configured" in await rig.ok("apply", "-f", "-", text=more)
    assert await rig.ok("get", "sts", "app-3g-v1", "-o", "jsonpath={.spec.replicas}") == "3"
    assert rows(await rig.ok("get", "sts"))[0][:2] == ["app-3g-v1", "0/3"]


async def test_server_side_apply_conflicts_and_can_be_forced(rig: Rig) -> None:
    text = _SET.replace("app-3g-v1", "ssa")
    await rig.ok("apply", "--server-side", "-f", "-", text=text)
    await rig.ok("scale", "sts", "ssa", "--replicas=5")
    complaint = await rig.fails("apply", "--server-side", "-f", "-", text=text)
    assert ".spec.replicas" in complaint
    await rig.ok("apply", "--server-side", "--force-conflicts", "-f", "-", text=text)
    assert await rig.ok("get", "sts", "ssa", "-o", "jsonpath={.spec.replicas}") == "2"


async def test_apply_refuses_a_field_nobody_knows(rig: Rig) -> None:
    complaint = await rig.fails("apply", "-f", "-", text=_SET.replace("replicas:", "replica:"))
    assert 'strict decoding error: unknown field "spec.replica"' in complaint


async def test_apply_shows_every_fault_of_a_pod(rig: Rig) -> None:
    text = """
apiVersion: v1
kind: Pod
metadata: {name: wrong}
spec:
  containers:
  - {name: train, image: x, resources: {limits: {aliyun.com/gpu-mem: 4.5}}}
  - {name: train, image: x}
"""
    complaint = await rig.fails("apply", "-f", "-", text=text)
    assert "must be an integer" in complaint
    assert 'spec.containers[1].name: Duplicate value: "train"' in complaint


async def test_generators_that_speak_protobuf(rig: Rig) -> None:
    await rig.ok("create", "namespace", "made")
    await rig.ok("-n", "made", "create", "deployment", "d", "--image=x:1", "--replicas=2")
    await rig.ok("-n", "made", "create", "configmap", "c", "--from-literal=a=b")
    await rig.ok("-n", "made", "create", "secret", "generic", "s", "--from-literal=a=b")
    await rig.ok("-n", "made", "create", "job", "j", "--image=x:1")
    await rig.ok(
        "-n", "made", "create", "service", "nodeport", "np", "--tcp=12345:12345", "--node-port=32766"
    )
    await rig.ok("-n", "made", "create", "role", "r", "--verb=get", "--resource=pods")
    await rig.ok("-n", "made", "create", "rolebinding", "rb", "--role=r", "--serviceaccount=made:default")
    await rig.ok("-n", "made", "create", "pdb", "b", "--selector=app=d", "--min-available=1")
    await rig.ok("-n", "made", "create", "cronjob", "cj", "--image=x:1", "--schedule=* * * * *")
    shown = await rig.ok("-n", "made", "get", "deploy,cm,secret,job,svc,role,rolebinding,pdb,cj")
    assert "12345:32766/TCP" in shown
    secret = yaml.safe_load(await rig.ok("-n", "made", "get", "secret", "s", "-o", "yaml"))
    assert secret["data"] == {"a": "Yg=="}


async def test_run_label_annotate_patch_and_select(rig: Rig) -> None:
    await rig.ok("run", "one", "--image=x:1", "--labels=app=one")
    await rig.ok("label", "pod", "one", "tier=web")
    await rig.ok("annotate", "pod", "one", "note=hello")
    await rig.ok("patch", "pod", "one", "-p", '{"metadata":{"labels":{"tier":"db"}}}')
    await rig.ok("patch", "pod", "one", "--type=merge", "-p", '{"metadata":{"labels":{"more":"x"}}}')
    step = '[{"op":"remove","path":"/metadata/labels/more"}]'
    await rig.ok("patch", "pod", "one", "--type=json", "-p", step)
    pod = json.loads(await rig.ok("get", "pod", "one", "-o", "json"))
    assert pod["metadata"]["labels"] == {"app": "one", "tier": "db"}
    assert pod["metadata"]["annotations"] == {"note": "hello"}
    assert "one" in await rig.ok(
        "get", "pods", "-l", "tier in (db,web)", "--field-selector=status.phase=Pending"
    )
    assert await rig.ok("get", "pods", "-A", "--field-selector=spec.nodeName=nope", "-o", "name") == ""
    shown = await rig.ok("get", "pod", "one", "-o", "custom-columns=N:.metadata.name,S:.status.phase")
    assert shown.split() == ["N", "S", "one", "Pending"]


async def test_patches_can_be_held_to_a_version(rig: Rig) -> None:
    await rig.ok("run", "held", "--image=x:1")
    stale = '{"metadata":{"resourceVersion":"1","labels":{"a":"b"}}}'
    complaint = await rig.fails("patch", "pod", "held", "--type=merge", "-p", stale)
    assert "the object has been modified" in complaint


async def test_describe_shows_events_about_the_object(rig: Rig) -> None:
    await rig.ok("run", "told", "--image=x:1")
    uid = await rig.ok("get", "pod", "told", "-o", "jsonpath={.metadata.uid}")
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "told.1", "namespace": "default"},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "name": "told",
            "namespace": "default",
            "uid": uid,
        },
        "reason": "FailedScheduling",
        "message": "0/1 nodes are available: 1 Insufficient aliyun.com/gpu-mem.",
        "type": "Warning",
        "source": {"component": "default-scheduler"},
    }
    await rig.ok("create", "-f", "-", text=json.dumps(event))
    assert "Insufficient aliyun.com/gpu-mem" in await rig.ok("describe", "pod", "told")
    assert "FailedScheduling" in await rig.ok("events", "--for=pod/told")
    assert "pod/told" in await rig.ok("get", "events", "--field-selector=involvedObject.name=told")
    described = await rig.ok("describe", "node", "cn-hangzhou.192.168.2.167")
    assert "aliyun.com/gpu-mem:  15" in described


async def test_watching_prints_changes_as_they_come(rig: Rig) -> None:
    process = await rig.start("get", "pods", "-w", "-l", "app=seen")
    assert process.stdout is not None
    await rig.ok("run", "seen", "--image=x:1", "--labels=app=seen")
    async with asyncio.timeout(HANG_S):
        header, first = [await process.stdout.readline() for _ in range(2)]
        await rig.ok("delete", "pod", "seen")
        last = await process.stdout.readline()
    process.terminate()
    await process.communicate()
    assert header.split()[:3] == [b"NAME", b"READY", b"STATUS"]
    assert first.split()[:3] == last.split()[:3] == [b"seen", b"0/1", b"Pending"]


async def test_wait_sees_conditions_and_deletion(rig: Rig) -> None:
    await rig.ok("run", "awaited", "--image=x:1")
    waiting = asyncio.create_task(rig.ok("wait", "pod/awaited", "--for=condition=Ready", "--timeout=120s"))
    status = '{"status":{"conditions":[{"type":"Ready","status":"True"}]}}'
    await rig.ok("patch", "pod", "awaited", "--subresource=status", "--type=merge", "-p", status)
    assert "condition met" in await waiting
    gone = asyncio.create_task(rig.ok("wait", "pod/awaited", "--for=delete", "--timeout=120s"))
    await rig.ok("delete", "pod", "awaited")
    await gone


async def test_deletion_waits_for_the_kubelet_or_is_forced(rig: Rig) -> None:
    await rig.ok("run", "bound", "--image=x:1")
    await rig.client.bind("default", "bound", "cn-hangzhou.192.168.2.167")
    assert rows(await rig.ok("get", "pod", "bound", "-o", "wide"))[0][6] == "cn-hangzhou.192.168.2.167"
    await rig.ok("delete", "pod", "bound", "--wait=false")
    assert rows(await rig.ok("get", "pod", "bound"))[0][2] == "Terminating"
    await rig.ok("delete", "pod", "bound", "--force", "--grace-period=0")
    assert '"bound" not found' in await rig.fails("get", "pod", "bound")


async def test_drain_evicts_what_the_budgets_allow(rig: Rig) -> None:
    node = "cn-hangzhou.192.168.2.167"
    await rig.ok("cordon", node)
    assert rows(await rig.ok("get", "node", node))[0][1] == "Ready,SchedulingDisabled"
    await rig.ok("drain", node)
    await rig.ok("uncordon", node)
    await rig.ok("taint", "node", node, "a=b:NoSchedule")
    await rig.ok("taint", "node", node, "a-")


async def test_explain_and_access_and_the_metrics_that_are_not_there(rig: Rig) -> None:
    assert "limits\t<map[string]string>" in await rig.ok("explain", "pod.spec.containers.resources")
    assert (await rig.ok("auth", "can-i", "create", "pods")).strip() == "yes"
    assert "Metrics API not available" in await rig.fails("top", "node")


async def test_what_is_not_there_is_named(rig: Rig) -> None:
    assert 'pods "nope" not found' in await rig.fails("get", "pod", "nope")
    assert "doesn't have a resource type" in await rig.fails("get", "nothings")
    await rig.ok("run", "on-no-node", "--image=x:1")
    assert "does not have a host assigned" in await rig.fails("logs", "on-no-node")


async def test_pages_are_followed(rig: Rig) -> None:
    for name in ("page-a", "page-b", "page-c"):
        await rig.ok("create", "configmap", name)
    shown = await rig.ok("get", "cm", "--chunk-size=1", "-o", "name")
    assert {"configmap/page-a", "configmap/page-b", "configmap/page-c"} <= set(shown.split())
