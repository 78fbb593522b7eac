"""kubelet's sockets and ours where the other side takes its time, or never comes to an end."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hpack import Encoder
from hyperframe.frame import DataFrame, HeadersFrame, SettingsFrame

from gpuslice.adapters.kubelet.podresources import PodResources, PodResourcesError
from gpuslice.adapters.kubelet.rpc import Server, unix_channel
from simcluster.kubelet.rpc import DevicePluginClient
from tests import HANG_S
from tests.unit.test_kubelet_garbage import PREFACE, next_head
from tests.unit.test_kubelet_wire import MEM, Plugin

TIMEOUT_S = 0.3
Send = Callable[[asyncio.StreamWriter], Coroutine[Any, Any, None]]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wire-") as name:  # socket paths must be short
        yield Path(name)


@contextlib.asynccontextmanager
async def kubelet(path: Path, send: Send) -> AsyncIterator[None]:
    """One that begins an answer and goes on with `send` until its client leaves."""
    head = Encoder().encode([(":status", "200"), ("content-type", "application/grpc")])

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(PREFACE))
        await next_head(reader)
        writer.write(SettingsFrame(0).serialize() + HeadersFrame(1, head, flags=["END_HEADERS"]).serialize())
        sending = asyncio.create_task(send(writer))
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
        left.set()

    left = asyncio.Event()
    async with await asyncio.start_unix_server(answer, path):
        yield
        async with asyncio.timeout(HANG_S):
            await left.wait()


async def nothing(_: asyncio.StreamWriter) -> None:
    return None


async def byte_by_byte(writer: asyncio.StreamWriter) -> None:
    """Of a message that is said to have 4 GiB."""
    writer.write(DataFrame(1, b"\0\xff\xff\xff\xff").serialize())
    while True:
        writer.write(DataFrame(1, b"x").serialize())
        await writer.drain()
        await asyncio.sleep(0.001)


async def endless(writer: asyncio.StreamWriter) -> None:
    """Faster than anybody gives leave for."""
    writer.write(DataFrame(1, b"\0\xff\xff\xff\xff").serialize())
    while True:
        writer.write(DataFrame(1, b"x" * 16_384).serialize())
        await writer.drain()


@pytest.mark.parametrize("send", [nothing, byte_by_byte, endless])
async def test_an_answer_that_does_not_end_is_a_failed_call_and_holds_up_nobody(
    folder: Path, send: Send
) -> None:
    path, ticks = folder / "kubelet.sock", 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(TIMEOUT_S / 30)
            ticks += 1

    async with kubelet(path, send):
        ticking, began_s = asyncio.create_task(tick()), time.monotonic()
        with pytest.raises(PodResourcesError):
            await PodResources(path, timeout_s=TIMEOUT_S).assignments(MEM)
        took_s = time.monotonic() - began_s
        ticking.cancel()
    assert took_s < HANG_S
    assert ticks >= min(3, took_s // (TIMEOUT_S / 5)), "the loop went on meanwhile"


async def test_who_is_connected_and_says_nothing_keeps_nobody_from_being_answered(folder: Path) -> None:
    path = folder / "p.sock"
    server = Server([Plugin()])
    await server.start(path=str(path))
    begun = [b"", PREFACE[:10], PREFACE, PREFACE + b"\0\0\xff\1\4\0\0\0\1", b"GET / HTTP/1.1\r\n\r\n"]
    lines = [await asyncio.open_unix_connection(path) for _ in range(200)]
    for number, (_, writer) in enumerate(lines):
        writer.write(begun[number % len(begun)])
    async with unix_channel(path) as channel:
        assert (await DevicePluginClient(channel).get_device_plugin_options(HANG_S)).pre_start_required
    server.close()
    async with asyncio.timeout(HANG_S):
        await server.wait_closed()
    for _, writer in lines:
        writer.close()


async def test_a_kubelet_that_comes_during_a_call_is_asked_next(folder: Path) -> None:
    """The one of before keeps its connection, and never answers."""
    path = folder / "kubelet.sock"
    async with kubelet(path, nothing):
        asking = asyncio.create_task(PodResources(path, timeout_s=TIMEOUT_S).assignments(MEM))
        await asyncio.sleep(TIMEOUT_S / 3)
        path.unlink()
        begun = asyncio.Event()

        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            begun.set()
            writer.close()

        async with await asyncio.start_unix_server(accepted, path):
            with pytest.raises(PodResourcesError):
                await asking
            assert not begun.is_set()
            with pytest.raises(PodResourcesError):
                await PodResources(path, timeout_s=TIMEOUT_S).assignments(MEM)
            assert begun.is_set()
