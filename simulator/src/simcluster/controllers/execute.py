"""Carries out what controllers decided: writes, deletions, events."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import AlreadyExistsError, ConflictError, KubeError, NotFoundError
from gpuslice.adapters.kube.events import EventRecorder
from gpuslice.adapters.kube.objects import ObjectReference
from simcluster.controllers.actions import Action, Again, Create, Delete, Patch, Tell
from simcluster.controllers.cache import Cache, known_kinds
from simcluster.controllers.expectations import Expectations
from simcluster.controllers.work import WorkQueue

Object = Mapping[str, Any]
Key = tuple[str, str]
"""Kind and uid of the object to look at."""

_COMPONENTS = {
    "StatefulSet": "statefulset-controller",
    "ReplicaSet": "replicaset-controller",
    "Deployment": "deployment-controller",
    "DaemonSet": "daemonset-controller",
    "Job": "job-controller",
    "Node": "node-controller",
    "Pod": "resource_claim",
}


class Executor:
    """Carries out actions in order; a KubeError ends the list, and the caller tries again later."""

    def __init__(
        self, client: KubeClient, cache: Cache, queue: WorkQueue[Key], expected: Expectations
    ) -> None:
        self._client = client
        self._cache = cache
        self._queue = queue
        self._expected = expected
        self._kinds = known_kinds()
        self._recorders: dict[str, EventRecorder] = {}

    async def carry_out(self, key: Key, about: Object | None, actions: Sequence[Action]) -> None:
        """``about`` is the object that the decision was made for; events refer to it."""
        for action in actions:
            match action:
                case Create():
                    await self._create(key, about, action)
                case Delete():
                    await self._delete(key, action)
                case Patch():
                    part = "status" if action.status else ""
                    with contextlib.suppress(NotFoundError):
                        await self._client.merge_patch(
                            self._kinds[action.kind],
                            action.name,
                            action.change,
                            action.namespace,
                            uid=action.uid,
                            subresource=part,
                        )
                case Tell():
                    await self._tell(key[0], about, action)
                case Again():
                    self._queue.add_after(key, action.after_s)

    async def _create(self, key: Key, about: Object | None, action: Create) -> None:
        try:
            made = await self._client.create(self._kinds[action.kind], action.obj, action.namespace)
        except AlreadyExistsError:
            self._queue.add_after(key, 0.1)
            return
        except KubeError as error:
            if action.kind == "Pod":
                await self._tell(key[0], about, Tell("FailedCreate", f"Error creating: {error}", "Warning"))
            raise
        uid = made["metadata"]["uid"]
        if uid not in self._cache.of(action.kind):
            self._expected.creation(key[1], uid)
        if action.kind == "Pod" and key[0] in ("ReplicaSet", "DaemonSet", "Job"):
            name = made["metadata"]["name"]
            await self._tell(key[0], about, Tell("SuccessfulCreate", f"Created pod: {name}"))

    async def _delete(self, key: Key, action: Delete) -> None:
        try:
            await self._client.delete(
                self._kinds[action.kind],
                action.name,
                action.namespace,
                uid=action.uid,
                propagation=action.propagation,
                grace_s=action.grace_s,
            )
        except (NotFoundError, ConflictError):
            return
        if action.uid in self._cache.of(action.kind):
            self._expected.deletion(key[1], action.uid)

    async def _tell(self, kind: str, about: Object | None, action: Tell) -> None:
        if about is None or kind not in _COMPONENTS:
            return
        component = _COMPONENTS[kind]
        recorder = self._recorders.setdefault(component, EventRecorder(self._client, component))
        metadata = about["metadata"]
        reference = ObjectReference(
            api_version=self._kinds[kind].api_version,
            kind=kind,
            namespace=metadata.get("namespace", ""),
            name=metadata["name"],
            uid=metadata["uid"],
        )
        await recorder.create_event(reference, action.reason, action.message, type=action.type)
