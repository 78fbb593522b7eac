"""Runs the controllers against an API server: examines changed objects and carries out decisions."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from simcluster.controllers import (
    claims,
    daemonset,
    deployment,
    garbage,
    job,
    namespaces,
    nodes,
    quota,
    replicaset,
    services,
    statefulset,
)
from simcluster.controllers.actions import Action
from simcluster.controllers.cache import Cache, collected_kinds, known_kinds
from simcluster.controllers.execute import Executor, Key
from simcluster.controllers.expectations import Expectations
from simcluster.controllers.ownership import controller_uid, labels_of
from simcluster.controllers.pods import is_finished
from simcluster.controllers.work import WorkQueue

Object = Mapping[str, Any]
_log = logging.getLogger(__name__)
_WORKERS = 4
_GARBAGE = "garbage"
_LOST_NODE = "lost node"  # keyed by its name


@dataclass(frozen=True, slots=True)
class Settings:
    """``node_grace_s``: how long a kubelet may be silent before its node is given up (upstream: 40 s)."""

    node_grace_s: float = 40.0


class Controllers:
    """``run`` follows the cluster until cancelled."""

    def __init__(
        self, client: KubeClient, settings: Settings = Settings(), clock: Callable[[], float] = time.time
    ) -> None:
        self._client = client
        self._settings = settings
        self._now_s = clock
        self._kinds = known_kinds()
        self._cache = Cache(client, [*collected_kinds(), "Lease"], self._changed)
        self._graph = garbage.Graph()
        self._queue: WorkQueue[Key] = WorkQueue()
        self._expected = Expectations(time.monotonic)
        self._busy: set[Key] = set()
        self._faces: dict[str, object] = {}
        self._reconcilers: dict[str, Callable[[Object], list[Action]]] = {
            "StatefulSet": self._stateful_set,
            "ReplicaSet": self._replica_set,
            "Deployment": self._deployment,
            "DaemonSet": self._daemon_set,
            "Job": self._job,
            "Node": self._node,
            "Service": self._service,
            "Pod": self._claiming_pod,
            "ResourceQuota": self._quota,
        }
        self._executor = Executor(client, self._cache, self._queue, self._expected)

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._cache.run(), name="controllers: cache")
                await self._cache.synced()
                for number in range(_WORKERS):
                    group.create_task(self._work(), name=f"controllers: worker {number}")
        finally:
            self._queue.close()

    # -- what changed ---------------------------------------------------------------------------------

    def _changed(self, kind: str, obj: Object, gone: bool) -> None:
        uid = obj["metadata"]["uid"]
        self._expected.seen(uid, gone or bool(obj["metadata"].get("deletionTimestamp")))
        self._touch_graph(kind, obj, gone)
        if kind in self._reconcilers and not gone and (kind != "Pod" or claims.names(obj)):
            self._queue.add((kind, uid))
        home = obj["metadata"].get("namespace", "")
        namespace = obj if kind == "Namespace" else self._cache.get("Namespace", "", home)
        if namespace and (kind == "Namespace" or namespace["metadata"].get("deletionTimestamp")):
            self._queue.add(("Namespace", namespace["metadata"]["uid"]))
        if owner := controller_uid(obj):
            self._touch_owner(obj, owner)
        # A node matters to every DaemonSet, a pod to its services and to a node that drives it away
        name = obj["metadata"]["name"]
        if kind == "Node" and gone:
            self._queue.add_after((_LOST_NODE, name), self._settings.node_grace_s)
        if kind == "Node" and self._looks_different(obj, gone):
            self._touch("DaemonSet", lambda _: True)
        elif kind == "ResourceClaim" and not gone:
            self._queue.add((kind, uid))
        elif kind == "ResourceClaimTemplate":
            self._touch("Pod", lambda pod: _home(pod) == home and name in claims.templates(pod))
        elif kind == "Pod":
            for claim_name in filter(None, claims.names(obj).values()):
                if (claim := self._cache.get("ResourceClaim", home, claim_name)) is not None:
                    self._queue.add(("ResourceClaim", claim["metadata"]["uid"]))
            node = self._cache.get("Node", "", obj["spec"].get("nodeName", ""))
            if node is not None and (node.get("spec") or {}).get("taints"):
                self._queue.add(("Node", node["metadata"]["uid"]))
            self._touch("Service", lambda service: services.selects_pod(service, obj))
            self._touch("ResourceQuota", lambda quota: _home(quota) == home)

    def _touch(self, kind: str, concerned: Callable[[Object], bool]) -> None:
        for uid, each in self._cache.of(kind).items():
            if concerned(each):
                self._queue.add((kind, uid))

    def _touch_graph(self, kind: str, obj: Object, gone: bool) -> None:
        if kind == "Lease":
            return
        node = garbage.Node(kind, obj)
        before = self._graph.nodes.get(node.uid, node)
        children = self._graph.dependents(node.uid)
        if gone:
            self._graph.discard(node.uid)
        else:
            self._graph.put(node)
        if node.owners or node.finalizers:
            self._queue.add((_GARBAGE, node.uid))
        owners = [reference["uid"] for reference in [*before.owners, *node.owners]]
        for uid in [*(child.uid for child in children), *owners]:
            self._queue.add((_GARBAGE, uid))

    def _touch_owner(self, obj: Object, uid: str) -> None:
        reference = next(r for r in obj["metadata"]["ownerReferences"] if r["uid"] == uid)
        if reference["kind"] in self._reconcilers:
            self._queue.add((reference["kind"], uid))
        if reference["kind"] == "ReplicaSet" and (owner := self._cache.of("ReplicaSet").get(uid)):
            self._queue.add(("Deployment", controller_uid(owner)))

    def _looks_different(self, node: Object, gone: bool) -> bool:
        """Whether anything relevant to placement changed; most reports of a kubelet change nothing."""
        uid, spec = node["metadata"]["uid"], node.get("spec") or {}
        face = None if gone else (labels_of(node), spec.get("taints"))
        before, self._faces[uid] = self._faces.get(uid), face
        if gone:
            del self._faces[uid]
        return face != before

    # -- deciding -------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            key = await self._queue.take()
            if key in self._busy:
                self._queue.add_after(key, 0.01)
                continue
            self._busy.add(key)
            try:
                await self._look(key)
                self._queue.succeeded(key)
            except KubeError as error:
                _log.info("controller retries", extra={"object": key, "error": str(error)})
                self._queue.failed(key)
            except Exception:
                _log.exception("controller failed", extra={"object": key})
                self._queue.failed(key)
            finally:
                self._busy.discard(key)

    async def _look(self, key: Key) -> None:
        kind, uid = key
        if kind == _GARBAGE:
            # owners missing in the cache are read from the server, since the cache may lag behind
            node = self._graph.nodes.get(uid)
            gone = [item["uid"] for item in node.owners if await self._is_gone(node, item)] if node else []
            await self._executor.carry_out(key, None, garbage.collect(self._graph, uid, gone))
            return
        if kind == _LOST_NODE:
            await self._executor.carry_out(
                key,
                None,
                [] if self._cache.get("Node", "", uid) else nodes.leave_lost_node(self._pods_on(uid)),
            )
            return
        obj = self._cache.of(kind).get(uid)
        if obj is None:
            return
        if (wait_s := self._expected.wait_s(uid)) > 0:
            self._queue.add_after(key, wait_s)
            return
        if kind == "Namespace":
            name = obj["metadata"]["name"]
            held = [
                garbage.Node(kind, item)
                for kind in collected_kinds()
                for item in self._cache.of(kind).values()
                if item["metadata"].get("namespace") == name
            ]
            await self._executor.carry_out(key, obj, namespaces.reconcile(obj, held))
            if namespaces.is_empty(obj, held):
                document = {**obj, "spec": {"finalizers": []}}
                await self._client.replace(self._kinds["Namespace"], document, subresource="finalize")
        elif kind == "ResourceClaim":
            await self._executor.carry_out(key, obj, claims.release(obj, await self._left(obj)))
        else:
            await self._executor.carry_out(key, obj, self._reconcilers[kind](obj))

    def _stateful_set(self, obj: Object) -> list[Action]:
        uid = obj["metadata"]["uid"]
        pods, revisions = self._cache.owned("Pod", uid), self._cache.owned("ControllerRevision", uid)
        return statefulset.reconcile(obj, pods, revisions, self._now_s())

    def _replica_set(self, obj: Object) -> list[Action]:
        return replicaset.reconcile(obj, self._cache.owned("Pod", obj["metadata"]["uid"]), self._now_s())

    def _deployment(self, obj: Object) -> list[Action]:
        sets = self._cache.owned("ReplicaSet", obj["metadata"]["uid"])
        pods = sum(len(self._cache.owned("Pod", item["metadata"]["uid"])) for item in sets)
        return deployment.reconcile(obj, sets, self._now_s(), pods)

    def _daemon_set(self, obj: Object) -> list[Action]:
        pods = self._cache.owned("Pod", obj["metadata"]["uid"])
        revisions = self._cache.owned("ControllerRevision", obj["metadata"]["uid"])
        return daemonset.reconcile(obj, pods, revisions, list(self._cache.of("Node").values()), self._now_s())

    def _job(self, obj: Object) -> list[Action]:
        return job.reconcile(obj, self._cache.owned("Pod", obj["metadata"]["uid"]), self._now_s())

    def _node(self, obj: Object) -> list[Action]:
        name = obj["metadata"]["name"]
        lease = self._cache.get("Lease", "kube-node-lease", name)
        pods = self._pods_on(name) if (obj.get("spec") or {}).get("taints") else []
        return nodes.reconcile(obj, lease, pods, self._now_s(), self._settings.node_grace_s)

    def _claiming_pod(self, obj: Object) -> list[Action]:
        namespace = obj["metadata"]["namespace"]
        templates = {
            name: found
            for name in claims.templates(obj)
            if (found := self._cache.get("ResourceClaimTemplate", namespace, name)) is not None
        }
        return claims.make(obj, templates, self._cache.owned("ResourceClaim", obj["metadata"]["uid"]))

    def _quota(self, obj: Object) -> list[Action]:
        namespace = obj["metadata"]["namespace"]
        pods = self._cache.of("Pod").values()
        return quota.reconcile(obj, [pod for pod in pods if pod["metadata"]["namespace"] == namespace])

    async def _left(self, claim: Object) -> set[str]:
        """The uids of pods that a claim is reserved for and that no longer use it."""
        found = set()
        for user in (claim.get("status") or {}).get("reservedFor") or ():
            reference = {"apiVersion": "v1", "kind": "Pod", "name": user["name"], "uid": user["uid"]}
            pod = self._cache.of("Pod").get(user["uid"])
            over = pod is not None and is_finished(pod)
            if over or (pod is None and await self._is_gone(garbage.Node("ResourceClaim", claim), reference)):
                found.add(user["uid"])
        return found

    def _pods_on(self, node: str) -> list[Object]:
        return [pod for pod in self._cache.of("Pod").values() if pod["spec"].get("nodeName") == node]

    def _service(self, obj: Object) -> list[Action]:
        metadata = obj["metadata"]
        pods = [pod for pod in self._cache.of("Pod").values() if services.selects_pod(obj, pod)]
        endpoints = self._cache.get("Endpoints", metadata["namespace"], metadata["name"])
        slices = self._cache.owned("EndpointSlice", metadata["uid"])
        return services.reconcile(obj, pods, endpoints, slices)

    async def _is_gone(self, node: garbage.Node, reference: Object) -> bool:
        if reference["uid"] in self._graph.nodes:
            return False
        resource = self._kinds.get(reference["kind"])
        if resource is None or resource.api_version != reference["apiVersion"]:
            return False
        namespace = node.obj["metadata"].get("namespace", "") if resource.namespaced else ""
        try:
            owner = await self._client.get(resource, reference["name"], namespace)
        except NotFoundError:
            return True
        return bool(owner["metadata"]["uid"] != reference["uid"])


def _home(obj: Object) -> str:
    return str(obj["metadata"].get("namespace", ""))
