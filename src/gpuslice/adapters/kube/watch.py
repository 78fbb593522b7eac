"""A collection of the API kept up to date: list, watch, resume, and list again if the server forgot too much.

The consumer sees one consistent stream of changes whatever happens to the connection: an object that vanished
while nobody watched is reported as deleted, and one that was deleted and recreated under its name as both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Generic, TypeVar, cast

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import GoneError, KubeError, UnavailableError
from gpuslice.adapters.kube.requests import PAGE
from gpuslice.adapters.kube.resources import Resource
from gpuslice.core.errors import GpusliceError
from gpuslice.core.views import version_number

T = TypeVar("T")
_log = logging.getLogger(__name__)


WORKED_S = 1.0
"""A watch that stayed open for that long has worked, even if nothing came."""
AT_ONCE = 500
"""Objects of a first list that are handled before other tasks have their turn."""
PROBE_S = 6
"""How long a second watch is asked for. The API server sends a bookmark two seconds before the end of every
watch, so that even a collection in which nothing happens answers (``nextBookmarkTime`` of the cacher)."""
PROBE_GRACE_S = 3.0
"""A probe that takes longer by this much is not answered at all."""
CATCHING_UP_S = 1.0
"""So much later than a second watch a healthy one may say the same."""
TOO_NEW = "ResourceVersionTooLarge"
"""Why a server's cache cannot answer a list that has to be of this version at least."""
ASKED_AGAIN_S = 2.0
"""Data that seem older are asked for again after that long: kine, which k3s can use instead of etcd, learns
only once a second what its other servers wrote."""


class HistoryRewoundError(GpusliceError):
    """The API server's data are older than what it said before: a backup of etcd was restored.

    What was deleted since then lives again, under its old uid, and versions are given out a second time. Who
    remembers either has to be restarted, as Kubernetes advises for its own components.
    """


class ChangeKind(StrEnum):
    ADDED = "added"
    MODIFIED = "modified"
    DELETED = "deleted"
    SYNCED = "synced"  # all that a list found has been reported


@dataclass(frozen=True, slots=True)
class Change(Generic[T]):
    """One change. `object` is the object as last known, also when DELETED; None when SYNCED.

    `old` is what was known before, for MODIFIED only; `version` the list's, for SYNCED only.
    """

    kind: ChangeKind
    object: T | None = None
    old: T | None = None
    version: str = ""


@dataclass(frozen=True, slots=True)
class Pace:
    """How patient a reflector is. Each wait is jittered so that many clients do not return at once.

    `quiet_s`: a watch that has said nothing for so long is asked about, by a short second one.
    """

    watch_timeout_s: int = 300
    quiet_s: float = 18.0
    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    page: int = PAGE


PER_NODE = Pace(quiet_s=90.0)
"""For what runs on every node. The server's bookmark of each minute is enough there, so that 10,000 healthy
nodes ask nothing more; `Reflector.hurry` asks at once."""


