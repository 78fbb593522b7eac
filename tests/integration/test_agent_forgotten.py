"""Containers that go on running when kubelet loses its checkpoint: nobody touches what they hold."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from grpclib import GRPCError

from gpuslice.adapters.kube.resources import EVENTS, PODS
from gpuslice.adapters.kube.watch import Change, Reflector
from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.adapters.kubelet.rpc import unix_channel
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.owner import token
from gpuslice.apps.agent.plugin import IDENTIFY_S
from gpuslice.apps.agent.reconciler import AssignmentSource
from gpuslice.core.contract import ANN_INDEX, GPU_MEM, card_of_device_id, device_id
from gpuslice.core.device_assignment import DeviceAssignment
from simcluster.cluster.faults import Fault
from simcluster.kubelet.devices import AdmissionError
from simcluster.kubelet.plugin_calls import PluginError
from simcluster.kubelet.rpc import DevicePluginClient
from tests.integration.agent_bench import Bench, Pod, container, eventually

ONE, TWO = {0: 16130}, {0: 16130, 1: 16130}


async def started(node: Bench, name: str, memory: int, *cards: int, **fields: Any) -> Pod:
    pod = await node.place(name, memory, *cards, **fields)
    await node.kubelet.admit(pod)
    await node.kubelet.start_container(pod)
    await node.annotated(name, ASSIGNED="true")
    return pod


async def forget(node: Bench) -> None:
    """kubelet comes back without its assignments, and what ran goes on running."""
    before = node.agent.server.registrations
    await node.kubelet.restart(lose_checkpoint=True)
    await eventually(lambda: node.agent.server.registrations > before, "registered again")
    await eventually(
        lambda: node.agent.state.assignments == () and node.agent.state.forgotten(), "it is noticed"
    )


def shown(node: Bench, name: str) -> list[str]:
    """Whom one of the agent's metrics names, by its labels."""
    families = {family.name: family.samples for family in node.agent.status().families()}
    return [text.strip("{}") for text, _ in families[f"gpuslice_agent_{name}"]]


async def told(node: Bench, reason: str) -> list[Any]:
    """The events of this reason."""
    found = await node.client.list(EVENTS, "default")
    return [each for each in found.items or () if each.reason == reason]


def owners(node: Bench) -> dict[str, tuple[str, frozenset[str]]]:
    """Folder and ids by the pod that owns it."""
    files = (node.folder / "host" / "containers").glob("*/owner.json")
    found = {file.parent.name: json.loads(file.read_text()) for file in files}
    return {each["pod"]: (name, frozenset(each["ids"])) for name, each in found.items() if each["pod"]}


async def allocate(node: Bench, ids: frozenset[str]) -> dp.ContainerAllocateResponse:
    """A kubelet that chose the ids itself."""
    async with unix_channel(node.kubelet.plugin_folder / "aliyungpushare.sock") as channel:
        one = dp.ContainerAllocateRequest(devices_ids=sorted(ids))
        answer = await DevicePluginClient(channel).allocate(dp.AllocateRequest(container_requests=[one]))
    return answer.container_responses[0]


async def pre_start(node: Bench, ids: frozenset[str]) -> None:
    async with unix_channel(node.kubelet.plugin_folder / "aliyungpushare.sock") as channel:
        request = dp.PreStartContainerRequest(devices_ids=sorted(ids))
        await DevicePluginClient(channel).pre_start_container(request)


def limits_folder(answer: dp.ContainerAllocateResponse) -> Path:
    (found,) = (Path(each.host_path) for each in answer.mounts if each.container_path == "/etc/gpuslice")
    return found


async def test_ids_of_a_container_that_kubelet_forgot_are_not_proposed(tmp_path: Path) -> None:
    async with Bench(tmp_path, ONE).running() as node:
        old = await started(node, "old", 5, 0)
        held = node.kubelet.ids(old)
        await forget(node)
        new = await started(node, "new", 5, 0)
        assert not node.kubelet.ids(new) & held
        assert owners(node).keys() == {"old", "new"}


async def test_an_agent_that_was_away_meanwhile_knows_them_too(tmp_path: Path) -> None:
    async with Bench(tmp_path, ONE).running() as node:
        held = node.kubelet.ids(await started(node, "old", 5, 0))
        await node.kill_agent()
        await node.kubelet.restart(lose_checkpoint=True)
        await node.start_agent()
        assert not node.kubelet.ids(await started(node, "new", 5, 0)) & held


