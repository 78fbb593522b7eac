"""What nobody requested of a card is lent to pods that may have more, and called back in time."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

from gpuslice.adapters.kube.resources import PODS
from gpuslice.core.units import MIB
from tests.integration.agent_bench import Bench, Pod, eventually, uuid
from tests.integration.test_agent_resize import OF, annotate, limit_mib
from tests.integration.test_agent_watchdog import Tenant, holds, warnings

LIMIT = "gpuslice.io/memory-limit"
RESERVE_MIB = 1024
ENDS: dict[str, Any] = {"watchdog": "stop"}


async def borrower(node: Bench, name: str, limit: str = "15") -> Tenant:
    """A running pod of 4 units that may have more."""
    tenant = Tenant(node, name)
    await tenant.start()
    await node.annotated(name, ASSIGNED="true")
    await node.client.merge_patch(PODS, name, {"metadata": {"annotations": {LIMIT: limit}}}, "default")
    return tenant


async def has(node: Bench, pod: Pod, mib: int) -> None:
    await eventually(lambda: limit_mib(node, pod) == mib, f"a limit of {mib} MiB")


async def test_a_pod_has_what_nobody_requested_up_to_its_limit(tmp_path: Path) -> None:
    async with Bench(tmp_path, settings=ENDS).running() as node:
        one = await borrower(node, "a", "10")
        await has(node, one.pod, OF[10])
        await annotate_limit(node, "a", "15")
        await has(node, one.pod, 16130 - RESERVE_MIB)
        await annotate_limit(node, "a", None)
        await has(node, one.pod, OF[4])


async def annotate_limit(node: Bench, name: str, limit: str | None) -> None:
    await node.client.merge_patch(PODS, name, {"metadata": {"annotations": {LIMIT: limit}}}, "default")


async def test_nothing_is_lent_where_nobody_would_end_what_is_not_given_back(tmp_path: Path) -> None:
    async with Bench(tmp_path, settings={"watchdog": "warn"}).running() as node:
        one = await borrower(node, "a")
        other = await borrower(node, "b")
        await annotate(node, "b", request="6", granted='{"main":6}')
        await has(node, other.pod, OF[6])  # time has passed
        assert limit_mib(node, one.pod) == OF[4]


async def test_what_is_requested_is_called_back_before_its_container_starts(tmp_path: Path) -> None:
    async with Bench(tmp_path, settings=ENDS).running() as node:
        one = await borrower(node, "a")
        await has(node, one.pod, 16130 - RESERVE_MIB)
        new = await node.place("b", 10, 0)
        await node.kubelet.admit(new)
        await node.kubelet.start_container(new)
        assert limit_mib(node, new) == OF[10]
        assert limit_mib(node, one.pod) == OF[4] + 16130 - 15054 - RESERVE_MIB  # 14 units are requested
        await node.client.delete(PODS, "b", "default")
        node.kubelet.remove(new)


async def test_what_is_granted_to_a_running_pod_is_called_back_first_too(tmp_path: Path) -> None:
    async with Bench(tmp_path, settings=ENDS).running() as node:
        one, other = await borrower(node, "a"), Tenant(node, "b")
        await other.start()
        await node.annotated("b", ASSIGNED="true")
        with one.process() as program:
            holds(node, (program, 8000))
            await eventually(lambda: limit_mib(node, one.pod) > 8000)
            await annotate(node, "b", request="11", granted='{"main":11}')
            await eventually(lambda: program.poll() is not None, "what holds the excess has ended")
            holds(node)
            await eventually(lambda: limit_mib(node, other.pod) == 11828, "the grant is in force")
            assert limit_mib(node, one.pod) == OF[4]


async def test_who_gives_nothing_back_is_ended_and_the_container_starts_after_that(tmp_path: Path) -> None:
    async with Bench(tmp_path, settings=ENDS).running() as node:
        one = await borrower(node, "a")
        await has(node, one.pod, 16130 - RESERVE_MIB)
        with one.process() as large, one.process() as small:
            holds(node, (large, 9000), (small, 1000))
            place = one.pod["metadata"]["uid"], "main", uuid(0)
            await eventually(lambda: node.agent.lender.live.reported.get(place) == 10000 * MIB)
            new = await node.place("b", 10, 0)
            await node.kubelet.admit(new)
            starts = asyncio.create_task(node.kubelet.start_container(new))
            await eventually(lambda: large.poll() is not None, "the largest has ended")
            assert not starts.done()
            assert large.returncode == -signal.SIGTERM
            holds(node, (small, 1000))
            await starts
            assert small.poll() is None
            messages = await warnings(node, "GPUMemoryCalledBack")
            assert any("called back for default/b, who requested it" in each for each in messages)
            assert any(
                "waits for memory of card" in each and "default/a borrowed" in each for each in messages
            )
            assert not await warnings(node)


async def test_a_new_agent_knows_what_was_lent(tmp_path: Path) -> None:
    async with Bench(tmp_path, settings=ENDS).running() as node:
        one = await borrower(node, "a")
        await has(node, one.pod, 16130 - RESERVE_MIB)
        await node.restart_agent()
        new = await node.place("b", 10, 0)
        await node.kubelet.admit(new)
        await node.kubelet.start_container(new)
        assert limit_mib(node, one.pod) == OF[4] + 16130 - 15054 - RESERVE_MIB
        assert limit_mib(node, new) == OF[10]


async def test_a_pod_that_was_never_given_a_limit_is_never_touched(tmp_path: Path) -> None:
    async with Bench(tmp_path, settings=ENDS).running() as node:
        plain = Tenant(node, "a")
        await plain.start()
        one = await borrower(node, "b")
        await has(node, one.pod, 16130 - OF[8] + OF[4] - RESERVE_MIB)
        with plain.process() as program:
            holds(node, (program, OF[4]))
            new = await node.place("c", 7, 0)
            await node.kubelet.admit(new)
            await node.kubelet.start_container(new)
            assert program.poll() is None
            assert limit_mib(node, plain.pod) == OF[4]


async def test_programs_are_asked_before_they_are_ended_and_are_told_how_much(tmp_path: Path) -> None:
    async with Bench(tmp_path, settings=ENDS).running() as node:
        one = await borrower(node, "a")
        await has(node, one.pod, 16130 - RESERVE_MIB)
        with one.process() as program:
            holds(node, (program, 9000))
            place = one.pod["metadata"]["uid"], "main", uuid(0)
            await eventually(lambda: node.agent.lender.live.reported.get(place) == 9000 * MIB)
            new = await node.place("b", 10, 0)
            await node.kubelet.admit(new)
            starts = asyncio.create_task(node.kubelet.start_container(new))
            limit = OF[4] + 16130 - 15054 - RESERVE_MIB
            asked = f"{uuid(0)} release={(9000 - limit) * MIB}\n"
            await eventually(lambda: pressure(node, one.pod) == asked, "it is asked")
            holds(node, (program, limit))
            await starts
            assert program.poll() is None
            assert pressure(node, one.pod) == ""
            assert not await warnings(node, "GPUMemoryCalledBack")


def pressure(node: Bench, pod: Pod) -> str | None:
    path = (
        node.agent.folders.region(node.agent.folders.current(node.kubelet.ids(pod))).parents[1]
        / "etc/pressure"
    )
    return path.read_text() if path.exists() else None


async def test_what_a_pod_borrowed_before_its_limit_was_taken_away_is_called_back_as_well(
    tmp_path: Path,
) -> None:
    async with Bench(tmp_path, settings=ENDS).running() as node:
        one = await borrower(node, "a")
        await has(node, one.pod, 16130 - RESERVE_MIB)
        with one.process() as program:
            holds(node, (program, 9000))
            place = one.pod["metadata"]["uid"], "main", uuid(0)
            await eventually(lambda: node.agent.lender.live.reported.get(place) == 9000 * MIB)
            await annotate_limit(node, "a", None)
            await has(node, one.pod, OF[4])
            new = await node.place("b", 10, 0)
            await node.kubelet.admit(new)
            starts = asyncio.create_task(node.kubelet.start_container(new))
            await eventually(lambda: program.poll() is not None, "what holds the excess has ended")
            assert not starts.done()
            holds(node)
            await starts
