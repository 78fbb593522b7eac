"""How long the API server lets us wait: what a bind takes beside that is our own work."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass

from gpuslice.adapters.kube.http import NO_STRINGS, Response
from gpuslice.adapters.kube.transport import Transport


@dataclass(slots=True)
class ApiTimes:
    """Requests to the API server and the seconds they took; watches are not counted."""

    requests: int = 0
    seconds: float = 0.0


class TimedTransport:
    """A transport that counts what goes through it."""

    def __init__(self, inner: Transport, times: ApiTimes) -> None:
        self._inner = inner
        self._times = times

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = NO_STRINGS,
        headers: Mapping[str, str] = NO_STRINGS,
        body: bytes = b"",
    ) -> Response:
        began = time.perf_counter()
        try:
            return await self._inner.request(method, path, query=query, headers=headers, body=body)
        finally:
            self._times.requests += 1
            self._times.seconds += time.perf_counter() - began

    def stream(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = NO_STRINGS,
        headers: Mapping[str, str] = NO_STRINGS,
    ) -> AsyncGenerator[bytes]:
        return self._inner.stream(method, path, query=query, headers=headers)
