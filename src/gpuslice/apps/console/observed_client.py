"""The console's API client: it records what cannot be read, and deduplicates what is read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import ForbiddenError, KubeError
from gpuslice.adapters.kube.requests import Listing, WatchEvent
from gpuslice.adapters.kube.resources import Resource
from gpuslice.adapters.kube.transport import Transport

T = TypeVar("T")
WATCH_HOLDS_S = 1.0
MOST_INTERNED = 2000


class Interner:
    """Stores equal parts of objects once: pods from one template are alike, down to each string."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def one(self, part: T) -> T:
        """The first part that was equal to `part`. It must not be modified afterwards."""
        if len(self._known) > MOST_INTERNED:
            self._known.clear()  # parts in use stay with their users
        return cast(T, self._known.setdefault(msgspec.json.encode(part), part))

    def containers(self, pod: objects.Pod) -> None:
        """Replace what its containers have in common with equal ones by the shared objects."""
        for container in (*pod.spec.containers, *(pod.spec.init_containers or ())):
            container.image = ""
        pod.spec.containers = self.one(pod.spec.containers)
        pod.spec.init_containers = self.one(pod.spec.init_containers)


class ObservedClient(KubeClient):
    """Records for each collection why it cannot be read at present.

    `forbidden`: those that the identity of the console may not read at all.
    """

    problems: Mapping[str, str] = {}
    forbidden: frozenset[str] = frozenset()

    def __init__(self, transport: Transport, *, manager: str) -> None:
        super().__init__(transport, manager=manager)
        self.interner = Interner()

    def received(self, page: Sequence[object]) -> None:
        """Share equal parts before the next page arrives: all pages at once take a third more memory."""
        for each in page:
            if isinstance(each, objects.Pod):
                self.interner.containers(each)

    async def list(self, resource: Resource[T], *args: Any, **kwargs: Any) -> Listing[T]:
        with self._noting(resource.plural):
            return await super().list(resource, *args, **kwargs)

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
