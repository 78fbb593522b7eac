"""kube-scheduler: watches, tries one pod after another, binds in the background.

The scheduling cycle is serial, binding is not. An assumed pod counts immediately and is forgotten if its
binding fails. Events that may make room wake the pods that did not fit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import aiohttp

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.events import EventRecorder, pod_reference
from gpuslice.adapters.kube.resources import NODES, PODS
from gpuslice.adapters.kube.watch import Change, ChangeKind, Reflector
from simcluster.cluster.amounts import Object
from simcluster.scheduler.allocator import AllocatorError
from simcluster.scheduler.claims import ClaimPlugin, Reserved
from simcluster.scheduler.configuration import DEFAULT, Configuration
from simcluster.scheduler.decision import Decider, FitError
from simcluster.scheduler.extender import ExtenderError, HttpExtender
from simcluster.scheduler.nodes import FINISHED, NodeCache
from simcluster.scheduler.queue import SchedulingQueue, Waiting

_log = logging.getLogger(__name__)
_NODE_PARTS_THAT_MATTER = ("labels", "annotations")


class Scheduler:
    """One scheduler of one cluster; `run` it until cancelled."""

    def __init__(
        self,
        client: KubeClient,
        configuration: Configuration = DEFAULT,
        *,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._configuration = configuration
        self._clock = clock
        self._rng = rng or random.Random()
        self._recorder = EventRecorder(client, configuration.scheduler_names[0])
        self._cache = NodeCache()
        self._claims = ClaimPlugin(client, self._claims_changed)
        self._gated: dict[str, Object] = {}  # pods whose claims are not created yet
        self._queue = SchedulingQueue(configuration.initial_backoff_s, configuration.max_backoff_s)
        self._stirred = asyncio.Event()
        self._bindings = asyncio.TaskGroup()
        self.synced = asyncio.Event()

    async def run(self) -> None:
        """Schedule forever."""
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            self._bindings = group
            extenders = [HttpExtender(one, session) for one in self._configuration.extenders]
            decider = Decider(
                self._cache, extenders, self._claims, self._configuration.percentage_of_nodes, self._rng
            )
            nodes = Reflector(self._client, NODES.as_dict(), self._on_node)
            pods = Reflector(self._client, PODS.as_dict(), self._on_pod)
            group.create_task(nodes.run(), name="scheduler nodes")
            group.create_task(pods.run(), name="scheduler pods")
            group.create_task(self._claims.run(), name="scheduler claims")
            await nodes.synced.wait()
            await self._claims.synced()
            await pods.synced.wait()
            self.synced.set()
            group.create_task(self._loop(decider, extenders), name="scheduler loop")

    # -- what changes ----------------------------------------------------------------------------

    def _on_node(self, change: Change[dict[str, Any]]) -> None:
        if change.object is None:
            return
        if change.kind is ChangeKind.DELETED:
            self._cache.remove_node(change.object["metadata"]["name"])
            return
        self._cache.set_node(change.object)
        self._wake(change.old is None or _node_digest(change.old) != _node_digest(change.object))

    def _on_pod(self, change: Change[dict[str, Any]]) -> None:
        pod = change.object
        if pod is None:
            return
        self._gated.pop(pod["metadata"]["uid"], None)
        if change.kind is ChangeKind.DELETED:
            self._queue.remove(pod["metadata"]["uid"])
            self._cache.remove_pod(pod["metadata"]["uid"])
            self._wake()
        elif pod["spec"].get("nodeName"):
            self._queue.remove(pod["metadata"]["uid"])
            self._cache.set_pod(pod)
            self._wake(pod.get("status", {}).get("phase") in FINISHED)
        elif self._is_ours(pod) and not self._claims.are_made(pod):
            self._gated[pod["metadata"]["uid"]] = pod
        elif self._is_ours(pod):
            self._cache.nominate(pod)
            self._queue.add(pod, self._clock())
            self._stirred.set()
        else:
            self._queue.remove(pod["metadata"]["uid"])

    def _claims_changed(self) -> None:
        for uid, pod in list(self._gated.items()):
            if self._claims.are_made(pod):
                self._queue.add(self._gated.pop(uid), self._clock())
        self._wake()

    def _is_ours(self, pod: Object) -> bool:
        spec, metadata = pod["spec"], pod["metadata"]
        named = spec.get("schedulerName", "default-scheduler") in self._configuration.scheduler_names
        gated, gone = spec.get("schedulingGates"), metadata.get("deletionTimestamp")
        finished = pod.get("status", {}).get("phase") in FINISHED
        return named and not gated and not gone and not finished

    def _wake(self, makes_room: bool = True) -> None:
        self._queue.wake(self._clock(), makes_room=makes_room)
        self._stirred.set()

    # -- the loop --------------------------------------------------------------------------------

    async def _loop(self, decider: Decider, extenders: list[HttpExtender]) -> None:
        while True:
            waiting = self._queue.pop(self._clock())
            if waiting is None:
                due = self._queue.next_due(self._clock())
                wait_s = None if due is None else max(0.001, due - self._clock())
                self._stirred.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):  # wait_for of 3.11 may lose a cancellation
                        await self._stirred.wait()
                continue
            if self._cache.is_assumed(waiting.uid):
                self._queue.done(waiting.uid)
                continue
            try:
                node = await decider.choose(waiting.pod)
                reserved = self._claims.reserve(waiting.pod, node)
            except FitError as error:
                waiting.any_event = error.by_extender
                await self._failed(waiting, str(error), unschedulable=True)
            except (ExtenderError, AllocatorError) as error:
                await self._failed(waiting, str(error), unschedulable=False)
            else:
                self._cache.assume(waiting.pod, node)
                name = f"bind {waiting.uid}"
                self._bindings.create_task(self._bind(waiting, node, reserved, extenders), name=name)

    async def _bind(
        self, waiting: Waiting, node: str, reserved: Reserved, extenders: list[HttpExtender]
    ) -> None:
        pod = waiting.pod
        try:
            await self._claims.write(pod, reserved)
            await self._write_binding(pod, node, extenders)
        except (KubeError, ExtenderError) as error:
            self._cache.forget(waiting.uid)
            self._claims.forget(reserved)
            await self._failed(waiting, f"binding rejected: {_words(error)}", unschedulable=False)
            self._wake()
            return
        self._queue.done(waiting.uid)
        name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        await self._event(pod, "Normal", "Scheduled", f"Successfully assigned {name} to {node}")

    async def _write_binding(self, pod: Object, node: str, extenders: list[HttpExtender]) -> None:
        metadata = pod["metadata"]
        for extender in extenders:
            if extender.binds and extender.is_interested(pod):
                try:
                    return await extender.bind(pod, node)
                except ExtenderError:
                    if not extender.config.ignorable:
                        raise
        return await self._client.bind(metadata["namespace"], metadata["name"], node, uid=metadata["uid"])

    # -- failures --------------------------------------------------------------------------------

    async def _failed(self, waiting: Waiting, message: str, *, unschedulable: bool) -> None:
        """Back to the queue; the pod's condition and an event say why, and its nomination is dropped."""
        self._queue.requeue(waiting, self._clock(), unschedulable=unschedulable)
        self._stirred.set()
        await self._event(waiting.pod, "Warning", "FailedScheduling", message)
        await self._set_condition(
            waiting.pod, "Unschedulable" if unschedulable else "SchedulerError", message
        )

    async def _set_condition(self, pod: Object, reason: str, message: str) -> None:
        status = pod.get("status", {})
        known = {one["type"]: one for one in status.get("conditions") or ()}
        old = known.get("PodScheduled", {})
        # whether the pod's nomination failed, and no pod is leaving for it
        over = (
            {"nominatedNodeName": None}
            if bool(pod.get("status", {}).get("nominatedNodeName")) and not self._cache.leaves_for(pod)
            else {}
        )
        if not over and (old.get("status"), old.get("reason"), old.get("message")) == (
            "False",
            reason,
            message,
        ):
            return
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": reason,
            "message": message,
            "lastTransitionTime": old.get("lastTransitionTime")
            or datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        others = [one for one in known.values() if one["type"] != "PodScheduled"]
        metadata = pod["metadata"]
        try:
            await self._client.patch_status(
                PODS.as_dict(),
                metadata["name"],
                {"phase": "Pending", "conditions": [*others, condition], **over},
                metadata["namespace"],
                uid=metadata["uid"],
            )
        except NotFoundError:
            pass  # deleted in the meantime
        except KubeError as error:
            _log.warning("condition not written", extra={"pod": metadata["name"], "error": str(error)})

    async def _event(self, pod: Object, kind: str, reason: str, message: str) -> None:
        metadata = pod["metadata"]
        about = pod_reference(metadata["namespace"], metadata["name"], metadata["uid"])
        await self._recorder.create_event(about, reason, message, type=kind)


def _words(error: Exception) -> str:
    """The API server's own sentence if there is one, as the real scheduler puts it into the event."""
    if isinstance(error, KubeError) and error.status.message:
        return f'running Bind plugin "DefaultBinder": {error.status.message}'
    return str(error)


def _node_digest(node: Object) -> tuple[Any, ...]:
    """The parts of a node that decide whether a pod fits; heartbeats do not change them."""
    metadata = node["metadata"]
    return (
        *(metadata.get(part) for part in _NODE_PARTS_THAT_MATTER),
        node.get("spec"),
        node.get("status", {}).get("allocatable"),
    )
