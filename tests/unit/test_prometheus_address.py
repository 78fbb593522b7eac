"""An address where no Prometheus is: a sentence, in which no password stands."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from gpuslice.diagnosis.prometheus import Prometheus, PrometheusError


@pytest.fixture
def chatter() -> Iterator[int]:
    """The port of a server that speaks no HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def greet() -> None:
            line, _ = listening.accept()
            with line:
                line.sendall(b"220 mail.example.com\r\n")
                line.recv(65536)

        thread = threading.Thread(target=greet)
        thread.start()
        yield listening.getsockname()[1]
        thread.join()


@pytest.mark.parametrize(
    "url", ["prometheus:9090", "foo", "ftp://me:secret@x", "http://", "http://[", "http://x:y"]
)
def test_what_is_no_address_is_told_at_once(url: str) -> None:
    with pytest.raises(PrometheusError, match="must be an http or https URL") as told:
        Prometheus(url)
    assert "secret" not in str(told.value)


def test_an_address_where_nobody_listens_is_told_in_words() -> None:
    with pytest.raises(PrometheusError, match=r"http://127.0.0.1:1 cannot be asked: Connection refused$"):
        Prometheus("http://me:secret@127.0.0.1:1").alerts()


def test_a_server_that_is_something_else_is_told(chatter: int) -> None:
    with pytest.raises(PrometheusError, match=f"http://127.0.0.1:{chatter} cannot be asked: 220 mail"):
        Prometheus(f"http://127.0.0.1:{chatter}").alerts()
