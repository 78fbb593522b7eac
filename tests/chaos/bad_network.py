"""Between our processes and a real API server: connections are cut, stopped, or lose an answer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from tests.e2e.control_plane import ControlPlane


@dataclass(eq=False)
class _Connection:
    """Two transports that pass bytes on. `passes` is clear while nothing gets through."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    passes: asyncio.Event = field(default_factory=asyncio.Event)
    loses_answer: bool = False

    def cut(self) -> None:
        self.client.transport.abort()
        self.server.transport.abort()


class BadNetwork:
    """A port of 127.0.0.1 that leads to the API server, in a thread of its own."""

    def __init__(self) -> None:
        self._port = self._target_port = 0
        self._connections: list[_Connection] = []
        self._loop = asyncio.new_event_loop()

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        begun = threading.Event()

        async def serve() -> None:
            server = await asyncio.start_server(self._joined, "127.0.0.1", 0)
            self._port = server.sockets[0].getsockname()[1]
            begun.set()

        thread = threading.Thread(target=self._loop.run_forever, name="bad network", daemon=True)
        thread.start()
        asyncio.run_coroutine_threadsafe(serve(), self._loop)
        begun.wait()
        try:
            yield
        finally:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()
            self._loop.close()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def kubeconfig(self, plane: ControlPlane) -> Path:
        """The administrator's, by this port, which leads there from now on."""
        self._target_port = urlsplit(plane.url).port or 0
        config = yaml.safe_load(plane.kubeconfig.read_text())
        config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{self._port}"
        file = plane.folder / "kubeconfig-by-bad-network"
        file.write_text(yaml.safe_dump(config))
        return file

    # -- what goes wrong; each says whether there was a connection to do it to -------------------------------

    def cut(self, dice: random.Random) -> bool:
        return self._do(dice, _Connection.cut)

    def lose_answer(self, dice: random.Random) -> bool:
        """The API server gets what is sent next, and its answer goes nowhere."""

        def loses(connection: _Connection) -> None:
            connection.loses_answer = True

        return self._do(dice, loses)

    def stop(self, dice: random.Random, seconds: float) -> bool:
        """Nothing gets through for so long, and then all of it."""

        def stops(connection: _Connection) -> None:
            connection.passes.clear()
            self._loop.call_later(seconds, connection.passes.set)

        return self._do(dice, stops)

    def _do(self, dice: random.Random, what: object) -> bool:
        open_now = list(self._connections)
        if not open_now:
            return False
        self._loop.call_soon_threadsafe(what, dice.choice(open_now))  # type: ignore[arg-type]
        return True

    # -- passing on ------------------------------------------------------------------------------------------

    async def _joined(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            answers, requests = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(writer, requests)
        connection.passes.set()
        self._connections.append(connection)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass(connection, reader, requests, answers=False))
                tasks.create_task(self._pass(connection, answers, writer, answers=True))
        finally:
            self._connections.remove(connection)
            connection.cut()

    @staticmethod
    async def _pass(
        connection: _Connection, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, answers: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await connection.passes.wait()
                if answers and connection.loses_answer:
                    break
                target.write(data)
                await target.drain()
        connection.cut()
