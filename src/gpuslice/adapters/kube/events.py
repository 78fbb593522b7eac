"""Events on objects: what a user must know, in `kubectl describe`.

The same event again only raises the count of the first, as client-go does it, and an object that says too
much is cut off: a pod that fails in a loop must not fill etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.objects import Event, EventSource, Metadata, ObjectReference
from gpuslice.adapters.kube.resources import EVENTS

_log = logging.getLogger(__name__)

LONGEST_NAME = 230
"""So much of an object's name is in that of an event about it: a time comes behind it."""


@dataclass(frozen=True, slots=True)
class Quota:
    """At most `burst` events of one object at once, then one each `refill_s`, for `remembered` objects."""

    burst: int = 25
    refill_s: float = 300.0
    remembered: int = 4096


@dataclass(slots=True)
class _Sent:
    name: str
    namespace: str
    count: int


@dataclass(slots=True)
class _Bucket:
    tokens: float
    at: float


WAITING = 1000  # events; what comes while so many wait is dropped: a storm must not take memory


class EventRecorder:
    """Writes events as `component`. Never raises for an event that could not be written: it logs instead."""

    def __init__(
        self,
        client: KubeClient,
        component: str,
        *,
        host: str = "",
        quota: Quota = Quota(),
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._client = client
        self._source = EventSource(component=component, host=host)
        self._quota = quota
        self._clock = clock
        self._now_ns = now_ns
        self._sent: OrderedDict[tuple[str, ...], _Sent] = OrderedDict()
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()
        self._waiting: asyncio.Queue[tuple[ObjectReference, str, str, str]] = asyncio.Queue(WAITING)

    def add(self, about: ObjectReference, reason: str, message: str, *, type: str = "Normal") -> None:
        """As `create_event`, in the background: nobody who has work to do waits for the API server."""
        try:
            self._waiting.put_nowait((about, reason, message, type))
        except asyncio.QueueFull:
            about_words = f"{about.kind}/{about.name}"
            _log.warning("event dropped", extra={"about": about_words, "reason": reason})

    async def run(self) -> None:
        """Write what was added, for ever."""
        while True:
            await self.create_event(*await self._waiting.get())

    async def write_waiting(self) -> None:
        """Write what was added so far."""
        while not self._waiting.empty():
            await self.create_event(*self._waiting.get_nowait())

    async def create_event(
        self, about: ObjectReference, reason: str, message: str, type: str = "Normal"
    ) -> None:
        """Tell `message` about an object. `type` is Normal or Warning, `reason` one CamelCase word."""
        if not self._allowed(about):
            return
        key = (about.kind, about.namespace, about.name, about.uid, type, reason, message)
        now = datetime.fromtimestamp(self._now_ns() / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        sent = self._sent.get(key)
        try:
            if sent is not None:
                sent.count += 1
                patch = {"count": sent.count, "lastTimestamp": now}
                with contextlib.suppress(NotFoundError):  # the server forgets events after an hour
                    await self._client.merge_patch(EVENTS, sent.name, patch, sent.namespace)
                    self._sent.move_to_end(key)
                    return
            # a DNS subdomain of 253 characters at most: its parts end with a letter or digit
            name = f"{about.name[:LONGEST_NAME].rstrip('-.')}.{self._now_ns():x}"
            namespace = about.namespace or "default"  # where events of nodes live
            event = Event(
                metadata=Metadata(name=name, namespace=namespace),
                involved_object=about,
                reason=reason,
                message=message[:1024],
                type=type,
                count=1,
                source=self._source,
                first_timestamp=now,
                last_timestamp=now,
            )
            await self._client.create(EVENTS, event)
            self._sent[key] = _Sent(name, namespace, 1)
            _trim(self._sent, self._quota.remembered)
        except KubeError as error:
            _log.warning(
                "event not written",
                extra={"about": f"{about.kind}/{about.name}", "reason": reason, "error": str(error)},
            )

    def _allowed(self, about: ObjectReference) -> bool:
        key = f"{about.kind}/{about.namespace}/{about.name}/{about.uid}"
        now = self._clock()
        bucket = self._buckets.setdefault(key, _Bucket(self._quota.burst, now))
        self._buckets.move_to_end(key)
        _trim(self._buckets, self._quota.remembered)
        bucket.tokens = min(self._quota.burst, bucket.tokens + (now - bucket.at) / self._quota.refill_s)
        bucket.at = now
        if bucket.tokens < 1:
            return False
        bucket.tokens -= 1
        return True


def _trim(cache: OrderedDict[Any, Any], size: int) -> None:
    while len(cache) > size:
        cache.popitem(last=False)


def pod_reference(namespace: str, name: str, uid: str, field_path: str = "") -> ObjectReference:
    """What an event on a pod is about; `field_path` names a container of it, as kubelet does."""
    return ObjectReference(
        api_version="v1", kind="Pod", namespace=namespace, name=name, uid=uid, field_path=field_path
    )


def node_reference(name: str) -> ObjectReference:
    """kubelet and kubectl look events of a node up by its *name* in the uid field."""
    return ObjectReference(api_version="v1", kind="Node", name=name, uid=name)
