"""Each answer of the API server becomes the class of the reaction it asks for."""

from __future__ import annotations

import pytest

from gpuslice.adapters.kube.errors import (
    AlreadyExistsError,
    ConflictError,
    ForbiddenError,
    GoneError,
    InvalidError,
    KubeError,
    NotFoundError,
    UnauthorizedError,
    UnavailableError,
    error_of,
)
from tests.unit.kube_wire import failure


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (400, "BadRequest", InvalidError),
        (401, "Unauthorized", UnauthorizedError),
        (403, "Forbidden", ForbiddenError),
        (404, "NotFound", NotFoundError),
        (409, "AlreadyExists", AlreadyExistsError),
        (409, "Conflict", ConflictError),
        (410, "Expired", GoneError),
        (410, "Gone", GoneError),
        (415, "UnsupportedMediaType", InvalidError),
        (422, "Invalid", InvalidError),
        (429, "TooManyRequests", UnavailableError),
        (500, "InternalError", UnavailableError),
        (503, "ServiceUnavailable", UnavailableError),
        (504, "Timeout", UnavailableError),
    ],
)
def test_code_and_reason_choose_the_reaction(code: int, reason: str, kind: type[KubeError]) -> None:
    error = error_of(code, failure(code, reason, "because").body, what="GET /api/v1/pods")
    assert type(error) is kind
    assert str(error).startswith("GET /api/v1/pods: because")
    assert str(error).endswith(f"(HTTP {code})")
    assert ("does not accept these credentials" in str(error)) == (code == 401)
    assert error.status.reason == reason


def test_a_page_of_a_proxy_is_quoted() -> None:
    error = error_of(502, b"<html>bad gateway</html>")
    assert isinstance(error, UnavailableError)
    assert "bad gateway" in str(error)


def test_an_empty_answer_still_makes_a_sentence() -> None:
    assert str(error_of(404, b"", what="GET /x")) == "GET /x: Not Found (HTTP 404)"


@pytest.mark.parametrize(
    ("code", "message", "unknown"),
    [
        (429, "", False),
        (504, "", True),
        (500, "etcdserver: request timed out", True),
        (500, 'Internal error occurred: failed calling webhook "a.b": failed to call webhook: EOF', False),
    ],
)
def test_what_is_surely_not_done(code: int, message: str, unknown: bool) -> None:
    error = error_of(code, failure(code, "InternalError", message).body)
    assert isinstance(error, UnavailableError)
    assert error.outcome_unknown is unknown


@pytest.mark.parametrize(
    ("headers", "body", "wait_s"),
    [
        ({"retry-after": "7"}, b"", 7),
        ({}, failure(429, "TooManyRequests", retryAfterSeconds=3).body, 3),
        ({"retry-after": "Sat, 01 Jan 2028 00:00:00 GMT"}, b"", 0),
    ],
    ids=["header", "details", "unreadable"],
)
def test_the_wait_the_server_asks_for_is_kept(headers: dict[str, str], body: bytes, wait_s: float) -> None:
    error = error_of(429, body, headers)
    assert isinstance(error, UnavailableError)
    assert error.retry_after_s == wait_s
