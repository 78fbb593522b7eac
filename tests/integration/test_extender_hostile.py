"""Hostile clients at the real process: whatever they send, its memory stays below what its pod may take.

What is measured is the peak of the process's resident memory, as the kernel keeps it (``VmHWM``).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import re
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import pytest
import trustme
from h2.config import H2Configuration
from h2.connection import H2Connection
from hyperframe.frame import HeadersFrame, SettingsFrame

from simcluster.apiserver.server import ApiServer
from tests import HANG_S
from tests.integration.extender_rig import PREFIX, Api, cluster
from tests.integration.http2_rig import PREFACE

POD_LIMIT_BYTES = 512 << 20  # the chart's
NAME = "gpuslice-scheduler"
ROOT = Path(__file__).resolve().parents[2]
POST = f"POST {PREFIX}/filter HTTP/1.1\r\nHost: x\r\n"


@dataclass
class Victim:
    """The extender's process, and how clients reach it: with kube-scheduler's certificate or without one."""

    process: subprocess.Popen[bytes]
    api: Api
    port: int
    known: ssl.SSLContext
    unknown: ssl.SSLContext

    def peak_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None, "the process has ended"
        return int(found[1]) << 10

    async def ask(self, names: list[str]) -> aiohttp.ClientResponse:
        """A question as kube-scheduler's, on a connection of its own."""
        pod = self.api.pod("p")
        async with aiohttp.ClientSession() as session:
            url = f"https://localhost:{self.port}{PREFIX}/filter"
            body = msgspec.json.encode({"Pod": pod, "Nodes": None, "NodeNames": names})
            async with session.post(url, data=body, ssl=self.known) as answer:
                await answer.read()
                return answer


@contextlib.asynccontextmanager
async def victim(folder: Path) -> AsyncIterator[Victim]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    shown = authority.issue_cert("localhost")
    shown.private_key_pem.write_to_path(str(folder / "tls.key"))
    shown.cert_chain_pems[0].write_to_path(str(folder / "tls.crt"))
    contexts = []
    for certificate in (authority.issue_cert(NAME), None):
        context = ssl.create_default_context()
        authority.configure_trust(context)
        if certificate is not None:
            certificate.configure_cert(context)
        contexts.append(context)
    api = cluster(n1=(30, 2))
    api.add_pod("p", "4")
    async with ApiServer(api.cluster) as server:
        (folder / "kubeconfig").write_text(server.kubeconfig())
        code = "from gpuslice.apps.extender.command import command; command()"
        flags = ["--port=0", "--host=127.0.0.1", f"--tls-client-names={NAME}", "--debug-tokens"]
        flags += [f"--tls-{flag}={folder / file}" for flag, file in FILES.items()]
        environment = {**os.environ, "KUBECONFIG": str(folder / "kubeconfig")}
        process = await asyncio.to_thread(
            subprocess.Popen, [sys.executable, "-c", code, *flags], env=environment, stderr=subprocess.PIPE
        )
        try:
            yield Victim(process, api, await asyncio.to_thread(port_of, process), *contexts)
        finally:
            process.kill()
            await asyncio.to_thread(process.communicate)


FILES = {"certificate": "tls.crt", "key": "tls.key", "client-ca": "ca.crt"}


def port_of(process: subprocess.Popen[bytes]) -> int:
    """By its log."""
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(rb'"port":\s*(\d+)', line)
        if b"serving" in line and found:
            return int(found[1])
    raise AssertionError("the extender did not start")


# -- what they do ------------------------------------------------------------------------------------------

Attack = Callable[[Victim, contextlib.AsyncExitStack, ssl.SSLContext], Awaitable[None]]


async def line(
    stack: contextlib.AsyncExitStack, port: int, context: ssl.SSLContext | None
) -> asyncio.StreamWriter | None:
    """A connection; None where it was cut at once."""
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("localhost", port, ssl=context)
        stack.push_async_callback(gone, writer)
        return writer
    return None


