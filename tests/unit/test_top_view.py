"""``gpuslice top`` in terminals of all sizes, and when nothing can be read."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, ConsoleDimensions

from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.web.scrape import ScrapeError, fetch
from gpuslice.apps.cli.live import CardRow, ClusterSource, ContainerRow, Picture, UrlSource
from gpuslice.apps.cli.live_view import History, view, watch

GIB = 1 << 30
NODE = "cn-hangzhou.192.168.2.167"


def shown(found: Picture, width: int = 120, height: int = 40, looks: int = 1) -> list[str]:
    """The lines of a terminal of this size after so many looks."""
    console, history = Console(width=width, height=height, file=StringIO()), History()
    for _ in range(looks):
        history.take(found)
    console.print(view(found, history, ConsoleDimensions(width, height)))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def card(number: int, busy: float = 0.25) -> CardRow:
    return CardRow(
        NODE, str(number), f"GPU-{number}", "NVIDIA H100 80GB HBM3", True, busy, 60 * GIB, 70 * GIB, 80 * GIB
    )


def container(number: int, sm_ratio: float = 0.5) -> ContainerRow:
    return ContainerRow(
        NODE, "0", "default", f"app-{number}", "main", 3 * GIB, 4 * GIB, 4 * GIB, sm_ratio, refused=17
    )


ONE = Picture((card(0),), (container(0),))


@given(st.integers(52, 300))
def test_figures_are_whole_in_any_terminal(width: int) -> None:
    lines = shown(ONE, width, looks=30)
    assert all(len(line) <= width for line in lines)
    for figure in ("25%", "60.0G/80.0G", "app-0", "3.0G/4.0G", "75%", "50%", "17"):
        assert any(figure in line for line in lines), (figure, lines)


def test_a_wide_terminal_shows_everything_and_a_sparkline() -> None:
    text = "\n".join(shown(ONE, 160, looks=30))
    for part in (NODE, "NVIDIA H100 80GB HBM3", "88%", "default", "main", "▃" * 24, "▇" * 24):
        assert part in text


def test_of_too_many_rows_the_busiest_are_shown_and_the_others_counted() -> None:
    cards = tuple(card(number, busy=0.9 if number == 40 else 0.1) for number in range(64))
    containers = tuple(container(number, sm_ratio=1.0 if number == 150 else 0.1) for number in range(200))
    found = Picture(cards, containers, ("n7: no answer",))
    lines = shown(found, height=24)
    assert len(lines) <= 24
    assert any(line.startswith(f"{NODE}   40 ") for line in lines)
    assert any("app-150" in line for line in lines)
    assert [line for line in lines if line.startswith("… and")] == [
        "… and 55 cards that use less",
        "… and 190 containers that use less",
    ]
    assert lines[-1] == "n7: no answer"


def test_unknown_is_not_nought() -> None:
    found = Picture((CardRow(NODE, "0", "GPU-0", up=False),), ())
    assert "lost" in shown(found)[1]
    assert "-/-" in shown(found)[1]


def test_where_nothing_can_be_read_there_is_only_the_reason() -> None:
    found = UrlSource(["127.0.0.1:1"]).read()
    assert shown(found) == ["http://127.0.0.1:1/metrics: Connection refused"]


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


class Going:
    """A cluster that is there, then is not, then is; then the user has seen enough."""

    def __init__(self) -> None:
        self.looks: Iterator[Picture | BaseException] = iter(
            [ONE, KubeError("GET /api/v1/pods: Connection refused"), ONE, KeyboardInterrupt()]
        )

    def read(self) -> Picture:
        look = next(self.looks)
        if isinstance(look, BaseException):
            raise look
        return look


def test_a_lost_api_server_leaves_the_last_picture_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"TERM": "xterm", "FORCE_COLOR": "1", "COLUMNS": "120", "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    watch(Going(), every_s=0.01)
    screens = capsys.readouterr().out.split("\x1b[H")
    lost = [screen for screen in screens if "shown as it was before" in screen]
    assert lost
    assert all("app-0" in screen and "Connection refused" in screen for screen in lost)
    assert "shown as it was before" not in screens[-1]


PAGE = 'gpuslice_gpu_up{node="n1",gpu="0",gpu_uuid="GPU-0"} 1\n'


@contextmanager
def cluster() -> Iterator[str]:
    """An API server with the exporters of two nodes; that of n2 does not answer."""
    over = threading.Event()

    class Handler(Quiet):
        def do_GET(self) -> None:
            if "/e2:" in self.path:
                over.wait(20)
                return
            pods = [
                {"metadata": {"name": f"e{n}", "namespace": "x"}, "spec": {"nodeName": f"n{n}"}}
                for n in (1, 2)
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


def test_an_exporter_that_does_not_answer_keeps_nobody_waiting() -> None:
    with cluster() as url:
        found = ClusterSource(Connection(url), page_timeout_s=0.3).read()
    assert [card.node for card in found.cards] == ["n1"]
    (problem,) = found.problems
    assert problem.startswith(
        "n2: GET /api/v1/namespaces/x/pods/e2:9400/proxy/metrics: no answer within 0.3 s"
    )