async def test_a_kubelet_that_insists_gets_another_folder(tmp_path: Path) -> None:
    """It is not obliged to follow a proposal. Limits and region of the one that runs stay as they are."""
    async with Bench(tmp_path, ONE).running() as node:
        held = node.kubelet.ids(await started(node, "old", 5, 0))
        folder, _ = owners(node)["old"]
        (home := node.folder / "host" / "containers" / folder).joinpath("var", "region").write_bytes(b"mine")
        before = (home / "etc" / "limits").stat()
        await forget(node)
        new = await node.place("new", 5, 0)
        answer = await allocate(node, held)
        assert limits_folder(answer).parent.name == f"{token(held)}-2"
        node.kubelet.hold(new, held, answer)
        await node.restart_agent()  # between the two calls, say
        await pre_start(node, held)
        assert (home / "var" / "region").read_bytes() == b"mine"
        after = (home / "etc" / "limits").stat()
        assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
        assert (limits_folder(answer) / "limits").read_text() == (home / "etc" / "limits").read_text()
        assert {name: owner[0] for name, owner in owners(node).items()} == {
            "old": folder,
            "new": f"{folder}-2",
        }


async def test_an_init_container_that_has_ended_is_not_forgotten(tmp_path: Path) -> None:
    """Its folder is there while the pod lives, and its devices are those of the app containers."""
    async with Bench(tmp_path, ONE).running() as node:
        apps = [container(3, "a"), container(3, "b")]
        old = await node.place("old", 0, 0, containers=apps, initContainers=[container(4, "init")])
        await node.kubelet.admit(old)
        for name in ("init", "a", "b"):
            await node.kubelet.start_container(old, name)
        await node.annotated("old", ASSIGNED="true")
        ended = [{"name": "init", "state": {"terminated": {"exitCode": 0}}}]
        runs: list[Pod] = [{"name": name, "state": {"running": {}}} for name in ("a", "b")]
        status = {"phase": "Running", "initContainerStatuses": ended, "containerStatuses": runs}
        await node.client.patch_status(PODS.as_dict(), "old", status, "default")
        await forget(node)
        (event,) = await eventually(lambda: told(node, "ForgottenByKubelet"), "an event")
        assert "of container a, b, which" in event.message
        await started(node, "new", 9, 0)  # there is room for just that
        lie: dict[str, Any] = {"metadata": {"annotations": {ANN_INDEX: "x"}}}
        await node.client.merge_patch(PODS.as_dict(), "old", lie, "default")
        await node.annotated("old", IDX="0", ASSIGNED="true")


async def test_a_card_is_not_filled_beyond_what_runs_there(tmp_path: Path) -> None:
    """kubelet sees 15 free units; 10 are in use. Who comes gets a sentence, at whichever call it shows."""
    async with Bench(tmp_path, ONE).running() as node:
        held = node.kubelet.ids(await started(node, "old", 10, 0))
        await forget(node)
        new = await node.place("new", 9)  # placed by nobody: the extender would have known
        with pytest.raises(AdmissionError, match=r"no room for 9 units .* \(free units: card 0: 5\)"):
            await node.kubelet.admit(new)
        some = frozenset(sorted(held)[:9])
        with pytest.raises(GRPCError, match=r"forgotten \(default/old\)"):
            await allocate(node, some)
        node.kubelet.hold(new, some, dp.ContainerAllocateResponse())  # granted by an agent that did not know
        with pytest.raises(PluginError, match=r"forgotten \(default/old\); delete those pods"):
            await node.kubelet.start_container(new)
        await node.client.delete(PODS, "old", "default", grace_s=0)
        await eventually(lambda: not node.agent.state.forgotten(), "old is gone")
        await node.kubelet.start_container(new)


async def test_a_container_that_nobody_could_tell_when_it_started_is_known_later(tmp_path: Path) -> None:
    """There was no news of its pod: it starts, and its folder says whose it is as soon as somebody knows."""
    async with Bench(tmp_path, ONE, settings={"sweep_after_s": 0.0}).running() as node:
        held = node.kubelet.ids(await started(node, "old", 5, 0))
        (file,) = (node.folder / "host" / "containers").glob("*/owner.json")
        named = json.loads(file.read_text())
        unknown = {**named, **dict.fromkeys(("uid", "namespace", "pod", "container"), "")}
        file.write_text(json.dumps(unknown))
        await node.agent.sweeper.sweep()
        assert json.loads(file.read_text()) == named
        await forget(node)
        assert not node.kubelet.ids(await started(node, "new", 5, 0)) & held
        file.write_text(json.dumps(unknown))  # nor did anybody learn it before kubelet forgot
        await node.agent.sweeper.sweep()
        assert json.loads(file.read_text()) == unknown


