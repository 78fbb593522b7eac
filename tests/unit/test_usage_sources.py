"""Usage is read from exporters that answer, answer nonsense, or do not answer."""

from __future__ import annotations

import contextlib
import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.web.scrape import ScrapeError, fetch, parse
from gpuslice.diagnosis.exporters import AT_ONCE, ClusterSource, Exporters, proxied
from gpuslice.diagnosis.usage import usage_of


class Quiet(http.server.BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing: tests' output is for tests."""


@contextmanager
def serving(handler: type[Quiet]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def answering(line: bytes) -> Iterator[str]:
    """A server that answers this, and hangs up."""

    class Handler(Quiet):
        def do_GET(self) -> None:
            self.wfile.write(line)

    with serving(Handler) as url:
        yield f"{url}/metrics"


@pytest.mark.parametrize(
    ("part", "pause_s", "why"), [(b"a 1\n", 0.02, "too slowly"), (bytes(1 << 20), 0.0, "more than 64 MiB")]
)
def test_a_page_without_end_is_a_reason(part: bytes, pause_s: float, why: str) -> None:
    class Handler(Quiet):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                while True:
                    self.wfile.write(part)
                    time.sleep(pause_s)

    with serving(Handler) as url, pytest.raises(ScrapeError, match=why):
        fetch(url, 0.1 if pause_s else 10.0)


@pytest.mark.parametrize(
    "line", [b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\na 1", b""]
)
def test_a_page_that_is_none_is_a_reason(line: bytes) -> None:
    with answering(line) as url, pytest.raises(ScrapeError, match=url):
        fetch(url)


@pytest.mark.parametrize(
    "url", ["http://localhost:port/metrics", "nowhere://x/metrics", "http://[::1/metrics"]
)
def test_an_address_that_is_none_is_a_reason(url: str) -> None:
    with pytest.raises(ScrapeError, match=r"^(http|nowhere)://"):
        fetch(url)


PAGE = 'gpuslice_gpu_up{node="n1",gpu="0",gpu_uuid="GPU-0"} 1\n'


@contextmanager
def cluster(others: int = 1, *, hang: bool = True) -> Iterator[str]:
    """An API server with exporters. Beside the first, which is listed last, none gives a page."""
    over = threading.Event()

    class Handler(Quiet):
        def do_GET(self) -> None:
            if "/proxy/" in self.path and "/e1:" not in self.path:
                if hang:
                    over.wait(20)
                else:
                    self.send_error(503)
                return
            pods = [
                {"metadata": {"name": f"e{n}", "namespace": "x"}, "spec": {"nodeName": f"n{n}"}}
                for n in range(1 + others, 0, -1)
            ]
            body = PAGE if "/proxy/" in self.path else json.dumps({"metadata": {}, "items": pods})
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

    with serving(Handler) as url:
        try:
            yield url
        finally:
            over.set()


async def test_an_exporter_that_does_not_answer_keeps_nobody_waiting() -> None:
    with cluster() as url:
        async with HttpTransport(Connection(url)) as transport:
            client = KubeClient(transport)
            exporters = Exporters(proxied(client), page_timeout_s=0.3)
            found = await exporters.read(await client.all(PODS))
    assert [card.node for card in found.cards] == ["n1"]
    (problem,) = found.problems
    assert problem.startswith("n2: its exporter does not answer: no page within 0.3 s")


async def test_many_exporters_that_give_no_page_cost_a_bounded_time_together() -> None:
    with cluster(others=100, hang=False) as url:
        async with HttpTransport(Connection(url)) as transport:
            await look_at_silent(ClusterSource(KubeClient(transport), in_vain_s=1e-6))


async def look_at_silent(source: ClusterSource) -> None:
    """The first one that gives no page is enough."""
    found = await source.read()
    first, second = found.problem_lines[:2]
    assert len(found.problems) <= AT_ONCE + 1
    assert first.startswith("not asked, after 1e-06 s of waiting for ")
    assert re.search(r"that do not answer: the exporters of n\d+, n\d+, .* and \d+ more$", first)
    assert "HTTP 503" in second
    for _ in range(100):  # those that were not asked come first, so all of them have their turn
        if found.cards:
            break
        found = await source.read()
    assert [card.node for card in found.cards] == ["n1"]
    assert [card.node for card in (await source.read()).cards] == ["n1"]


def test_a_container_that_two_exporters_report_is_one() -> None:
    """As while an exporter's pod is replaced, and where there are two releases of it."""
    at = '{node="n",gpu="0",gpu_uuid="GPU-0",namespace="ns",pod="p",container="main"%s}'
    lines = [f"gpuslice_container_info{at % ''} 1", f"gpuslice_container_memory_used_bytes{at % ''} 7"]
    other = lines[0].replace("} 1", ',pod_uid="other"} 1')
    pages = [parse("\n".join(lines)), parse("\n".join([other, *lines[1:]]))]
    (found,) = usage_of(pages).containers
    assert found.used_bytes == 7
