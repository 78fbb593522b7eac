"""The console's client of the API server: it knows what cannot be read, and makes smaller what is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
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
    """Equal parts of objects, kept once: pods made of one template ask for the same, down to each string."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def one(self, part: T) -> T:
        """The first that was equal to `part`. Nobody may change it afterwards."""
        if len(self._known) > MOST_INTERNED:
            self._known.clear()  # what is in use stays with its users
        return cast(T, self._known.setdefault(msgspec.json.encode(part), part))

    def containers(self, pod: objects.Pod) -> None:
        """Have what its containers are in common with all that are alike."""
        for container in (*pod.spec.containers, *(pod.spec.init_containers or ())):
            container.image = ""
        pod.spec.containers = self.one(pod.spec.containers)
        pod.spec.init_containers = self.one(pod.spec.init_containers)


class ObservedClient(KubeClient):
    """Remembers of each collection why it cannot be read just now.

    `forbidden`: those of them that whose rights the console has may not read at all.
    """

    problems: Mapping[str, str] = {}
    forbidden: frozenset[str] = frozenset()

    def __init__(self, transport: Transport, *, manager: str) -> None:
        super().__init__(transport, manager=manager)
        self.interner = Interner()

    def received(self, page: Sequence[object]) -> None:
        """Equal parts are shared before the next page comes: all of them at once are a third more."""
        for each in page:
            if isinstance(each, objects.Pod):
                self.interner.containers(each)

    async def list(self, resource: Resource[T], *args: Any, **kwargs: Any) -> Listing[T]:
        try:
            return await super().list(resource, *args, **kwargs)
        except KubeError as error:
            self._note(resource.plural, str(error), forbidden=type(error) is ForbiddenError)
            raise

    async def watch(self, resource: Resource[T], *args: Any, **kwargs: Any) -> AsyncGenerator[WatchEvent[T]]:
        """The server says nothing while nothing changes: a watch that was not refused at once works."""
        works = asyncio.get_running_loop().call_later(WATCH_HOLDS_S, self._note, resource.plural, "")
        try:
            async for event in super().watch(resource, *args, **kwargs):
                self._note(resource.plural, "")
                yield event
        except KubeError as error:
            self._note(resource.plural, str(error), forbidden=type(error) is ForbiddenError)
            raise
        finally:
            works.cancel()

    def _note(self, plural: str, problem: str, *, forbidden: bool = False) -> None:
        self.forbidden = self.forbidden | {plural} if forbidden else self.forbidden - {plural}
        if self.problems.get(plural, "") != problem:
            self.problems = {**self.problems, plural: problem}
