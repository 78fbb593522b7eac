"""A transport that tells how long each request took, and of what kind it was."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from functools import lru_cache

from gpuslice.adapters.kube.http import NO_STRINGS, ApiResponse
from gpuslice.adapters.kube.transport import Transport

Observe = Callable[[float, str, str], None]
"""Seconds, method, resource."""


class TimedTransport:
    """`observe` hears of every request when it has been answered or has failed; not of watches."""

    def __init__(self, inner: Transport, observe: Observe) -> None:
        self._inner = inner
        self._observe = observe

    async def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = NO_STRINGS,
        headers: Mapping[str, str] = NO_STRINGS,
        body: bytes = b"",
    ) -> ApiResponse:
        began = time.perf_counter()
        try:
            return await self._inner.request(method, path, query=query, headers=headers, body=body)
        finally:
            self._observe(time.perf_counter() - began, method, resource_of(path))

    def stream(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] = NO_STRINGS,
        headers: Mapping[str, str] = NO_STRINGS,
    ) -> AsyncGenerator[bytes]:
        return self._inner.stream(method, path, query=query, headers=headers)


@lru_cache(maxsize=1024)
def resource_of(path: str) -> str:
    """``pods/binding`` of ``/api/v1/namespaces/a/pods/b/binding``: as an RBAC rule writes it."""
    parts = path.strip("/").split("/")
    parts = parts[2:] if parts[0] == "api" else parts[3:]  # after the version; groups are one part more
    if parts[:1] == ["namespaces"] and len(parts) > 2:
        parts = parts[2:]
    return "/".join(parts[::2])
