"""Any number of strangers at our servers: who is known, or comes for the first time, hardly waits for them.

Counted is what the server does for strangers meanwhile, which does not depend on the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from gpuslice.adapters.web.app import Router, get
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, text_answer
from gpuslice.adapters.web.serve import Arrived, Listen, serving
from tests import HANG_S
from tests.integration.agent_bench import eventually

MOST_ANSWERS = 15
"""To strangers, while somebody connects, shakes hands and asks: two a turn of the server's loop."""
REQUEST = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"


class Served:
    """A server that counts its answers to strangers, and how others reach it."""

    def __init__(self) -> None:
        self.answers = 0
        self.port = 0
        self.known: ssl.SSLContext | None = None
        self.unknown: ssl.SSLContext | None = None
        self._stack = contextlib.AsyncExitStack()

    def answer(self, request: HttpRequest) -> HttpResponse:
        self.answers += request.headers.get("who") != "ours"
        return text_answer("x" * 1000)

    async def line(
        self, context: ssl.SSLContext | None, address: str = "127.0.0.1"
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        name = "localhost" if context is not None else None
        return await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=context, server_hostname=name, local_addr=(address, 0)
        )

    @contextlib.asynccontextmanager
    async def flood(self, clients: int, *, anew: bool) -> AsyncIterator[None]:
        """So many strangers, each of whom asks again at once, on its connection or on a new one."""

        async def stranger() -> None:
            while True:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    reader, writer = await self.line(self.unknown)
                    try:
                        while True:
                            writer.write(REQUEST)
                            await reader.readuntil(b"x" * 1000)
                            if anew:
                                break
                    finally:
                        writer.transport.abort()

        tasks = [asyncio.create_task(stranger()) for _ in range(clients)]
        await eventually(lambda: self.answers >= 3 * clients, "the flood is at its height")
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def first_request(self, context: ssl.SSLContext | None) -> int:
        """How many strangers are answered while somebody connects and is answered."""
        before = self.answers
        async with asyncio.timeout(HANG_S):
            reader, writer = await self.line(context, "127.0.0.2")
            await self._asked(reader, writer)
        writer.transport.abort()
        return self.answers - before

    async def further_requests(self, context: ssl.SSLContext | None, count: int) -> list[int]:
        """The same for each further request on one connection."""
        waited = []
        async with asyncio.timeout(HANG_S):
            reader, writer = await self.line(context, "127.0.0.2")
            await self._asked(reader, writer)
            for _ in range(count):
                before = self.answers
                await self._asked(reader, writer)
                waited.append(self.answers - before)
        writer.transport.abort()
        return waited

    async def _asked(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REQUEST.replace(b"Host: x", b"Host: x\r\nWho: ours"))
        await reader.readuntil(b"x" * 1000)


@contextlib.asynccontextmanager
async def served(folder: Path, *, tls: bool) -> AsyncIterator[Served]:
    at, listen = Served(), Listen(0, "127.0.0.1", drain_s=0.1)
    if tls:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / "ca.crt"))
        shown = authority.issue_cert("localhost")
        shown.private_key_pem.write_to_path(str(folder / "tls.key"))
        shown.cert_chain_pems[0].write_to_path(str(folder / "tls.crt"))
        certificate, key, client_ca = (str(folder / name) for name in ("tls.crt", "tls.key", "ca.crt"))
        listen = replace(listen, certificate=certificate, key=key, client_ca=client_ca)
        at.known, at.unknown = ssl.create_default_context(), ssl.create_default_context()
        for context in (at.known, at.unknown):
            authority.configure_trust(context)
        authority.issue_cert("known").configure_cert(at.known)
    async with serving(Router([get("/x", at.answer)]), listen) as at.port:
        yield at


@pytest.mark.parametrize("clients", [20, 250])
@pytest.mark.parametrize("anew", [False, True], ids=["on their connections", "on new connections"])
@pytest.mark.parametrize("who", ["a certificate", "a newcomer over TLS", "a newcomer"])
async def test_a_first_request_waits_for_a_few_of_any_number_of_strangers(
    tmp_path: Path, who: str, anew: bool, clients: int
) -> None:
    async with served(tmp_path, tls=who != "a newcomer") as at, at.flood(clients, anew=anew):
        context = at.known if who == "a certificate" else at.unknown
        for _ in range(5):
            assert await at.first_request(context) <= MOST_ANSWERS


@pytest.mark.parametrize("tls", [True, False], ids=["TLS", "plain"])
async def test_without_an_authority_for_clients_further_requests_wait_for_one_of_each_address(
    tmp_path: Path, tls: bool
) -> None:
    """As of kube-scheduler, which keeps its connection and then cannot show who it is."""
    async with served(tmp_path, tls=tls) as at, at.flood(250, anew=False):
        assert max(await at.further_requests(at.unknown, 20)) <= MOST_ANSWERS


def test_of_too_many_that_arrive_those_of_the_busiest_address_go() -> None:
    """Before anything is read from them: the others are served, each address in its turn."""
    arrived, pairs = Arrived(3), [socket.socketpair() for _ in range(5)]
    for (ours, _), address in zip(pairs, ("1", "2", "1", "1", "3"), strict=True):
        arrived.add(ours, (f"10.0.0.{address}", 1))
    assert [each for each, (ours, _) in enumerate(pairs) if ours.fileno() < 0] == [0, 2]
    assert [arrived.next() for _ in range(len(arrived))] == [pairs[each][0] for each in (3, 1, 4)]
    for pair in pairs:
        for end in pair:
            end.close()
