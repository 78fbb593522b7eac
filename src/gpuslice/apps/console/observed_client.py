"""The console's API client: it records what cannot be read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any, TypeVar

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import ForbiddenError, KubeError
from gpuslice.adapters.kube.requests import Listing, WatchEvent
from gpuslice.adapters.kube.resources import Resource

T = TypeVar("T")
U = TypeVar("U")
WATCH_HOLDS_S = 1.0


class ObservedClient(KubeClient):
    """Records for each collection why it cannot be read at present.

    `forbidden`: those that the identity of the console may not read at all.
    """

    problems: Mapping[str, str] = {}
    forbidden: frozenset[str] = frozenset()

    async def list_as(
        self, resource: Resource[T], each: Callable[[T], U], *args: Any, **kwargs: Any
    ) -> Listing[U]:
        with self._noting(resource.plural):
            return await super().list_as(resource, each, *args, **kwargs)

    async def current_version(self, resource: Resource[Any], namespace: str = "") -> str:
        with self._noting(resource.plural):
            return await super().current_version(resource, namespace)

    async def watch(self, resource: Resource[T], *args: Any, **kwargs: Any) -> AsyncGenerator[WatchEvent[T]]:
        """The server sends nothing while nothing changes: a watch that was not refused immediately works."""
        works = asyncio.get_running_loop().call_later(WATCH_HOLDS_S, self._note, resource.plural, "")
        try:
            with self._noting(resource.plural):
                async for event in super().watch(resource, *args, **kwargs):
                    self._note(resource.plural, "")
                    yield event
        finally:
            works.cancel()

    @contextlib.contextmanager
    def _noting(self, plural: str) -> Iterator[None]:
        try:
            yield
        except KubeError as error:
            self._note(plural, str(error), forbidden=type(error) is ForbiddenError)
            raise

    def _note(self, plural: str, problem: str, *, forbidden: bool = False) -> None:
        self.forbidden = self.forbidden | {plural} if forbidden else self.forbidden - {plural}
        if self.problems.get(plural, "") != problem:
            self.problems = {**self.problems, plural: problem}
