"""doctor asks services whether they answer: whatever does is a finding, not the end of doctor."""

from __future__ import annotations

import socketserver
import threading

import pytest

from gpuslice.apps.cli.doctor_answers import answers, ask, places_of
from gpuslice.diagnosis.doctor.facts import Facts


@pytest.mark.parametrize(
    ("said", "why"),
    [(b"nonsense\r\n\r\n", "nonsense"), (b"", "without response"), (b"HTTP/1.1 200 OK\r\n\r\n", "")],
)
def test_what_is_no_http_is_a_reason(said: bytes, why: str) -> None:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while self.rfile.readline().strip():
                pass
            self.wfile.write(said)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        found = ask(f"http://127.0.0.1:{server.server_address[1]}/", "")
    assert (why in found) if why else found == ""


@pytest.mark.parametrize("url", ["http://[", "http://[here]/", "nowhere", "http://x:y/"])
def test_what_is_no_address_is_a_reason(url: str) -> None:
    assert places_of([url]) == []
    (finding,) = answers(Facts(), [url])
    assert (finding.where, finding.what.partition(":")[0]) == (url, "does not answer")
