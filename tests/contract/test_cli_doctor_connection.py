"""What `gpuslice doctor` says of connections: kube-scheduler's, and its own to the services."""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme

from gpuslice.apps.cli.doctor_answers import ask
from tests.contract.test_cli_doctor import Object, judged


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"enableHTTPS": False}, "plain HTTP"),
        ({"enableHTTPS": None}, "plain HTTP"),
        ({"urlPrefix": "http://extender"}, "plain HTTP"),
        ({"tlsConfig": None}, "does not check"),
        ({"tlsConfig": {"caFile": "/ca", "certFile": "/crt", "insecure": True}}, "does not check"),
        ({"tlsConfig": {"caData": "Y2E="}}, "no certificate"),
    ],
)
def test_a_connection_that_anybody_may_make_is_found(changes: Object, found: str) -> None:
    (what,) = judged(**changes)
    assert found in what


class Ready(BaseHTTPRequestHandler):
    """Says yes."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_service_is_trusted_as_the_api_server_trusts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the authority of its webhook configuration: a certificate that another one signed is no answer.

    Of a service that no webhook uses, by SSL_CERT_FILE, which the chart's test sets for the extender.
    """
    authority, stranger = trustme.CA(), trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with ThreadingHTTPServer(("localhost", 0), Ready) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"https://localhost:{server.server_port}/readyz"
        assert ask(url, authority.cert_pem.bytes().decode()) == ""
        assert "certificate verify failed" in ask(url, stranger.cert_pem.bytes().decode()).lower()
        assert "certificate verify failed" in ask(url, "").lower()
        authority.cert_pem.write_to_path(tmp_path / "ca.crt")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.crt"))
        assert ask(url, "") == ""
        server.shutdown()
    assert ask(url, "") == "Connection refused"
