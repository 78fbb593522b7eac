"""What a request costs in our HTTP server and client, and in the libraries that could replace them.

    python bench/http_libraries.py --json
    pip install uvicorn httptools aiohttp httpx     first, for the columns beside ours

CPU per request of the process under test alone, with keep-alive; its memory beyond that of bare Python.
`flood_mib`: what one connection with an endless head adds to that. Decision record 9 has such figures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from gpuslice.adapters.kube.http import ApiRequest

ANSWER = b'{"NodeNames":["n1"]}' * 50
QUESTIONS_BYTES = {"small": 400, "of 5,000 names": 120_000}
FLOOD_HEADERS = 100  # of 65,000 bytes each

Server = Callable[[], contextlib.AbstractAsyncContextManager[int]]
Call = Callable[[], Awaitable[object]]


def memory_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


@contextlib.asynccontextmanager
async def our_server() -> AsyncIterator[int]:
    from gpuslice.adapters.web.app import Router, post
    from gpuslice.adapters.web.messages import JSON, HttpResponse
    from gpuslice.adapters.web.serve import Listen, serving

    routes = [post("/filter", lambda _: HttpResponse(ANSWER, content_type=JSON))]
    async with serving(Router(routes), Listen(0, "127.0.0.1")) as port:
        yield port


@contextlib.asynccontextmanager
async def uvicorn_server() -> AsyncIterator[int]:
    uvicorn: Any = importlib.import_module("uvicorn")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        parts, more = [], True
        while more:
            message = await receive()
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        b"".join(parts)
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": ANSWER})

    settings = uvicorn.Config(
        app, port=0, http="httptools", lifespan="off", loop="none", log_level="critical"
    )
    server = uvicorn.Server(settings)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 it has no event for it
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


@contextlib.asynccontextmanager
async def aiohttp_server() -> AsyncIterator[int]:
    web: Any = importlib.import_module("aiohttp.web")

    async def answer(request: Any) -> Any:
        await request.read()
        return web.Response(body=ANSWER, content_type="application/json")

    app = web.Application(client_max_size=1 << 20)
    app.router.add_post("/filter", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


SERVERS: dict[str, Server] = {"ours": our_server, "uvicorn": uvicorn_server, "aiohttp": aiohttp_server}


async def ask(port: int, requests: int, body_bytes: int) -> None:
    """The client, in a process of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /filter HTTP/1.1\r\nHost: x\r\nContent-Length: {body_bytes}\r\n\r\n".encode()
    for _ in range(requests):
        writer.write(head + b"x" * body_bytes)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(answer.partition(b"content-length:")[2].split(b"\r\n")[0]))
    writer.close()


async def flood(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /filter HTTP/1.1\r\nHost: x\r\n")
    with contextlib.suppress(ConnectionError):
        for number in range(FLOOD_HEADERS):
            writer.write(b"x%d: " % number + b"a" * 65_000 + b"\r\n")
            await writer.drain()
        await asyncio.wait_for(reader.read(1), 0.5)
    writer.close()


async def beside(*words: object) -> asyncio.subprocess.Process:
    command = [sys.executable, __file__, *map(str, words)]
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)


async def measure_server(name: str, requests: int) -> dict[str, float]:
    before, result = memory_mib(), {}
    async with SERVERS[name]() as port:
        for size, body_bytes in QUESTIONS_BYTES.items():
            process = await beside("--ask", port, requests, body_bytes)
            began = time.process_time()
            await process.wait()
            result[f"us, {size}"] = round((time.process_time() - began) / requests * 1e6, 1)
        result["memory_mib"] = round(memory_mib() - before, 1)
        flooded = memory_mib()
        with contextlib.suppress(TimeoutError):
            await flood(port)
        result["flood_mib"] = round(memory_mib() - flooded, 1)
    return result


async def answering() -> None:
    """An API server that always gives the same answer."""

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := (await reader.readuntil(b"\r\n\r\n")).lower():
                length = head.partition(b"content-length:")[2].split(b"\r\n")[0]
                await reader.readexactly(int(length or 0))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER)

    server = await asyncio.start_server(client, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextlib.asynccontextmanager
async def caller(name: str, url: str) -> AsyncIterator[Call]:
    body, headers = b"{}" * 200, {"Content-Type": "application/merge-patch+json"}
    if name == "ours":
        from gpuslice.adapters.kube.config import Connection
        from gpuslice.adapters.kube.transport import HttpTransport

        async with HttpTransport(Connection(url)) as transport:
            yield lambda: transport.request(ApiRequest("PATCH", "/pods/x", headers=headers, body=body))
        return
    library: Any = importlib.import_module(name)
    session = library.ClientSession() if name == "aiohttp" else library.AsyncClient()

    async def call() -> None:
        if name == "httpx":
            await session.patch(f"{url}/pods/x", content=body, headers=headers)
            return
        async with session.patch(f"{url}/pods/x", data=body, headers=headers) as answer:
            await answer.read()

    yield call
    await (session.close() if name == "aiohttp" else session.aclose())


async def measure_client(name: str, requests: int) -> dict[str, float]:
    process = await beside("--answer")
    assert process.stdout is not None
    port, before = int(await process.stdout.readline()), memory_mib()
    async with caller(name, f"http://127.0.0.1:{port}") as call:
        await call()
        began = time.process_time()
        for _ in range(requests // 4):
            await asyncio.gather(*(call() for _ in range(4)))
        cost_us = (time.process_time() - began) / requests * 1e6
    process.kill()
    await process.wait()
    return {"us": round(cost_us, 1), "memory_mib": round(memory_mib() - before, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--ask", nargs=3, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.ask:
        asyncio.run(ask(*given.ask))
    elif given.answer:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(answering())
    elif given.one:
        side, name = given.one
        measure = measure_server if side == "server" else measure_client
        print(json.dumps(asyncio.run(measure(name, given.requests))))
    else:
        compare(given.requests, given.json)


def compare(requests: int, as_json: bool) -> None:
    """Run each in a process of its own, so that none pays for another's imports."""
    import subprocess

    results: dict[str, Any] = {}
    for side, names in (("server", SERVERS), ("client", ("ours", "aiohttp", "httpx"))):
        for name in names:
            if name != "ours" and importlib.util.find_spec(name) is None:
                continue
            command = [sys.executable, __file__, "--one", side, name, "--requests", str(requests)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            results[f"{side}, {name}"] = json.loads(done.stdout)
    if as_json:
        print(json.dumps(results, indent=2))
        return
    for name, figures in results.items():
        print(f"{name:18}", "  ".join(f"{key} {value}" for key, value in figures.items()))


if __name__ == "__main__":
    main()
