"""An idle holder gives its memory to those that borrow, and has it again as soon as it calls the driver."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from gpuslice.adapters.kube.resources import PODS
from tests.integration.agent_bench import eventually, uuid
from tests.integration.parking_rig import V100_MIB, parking_node
from tests.integration.sim_driver_client import MIB
from tests.integration.test_agent_resize import OF

RESERVE_MIB = 1024
ALONE_MIB = V100_MIB - OF[8] - RESERVE_MIB  # what two pods of 4 units leave to a borrower
PARKS = {"gpuslice.io/when-idle": "park", "gpuslice.io/idle-after": "10s"}


async def test_an_order_parks_a_pod_and_another_one_wakes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with parking_node(tmp_path, monkeypatch) as node:
        one = await node.tenant("a")
        before = one.held_mib()
        await one.order("park")
        await one.is_parked()
        await one.order("wake")
        await one.runs()
        assert one.held_mib() == before
        found = await node.bench.annotations("a")
        assert not {"gpuslice.io/park", "gpuslice.io/parked"} & found.keys()


async def test_what_is_parked_is_lent_and_called_back_before_its_holder_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with parking_node(tmp_path, monkeypatch) as node:
        holder = await node.tenant("a", holds_mib=1000)
        borrower = await node.tenant("b", limit="15", holds_mib=1000)
        await node.lends(borrower, ALONE_MIB)
        held = holder.held_mib()
        await holder.order("park")
        await holder.is_parked()
        await node.lends(borrower, ALONE_MIB + held)
        borrower.process.alloc((V100_MIB - OF[4] - RESERVE_MIB) * MIB)  # of which it has to give back most
        await holder.order("wake")
        await eventually(lambda: borrower.process.process.poll() is not None, "the excess is ended")
        await holder.runs()
        assert holder.held_mib() == held
        holder.process.alloc(MIB)


async def test_any_call_of_the_driver_wakes_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with parking_node(tmp_path, monkeypatch) as node:
        one = await node.tenant("a")
        address = one.process.alloc(2 * MIB)
        await one.order("park")
        await one.is_parked()
        await asyncio.sleep(0.2)
        assert await one.condition() == "True"  # nobody called
        copy = threading.Thread(target=one.process.cu, args=("cuMemsetD8_v2", address, 7, 16), daemon=True)
        copy.start()
        await one.runs()
        await asyncio.to_thread(copy.join, 10)
        assert not copy.is_alive()


async def test_the_longest_idle_is_parked_when_a_borrower_needs_room_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with parking_node(tmp_path, monkeypatch) as node:
        idle = await node.tenant("a", 2, 500, annotations=PARKS)
        busy = await node.tenant("b", 2, 500, annotations=PARKS)
        keeps = await node.tenant("c", 2, 500)
        node.source.busy.add(busy.process.pid)
        borrower = await node.tenant("d", limit="15", holds_mib=1000)
        await asyncio.sleep(1)
        node.later(60)
        await asyncio.sleep(1)
        assert {await each.condition() for each in (idle, busy, keeps)} == {""}  # nobody needs room
        lease = node.bench.agent.lender.lease_bytes(*borrower.place, uuid(0)) // MIB
        borrower.process.alloc((OF[4] + lease - 1000 - 600 - 64) * MIB)
        await idle.is_parked()
        assert {await each.condition() for each in (busy, keeps)} == {""}


@pytest.mark.parametrize(
    ("fields", "settings", "why"),
    [
        ({"memory_max": str(100 * MIB)}, {}, "ask for more resources.limits.memory"),
        ({}, {"parking_host_mib": 100}, "this node gives them"),
        ({}, {"driver": "535"}, "570 is the first"),
        ({}, {"watchdog": "warn"}, "lends nothing to others"),
    ],
    ids=["no host memory", "the node's bound", "old driver", "no lending"],
)
async def test_what_cannot_be_parked_is_not_touched_and_told_why(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, object],
    settings: dict[str, object],
    why: str,
) -> None:
    async with parking_node(tmp_path, monkeypatch, **settings) as node:  # type: ignore[arg-type]
        one = await node.tenant("a", **fields)  # type: ignore[arg-type]
        held = one.held_mib()
        await one.order("park")
        await one.warned(why)
        assert one.held_mib() == held


async def test_what_uses_nearly_all_of_its_request_stays_on_its_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once its neighbours have grown to theirs, what the driver itself needs of the card would be missing."""
    async with parking_node(tmp_path, monkeypatch) as node:
        one = await node.tenant("a")
        one.process.alloc((OF[4] - one.held_mib() - 4) * MIB)
        await one.order("park")
        await one.warned("to be sure of its return it must leave the 10 MiB that the driver takes")
        assert one.held_mib() > 0


async def test_a_new_agent_reads_from_the_driver_who_is_parked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with parking_node(tmp_path, monkeypatch) as node:
        one, other = await node.tenant("a"), await node.tenant("b", limit="15")
        held = one.held_mib()
        await one.order("park")
        await one.is_parked()
        await node.lends(other, ALONE_MIB + held)
        await node.bench.restart_agent()
        await eventually(lambda: one.place in node.bench.agent.parker.parked, "it is known")
        await node.lends(other, ALONE_MIB + held)
        await one.order("wake")
        await one.runs()


async def test_an_agent_that_died_in_a_move_leaves_nobody_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with parking_node(tmp_path, monkeypatch) as node:
        one = await node.tenant("a")
        patch = {"metadata": {"annotations": {"gpuslice.io/parked": f'{{"main":{{"{uuid(0)}":1}}}}'}}}
        await node.bench.kill_agent()
        await node.bench.client.merge_patch(PODS, "a", patch, "default")
        with one.node_tool() as tool:
            tool.cu("cuInit", 0)
            tool.cu("cuCheckpointProcessLock", one.process.pid, None)
        await node.bench.start_agent()
        await one.runs()
        one.process.alloc(MIB)


async def test_a_container_that_ends_while_it_is_parked_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with parking_node(tmp_path, monkeypatch) as node:
        one = await node.tenant("a")
        await one.order("park")
        await one.is_parked()
        one.end()
        await node.bench.client.delete(PODS, "a", "default", grace_s=0)
        node.bench.kubelet.remove(one.pod)
        await eventually(lambda: not node.bench.agent.parker.parked, "it is forgotten")
        assert node.bench.agent.lender.parked_bytes(*one.place, uuid(0)) == 0


async def test_a_wake_waits_while_a_stranger_holds_the_card_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with parking_node(tmp_path, monkeypatch) as node:
        one = await node.tenant("a")
        held = one.held_mib()
        await one.order("park")
        await one.is_parked()
        with one.node_tool() as stranger:  # of the host: nobody counts it
            free, _ = stranger.start().memory()
            filler = stranger.alloc(free - 500 * MIB)
            await one.order("wake")
            await one.warned("waits for")
            assert one.held_mib() == 0
            stranger.cu("cuMemFree_v2", filler)
            await one.runs()
        assert one.held_mib() == held


async def test_a_container_that_starts_again_has_its_room_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with parking_node(tmp_path, monkeypatch) as node:
        one, other = await node.tenant("a"), await node.tenant("b", limit="15")
        held = one.held_mib()
        await one.order("park")
        await one.is_parked()
        await node.lends(other, ALONE_MIB + held)
        one.end()
        await node.bench.kubelet.start_container(one.pod)
        lease = node.bench.agent.lender.lease_bytes(*other.place, uuid(0)) // MIB
        assert lease <= ALONE_MIB
