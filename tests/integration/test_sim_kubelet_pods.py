"""Pods on a simulated node: real processes, real sockets, the statuses that kubectl prints."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.kube.resources import NODES, PODS
from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.adapters.kubelet.rpc import PodResourcesClient, unix_channel
from simcluster.kubelet import checkpoint
from simcluster.kubelet.backoff import BackOff, shown
from simcluster.kubelet.devices import DeviceAssignments
from simcluster.kubelet.node import NodeStatus
from simcluster.kubelet.runtime import Runtime
from tests import HANG_S
from tests.integration.sim_node import MEM, Node, Plugin, make_pod, restarts_of, simulated_node, state_of


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with simulated_node(tmp_path) as one:
        yield one


@pytest.fixture
async def plugin(node: Node) -> AsyncIterator[Plugin]:
    one = Plugin(node.settings.plugin_folder)
    await one.start()
    await node.wait_node(lambda it: it["status"]["allocatable"].get(MEM) == "15")
    yield one
    await one.stop()


async def test_a_pod_runs_and_its_status_is_complete(node: Node) -> None:
    await node.create(make_pod("one"))
    pod = await node.wait_pod("one", lambda it: it["status"].get("phase") == "Running")
    conditions = {one["type"]: one["status"] for one in pod["status"]["conditions"]}
    assert conditions["Ready"] == conditions["Initialized"] == "True"
    assert pod["status"]["podIP"].startswith("172.20.64.")
    assert [reason for reason, _ in await node.events("one")] == [
        "Pulling",
        "Pulled",
        "Created",
        "Started",
    ]


async def test_a_granted_pod_gets_the_plugins_environment_and_the_pod_wins(
    node: Node, plugin: Plugin
) -> None:
    plugin.answer.envs.update({"BOTH": "plugin"})
    env = [
        {"name": "BOTH", "value": "pod"},
        {"name": "WHERE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "JOINED", "value": "$(WHERE)/$(UNKNOWN)/$$(X)"},
    ]
    await node.create(
        make_pod(
            "one", 4, command="echo $GRANTED $BOTH $JOINED", container={"env": env}, restartPolicy="Never"
        )
    )
    pod = await node.wait_pod("one", lambda it: it["status"].get("phase") == "Succeeded")
    assert state_of(pod) == "Completed"
    assert await node.log("one") == "plugin pod n1/$(UNKNOWN)/$(X)\n"


async def test_hooks_of_cdi_devices_run_before_the_program_and_keep_it_from_starting_if_they_fail(
    node: Node, plugin: Plugin, tmp_path: Path
) -> None:
    hook, said = tmp_path / "hook", tmp_path / "said"
    hook.write_text(f'#!/bin/sh\ncat >> {said}\necho "$1 is full" >&2\n[ "$1" != bad ]\n')
    hook.chmod(0o755)
    devices = [
        {
            "name": name,
            "containerEdits": {
                "env": [f"FROM={name}"],
                "hooks": [{"hookName": "createRuntime", "path": str(hook), "args": ["hook", name]}],
            },
        }
        for name in ("good", "bad")
    ]
    node.settings.cdi_folder.mkdir(parents=True)
    (node.settings.cdi_folder / "x.json").write_text(json.dumps({"kind": "x.io/card", "devices": devices}))
    plugin.answer.cdi_devices.append(dp.CDIDevice(name="x.io/card=good"))
    await node.create(make_pod("one", 1, command=f"echo $FROM; cat {said}", restartPolicy="Never"))
    pod = await node.wait_pod("one", lambda it: it["status"].get("phase") == "Succeeded")
    first, state = (await node.log("one")).splitlines()
    assert (first, json.loads(state)["status"]) == ("good", "creating")
    plugin.answer.cdi_devices[0].name = "x.io/card=bad"
    await node.create(make_pod("two", 1, command="echo started", restartPolicy="Never"))
    pod = await node.wait_pod("two", lambda it: it["status"].get("phase") == "Failed")
    assert state_of(pod) == "StartError"
    ended = pod["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (
        "error running createRuntime hook #0: exit status 1, stdout: , stderr: bad is full"
        in ended["message"]
    )
    plugin.answer.cdi_devices[0].name = "x.io/card=none"
    await node.create(make_pod("three", 1))
    pod = await node.wait_pod("three", lambda it: state_of(it) == "CreateContainerConfigError")


async def test_a_refused_allocation_fails_the_pod_with_kubelets_words(node: Node, plugin: Plugin) -> None:
    plugin.refusal = "no card has 4 units"
    await node.create(make_pod("one", 4))
    pod = await node.wait_pod("one", lambda it: it["status"].get("phase") == "Failed")
    words = (
        "Allocate failed due to rpc error: code = FailedPrecondition desc = no card has 4 units, "
        "which is unexpected"
    )
    assert pod["status"]["reason"] == "UnexpectedAdmissionError"
    assert pod["status"]["message"] == f"Pod was rejected: {words}"
    assert ("UnexpectedAdmissionError", words) in await node.events("one")


async def test_pod_resources_names_each_device_in_an_entry_of_its_own(node: Node, plugin: Plugin) -> None:
    await node.create(make_pod("one", 4))
    await node.wait_pod("one", lambda it: state_of(it) == "running")
    async with unix_channel(node.settings.pod_resources_socket) as channel:
        answer = await PodResourcesClient(channel).list(5.0)
    (pod,) = answer.pod_resources
    assert (pod.namespace, pod.name) == ("default", "one")
    entries = pod.containers[0].devices
    assert [list(entry.device_ids) for entry in entries] == [[f"card-_-{n}"] for n in (0, 1, 10, 11)]


async def test_a_failing_pre_start_is_tried_again_before_each_start(node: Node, plugin: Plugin) -> None:
    plugin.pre_start_failures = 2
    await node.create(make_pod("one", 4))
    await node.wait_pod("one", lambda it: state_of(it) == "CreateContainerConfigError")
    await node.wait_pod("one", lambda it: state_of(it) == "running")
    assert plugin.count("pre-start") == 3
    assert plugin.count("allocate") == 1


async def test_a_crashing_container_backs_off_and_keeps_its_allocation(node: Node, plugin: Plugin) -> None:
    await node.create(make_pod("one", 4, command="echo attempt; exit 3"))
    pod = await node.wait_pod("one", lambda it: state_of(it) == "CrashLoopBackOff" and restarts_of(it) >= 3)
    starts = plugin.count("pre-start")
    (container,) = pod["status"]["containerStatuses"]
    assert starts == container["restartCount"] + 1
    assert container["lastState"]["terminated"]["exitCode"] == 3
    message = container["state"]["waiting"]["message"]
    assert re.match(
        r"back-off (40s|1m20s|2m40s|5m0s) restarting failed container=main pod=one_default", message
    )
    assert pod["status"]["phase"] == "Running"
    assert plugin.count("allocate") == 1
    assert await node.log("one") == "attempt\n"


def test_back_off_starts_at_once_doubles_and_is_forgiven() -> None:
    back_off = BackOff()
    waits = [back_off.after_failure() for _ in range(8)]
    assert waits == [0, 10, 20, 40, 80, 160, 300, 300]
    assert [shown(one) for one in (10, 80, 300)] == ["10s", "1m20s", "5m0s"]
    assert back_off.after_failure(ran_s=601) == 0


async def test_an_unknown_image_is_not_pulled_and_says_so(node: Node) -> None:
    await node.create(make_pod("one", container={"image": "nowhere.example/none:1"}))
    pod = await node.wait_pod("one", lambda it: state_of(it) == "ImagePullBackOff")
    message = pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"]
    assert message.startswith('Back-off pulling image "nowhere.example/none:1"')
    assert pod["status"]["phase"] == "Pending"


async def test_a_missing_program_is_a_start_error(node: Node) -> None:
    await node.create(make_pod("one", container={"command": ["nothing-here"]}, restartPolicy="Never"))
    pod = await node.wait_pod("one", lambda it: it["status"].get("phase") == "Failed")
    assert state_of(pod) == "StartError"


async def test_init_containers_run_in_order_and_reuse_their_devices(node: Node, plugin: Plugin) -> None:
    init = [
        {
            "name": "setup",
            "image": "busybox",
            "command": ["sh", "-c", "true"],
            "resources": {"limits": {MEM: "2"}},
        }
    ]
    await node.create(make_pod("one", 4, initContainers=init))
    pod = await node.wait_pod("one", lambda it: state_of(it) == "running")
    first, second = (set(ids) for call, ids in plugin.calls if call == "allocate")
    assert first < second
    assert pod["status"]["initContainerStatuses"][0]["state"]["terminated"]["reason"] == "Completed"


async def test_a_sidecar_starts_first_and_ends_last(node: Node) -> None:
    sidecar = {
        "name": "proxy",
        "image": "busybox",
        "restartPolicy": "Always",
        "command": ["sh", "-c", "sleep 60"],
    }
    await node.create(make_pod("one", command="exit 0", initContainers=[sidecar], restartPolicy="Never"))
    pod = await node.wait_pod("one", lambda it: it["status"].get("phase") == "Succeeded")
    assert "terminated" in pod["status"]["initContainerStatuses"][0]["state"]


async def test_a_deleted_pod_is_asked_to_end_then_killed_then_gone(node: Node) -> None:
    await node.create(make_pod("one", command="trap '' TERM; while :; do sleep 0.05; done"))
    await node.wait_pod("one", lambda it: state_of(it) == "running")
    container = node.runtime.of_pod((await node.pod("one"))["metadata"]["uid"])[0]
    await node.client.delete(PODS, "one", "default")
    await asyncio.wait_for(container.exited.wait(), HANG_S)
    assert container.exit_code == 137
    await node.wait_gone("one")


async def test_a_restarted_kubelet_finds_its_containers_and_asks_nothing_again(
    node: Node, plugin: Plugin
) -> None:
    await node.create(make_pod("one", 4))
    before = await node.wait_pod("one", lambda it: state_of(it) == "running")
    await plugin.stop()
    await node.crash()
    assert all(one.running for one in node.runtime.of_pod(before["metadata"]["uid"]))
    await node.start()
    assert not (node.settings.plugin_folder / "test.sock").exists()
    again = Plugin(node.settings.plugin_folder)
    await again.start()
    await node.wait_node(lambda it: it["status"]["allocatable"].get(MEM) == "15")
    after = await node.pod("one")
    assert (
        after["status"]["containerStatuses"][0]["containerID"]
        == (before["status"]["containerStatuses"][0]["containerID"])
    )
    assert again.calls == []
    await node.create(make_pod("two", 12))
    pod = await node.wait_pod("two", lambda it: it["status"].get("phase") == "Failed")
    assert "Requested: 12, Available: 11" in pod["status"]["message"]
    await again.stop()


async def test_a_lost_plugin_zeroes_allocatable_and_rejects_new_pods_but_stops_none(
    node: Node, plugin: Plugin
) -> None:
    await node.create(make_pod("one", 4))
    await node.wait_pod("one", lambda it: state_of(it) == "running")
    await plugin.stop()
    status = (await node.wait_node(lambda it: it["status"]["allocatable"].get(MEM) == "0"))["status"]
    assert status["capacity"][MEM] == "15"
    await node.create(make_pod("two", 4))
    pod = await node.wait_pod("two", lambda it: it["status"].get("phase") == "Failed")
    assert (
        "no healthy devices present; cannot allocate unhealthy devices aliyun.com/gpu-mem"
        in (pod["status"]["message"])
    )
    assert state_of(await node.pod("one")) == "running"


async def test_after_a_reboot_a_pod_is_rejected_until_the_plugin_is_back(node: Node, plugin: Plugin) -> None:
    await node.create(make_pod("one", 4))
    await node.wait_pod("one", lambda it: state_of(it) == "running")
    await plugin.stop()
    await node.crash()
    await node.runtime.close()
    node.runtime = Runtime()
    await node.start()
    pod = await node.wait_pod("one", lambda it: it["status"].get("phase") == "Failed")
    assert "no healthy devices present; cannot allocate unhealthy devices" in pod["status"]["message"]
    again = Plugin(node.settings.plugin_folder)
    await again.start()
    await node.wait_node(lambda it: it["status"]["allocatable"].get(MEM) == "15")
    await node.create(make_pod("two", 15))
    await node.wait_pod("two", lambda it: state_of(it) == "running")
    await again.stop()


async def test_a_corrupt_checkpoint_does_not_keep_the_kubelet_from_starting(node: Node) -> None:
    await node.crash()
    (node.settings.plugin_folder / checkpoint.FILE_NAME).write_text("{")
    await node.start()
    await node.create(make_pod("one"))
    await node.wait_pod("one", lambda it: state_of(it) == "running")


async def test_a_lost_checkpoint_leaves_extended_resources_of_others_as_they_are(node: Node) -> None:
    """kubelet's own socket is in the folder when it registers, and counts as a checkpoint."""
    await node.crash()
    (node.settings.plugin_folder / checkpoint.FILE_NAME).unlink(missing_ok=True)
    await node.patch_capacity({"aliyun.com/gpu-count": "1"})
    await node.start()
    assert (await node.node())["status"]["capacity"]["aliyun.com/gpu-count"] == "1"


