"""Two agents on one node, as an update has it: the next one stands by until this one ends."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gpuslice.adapters.gpu.recorded import RecordedSource
from gpuslice.adapters.kube.resources import EVENTS
from gpuslice.adapters.web.app import Router
from gpuslice.adapters.web.serve import Listen
from gpuslice.apps.agent.active_lock import ActiveLock, serving_once_free
from gpuslice.apps.agent.main import Agent
from gpuslice.apps.settings import SettingsError
from gpuslice_demo.ports import free_port
from tests import HANG_S
from tests.integration.agent_bench import NODE, Bench, eventually

SMALLER_MIB = 15079


@contextlib.asynccontextmanager
async def next_agent(bench: Bench, **settings: Any) -> AsyncIterator[Agent]:
    """The agent of an update, which sees a card of another size; it is asked to end at the end."""
    recording = bench.folder / "next.json"
    recording.write_text(bench.recording.read_text().replace("16130", str(SMALLER_MIB)))
    bench.settings = {**bench.settings, **settings}
    agent = Agent(
        bench.agent_settings(), bench.client, RecordedSource(recording, poll_s=0.05), boot=bench.boot
    )
    stopped = asyncio.Event()
    running = asyncio.create_task(agent.run(stopped.wait()))
    try:
        yield agent
    finally:
        stopped.set()
        await running


async def told_memory_mib(bench: Bench) -> int:
    text = (await bench.node_object())["metadata"].get("annotations", {}).get("gpuslice.io/gpus")
    return int(json.loads(text)[0]["memory_mib"]) if text else 0


async def readiness(port: int) -> int:
    with contextlib.suppress(aiohttp.ClientError):
        async with aiohttp.ClientSession() as web, web.get(f"http://127.0.0.1:{port}/readyz") as answer:
            return answer.status
    return 0


async def test_the_next_agent_is_prepared_and_takes_over_when_this_one_ends(tmp_path: Path) -> None:
    port = free_port()
    bench = Bench(tmp_path, settings={"port": port})
    async with bench.running(), next_agent(bench) as following:
        await eventually(lambda: following.not_ready() == "", "the next one is prepared")
        assert following.state.node.cards
        assert not following.lock.held.is_set()
        assert (bench.kubelet.healthy(), bench.agent.server.registered) == (15, True)
        await bench.stop_agent()
        await eventually(lambda: following.server.registered, "the next one is registered")
        await eventually(lambda: bench.kubelet.healthy() == 14, "kubelet follows its list")
        await eventually(lambda: _is(readiness(port), 200), "it answers on the same port")


async def test_an_agent_that_stands_by_writes_nothing(tmp_path: Path) -> None:
    """Two versions that wrote different things about one node would undo each other's for ever."""
    bench = Bench(tmp_path)
    async with bench.running():
        await eventually(lambda: _is(told_memory_mib(bench), 16130), "this one told of its card")
        async with next_agent(bench, node_label="cgpu") as following:
            await eventually(lambda: following.not_ready() == "", "the next one is prepared")
            following.node.wake()
            await following.cards.refresh()
            pod = await bench.place("p", 4, 0)
            await bench.kubelet.admit(pod)
            await bench.annotated("p", ASSIGNED="true")
            assert await told_memory_mib(bench) == 16130
        found = await bench.client.list(EVENTS)
        assert not [each for each in found.items or () if each.reason == "GPUSharingEnds"]
        assert bench.agent.server.registered


async def test_what_the_next_agent_found_is_written_once_it_is_its_turn(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.running():
        await eventually(lambda: _is(told_memory_mib(bench), 16130), "this one told of its card")
        async with next_agent(bench) as following:
            await eventually(lambda: following.not_ready() == "", "the next one is prepared")
            await bench.kill_agent()
            await eventually(lambda: following.server.registered, "the next one is registered")
            await eventually(
                lambda: _is(told_memory_mib(bench), SMALLER_MIB), "the next one told of its card"
            )


async def test_a_port_of_its_own_is_served_while_it_stands_by(tmp_path: Path) -> None:
    """Else an update that changes the port would wait for ever for the next one to be ready."""
    bench = Bench(tmp_path, settings={"port": free_port()})
    async with bench.running():
        other = free_port()
        async with next_agent(bench, port=other) as following:
            await eventually(lambda: _is(readiness(other), 200), "ready on its own port")
            assert not following.lock.held.is_set()


async def test_a_folder_that_cannot_be_locked_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    labels = {"cgpu.disable.isolation": "true"}
    bench = Bench(tmp_path, labels=labels, settings={"root": str(tmp_path / "file")})
    async with bench.running() as node:
        assert node.kubelet.healthy() == 15
        assert (await node.node_object())["metadata"]["name"] == NODE


async def test_the_turn_is_given_up_only_when_kubelet_is_served_no_more(tmp_path: Path) -> None:
    """Some versions of kubelet take the end of the old stream for that of the new one."""
    lock, following = ActiveLock(tmp_path), ActiveLock(tmp_path)
    first, second = (asyncio.create_task(each.hold()) for each in (lock, following))
    await lock.held.wait()
    with lock.serving():
        first.cancel()
        await asyncio.wait({first}, timeout=0.2)
        assert not first.done()
        assert not following.held.is_set()
    await asyncio.wait({first})
    await asyncio.wait_for(following.held.wait(), HANG_S)
    second.cancel()
    await asyncio.wait({second})


async def test_no_other_user_of_the_host_can_hold_the_lock(tmp_path: Path) -> None:
    """Whoever can open a folder can lock it, and no agent would serve the node."""
    tmp_path.chmod(0o755)  # as /var/lib/gpuslice
    lock = ActiveLock(tmp_path)
    holding = asyncio.create_task(lock.hold())
    await lock.held.wait()
    held = [folder for folder in (tmp_path, *tmp_path.iterdir()) if is_locked(folder)]
    assert [folder.stat().st_mode & 0o777 for folder in held] == [0o700]
    holding.cancel()
    await asyncio.wait({holding})


def is_locked(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


async def test_a_port_of_another_program_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        listen = Listen(int(other.getsockname()[1]), "127.0.0.1")
        lock = ActiveLock(Path("/"))
        lock.held.set()
        with pytest.raises(SettingsError, match=f"port {listen.port} is used by another program"):
            async with serving_once_free(Router([]), listen, lock, patience_s=0.1):
                pass


async def _is(coming: Any, wanted: Any) -> bool:
    found: Any = await coming
    return bool(found == wanted)