async def gone(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def send(writer: asyncio.StreamWriter | None, data: bytes) -> None:
    if writer is not None:
        with contextlib.suppress(OSError):
            writer.write(data)
            await asyncio.wait_for(writer.drain(), 1)


async def bodies_that_never_end(
    at: Victim, stack: contextlib.AsyncExitStack, context: ssl.SSLContext
) -> None:
    """Each holds a byte less than the step at which it would be counted, or than a MiB."""
    head = f"{POST}Content-Length: {2 << 20}\r\n\r\n".encode()
    for size in ((1 << 20) - 1, (1 << 16) - 1):
        for _ in range(200):
            await send(await line(stack, at.port, context), head + b"x" * size)


async def heads_that_never_end(at: Victim, stack: contextlib.AsyncExitStack, context: ssl.SSLContext) -> None:
    for _ in range(400):
        await send(await line(stack, at.port, context), f"{POST}X: {'x' * 32_000}".encode())


async def handshakes_that_never_end(
    at: Victim, stack: contextlib.AsyncExitStack, context: ssl.SSLContext
) -> None:
    for _ in range(800):
        await send(await line(stack, at.port, None), b"\x16\x03\x01\x02\x00\x01\x00")


async def answers_that_nobody_reads(
    at: Victim, stack: contextlib.AsyncExitStack, context: ssl.SSLContext
) -> None:
    """Thousands of requests sent ahead on each connection."""
    ahead = f"GET {PREFIX}/inspect HTTP/1.1\r\nHost: x\r\n\r\n".encode() * 4000
    for _ in range(100):
        await send(await line(stack, at.port, context), ahead)


async def questions_that_grow_when_read(
    at: Victim, stack: contextlib.AsyncExitStack, context: ssl.SSLContext
) -> None:
    pod = b'{"metadata":{"name":"p","uid":"u"},"spec":{"containers":[]}}'
    names = b'{"Pod":' + pod + b',"Nodes":null,"NodeNames":[' + b'"a",' * (8 << 20) + b'"a"]}'
    nodes = b'{"Pod":' + pod + b',"Nodes":{"items":[' + b"{}," * (10 << 20) + b"{}]}}"
    deep = b"[" * (30 << 20)
    async with aiohttp.ClientSession() as session:
        for verb, body in (("filter", names), ("filter", nodes), ("preempt", nodes), ("prioritize", deep)):
            url = f"https://localhost:{at.port}{PREFIX}/{verb}"
            with contextlib.suppress(aiohttp.ClientError):
                async with session.post(url, data=io.BytesIO(body), ssl=context) as answer:
                    await answer.read()


async def streams_with_large_heads(
    at: Victim, stack: contextlib.AsyncExitStack, context: ssl.SSLContext
) -> None:
    """HTTP/2: 27 kB that are a dozen bytes on the wire, on each stream of each connection."""
    context.set_alpn_protocols(["h2"])
    encoder = H2Connection(H2Configuration()).encoder
    fields = [(":method", "GET"), (":path", "/healthz"), (":scheme", "https"), (":authority", "localhost")]
    sent = PREFACE + SettingsFrame(0).serialize()
    for stream in range(1, 250, 2):
        block = encoder.encode([*fields, *[("x", "a" * 3900)] * (1 if stream == 1 else 7)])
        sent += HeadersFrame(stream, block, flags=["END_HEADERS"]).serialize()
    for _ in range(60):
        await send(await line(stack, at.port, context), sent)


MOST_BYTES = (
    256 << 20
)  # beside what it takes anyway: requests and answers under way, and reading one question


@pytest.mark.parametrize(
    ("attack", "shows", "most_bytes"),
    [
        (bodies_that_never_end, "a certificate", MOST_BYTES),
        (bodies_that_never_end, "none", 16 << 20),  # not a byte of them is kept
        (heads_that_never_end, "none", MOST_BYTES),
        (handshakes_that_never_end, "none", MOST_BYTES),
        (answers_that_nobody_reads, "none", MOST_BYTES),
        (streams_with_large_heads, "none", 128 << 20),
        (questions_that_grow_when_read, "a certificate", MOST_BYTES),
    ],
)
async def test_no_client_makes_the_process_larger_than_its_pod_may_be(
    attack: Attack, shows: str, most_bytes: int, tmp_path: Path
) -> None:
    """Nor all of them together, and kube-scheduler is answered meanwhile."""
    async with victim(tmp_path) as at, contextlib.AsyncExitStack() as stack, asyncio.timeout(HANG_S):
        assert (await at.ask(["n1"])).status == 200
        before = at.peak_bytes()
        await attack(at, stack, at.known if shows == "a certificate" else at.unknown)
        assert (await at.ask(["n1"])).status == 200
        assert at.peak_bytes() - before < most_bytes
        assert at.peak_bytes() < POD_LIMIT_BYTES


@pytest.fixture(autouse=True)
def many_files() -> Iterator[None]:
    """Ours are as many as the victim's."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