async def test_an_empty_plugin_folder_zeroes_extended_resources_of_others(node: Node) -> None:
    await node.crash()
    await node.patch_capacity({"aliyun.com/gpu-count": "1"})
    status = NodeStatus(node.client, node.settings, DeviceAssignments(random.Random(1)), "http://127.0.0.1:1")
    await status.register(reset_extended=True)
    assert (await node.node())["status"]["capacity"]["aliyun.com/gpu-count"] == "0"


async def test_an_unchanged_status_is_reported_every_five_minutes(node: Node) -> None:
    """Or its clock seems to be behind."""
    await node.crash()
    status = NodeStatus(node.client, node.settings, DeviceAssignments(random.Random(1)), "http://127.0.0.1:1")
    await status.report()
    assert not await status.report()
    conditions = (await node.node())["status"]["conditions"]
    old = [{**each, "lastHeartbeatTime": "2026-01-01T00:00:00Z"} for each in conditions]
    await node.client.patch_status(NODES.as_dict(), node.settings.name, {"conditions": old})
    assert await status.report()
    conditions = (await node.node())["status"]["conditions"]
    assert all(each["lastHeartbeatTime"] > "2026-01-02" for each in conditions)
    assert {each["lastTransitionTime"] for each in conditions} == {each["lastTransitionTime"] for each in old}


