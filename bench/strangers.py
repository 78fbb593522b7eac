"""How long a known client's first request takes, alone and beside many strangers.

    python bench/strangers.py --json

Each process is started as it is deployed; strangers keep their connections and ask again at once. Known is
who shows a certificate, or where none is asked for, who comes from another address. For whom such a request
waits is counted by `tests/integration/test_web_strangers.py`; here is what that takes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import trustme

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.integration.extender_rig import Api  # noqa: E402 - after the path to it
from tests.integration.test_extender_hostile import port_of  # noqa: E402

from simcluster.apiserver.server import ApiServer  # noqa: E402

NAME = "gpuslice-scheduler"
PROCESSES: dict[str, list[str]] = {
    "extender": [
        "--tls-certificate=tls.crt",
        "--tls-key=tls.key",
        "--tls-client-ca=ca.crt",
        "--debug-tokens",
    ],
    "webhook": ["--tls-certificate=tls.crt", "--tls-key=tls.key"],
    "exporter": [],
    "claims": [],
}
REQUEST = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.contextmanager
def running(name: str, folder: Path) -> Iterator[int]:
    where = ["--address=127.0.0.1:0"] if name == "exporter" else ["--port=0", "--host=127.0.0.1"]
    command = [sys.executable, "-m", "gpuslice", name, *where, *PROCESSES[name]]
    environment = {**os.environ, "KUBECONFIG": str(folder / "kubeconfig"), "NODE_NAME": "n1"}
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE)
    try:
        yield port_of(process)
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def flood(port: int, clients: int, *, tls: bool) -> Iterator[None]:
    """From a process of its own, until it has been answered by all."""
    command = [sys.executable, __file__, f"--flood={port}", f"--strangers={clients}", f"--tls={int(tls)}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield
    finally:
        process.kill()
        process.communicate()


async def ask_for_ever(port: int, clients: int, *, tls: bool) -> None:
    answered = 0
    context = ssl._create_unverified_context() if tls else None

    async def stranger() -> None:
        nonlocal answered
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
                while True:
                    writer.write(REQUEST)
                    await reader.readuntil(b"\r\n\r\n")
                    await reader.readexactly(5)
                    answered += 1
                    if answered == 3 * clients:
                        print("answered", flush=True)

    await asyncio.gather(*(stranger() for _ in range(clients)))


def first_request_s(port: int, context: ssl.SSLContext | None) -> float:
    began = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0)) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line = context.wrap_socket(plain, server_hostname="localhost") if context is not None else plain
        line.sendall(REQUEST)
        while not line.recv(65536):
            pass
        return time.perf_counter() - began


def measured(port: int, context: ssl.SSLContext | None, clients: int, times: int) -> dict[str, float]:
    def median_ms() -> float:
        return round(1e3 * statistics.median(first_request_s(port, context) for _ in range(times)), 2)

    quiet = median_ms()
    with flood(port, clients, tls=context is not None):
        beside = median_ms()
    return {"quiet_ms": quiet, "beside_strangers_ms": beside, "times": round(beside / quiet, 2)}


async def all_of(clients: int, times: int, only: str) -> dict[str, dict[str, float]]:
    authority, found = trustme.CA(), {}
    known = ssl.create_default_context()
    authority.configure_trust(known)
    authority.issue_cert(NAME).configure_cert(known)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shown = authority.issue_cert("localhost")
        authority.cert_pem.write_to_path(str(folder / "ca.crt"))
        shown.private_key_pem.write_to_path(str(folder / "tls.key"))
        shown.cert_chain_pems[0].write_to_path(str(folder / "tls.crt"))
        async with ApiServer(Api().cluster) as server:
            (folder / "kubeconfig").write_text(server.kubeconfig())

            def row(process: str) -> dict[str, float]:
                context = known if PROCESSES[process] else None
                with running(process, folder) as port:
                    return measured(port, context, clients, times)

            for process in PROCESSES:
                if only in process:
                    found[process] = await asyncio.to_thread(row, process)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strangers", type=int, default=200)
    parser.add_argument("--times", type=int, default=50, help="requests of the known client")
    parser.add_argument("--only", default="", help="processes whose name contains this")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--flood", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--tls", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.flood:
        asyncio.run(ask_for_ever(given.flood, given.strangers, tls=bool(given.tls)))
    found = asyncio.run(all_of(given.strangers, given.times, given.only))
    if given.json:
        print(json.dumps(found, indent=2))
        return
    for process, row in found.items():
        print(f"{process:<10} {row['quiet_ms']:>8} ms {row['beside_strangers_ms']:>8} ms {row['times']:>6} ×")


if __name__ == "__main__":
    main()
