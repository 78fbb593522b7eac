"""Random requests at console and exporter: each has an answer that blames its sender, or none at all."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Sequence

import pytest

from gpuslice.adapters.web.process import ProcessMetrics
from gpuslice.apps.exporter.settings import ExporterSettings
from gpuslice.apps.exporter.web import serve_all
from tests import HANG_S
from tests.integration.console_rig import V100, console, node
from tests.integration.test_web_serve import app_of

REQUESTS = 1500
PATHS = ("cluster", "pod", "health", "advice", "teams", "simulation")
WORDS = (
    *(
        "",
        "0",
        "-1",
        "1e309",
        "9" * 400,
        "nan",
        "default",
        "p",
        "..",
        "%00",
        "%ff",
        "%C3%28",
        "\xff",
        "a" * 4000,
    ),
    *(
        "[",
        "{}",
        "é",
        "1.1.1.x",
        "../../etc/passwd",
        "%2e%2e",
        "later",
        "true",
        "-9223372036854775809",
        "'\"<>&",
    ),
)
NAMES = (
    *(
        "since",
        "figures",
        "namespace",
        "name",
        "pods",
        "memory",
        "cards",
        "compute",
        "hours",
        "days",
        "count",
    ),
    *("", "a", "gpu", "units"),
)
METHODS = ("GET", "HEAD", "POST", "PUT", "OPTIONS", "TRACE", "get", "X")
HEADERS = (
    "Authorization",
    "Accept",
    "Accept-Encoding",
    "Content-Length",
    "Host",
    "Range",
    "If-None-Match",
    "X",
)
VALUES = (
    *WORDS, "Bearer a", "Basic YTpi", "Basic =", "gzip;q=0.5,*", "application/openmetrics-text;version=1.0.0",
    "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited", "q=q;;;,,,",
)  # fmt: skip


def requests(paths: Sequence[str], dice: random.Random) -> list[bytes]:
    made = []
    for _ in range(REQUESTS):
        path = dice.choice(paths) + dice.choice(("", "", "", f"/{dice.choice(WORDS)}"))
        pairs = [f"{dice.choice(NAMES)}={dice.choice(WORDS)}" for _ in range(dice.randrange(5))]
        method = dice.choice(METHODS) if dice.random() < 0.3 else "GET"
        head = f"{method} {path}{'?' if pairs else ''}{'&'.join(pairs)} HTTP/1.1\r\n"
        fields = [f"{dice.choice(HEADERS)}: {dice.choice(VALUES)}" for _ in range(dice.randrange(4))]
        text = head + "\r\n".join(["Host: localhost", *fields, "Connection: close", "", ""])
        data = bytearray(text.encode("latin-1", "replace"))
        for _ in range(dice.choice((0, 0, 0, 1, 3))):
            data[dice.randrange(len(data))] = dice.randrange(256)
        made.append(bytes(data))
    return made


async def status(port: int, data: bytes) -> int | None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        writer.write_eof()
        async with asyncio.timeout(HANG_S):
            found = re.match(rb"HTTP/1\.1 (\d{3})", await reader.read())
        return int(found[1]) if found else None
    except ConnectionError:
        return None
    finally:
        writer.transport.abort()


async def survives(port: int, paths: Sequence[str], good: str, dice: random.Random) -> None:
    asked = requests(paths, dice)
    for start in range(0, len(asked), 50):
        part = asked[start : start + 50]
        for data, found in zip(
            part, await asyncio.gather(*(status(port, each) for each in part)), strict=True
        ):
            assert found is None or found < 500, data
    assert await status(port, f"GET {good} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()) == 200


@pytest.mark.parametrize("seed", range(2))
async def test_the_console_answers_or_refuses_in_a_sentence(seed: int) -> None:
    async with console([node("n1", 2, V100)], access="kubeconfig", port=0) as rig:
        base = "/" + rig.url.split("/", 3)[3].rstrip("/")
        port = int(rig.url.split("/")[2].rpartition(":")[2])
        paths = [f"{base}/api/v1/{each}" for each in PATHS] + [base, f"{base}/static/app.js", "/metrics", "/"]
        while not rig.console.state.synced:
            await rig.console.rows.newer_than(rig.console.rows.number)
        await survives(port, paths, f"{base}/", random.Random(seed))


@contextlib.asynccontextmanager
async def exporter() -> AsyncIterator[int]:
    app = app_of()
    settings = ExporterSettings(address="127.0.0.1:0")
    async with serve_all(settings, ProcessMetrics(), app, app) as port:
        yield port


@pytest.mark.parametrize("seed", range(2))
async def test_the_exporter_answers_or_refuses_in_a_sentence(seed: int) -> None:
    async with exporter() as port:
        paths = ["/metrics", "/", "/health", "/healthz", "/debug/state", "/debug/stacks", "/version"]
        await survives(port, paths, "/metrics", random.Random(seed))