async def test_a_pod_too_large_for_the_node_is_rejected(node: Node) -> None:
    await node.create(make_pod("one", container={"resources": {"requests": {"cpu": "64"}}}))
    pod = await node.wait_pod("one", lambda it: it["status"].get("phase") == "Failed")
    assert pod["status"]["reason"] == "OutOfcpu"


async def test_a_pod_bound_to_the_wrong_node_is_rejected_by_the_labels_of_now(node: Node) -> None:
    await node.create(make_pod("one", nodeSelector={"pool": "a"}))
    pod = await node.wait_pod("one", lambda it: it["status"].get("phase") == "Failed")
    assert pod["status"]["reason"] == "NodeAffinity"
    await node.label({"pool": "a"})
    await node.create(make_pod("two", nodeSelector={"pool": "a"}))
    await node.wait_pod("two", lambda it: state_of(it) == "running")


async def test_config_maps_and_secrets_reach_a_container_once_they_exist(node: Node) -> None:
    reference = {"name": "settings", "key": "colour"}
    env = [{"name": "COLOUR", "valueFrom": {"configMapKeyRef": reference}}]
    await node.create(make_pod("one", command="echo $COLOUR", container={"env": env}, restartPolicy="Never"))
    pod = await node.wait_pod("one", lambda it: state_of(it) == "CreateContainerConfigError")
    assert pod["status"]["containerStatuses"][0]["state"]["waiting"]["message"] == (
        'configmap "settings" not found'
    )
    await node.create_config_map("settings", {"colour": "green"})
    await node.wait_pod("one", lambda it: it["status"].get("phase") == "Succeeded")
    assert await node.log("one") == "green\n"


