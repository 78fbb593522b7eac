"""The agent when things happen in another order, or do not happen: every way ends in one truth."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice.adapters.gpu.recorded import RecordedSource
from gpuslice.adapters.kube.resources import NODES, PODS
from gpuslice.apps.agent.main import Agent
from simcluster.cluster.faults import Fault
from simcluster.kubelet.devices import AdmissionError
from simcluster.kubelet.plugin_calls import PluginError
from tests import HANG_S
from tests.integration.agent_bench import NODE, Bench, container, eventually, uuid

V100 = 16130
TWO = {0: V100, 1: V100}


# -- two equal pods in the other order -------------------------------------------------------------------
async def test_two_equal_pods_started_in_the_opposite_order_each_say_their_own_card(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        first = await node.place("first", 4, 0, assume_ns=1)
        second = await node.place("second", 4, 1, assume_ns=2)
        of_second = (await node.kubelet.admit(second))["main"]
        await node.kubelet.start_container(second)
        of_first = (await node.kubelet.admit(first))["main"]
        await node.kubelet.start_container(first)
        for name, granted in (("first", of_first), ("second", of_second)):
            said = await node.annotations(name)
            assert said["ALIYUN_COM_GPU_MEM_IDX"] == granted.envs["ALIYUN_COM_GPU_MEM_IDX"]
            assert said["ALIYUN_COM_GPU_MEM_ASSIGNED"] == "true"
        assert node.kubelet.cards(first) != node.kubelet.cards(second)


async def test_a_container_whose_environment_is_made_of_annotations_starts_with_the_true_ones(
    tmp_path: Path,
) -> None:
    """kubelet has read them by then; its next try reads them anew. Who does not read them is not put off."""
    field = {"fieldRef": {"fieldPath": "metadata.annotations['gpuslice.io/visible-devices']"}}
    reading = container(4) | {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "valueFrom": field}]}
    async with Bench(tmp_path, TWO).running() as node:
        first = await node.place("first", 4, 0, assume_ns=1)
        second = await node.place("second", 4, 1, assume_ns=2, containers=[reading])
        await node.kubelet.admit(second)
        assert node.kubelet.cards(second) == {uuid(0)}, "kubelet admits the later one first"
        with pytest.raises(PluginError, match="try again with them"):
            await node.kubelet.start_container(second)
        assert (await node.annotations("second"))["gpuslice.io/visible-devices"] == uuid(0)
        await node.kubelet.start_container(second)
        await node.kubelet.admit(first)
        await node.kubelet.start_container(first)


async def test_a_pod_that_still_waits_takes_over_the_wish_of_the_one_that_got_its_card(
    tmp_path: Path,
) -> None:
    """Else the extender would think that both sit on one card and give the other card away."""
    async with Bench(tmp_path, TWO).running() as node:
        late = await node.place("late", 10, 0, assume_ns=1)
        early = await node.place("early", 10, 1, assume_ns=2)
        await node.kubelet.admit(early)  # gets card 0: "late" was placed before it
        assert node.kubelet.cards(early) == {uuid(0)}
        await node.annotated("early", IDX="0", ASSIGNED="true")
        said = await node.annotated("late", IDX="1", ASSIGNED="false", ASSUME_TIME="1")
        assert json.loads(said["scheduler.framework.gpushare.allocation"]) == {"0": {"1": 10}}
        await node.kubelet.admit(late)
        assert node.kubelet.cards(late) == {uuid(1)}


async def test_a_pod_lands_where_there_really_is_room(tmp_path: Path) -> None:
    """Its card was given to a pod that nobody had placed; there is room on the other one."""
    async with Bench(tmp_path, TWO, settings={"place_unplaced": True}).running() as node:
        await node.kubelet.admit(await node.place("nobody", 10))  # the best fit of two empty cards is card 0
        pod = await node.place("p", 10, 0)
        granted = (await node.kubelet.admit(pod))["main"]
        assert granted.envs["ALIYUN_COM_GPU_MEM_IDX"] == "1"
        await node.annotated("p", IDX="1", ASSIGNED="true")


# -- kubelet ---------------------------------------------------------------------------------------------
async def test_after_a_restart_of_kubelet_the_plugin_is_registered_again_and_pods_stay(
    tmp_path: Path,
) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        pod = await node.place("p", 4, 1)
        await node.kubelet.admit(pod)
        await node.kubelet.restart()
        assert node.kubelet.healthy() == 0
        # its socket is seen to be another one; that its stream has ended counts after five seconds only
        await eventually(lambda: node.kubelet.healthy() == 30, "registered again", timeout_s=4.5)
        assert node.kubelet.cards(pod) == {uuid(1)}
        await node.kubelet.start_container(pod)
        assert (await node.annotations("p"))["ALIYUN_COM_GPU_MEM_ASSIGNED"] == "true"


async def test_after_a_lost_checkpoint_assigned_pods_get_their_own_cards_again(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        pods = [await node.place(name, 5, card) for name, card in (("a", 1), ("b", 0), ("c", 1))]
        for pod in pods:
            await node.kubelet.admit(pod)
            await node.kubelet.start_container(pod)
        await node.annotated("c", ASSIGNED="true")
        before = {pod["metadata"]["name"]: node.kubelet.cards(pod) for pod in pods}
        await node.kubelet.restart(lose_checkpoint=True)
        await eventually(
            lambda: node.kubelet.healthy() == 30 and node.agent.state.assignments == (),
            "nothing is assigned",
        )
        for pod in pods:  # kubelet admits by creation time
            await node.kubelet.admit(pod)
        assert {pod["metadata"]["name"]: node.kubelet.cards(pod) for pod in pods} == before


async def test_the_sockets_may_vanish_without_a_restart(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        before = node.agent.server.registrations
        (node.kubelet.plugin_folder / "aliyungpushare.sock").unlink()
        await eventually(lambda: node.agent.server.registrations > before, "registered again")
        await eventually(lambda: node.kubelet.healthy() == 15, "told the devices")


async def test_sighup_registers_again(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        before = node.agent.server.registrations
        node.agent.register_again()
        await eventually(lambda: node.agent.server.registrations > before, "registered again")
        await node.kubelet.admit(await node.place("p", 4, 0))


async def test_kubelet_may_come_after_the_agent(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        await node.kubelet.stop()
        await node.stop_agent()
        node.ready = False
        (node.kubelet.plugin_folder / "kubelet.sock").unlink(missing_ok=True)
        await node.start_agent()
        await eventually(lambda: "kubelet has not registered" in node.agent.not_ready(), "agent waits")
        await node.kubelet.start()
        await eventually(node.registered, "registered")


async def test_kubelets_book_unreadable_does_not_keep_a_container_from_its_limit(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        pod = await node.place("p", 4, 1)
        await node.kubelet.close_pod_resources()
        await node.kubelet.admit(pod)
        await node.kubelet.start_container(pod)
        (limits,) = (tmp_path / "host" / "containers").glob("*/etc/limits")
        assert f"{uuid(1)} memory=4509925376" in limits.read_text()
        assert "pod-resources" in node.agent.reconciler.problem
        await node.kubelet.open_pod_resources()
        await node.annotated("p", ASSIGNED="true")


async def test_where_compute_is_divided_a_container_waits_until_it_is_told_apart(tmp_path: Path) -> None:
    async with Bench(tmp_path, labels={"ack.node.gpu.schedule": "core_mem"}).running() as node:
        from simcluster.kubelet.plugin_calls import PluginError

        spec = container(4, **{"aliyun.com/gpu-core.percentage": "30"})
        pod = await node.place("p", 0, 0, containers=[spec])
        await node.kubelet.close_pod_resources()
        await node.kubelet.admit(pod)
        with pytest.raises(PluginError, match="does not list this container yet"):
            await node.kubelet.start_container(pod)
        await node.kubelet.open_pod_resources()
        await node.kubelet.start_container(pod)
        (limits,) = (tmp_path / "host" / "containers").glob("*/etc/limits")
        assert " share=30\n" in limits.read_text()


# -- the agent itself ------------------------------------------------------------------------------------
async def test_the_agent_may_die_between_allocate_and_the_containers_start(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        pod = await node.place("p", 4, 1)
        other = await node.place("other", 4, 0)
        await node.kubelet.admit(pod)
        await node.kill_agent()
        await node.start_agent()
        await node.kubelet.start_container(pod)
        (limits,) = (tmp_path / "host" / "containers").glob("*/etc/limits")
        assert uuid(1) in limits.read_text() or node.kubelet.cards(pod) == {uuid(0)}
        await node.kubelet.admit(other)
        await node.kubelet.start_container(other)
        for name, each in (("p", pod), ("other", other)):
            card = next(iter(node.kubelet.cards(each)))
            said = await node.annotated(name, ASSIGNED="true")
            assert uuid(int(said["ALIYUN_COM_GPU_MEM_IDX"])) == card


async def test_a_second_agent_waits_until_the_first_has_ended(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        first = node.agent
        first_task, first_stop = node._agent_task, node._stopped
        node.ready = False
        await node.start_agent()
        await asyncio.sleep(0.5)
        assert first.server.registered
        assert not node.agent.server.registered
        first_stop.set()
        assert first_task is not None
        await first_task
        await eventually(node.registered, "the second took over")


async def test_an_agent_that_ends_leaves_no_socket_behind(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        await node.stop_agent()
        assert not (node.kubelet.plugin_folder / "aliyungpushare.sock").exists()
        await eventually(lambda: node.kubelet.healthy() == 0, "kubelet noticed")


# -- the API server --------------------------------------------------------------------------------------
async def test_pods_are_admitted_and_started_while_the_api_server_is_down(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        pod = await node.place("p", 4, 1)
        node.cluster.add_fault(Fault(code=503))
        node.cluster.drop_watches()
        async with asyncio.timeout(HANG_S):
            granted = (await node.kubelet.admit(pod))["main"]
            await node.kubelet.start_container(pod)
        assert granted.envs["ALIYUN_COM_GPU_MEM_IDX"] == "1"
        node.cluster.faults.clear()
        await node.annotated("p", ASSIGNED="true")


async def test_a_slow_api_server_does_not_hold_a_container_up_for_long(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        pod = await node.place("p", 4, 1)
        await node.kubelet.admit(pod)
        node.cluster.add_fault(Fault(method="PATCH", delay_s=60))
        began = asyncio.get_running_loop().time()
        await node.kubelet.start_container(pod)
        assert asyncio.get_running_loop().time() - began < 5
        node.cluster.faults.clear()


async def test_a_pod_of_the_same_name_made_anew_at_once_is_another_pod(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        for turn in range(6):
            pod = await node.place("web-0", 4, turn % 2, assume_ns=turn + 1)
            granted = (await node.kubelet.admit(pod))["main"]
            assert granted.envs["ALIYUN_COM_GPU_MEM_IDX"] == str(turn % 2)
            await node.kubelet.start_container(pod)
            await node.annotated("web-0", IDX=str(turn % 2), ASSIGNED="true")
            node.kubelet.remove(pod)
            await node.client.delete(PODS, "web-0", "default", grace_s=0)
        await eventually(lambda: not node.agent.state.waiting(), "the last one is known to be gone")


async def test_a_pod_heard_of_a_moment_after_kubelets_question_is_waited_for(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO, settings={"match_wait_s": 5.0}).running() as node:
        node.cluster.add_fault(Fault(method="GET", path="/api/v1/pods", delay_s=0.5))
        node.cluster.drop_watches()
        pod = await node.place("p", 4, 1, known=False)
        granted = (await node.kubelet.admit(pod))["main"]
        assert granted.envs["ALIYUN_COM_GPU_MEM_IDX"] == "1"


async def test_kubelets_question_ends_the_pause_after_an_outage(tmp_path: Path) -> None:
    """kubelet may be connected again half a minute before we would be, and fails for good what we refuse."""
    async with Bench(tmp_path, TWO, settings={"match_wait_s": 5.0}).running() as node:
        outage = Fault(path="/api/v1/pods", code=503, retry_after_s=30, times=1)
        node.cluster.add_fault(outage)
        node.cluster.drop_watches()
        await eventually(lambda: outage.times == 0, "the watch pauses")
        granted = (await node.kubelet.admit(await node.place("p", 4, 1, known=False)))["main"]
        assert granted.envs["ALIYUN_COM_GPU_MEM_IDX"] == "1"


async def test_a_request_without_a_pod_is_refused_after_a_bounded_wait_and_not_waited_for_twice(
    tmp_path: Path,
) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        began = asyncio.get_running_loop().time()
        for name in ("x", "y"):
            with pytest.raises(AdmissionError, match="no pod that waits"):
                await node.kubelet.admit(await node.place(name, 3, known=False))
        assert asyncio.get_running_loop().time() - began < 1.5  # 0.3 s is the wait


async def test_a_request_for_devices_of_a_foreign_card_is_refused(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        from grpclib import GRPCError

        from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
        from gpuslice.adapters.kubelet.rpc import unix_channel
        from simcluster.kubelet.rpc import DevicePluginClient

        async with unix_channel(node.kubelet.plugin_folder / "aliyungpushare.sock") as channel:
            plugin = DevicePluginClient(channel)
            for ids in (["GPU-of-another-node-_-0"], ["nonsense"], []):
                one = dp.ContainerAllocateRequest(devices_ids=ids)
                with pytest.raises(GRPCError) as refused:
                    await plugin.allocate(dp.AllocateRequest(container_requests=[one]))
                assert refused.value.status.name == "FAILED_PRECONDITION"
                assert refused.value.message


# -- the host --------------------------------------------------------------------------------------------
@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few pages; root only, as the tests that mount something are."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a disk cannot be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


async def test_a_full_disk_refuses_pods_with_a_sentence_and_leaves_no_half_limits(
    tmp_path: Path, small_disk: Path
) -> None:
    async with Bench(tmp_path, TWO, settings={"root": str(small_disk)}).running() as node:
        before = await node.place("before", 4, 0)
        await node.kubelet.admit(before)
        filler = small_disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1024))
        with pytest.raises(PluginError, match="No space left on device"):
            await node.kubelet.start_container(before)
        with pytest.raises(AdmissionError, match="No space left on device"):
            await node.kubelet.admit(await node.place("meanwhile", 4, 1))
        assert list(small_disk.glob("containers/*/etc/limits")) == []
        filler.unlink()
        await node.kubelet.start_container(before)
        (limits,) = small_disk.glob("containers/*/etc/limits")
        assert " memory=4509925376" in limits.read_text()
        after = await node.place("after", 4, 1)
        await node.kubelet.admit(after)
        await node.kubelet.start_container(after)


async def test_an_agent_that_ends_while_kubelet_asks_leaves_nothing_half_done(tmp_path: Path) -> None:
    """SIGTERM while Allocate waits for its pod: the call fails, and the next agent starts from the truth."""
    async with Bench(tmp_path, TWO, settings={"match_wait_s": 2.0 * HANG_S}).running() as node:
        asked = asyncio.create_task(node.kubelet.admit(await node.place("early", 6, known=False)))
        await asyncio.sleep(0.2)  # it waits for somebody who places the pod
        async with asyncio.timeout(HANG_S):
            await node.stop_agent()
        with pytest.raises(AdmissionError):
            await asked
        await node.start_agent()
        pod = await node.place("p", 6, 1)
        await node.kubelet.admit(pod)
        await node.kubelet.start_container(pod)
        await node.annotated("p", IDX="1", ASSIGNED="true")


async def test_a_clock_that_is_set_moves_nothing(tmp_path: Path) -> None:
    """Years ahead or back: order follows who was placed first, folders of the living are not swept."""
    async with Bench(tmp_path, TWO, settings={"sweep_after_s": 1.0}).running() as node:
        future, past = 4_000_000_000 * 10**9, 1
        late = await node.place("late", 4, 1, assume_ns=future)
        await node.kubelet.admit(late)
        await node.kubelet.start_container(late)
        await node.annotated("late", IDX="1", ASSIGNED="true")
        (folder,) = (tmp_path / "host" / "containers").iterdir()
        for when in (0, 4_000_000_000):
            os.utime(folder, (when, when))
            await node.agent.sweeper.sweep()
            assert folder.exists()
        early = await node.place("early", 4, 0, assume_ns=past)
        await node.kubelet.admit(early)
        await node.annotated("early", IDX="0", ASSIGNED="true")


async def test_nothing_is_swept_before_it_is_known_who_lives_here(tmp_path: Path) -> None:
    """kubelet has forgotten the container, and the API server does not answer the agent that comes next."""
    async with Bench(tmp_path, TWO, settings={"sweep_after_s": 1.0, "reconcile_s": 0.05}).running() as node:
        pod = await node.place("p", 4, 1)
        await node.kubelet.admit(pod)
        await node.kubelet.start_container(pod)
        await node.annotated("p", IDX="1", ASSIGNED="true")
        (folder,) = (tmp_path / "host" / "containers").iterdir()
        await node.stop_agent()
        os.utime(folder, (0, 0))
        following = Agent(
            node.agent_settings(), node.agents_client, RecordedSource(node.recording), boot=node.boot
        )
        await following.reconciler.read()
        following.state.assignments_read((), 0.0)
        works = [asyncio.create_task(each) for each in (following.lock.hold(), following.sweep())]
        await following.lock.held.wait()
        await asyncio.sleep(0.3)  # six rounds
        assert folder.exists()
        for work in works:
            work.cancel()
        await asyncio.wait(works)
        await node.start_agent()


async def test_a_node_that_is_made_anew_is_told_its_cards_again(tmp_path: Path) -> None:
    """Deleted and registered again, as when a machine gets another name or is joined anew."""
    async with Bench(tmp_path, TWO).running() as node:

        async def told() -> bool:
            found = await node.node_object()
            counted = found.get("status", {}).get("capacity", {}).get("aliyun.com/gpu-count")
            return counted == "2" and "gpuslice.io/gpus" in found["metadata"].get("annotations", {})

        await eventually(told, "cards and count")
        await node.client.delete(NODES, NODE)
        await node.client.create(NODES.as_dict(), {"metadata": {"name": NODE}})
        await eventually(told, "cards and count again")
