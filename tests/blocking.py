"""Requests to an API server from tests that have no event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kube.transport import HttpTransport

T = TypeVar("T")


class BlockingTransport:
    """Each request on a connection, and in a loop, of its own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def request(self, request: ApiRequest) -> ApiResponse:
        async def ask() -> ApiResponse:
            async with HttpTransport(self._connection) as transport:
                return await transport.request(request)

        return asyncio.run(ask())


def asked(connection: Connection, question: Callable[[KubeClient], Awaitable[T]]) -> T:
    async def ask() -> T:
        async with HttpTransport(connection) as transport:
            return await question(KubeClient(transport))

    return asyncio.run(ask())