async def test_a_pod_is_ready_only_when_its_probe_says_so(node: Node) -> None:
    probe = {"exec": {"command": ["sh", "-c", 'test -e "$HOME/tmp/ready"']}, "periodSeconds": 1}
    command = "sleep 0.5; touch $HOME/tmp/ready; sleep 60"
    await node.create(make_pod("one", command=command, container={"readinessProbe": probe}))
    pod = await node.wait_pod("one", lambda it: state_of(it) == "running")
    assert pod["status"]["containerStatuses"][0]["ready"] is False
    pod = await node.wait_pod("one", lambda it: it["status"]["containerStatuses"][0]["ready"])
    assert {c["type"]: c["status"] for c in pod["status"]["conditions"]}["Ready"] == "True"


async def test_a_container_whose_liveness_fails_is_started_again(node: Node) -> None:
    probe = {"tcpSocket": {"port": 1}, "periodSeconds": 1, "failureThreshold": 1}
    await node.create(make_pod("one", container={"livenessProbe": probe}))
    await node.wait_pod("one", lambda it: restarts_of(it) > 0)
    reasons = [reason for reason, _ in await node.events("one")]
    assert "Unhealthy" in reasons
    assert "Killing" in reasons


@pytest.mark.parametrize(
    ("pressure", "shutting_down", "reason", "message"),
    [
        ("DiskPressure", False, "Evicted", "Pod was rejected: The node had condition: [DiskPressure]. "),
        ("PIDPressure", False, "Evicted", "Pod was rejected: The node had condition: [PIDPressure]. "),
        ("", True, "NodeShutdown", "Pod was rejected: Pod was rejected as the node is shutting down."),
    ],
)
async def test_a_machine_in_trouble_lets_no_pod_start_but_critical_ones(
    node: Node, pressure: str, shutting_down: bool, reason: str, message: str
) -> None:
    node.kubelet.troubles.pressure |= {pressure} - {""}
    node.kubelet.troubles.shutting_down = shutting_down
    await node.create(make_pod("one"))
    pod = await node.wait_pod("one", lambda it: it["status"].get("phase") == "Failed")
    assert (pod["status"]["reason"], pod["status"]["message"]) == (reason, message)
    assert not pod["status"].get("containerStatuses")
    kind = pressure or "Ready"
    wanted = "True" if pressure else "False"
    await node.wait_node(lambda it: (kind, wanted) in states_of(it))
    node.kubelet.troubles.pressure.clear()
    node.kubelet.troubles.shutting_down = False
    await node.create(make_pod("two"))
    await node.wait_pod("two", lambda it: state_of(it) == "running")


def states_of(node: dict[str, Any]) -> set[tuple[str, str]]:
    return {(each["type"], each["status"]) for each in node["status"]["conditions"]}


async def test_a_container_in_state_d_outlives_its_pod_and_keeps_its_devices(
    node: Node, plugin: Plugin
) -> None:
    await node.create(make_pod("one", 15))
    await node.wait_pod("one", lambda it: state_of(it) == "running")
    (container,) = node.runtime.running()
    container.stuck = True
    await node.client.delete(PODS, "one", "default", grace_s=0)
    await node.create(make_pod("two", 15))
    pod = await node.wait_pod("two", lambda it: it["status"].get("phase") == "Failed")
    assert pod["status"]["reason"] == "UnexpectedAdmissionError"
    assert container.running
    container.stuck = False
    await asyncio.wait_for(container.exited.wait(), HANG_S)
