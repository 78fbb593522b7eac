"""What a Service is to its clients: one address that leads to a replica that is ready.

As with kube-proxy, readiness decides where a *new* connection goes; one that is open stays where it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from tests.e2e.cluster import Running

PROBE_EVERY_S = 0.05


@dataclass
class Service:
    """The replicas behind one port, and since when which of them is ready."""

    replicas: list[Running] = field(default_factory=list)
    port: int = 0
    ready: Running | None = None
    probed: asyncio.Event = field(default_factory=asyncio.Event)
    both_ready: bool = False  # ever two at once
    connections: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    async def until_ready(self, timeout_s: float) -> float:
        """Seconds until a replica was ready; TimeoutError."""
        began = time.monotonic()
        async with asyncio.timeout(timeout_s):
            while self.ready is None:
                self.probed.clear()
                await self.probed.wait()
        return time.monotonic() - began

    async def probe(self) -> None:
        while True:
            asked = list(self.replicas)
            said_yes = [each for each in asked if await asyncio.to_thread(each.ready)]
            ready = [each for each in said_yes if each in self.replicas]  # not those removed meanwhile
            self.both_ready |= len(ready) > 1
            self.ready = ready[0] if ready else None
            self.probed.set()
            await asyncio.sleep(PROBE_EVERY_S)

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.connections.add(task)
        try:
            if self.ready is not None:
                await _joined(reader, writer, self.ready.port)
        except (OSError, asyncio.CancelledError):
            pass  # the replica is gone, or the test is over: its client sees the connection end
        finally:
            self.connections.discard(task)
            writer.close()

    async def close(self) -> None:
        for task in tuple(self.connections):
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)


async def _joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """Until either side ends it."""
    from_replica, to_replica = await asyncio.open_connection("127.0.0.1", port)
    ways = [_pump(reader, to_replica), _pump(from_replica, writer)]
    tasks = [asyncio.create_task(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        to_replica.close()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while chunk := await source.read(65536):
        sink.write(chunk)
        await sink.drain()


@contextlib.asynccontextmanager
async def service(*replicas: Running) -> AsyncIterator[Service]:
    made = Service(list(replicas))
    server = await asyncio.start_server(made.connect, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    probing = asyncio.create_task(made.probe())
    try:
        yield made
    finally:
        probing.cancel()
        server.close()
        await made.close()
        await asyncio.sleep(0)  # what was closed says so to the loop
