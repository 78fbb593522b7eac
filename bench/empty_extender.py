"""An extender that decides nothing: what any extender costs, for `end_to_end.py` to show beside ours.

    KUBECONFIG=... python bench/empty_extender.py --port 12345 --busy-ms 1.4

It passes the first node that kube-scheduler asks about and binds the pod there, without TLS, annotations,
fence, ledger, watches or bounds; kube-scheduler's own sums are all that prevents over-commitment.
`--busy-ms` makes it compute for that long at each question, like one that decides something.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.e2e.cluster import Running, wait_ready  # noqa: E402 - after the path to it
from tests.e2e.control_plane import ControlPlane  # noqa: E402

from gpuslice.adapters.kube.client import KubeClient  # noqa: E402
from gpuslice.adapters.kube.config import connect  # noqa: E402
from gpuslice.adapters.kube.transport import HttpTransport  # noqa: E402
from gpuslice_demo.ports import free_port  # noqa: E402


class Question(msgspec.Struct):
    """A request to `filter` (`NodeNames`) or to `bind` (the other fields)."""

    NodeNames: list[str] = []
    PodName: str = ""
    PodNamespace: str = ""
    PodUID: str = ""
    Node: str = ""


class Answering(asyncio.Protocol):
    """One HTTP/1.1 connection of a client that waits for each answer."""

    def __init__(self, client: KubeClient, busy_s: float) -> None:
        self._client = client
        self._busy_s = busy_s
        self._received = b""
        self._binds = set[asyncio.Task[None]]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not one by type

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = int((head.lower() + b"\r\n").partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
        if not end or len(body) < length:
            return
        self._received = b""
        question = msgspec.json.decode(body or b"{}", type=Question)
        if question.Node:
            bind = asyncio.create_task(self._bind(question))
            self._binds.add(bind)
            bind.add_done_callback(self._binds.discard)
        else:  # a filter, or a health check
            end_s = time.thread_time() + self._busy_s
            while time.thread_time() < end_s:
                pass
            self._answer({"NodeNames": question.NodeNames[:1], "FailedNodes": {}, "Error": ""})

    async def _bind(self, question: Question) -> None:
        where = (question.PodNamespace, question.PodName, question.Node)
        await self._client.bind(*where, uid=question.PodUID)
        self._answer({"Error": ""})

    def _answer(self, value: dict[str, Any]) -> None:
        body = msgspec.json.encode(value)
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


@contextlib.contextmanager
def empty_extender(plane: ControlPlane, busy_ms: float) -> Iterator[Running]:
    """An extender that decides nothing, as a process; it answers every path."""
    port = free_port()
    command = [sys.executable, __file__, f"--port={port}", f"--busy-ms={busy_ms}"]
    environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig)}
    with (plane.folder / "empty_extender.log").open("ab") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        running = Running(port, process, tls=False)
        wait_ready(running)
        yield running
    finally:
        process.terminate()
        process.wait(30)


async def serve(port: int, busy_s: float) -> None:
    async with HttpTransport(connect(os.environ), connections=100) as transport:
        client = KubeClient(transport)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Answering(client, busy_s), "127.0.0.1", port)
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--busy-ms", type=float, default=0.0)
    chosen = parser.parse_args()
    uvloop.run(serve(chosen.port, chosen.busy_ms / 1e3))
