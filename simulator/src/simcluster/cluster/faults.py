"""Injected faults: slow answers, errors, dropped watches, forgotten history."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field

from simcluster.cluster.errors import ApiError
from simcluster.cluster.request import Request, Response

_REASONS = {
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    409: "Conflict",
    410: "Expired",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
    504: "Timeout",
}


@dataclass(slots=True)
class Fault:
    """Applies to requests whose method and path match; ``times`` is how often, None for ever.

    ``code`` 0 only delays, by ``delay_s`` or until ``held`` is set. ``after`` lets the request take effect
    and then answers with the error, as a lost answer does. ``code`` 200 is the page of a proxy instead of the
    server's answer.
    """

    method: str = ".*"
    path: str = ".*"
    code: int = 0
    delay_s: float = 0.0
    times: int | None = None
    after: bool = False
    retry_after_s: int | None = None
    held: asyncio.Event | None = None

    def matches(self, request: Request) -> bool:
        wanted = self.times is None or self.times > 0
        return wanted and bool(
            re.fullmatch(self.method, request.method) and re.fullmatch(self.path, request.path)
        )


@dataclass(slots=True)
class Faults:
    """The faults that are set; the first that matches a request applies."""

    active: list[Fault] = field(default_factory=list)

    def add(self, fault: Fault) -> None:
        self.active.append(fault)

    def clear(self) -> None:
        self.active.clear()

    def strike(self, request: Request) -> Fault | None:
        """The fault that applies to this request, which is counted."""
        fault = next((item for item in self.active if item.matches(request)), None)
        if fault is not None and fault.times is not None:
            fault.times -= 1
        return fault


def answer_of(fault: Fault) -> Response:
    if fault.code == 200:
        return Response(200, b"<html><body>Please log in</body></html>", {"content-type": "text/html"})
    details = {"retryAfterSeconds": fault.retry_after_s} if fault.retry_after_s is not None else None
    reason = _REASONS.get(fault.code, "InternalError")
    return ApiError(fault.code, reason, f"injected fault: {fault.code}", details).response()