async def test_a_card_is_not_filled_by_somebody_of_whom_there_is_no_news_yet(tmp_path: Path) -> None:
    """Its pod may come to be known in a moment, and kubelet asks again."""
    async with Bench(tmp_path, ONE).running() as node:
        held = node.kubelet.ids(await started(node, "old", 10, 0))
        await forget(node)
        with pytest.raises(GRPCError, match=r"forgotten \(default/old\)"):
            await pre_start(node, frozenset(sorted(held)[:9]))


class ComesAgain:
    """kubelet's assignments; amid the answer `at`, another kubelet begins to follow the device list."""

    def __init__(self, node: Bench, inner: AssignmentSource, at: int) -> None:
        self._node, self._inner, self._left = node, inner, at

    async def assignments(self, resource: str) -> tuple[DeviceAssignment, ...]:
        found = await self._inner.assignments(resource)
        self._left -= 1
        if self._left == 0:
            await asyncio.sleep(IDENTIFY_S - 0.5)  # then there is no time left to ask again
            self._node.agent.state.kubelet_came(self._node.agent.state.maybe_forgotten())
        return found


async def test_a_kubelet_that_comes_amid_a_start_fills_no_card(tmp_path: Path) -> None:
    async with Bench(tmp_path, ONE, settings={"reconcile_s": 60.0}).running() as node:
        held = node.kubelet.ids(await started(node, "old", 10, 0))
        await forget(node)
        reconciler = node.agent.reconciler
        reconciler._kubelet = ComesAgain(node, reconciler._kubelet, at=8)
        with pytest.raises(GRPCError, match=r"forgotten \(default/old\)"):
            await pre_start(node, frozenset(sorted(held)[:9]))


async def test_who_runs_is_not_taken_for_the_one_who_asks_while_news_may_still_come(tmp_path: Path) -> None:
    """Of two pods of one size kubelet asks for the one that the agent has not heard of."""
    async with Bench(tmp_path, TWO, settings={"match_wait_s": 5.0}).running() as node:
        await started(node, "old", 5, 1)
        await forget(node)
        cards = node.agent.state.node.cards
        free = {device_id(card.uuid, unit) for card in cards for unit in range(card.units)}
        wish = dp.ContainerPreferredAllocationRequest(available_deviceIDs=sorted(free), allocation_size=5)
        question = dp.PreferredAllocationRequest(container_requests=[wish])
        asked = asyncio.create_task(node.agent.plugin.get_preferred_allocation(question))
        await asyncio.sleep(0)
        await node.place("new", 5, 0)
        (answer,) = (await asked).container_responses
        assert {card_of_device_id(each) for each in answer.deviceIDs} == {cards[0].uuid}


async def test_after_a_reboot_nobody_is_taken_for_running(tmp_path: Path) -> None:
    async with Bench(tmp_path, ONE).running() as node:
        old = await started(node, "old", 10, 0)
        held = node.kubelet.ids(old)
        await node.kubelet.stop()
        (node.kubelet.plugin_folder / "kubelet_internal_checkpoint").unlink()
        node.kubelet.pods.clear()
        await node.stop_agent()
        node.boot = "another"
        await node.kubelet.start()
        await node.start_agent()
        await started(node, "new", 12, 0)
        assert node.agent.state.forgotten() == ()
        assert held


async def test_a_container_that_did_end_with_kubelet_gets_its_card_again_and_a_clean_folder(
    tmp_path: Path,
) -> None:
    """kubelet asks for it, so it does not run, and nobody needs its old folder."""
    async with Bench(tmp_path, ONE, settings={"sweep_after_s": 1.0}).running() as node:
        old = await started(node, "old", 14, 0)
        (before,) = (node.folder / "host" / "containers").iterdir()
        await forget(node)
        await node.kubelet.admit(old)
        await node.kubelet.start_container(old)
        await eventually(lambda: not node.agent.state.forgotten(), "kubelet knows it again")
        await eventually(lambda: not before.exists(), "nobody lives there any more")
        assert owners(node)["old"][1] == node.kubelet.ids(old)


async def test_an_init_container_that_has_ended_is_not_taken_for_forgotten(tmp_path: Path) -> None:
    """kubelet never lists it. Were it counted, a full card would let nobody start again."""
    async with Bench(tmp_path, ONE).running() as node:
        init = container(4, "first")
        pod = await node.place("p", 3, 0, initContainers=[init])
        await node.kubelet.admit(pod)
        for name in ("first", "main"):
            await node.kubelet.start_container(pod, name)
        rest = await started(node, "rest", 11, 0)
        await node.restart_agent()
        await eventually(lambda: node.agent.state.assignments, "the assignments are read")
        assert node.agent.state.forgotten() == ()
        await node.kubelet.start_container(rest)
        await node.kubelet.start_container(pod)


