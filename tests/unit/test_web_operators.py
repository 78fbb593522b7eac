"""What operators alone may see: the data behind decisions names every pod of the cluster."""

from __future__ import annotations

import json

import pytest

from gpuslice.adapters.web.app import Router, for_operators, get
from gpuslice.adapters.web.clients import is_local
from gpuslice.adapters.web.messages import HttpRequest, HttpResponse, text_answer


@pytest.mark.parametrize(
    ("peer", "local"),
    [
        (("127.0.0.1", 40000), True),
        (("127.8.0.1", 40000), True),
        (("::1", 40000, 0, 0), True),
        (("::ffff:127.0.0.1", 40000, 0, 0), True),
        ("", True),  # a unix socket
        (None, True),
        (("10.0.0.7", 40000), False),
        (("::ffff:10.0.0.7", 40000, 0, 0), False),
        (("fe80::1%eth0", 40000, 0, 2), False),
        (("nonsense", 1), False),
    ],
)
def test_local_is_who_comes_by_loopback_or_a_unix_socket(peer: object, local: bool) -> None:
    assert is_local(peer) is local


@pytest.mark.parametrize(
    ("local", "known", "status"), [(True, False, 200), (False, True, 200), (False, False, 403)]
)
def test_debug_data_is_for_this_machine_or_a_certificate(local: bool, known: bool, status: int) -> None:
    app = Router([for_operators(get("/debug/state", lambda _: text_answer("all pods")))])
    answer = app(HttpRequest("GET", "/debug/state", known=known, local=local))
    assert isinstance(answer, HttpResponse)
    assert answer.status == status
    if status == 403:
        assert "kubectl port-forward" in json.loads(answer.body)["error"]
