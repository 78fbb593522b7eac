"""What `gpuslice doctor` says of the connection between kube-scheduler and the extender."""

from __future__ import annotations

import pytest

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