async def test_folders_of_one_name_go_when_their_pods_do(tmp_path: Path) -> None:
    ids = frozenset({"GPU-a-_-0", "GPU-a-_-1"})
    folders = Folders(tmp_path, boot="this")
    first = folders.prepare(ids)
    assert folders.prepare(ids) == first
    second = folders.prepare(ids, occupied={first})
    assert folders.prepare(ids, occupied={first}) == second
    third = folders.prepare(ids, occupied={first, second})
    assert [first, second, third] == [token(ids), f"{token(ids)}-2", f"{token(ids)}-3"]
    folders.discard(third)
    folders.discard(second)
    assert folders.current(ids) == first


# -- pods that kubelet started when it knew no device plugin ---------------------------------------------
async def test_a_pod_that_runs_without_devices_is_told_of_once(tmp_path: Path) -> None:
    async with Bench(tmp_path, ONE).running() as node:
        fine = await started(node, "fine", 4, 0)
        bare = await node.place("bare", 4, 0)
        for pod in (fine, bare):
            name = pod["metadata"]["name"]
            state = {"name": "main", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
            status = {"phase": "Running", "containerStatuses": [state]}
            await node.client.patch_status(PODS.as_dict(), name, status, "default")

        (event,) = await eventually(lambda: told(node, "RunsWithoutDevices"), "an event")
        assert event.involved_object.name == "bare"
        assert f"container main runs without the {GPU_MEM} it asks for" in event.message
        await eventually(
            lambda: shown(node, "pod_without_devices") == ['namespace="default",pod="bare"'], "its metric"
        )
        await node.client.delete(PODS, "bare", "default", grace_s=0)
        await eventually(lambda: not shown(node, "pod_without_devices"), "no longer")
        assert len(await told(node, "RunsWithoutDevices")) == 1


async def test_a_forgotten_pod_is_named_until_it_is_deleted(tmp_path: Path) -> None:
    async with Bench(tmp_path, ONE).running() as node:
        await started(node, "old", 5, 0)
        await forget(node)
        (event,) = await eventually(lambda: told(node, "ForgottenByKubelet"), "an event")
        assert event.involved_object.name == "old"
        assert "kubelet has lost its record of container main" in event.message
        assert shown(node, "container_forgotten") == ['namespace="default",pod="old",container="main"']
        await node.client.delete(PODS, "old", "default", grace_s=0)
        await eventually(lambda: not shown(node, "container_forgotten"), "no longer")
        assert len(await told(node, "ForgottenByKubelet")) == 1


# -- writing ---------------------------------------------------------------------------------------------
async def test_what_was_planned_before_a_pods_start_is_not_written_after_it(tmp_path: Path) -> None:
    """While one pod's annotations were being written another one started: its old line must not follow."""
    async with Bench(tmp_path, TWO, settings={"reconcile_s": 60.0}).running() as node:
        slow = await node.place("slow", 2, 0, assume_ns=1)
        late = await node.place("late", 10, 0, assume_ns=2)
        early = await node.place("early", 10, 1, assume_ns=3)
        said: list[str] = []
        watch: Reflector[Pod] = Reflector(node.client, PODS, lambda change: said.extend(_assigned(change)))
        watching = asyncio.create_task(watch.run())
        answered = asyncio.Event()
        node.cluster.add_fault(Fault(method="PATCH", path=".*/pods/slow", times=1, held=answered))
        await node.kubelet.admit(slow)
        await node.kubelet.admit(early)  # gets the card of "late", whose annotation is to tell so
        uid = late["metadata"]["uid"]
        await eventually(lambda: uid in node.agent.state.targets, "it is planned, and the first is written")
        await node.kubelet.admit(late)
        answered.set()
        await node.kubelet.start_container(late)
        await node.annotated("slow", ASSIGNED="true")
        await node.annotated("early", IDX="0", ASSIGNED="true")
        await node.annotated("late", IDX="1", ASSIGNED="true")
        await eventually(lambda: "true" in said, "the watch has told it")
        watching.cancel()
        assert "false" not in said[said.index("true") :]


def _assigned(change: Change[Any]) -> list[str]:
    if change.object is None or change.object.metadata.name != "late":
        return []
    return [(change.object.metadata.annotations or {})["ALIYUN_COM_GPU_MEM_ASSIGNED"]]
