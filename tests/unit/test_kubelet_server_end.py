"""How a server of kubelet's services ends: no client keeps it waiting, and none is left connected."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.kubelet.rpc import Server
from tests import HANG_S
from tests.unit.test_kubelet_wire import Plugin


class WatchedServer(Server):
    """Tells the moment a client is accepted: asyncio connects it in a later turn of the loop."""

    def __init__(self) -> None:
        super().__init__([Plugin()])
        self.accepted = asyncio.Event()

    def _protocol_factory(self) -> Any:
        self.accepted.set()
        return super()._protocol_factory()


@pytest.mark.parametrize("turns", range(6))
async def test_no_connection_outlives_a_server_that_has_ended(tmp_path: Path, turns: int) -> None:
    """Of a client that is accepted in the turn of the loop in which the server ends, nothing is known yet."""
    server = Server([Plugin()])
    await server.start(path=str(tmp_path / "plugin.sock"))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "plugin.sock"))
        for _ in range(turns):
            await asyncio.sleep(0)
        server.close()
        await server.wait_closed()
        client.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=client)
        async with asyncio.timeout(HANG_S):
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_a_client_that_comes_while_a_server_ends_keeps_nobody_waiting(tmp_path: Path) -> None:
    server = WatchedServer()
    await server.start(path=str(tmp_path / "plugin.sock"))
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "plugin.sock"))
        await server.accepted.wait()
        server.close()
        async with asyncio.timeout(HANG_S):
            await server.wait_closed()