class Reflector(Generic[T]):
    """Calls `handle` for each change of a collection until cancelled; `synced` is set after the first list.

    `handle` is called on the event loop and must return soon: what takes time goes to a queue of its own. An
    exception from it ends `run`, and so does `HistoryRewoundError`. `objects` is the collection as reported
    so far, by (namespace, name): what `each` made of them as they came, which must still have their metadata.
    `cached`, for the few objects of one node: lists come from the server's cache, as kubelet's do, and the
    `pace` is `PER_NODE`. For any other list of one node's pods, Kubernetes before 1.34 or with an older etcd
    reads the whole cluster's.
    """

    def __init__(
        self,
        client: KubeClient,
        resource: Resource[Any],
        handle: Callable[[Change[T]], None],
        *,
        each: Callable[[Any], T] = lambda item: item,
        cached: bool = False,
        namespace: str = "",
        labels: str = "",
        fields: str = "",
        pace: Pace | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self.objects: dict[tuple[str, str], T] = {}
        self.synced = asyncio.Event()
        self._client = client
        self._resource = resource
        self._handle = handle
        self._each = each
        self._cached = cached
        self._namespace = namespace
        self._scope = {"namespace": namespace, "labels": labels, "fields": fields}
        self._pace = pace or (PER_NODE if cached else Pace())
        self._sleep = sleep
        self._clock = clock
        self._uniform = (rng or random).uniform
        self._version = ""  # the last that was seen
        self._must_list = True
        self._pause: asyncio.Future[None] | None = None  # after a failure
        self._hurried = asyncio.Event()
        self._bookmarked = False  # the server sends some, so that silence says something
        self._doubted = False  # a list has looked since the last watch ended by itself
        self._heard_s: float | None = None
        self._failures = 0  # in a row: lists and watches that got no answer
        self._refusals = 0  # since a watch last worked, however well lists do

    def silent_s(self) -> float:
        """Since the API server said anything: a list, a change, or the bookmark of each minute; 0 before the
        first."""
        return 0.0 if self._heard_s is None else self._clock() - self._heard_s

    def hurry(self) -> None:
        """There is news that has not come: connect now if that waits for the end of a pause, or ask about the
        watch if it is silent."""
        self._hurried.set()
        if self._pause is not None:
            self._pause.cancel()

    async def run(self) -> None:
        """Follow the collection for ever."""
        doubted = False
        while True:
            try:
                if self._must_list:
                    await self._list()
                elif self._failures:
                    # a watch from a version that is still to come would be silent until then
                    current = await self._client.current_version(self._resource, self._namespace)
                    self._check_not_older(current, self._version)
                doubted = False
                await self._watch()
            except HistoryRewoundError:
                if doubted:
                    raise
                doubted = True
                await self._sleep(ASKED_AGAIN_S)
            except GoneError as error:
                if self._refusals:  # what it listed just now is too old for it already
                    await self._back_off(error)
                else:
                    self._must_list, self._refusals = True, 1
            except KubeError as error:
                await self._back_off(error)

    # -- list -----------------------------------------------------------------------------------------

    async def _list(self) -> None:
        ask: Any = partial(self._client.list_as, self._resource, self._each, **cast(Any, self._scope))
        version = (self._version or "0") if self._cached else ""
        try:
            listing: Any = await ask(page=self._pace.page, version=version)
        except GoneError:  # a slow reader in a busy cluster: pages expire, one whole answer cannot
            listing = await ask(page=0)
        except UnavailableError as error:
            if not error.status.has_cause(TOO_NEW):
                raise
            listing = await ask(page=self._pace.page)  # its cache lags, or a backup was restored
        found = {_key(item): item for item in listing.items or []}
        self._check_not_older(listing.metadata.resource_version, self._version)
        for key in found.keys() & self.objects.keys():
            (_, _, version, uid), (_, _, known, known_uid) = map(_metadata, (found[key], self.objects[key]))
            if uid == known_uid:
                self._check_not_older(version, known)  # restored as if at a later version
        if self._doubted and _versions(found) != _versions(self.objects):
            self._bookmarked = True  # whether it does or not: this way carries none
        for key in [key for key in self.objects if key not in found]:
            self._delete(key, self.objects[key])
        for number, item in enumerate(found.values(), start=1):
            self._put(item)
            if number % AT_ONCE == 0 and not self.synced.is_set():
                await asyncio.sleep(0)  # nobody relies on a first list yet, but a lease has to be renewed
        self._version = listing.metadata.resource_version
        self._must_list = False
        self._failures = 0
        self._heard_s = self._clock()
        self.synced.set()
        self._handle(Change(ChangeKind.SYNCED, version=self._version))

    # -- watch ----------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """One watch to its end. An end that comes at once is a failure: a proxy may do that for ever."""
        began = self._clock()
        timeout_s = int(self._pace.watch_timeout_s * self._uniform(1, 1.5))
        lines = self._client.watch(self._resource, self._version, timeout_s=timeout_s, **self._scope)
        worked = False
        deaf = asyncio.timeout(None)
        probing = asyncio.create_task(self._probe_in_silence(deaf), name=f"probe {self._resource.plural}")
        try:
            async with deaf, contextlib.aclosing(lines) as open_lines:
                async for event in open_lines:
                    self._heard_s = self._clock()
                    if event.type in ("ADDED", "MODIFIED"):
                        self._put(self._each(event.object))
                    elif event.type == "DELETED":
                        self._delete(_key(event.object), self._each(event.object))
                    else:
                        self._bookmarked = True
                    self._version = _metadata(event.object)[2] or self._version  # all that a BOOKMARK has
                    worked = True
        except TimeoutError:
            if not deaf.expired():
                raise
        finally:
            self._doubted = self._doubted and deaf.expired()
            probing.cancel()
            await asyncio.wait([probing])
            worked = worked or self._clock() - began >= WORKED_S
            if worked:
                self._failures = self._refusals = 0
        if not worked:
            raise UnavailableError(f"watch of {self._resource.plural} was closed immediately, without events")

    async def _probe_in_silence(self, deaf: asyncio.Timeout) -> None:
        """Ends the watch once it turns out to have missed something: what swallows lines may keep it open."""
        asked_s = self._clock()
        while True:
            quiet_s = self._pace.quiet_s * self._uniform(0.8, 1)
            rest_s = quiet_s - (self._clock() - max(asked_s, self._heard_s or 0.0))
            self._hurried.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rest_s):
                    await self._hurried.wait()
            hurried = self._hurried.is_set() and self.silent_s() >= CATCHING_UP_S
            if hurried or self.silent_s() >= self._pace.quiet_s * 0.8:
                if missed := await self._missed():
                    silent = {"resource": self._resource.plural, "silent_s": round(self.silent_s(), 1)}
                    _log.warning("watch is open and silent; reopened", extra={**silent, "missed": missed})
                    deaf.reschedule(asyncio.get_running_loop().time())
                    return
                asked_s = self._clock()

    async def _missed(self) -> str:
        """What a second watch from the same version hears that the first has not said; "" if all is well or
        nobody knows."""
        heard_s, answered = self._heard_s, False
        lines = self._client.watch(self._resource, self._version, timeout_s=PROBE_S, **self._scope)
        try:
            async with asyncio.timeout(PROBE_S + PROBE_GRACE_S), contextlib.aclosing(lines) as open_lines:
                async for event in open_lines:
                    answered = True
                    if event.type == "BOOKMARK":
                        self._bookmarked = True
                        continue
                    await asyncio.sleep(CATCHING_UP_S)
                    return (
                        "" if self._heard_s != heard_s else f"{event.type} of {'/'.join(_key(event.object))}"
                    )
        except GoneError:
            return "too much to be told"
        except (KubeError, TimeoutError):
            return ""  # the next try may tell
        if answered or self._heard_s != heard_s or (self._doubted and not self._bookmarked):
            return ""
        # the way is barred to every watch; or it is a server without a cache, which is listed once in a watch
        self._doubted = self._must_list = True
        return "even a bookmark"

    # -- changes --------------------------------------------------------------------------------------

    def _check_not_older(self, version: str, known: str) -> None:
        """Raises `HistoryRewoundError`."""
        if 0 < version_number(version) < version_number(known):
            raise HistoryRewoundError(
                f"the API server's {self._resource.plural} went back from version {known} to {version}: a "
                "backup of etcd was probably restored; what this process knows is not true any more, so it "
                "ends and has to be started again"
            )

    def _put(self, item: T) -> None:
        namespace, name, version, uid = _metadata(item)
        key = (namespace, name)
        old = self.objects.get(key)
        _, _, old_version, old_uid = _metadata(old) if old is not None else ("", "", "", "")
        if old is not None and old_uid != uid:
            self._delete(key, old)  # deleted and recreated while nobody watched
            old = None
        if old is not None and old_version == version:
            return  # `old` stays: whoever handled it may have made it smaller
        self.objects[key] = item
        if old is None:
            self._handle(Change(ChangeKind.ADDED, item))
        else:
            self._handle(Change(ChangeKind.MODIFIED, item, old))

    def _delete(self, key: tuple[str, str], item: T) -> None:
        known = self.objects.get(key)
        if known is None or _metadata(known)[3] != _metadata(item)[3]:
            return
        del self.objects[key]
        self._handle(Change(ChangeKind.DELETED, item))

    async def _back_off(self, error: KubeError) -> None:
        times = max(self._failures, self._refusals)
        longest = min(self._pace.longest_delay_s, self._pace.first_delay_s * 2 ** min(times, 16))
        delay_s = longest * self._uniform(0.5, 1)
        if isinstance(error, UnavailableError):
            delay_s = max(delay_s, min(error.retry_after_s, self._pace.longest_delay_s))
            self._failures += 1
        else:
            self._must_list = True  # not a passing trouble: what we know may not be true any more
            self._refusals += 1
        _log.warning(
            "watch interrupted",
            extra={"resource": self._resource.plural, "error": str(error), "retry_in_s": round(delay_s, 2)},
        )
        self._pause = asyncio.ensure_future(self._sleep(delay_s))
        try:
            await asyncio.wait([self._pause])
        finally:
            self._pause.cancel()


def _metadata(item: Any) -> tuple[str, str, str, str]:
    """(namespace, name, resourceVersion, uid) of a struct or a dict."""
    if isinstance(item, dict):
        metadata = item.get("metadata", {})
        names = ("namespace", "name", "resourceVersion", "uid")
        return tuple(str(metadata.get(name, "")) for name in names)  # type: ignore[return-value]
    metadata = item.metadata
    return metadata.namespace, metadata.name, metadata.resource_version, metadata.uid


def _versions(objects: Mapping[tuple[str, str], Any]) -> dict[tuple[str, str], str]:
    return {key: _metadata(item)[2] for key, item in objects.items()}


def _key(item: Any) -> tuple[str, str]:
    return _metadata(item)[:2]
