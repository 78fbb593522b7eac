"""Cards that fail, come back, or were never there."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncGenerator
from pathlib import Path

import aiohttp
import pytest

from gpuslice.adapters.gpu.source import DriverCard, GpuUnavailableError, Inventory, XidEvent
from gpuslice.adapters.gpu.worker import BlockingWorker
from gpuslice.adapters.kube.resources import CONFIG_MAPS, EVENTS, NODES
from gpuslice.core.attribution import ProcessReading
from simcluster.cluster.faults import Fault
from simcluster.kubelet.devices import AdmissionError
from simcluster.kubelet.plugin_calls import PluginError
from tests.integration.agent_bench import NODE, Bench, eventually, uuid

V100 = 16130
TWO = {0: V100, 1: V100}
SETTINGS = {"recovery_s": 0.0}


async def configmap_says(node: Bench, cards: str, key: str = "gpus") -> None:
    async def says() -> bool:
        return await node.unhealthy(key) == cards

    await eventually(says, f"ConfigMap says {cards!r}")


async def test_a_critical_xid_takes_its_card_out_in_one_message(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO, settings=SETTINGS).running() as node:
        node.record(TWO, events=[{"xid": 31, "uuid": uuid(0)}, {"xid": 79, "uuid": uuid(1)}])
        await eventually(lambda: node.kubelet.healthy() == 15, "card 1 is out")
        assert {
            one.rpartition("-_-")[0] for one in node.kubelet.device_manager.healthy("aliyun.com/gpu-mem")
        } == {uuid(0)}
        await configmap_says(node, "1")
        pod = await node.place("p", 4, 1)  # placed before the extender heard of it
        await node.kubelet.admit(pod)
        assert node.kubelet.cards(pod) == {uuid(0)}
        await node.annotated("p", IDX="0")


async def test_the_node_says_how_near_its_cards_are_where_they_differ(tmp_path: Path) -> None:
    """Also while one of them is lost: what is near to what does not change by that."""
    four = dict.fromkeys(range(4), V100)
    pairs = {(0, 1): 3, (2, 3): 3}
    links = [
        {"uuid": uuid(one), "other": uuid(other), "link": pairs.get((one, other), 1)}
        for one in four
        for other in range(one + 1, 4)
    ]
    async with Bench(tmp_path, four, settings=SETTINGS).running() as node:

        async def said() -> str | None:
            found: str | None = (await node.node_object())["metadata"]["annotations"].get("gpuslice.io/links")
            return found

        async def says(text: str) -> bool:
            return await said() == text

        assert await said() is None  # a driver that tells of no links
        node.record(four, links=links)
        await eventually(lambda: says("311,11,3"), "the links are written")
        node.record(
            {0: V100, 2: V100, 3: V100}, links=[each for each in links if uuid(1) not in each.values()]
        )
        await eventually(lambda: node.kubelet.healthy() == 45, "card 1 is lost")
        assert await said() == "311,11,3"
        node.record(four, links=[{**each, "link": 3} for each in links])
        await eventually(lambda: says(""), "all are alike again")


async def test_a_card_in_mig_mode_is_given_out_once_it_is_whole_again(tmp_path: Path) -> None:
    """CUDA shows programs its MIG devices alone: nothing of the whole card could be used."""
    async with Bench(tmp_path, TWO, settings=SETTINGS).running() as node:
        node.record(TWO, divided=[0])
        await eventually(lambda: node.kubelet.healthy() == 15, "card 0 is out")
        reason = "0: is in MIG mode, so it can only be given out by its MIG devices"
        await configmap_says(node, reason, "reasons")
        node.record(TWO)
        await eventually(lambda: node.kubelet.healthy() == 30, "card 0 is back")


async def test_a_report_without_a_card_may_mean_any(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO, settings=SETTINGS).running() as node:
        node.record(TWO, events=[{"xid": 119}])
        await eventually(lambda: node.kubelet.healthy() == 0, "all cards are out")
        await configmap_says(node, "0,1")
        with pytest.raises(AdmissionError, match="no healthy devices present"):
            await node.kubelet.admit(await node.place("p", 4, 0))


async def test_faults_of_applications_and_a_switched_off_check_change_nothing(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO, settings={"health_check": False}).running() as node:
        node.record(TWO, events=[{"xid": 79, "uuid": uuid(1)}])
        pod = await node.place("p", 4, 1)
        await node.kubelet.admit(pod)
        await node.annotated("p", ASSIGNED="true")
        assert node.kubelet.healthy() == 30


async def test_an_api_server_that_hangs_delays_no_news_of_a_card(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Bench(tmp_path, TWO, settings=SETTINGS).running() as node:
        node.cluster.add_fault(Fault(path=".*/(configmaps|events).*", delay_s=10.0))
        first, second = ({"xid": 79, "uuid": uuid(card)} for card in TWO)
        node.record(TWO, events=[first])
        await eventually(lambda: node.kubelet.healthy() == 15, "card 0 is out")
        node.record(TWO, events=[first, second])
        await eventually(lambda: node.kubelet.healthy() == 0, "card 1 is out")
        assert "not written" not in caplog.text  # the first has not been given up before


@pytest.mark.parametrize("told_late", [False, True])
async def test_a_card_recovers_and_events_tell_of_it(tmp_path: Path, told_late: bool) -> None:
    """Also where it was over before the API server could be told that it began."""
    async with Bench(tmp_path, TWO, settings={"recovery_s": 2.0}).running() as node:
        if told_late:
            node.cluster.add_fault(Fault(path=".*/configmaps.*", code=503))
        node.record(TWO, events=[{"xid": 79, "uuid": uuid(1)}])
        await eventually(lambda: node.kubelet.healthy() == 15, "card 1 is out")
        await eventually(lambda: node.kubelet.healthy() == 30, "card 1 is back")
        node.cluster.faults.clear()
        if not told_late:
            await configmap_says(node, "")

        async def told() -> bool:
            events = (await node.client.list(EVENTS, "default")).items or []
            said = [(event.reason, event.message) for event in events]
            return said == [
                ("GPUOutOfUse", "card 1: Xid 79"),
                ("GPUBackInUse", "card 1 is given out again"),
            ]

        await eventually(told, "events on the node")


async def test_a_restart_of_the_agent_makes_no_card_well_and_keeps_the_operators_entries(
    tmp_path: Path,
) -> None:
    three = {0: V100, 1: V100, 2: V100}
    async with Bench(tmp_path, three, settings=SETTINGS).running() as node:
        by_hand = {"metadata": {"name": f"unhealthy-gpu-{NODE}"}, "data": {"gpus": "2, garbage"}}
        await node.client.create(CONFIG_MAPS, by_hand, "kube-system")
        node.record(three, events=[{"xid": 79, "uuid": uuid(1)}])
        await configmap_says(node, "1,2")
        await node.stop_agent()
        node.record(three)
        await node.start_agent()
        await eventually(lambda: node.kubelet.healthy() == 30, "card 1 is still out")
        assert node.agent.cards.reasons() == {1: "recorded before the agent's start"}
        await configmap_says(node, "1,2")


async def test_a_recorded_fault_is_the_cards_not_the_slots(tmp_path: Path) -> None:
    """A machine that comes back without a card, or with another, renumbers its cards."""
    async with Bench(tmp_path, TWO, settings=SETTINGS).running() as node:
        node.record(TWO, events=[{"xid": 79, "uuid": uuid(1)}])
        await configmap_says(node, "1")
        await node.stop_agent()
        cards = [{"index": at, "uuid": uuid(each), "memory_mib": V100} for at, each in ((0, 1), (1, 7))]
        node.recording.write_text(json.dumps({"cards": cards}))
        await node.start_agent()
        await configmap_says(node, "0")
        await eventually(lambda: node.kubelet.healthy() == 15, "the new card is given out")


async def test_what_ends_while_no_agent_is_there_is_over(tmp_path: Path) -> None:
    """An exclusion that the operator takes back, a card that answers again: nothing of it is a fault."""
    three = {0: V100, 1: V100, 2: V100}
    file = tmp_path / "unhealthyDevices.json"
    async with Bench(tmp_path, three).running() as node:
        file.write_text(json.dumps({"index": [0, 2]}))
        await configmap_says(node, "0,2")
        node.record({0: V100, 2: V100}, lost=[{"position": 1, "reason": "GPU is lost"}])
        await configmap_says(node, "0,1,2")
        node.record({0: V100, 2: V100}, events=[{"xid": 79, "uuid": uuid(2)}])
        await configmap_says(node, uuid(2), "faults")  # of one that is excluded anyway
        await node.stop_agent()
        file.unlink()
        node.record(three)
        await node.start_agent()
        await eventually(lambda: node.kubelet.healthy() == 30, "cards 0 and 1 are given out")
        await configmap_says(node, "2")
        assert node.agent.cards.reasons() == {2: "recorded before the agent's start"}


async def test_a_lost_card_affects_only_itself_and_may_come_back(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        pod = await node.place("p", 4, 0)
        await node.kubelet.admit(pod)
        node.record({0: V100}, lost=[{"position": 1, "reason": "GPU is lost"}])
        await eventually(lambda: node.kubelet.healthy() == 15, "card 1 is out")
        assert len(node.kubelet.device_manager.devices["aliyun.com/gpu-mem"]) == 30
        await configmap_says(node, "1")
        node.record(TWO)
        await eventually(lambda: node.kubelet.healthy() == 30, "card 1 is back")
        assert node.kubelet.cards(pod) == {uuid(0)}


async def test_an_index_is_of_the_card_that_has_it_now(tmp_path: Path) -> None:
    """After a reload of the driver the cards that still answer are counted anew."""
    async with Bench(tmp_path, TWO).running() as node:
        pod, on_the_lost = await node.place("p", 4, 1), await node.place("lost", 4, 0)
        await node.kubelet.admit(pod)
        await node.kubelet.admit(on_the_lost)
        cards = [{"index": 0, "uuid": uuid(1), "memory_mib": V100}]
        node.recording.write_text(json.dumps({"cards": cards}))
        await eventually(
            lambda: [each.index for each in node.agent.cards.cards] == [0], "card 1 is card 0 now"
        )
        await node.annotated("p", IDX="0")
        cards.append({"index": 1, "uuid": uuid(7), "memory_mib": V100})
        node.recording.write_text(json.dumps({"cards": cards}))
        await eventually(lambda: node.kubelet.healthy() == 30, "a new card is card 1")

        async def tells() -> bool:
            told = json.loads((await node.node_object())["metadata"]["annotations"]["gpuslice.io/gpus"])
            return [(each["index"], each["uuid"]) for each in told] == [(0, uuid(1)), (1, uuid(7))]

        await eventually(tells, "the node tells of both")
        with pytest.raises(PluginError, match="has no card GPU-00000000"):
            await node.kubelet.start_container(on_the_lost)


async def test_a_card_that_cannot_be_given_out_from_the_start_is_told(tmp_path: Path) -> None:
    bench = Bench(tmp_path, TWO)
    twins = [{"index": index, "uuid": uuid(0), "memory_mib": V100} for index in TWO]
    lost = [{"position": 2, "reason": "GPU is lost"}]
    bench.recording.write_text(json.dumps({"cards": twins, "lost": lost}))
    async with bench.running() as node:
        await eventually(lambda: node.kubelet.healthy() == 15, "card 0 is given out")

        twin = f"card 1 of the driver's list: has the uuid of card 0, {uuid(0)}"
        told = {twin, "card 2 of the driver's list: GPU is lost"}

        async def says() -> bool:
            events = (await node.client.list(EVENTS, "default")).items or []
            return told == {each.message for each in events if each.reason == "GPUOutOfUse"}

        await eventually(says, "both are told")


async def test_the_operators_file_is_honoured_and_a_corrupt_one_changes_nothing(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        file = tmp_path / "unhealthyDevices.json"
        file.write_text(json.dumps({"index": ["0"], "uuid": []}))
        await eventually(lambda: node.kubelet.healthy() == 15, "card 0 is out")
        file.write_text("{")
        await node.kubelet.admit(await node.place("p", 4, 1))
        assert node.kubelet.healthy() == 15
        file.write_text(json.dumps({"index": [], "uuid": [uuid(0), uuid(1)]}))
        await eventually(lambda: node.kubelet.healthy() == 0, "both are out")
        file.unlink()
        await eventually(lambda: node.kubelet.healthy() == 30, "both are back")


async def test_the_configmap_is_written_when_the_api_server_is_back(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO, settings=SETTINGS).running() as node:
        node.cluster.add_fault(Fault(path=".*/configmaps.*", code=503))
        node.record(TWO, events=[{"xid": 79, "uuid": uuid(1)}])
        await eventually(lambda: node.kubelet.healthy() == 15, "card 1 is out")
        node.cluster.faults.clear()
        await configmap_says(node, "1")


class HangingSource:
    """A driver that stops answering: its calls do not come back before they are let go."""

    def __init__(self) -> None:
        self.hangs = False
        self._go = threading.Event()
        self._worker = BlockingWorker("driver")

    def let_go(self) -> None:
        self.hangs = False
        self._go.set()

    async def inventory(self) -> Inventory:
        return await self._worker.call(self._hang if self.hangs else self._read, 0.05 if self.hangs else 10.0)

    def _hang(self) -> Inventory:
        self._go.wait(30)
        return self._read()

    def _read(self) -> Inventory:
        return Inventory(tuple(DriverCard(index, uuid(index), V100) for index in TWO))

    async def processes(self) -> tuple[ProcessReading, ...]:
        raise GpuUnavailableError("this driver tells of no processes")

    async def free_bytes(self, uuid: str) -> int:
        raise GpuUnavailableError("this driver tells of no memory")

    async def events(self) -> AsyncGenerator[XidEvent]:
        raise GpuUnavailableError("this driver reports nothing")
        yield XidEvent(0)

    async def close(self) -> None:
        self.let_go()


async def test_a_driver_that_hangs_makes_the_cards_unhealthy_and_blocks_nobody(tmp_path: Path) -> None:
    source = HangingSource()
    async with Bench(tmp_path, TWO, source=source).running() as node:
        pod = await node.place("p", 4, 1)
        source.hangs = True
        await node.kubelet.admit(pod)
        await node.kubelet.start_container(pod)
        await eventually(lambda: node.kubelet.healthy() == 0, "the cards are out")
        assert "has not come back" in node.agent.cards.problem
        source.let_go()
        await eventually(lambda: node.kubelet.healthy() == 30, "the cards are back")


# -- nothing to give out ---------------------------------------------------------------------------------
async def test_without_cards_the_agent_stays_up_says_why_and_takes_those_that_come(tmp_path: Path) -> None:
    async with Bench(tmp_path, {}, ready=False).running() as node:
        await eventually(lambda: "no card" in node.agent.not_ready(), "says why")
        async with aiohttp.ClientSession() as web:
            async with web.get(f"http://127.0.0.1:{node.port}/readyz") as answer:
                assert (answer.status, await answer.text()) == (503, "the driver reports no card")
            async with web.get(f"http://127.0.0.1:{node.port}/healthz") as answer:
                assert answer.status == 200
        assert node.agent.server.registrations == 0
        node.record({0: V100})
        await eventually(lambda: node.kubelet.healthy() == 15, "registered with the card")


async def test_a_driver_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    bench = Bench(tmp_path, {}, ready=False)
    bench.recording.unlink()
    async with bench.running() as node:
        await eventually(lambda: "cards.json" in node.agent.not_ready(), "names the driver's trouble")


async def test_nothing_is_given_out_while_the_library_that_holds_the_limits_is_missing(
    tmp_path: Path,
) -> None:
    missing = tmp_path / "not-there.so"
    async with Bench(tmp_path, settings={"library": str(missing)}, ready=False).running() as node:
        await eventually(lambda: str(missing) in node.agent.not_ready(), "names the library")
        assert node.kubelet.healthy() == 0
        missing.write_bytes(b"it came late")
        await eventually(node.registered, "registered")


@pytest.mark.parametrize("labels", [{"cgpu": "false"}, {"ack.node.gpu.schedule": "default"}])
async def test_a_node_that_is_not_shared_advertises_nothing(tmp_path: Path, labels: dict[str, str]) -> None:
    async with Bench(tmp_path, labels=labels, ready=False).running() as node:
        await eventually(lambda: "not shared" in node.agent.not_ready(), "says why")
        assert node.agent.server.registrations == 0


# -- the isolation label ---------------------------------------------------------------------------------
async def test_the_isolation_label_counts_at_the_start_only(tmp_path: Path) -> None:
    async with Bench(tmp_path).running() as node:
        await relabel(node, {"cgpu.disable.isolation": "true"})
        granted = (await node.kubelet.admit(await node.place("before", 4, 0)))["main"]
        assert "CGPU_DISABLE" not in granted.envs
        await node.stop_agent()
        await node.start_agent()
        granted = (await node.kubelet.admit(await node.place("after", 4, 0)))["main"]
        assert granted.envs["CGPU_DISABLE"] == "true"


async def test_as_an_option_the_isolation_label_counts_at_once_for_new_containers(tmp_path: Path) -> None:
    async with Bench(tmp_path, settings={"hot_reload_isolation": True}).running() as node:
        first = await node.place("first", 4, 0)
        await node.kubelet.admit(first)
        await relabel(node, {"cgpu.disable.isolation": "true"})
        await eventually(lambda: not node.agent.state.rules.isolation, "the rules changed")
        granted = (await node.kubelet.admit(await node.place("second", 4, 0)))["main"]
        assert granted.envs["CGPU_DISABLE"] == "true"
        await node.kubelet.start_container(first)
        (limits,) = (tmp_path / "host" / "containers").glob("*/etc/limits")
        assert "memory=4509925376" in limits.read_text()


async def relabel(node: Bench, labels: dict[str, str]) -> None:
    seen = await node.client.merge_patch(NODES, NODE, {"metadata": {"labels": labels}})
    version = int(seen.metadata.resource_version)

    def heard() -> bool:
        known = node.agent.node.seen
        return known is not None and int(known.metadata.resource_version) >= version

    await eventually(heard, "the agent heard of the labels")


# -- what it tells ---------------------------------------------------------------------------------------
async def test_metrics_and_state_tell_what_is_going_on(tmp_path: Path) -> None:
    async with Bench(tmp_path, TWO).running() as node:
        await node.kubelet.admit(await node.place("p", 4, 1))
        with pytest.raises(AdmissionError):
            await node.kubelet.admit(await node.place("q", 3))
        async with aiohttp.ClientSession() as web:
            async with web.get(f"http://127.0.0.1:{node.port}/metrics") as answer:
                text = await answer.text()
            async with web.get(f"http://127.0.0.1:{node.port}/debug/state") as answer:
                state = await answer.json()
        for line in (
            "gpuslice_agent_grants_total 1",
            'gpuslice_agent_refusals_total{reason="no match"} 1',
            'gpuslice_agent_refusals_total{reason="host"} 0',  # or Prometheus does not see its first count
            'gpuslice_agent_devices{health="healthy"} 30',
            "gpuslice_agent_registered 1",
            'gpuslice_agent_request_seconds_count{call="Allocate"} 2',
        ):
            assert line in text.splitlines(), line
        assert [card["units"] for card in state["cards"]] == [15, 15]
        assert [want["pod"] for want in state["waiting"]] == ["default/q"]
        assert state["rules"] == {"mode": "shared", "divides_compute": False}
