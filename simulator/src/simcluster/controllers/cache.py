"""What the controllers know about the cluster: reflected collections, with the indexes that they need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.resources import Resource
from gpuslice.adapters.kube.watch import Change, ChangeKind, Pace, Reflector
from simcluster.cluster.resources import standard_catalog
from simcluster.controllers.ownership import controller_uid

Object = Mapping[str, Any]
Listener = Callable[[str, Object, bool], None]
"""Called with the kind, the object, and whether it is gone."""

_LEFT_OUT = frozenset({"events", "leases.coordination.k8s.io"})
_PACE = Pace(first_delay_s=0.05, longest_delay_s=2.0)


def known_kinds() -> dict[str, Resource[dict[str, Any]]]:
    """Every stored kind of the catalog by its name, as the client addresses it."""
    kinds: dict[str, Resource[dict[str, Any]]] = {}
    for item in standard_catalog().resources:
        if not item.is_virtual and item.group != "events.k8s.io":
            kinds[item.kind] = Resource(item.api_version, item.plural, item.kind, dict, item.namespaced)
    return kinds


class Cache:
    """Follows the kinds named; ``objects`` of a kind are by uid."""

    def __init__(self, client: KubeClient, kinds: Iterable[str], listen: Listener) -> None:
        resources = known_kinds()
        self._client = client
        self._listen = listen
        self._objects: dict[str, dict[str, Object]] = {kind: {} for kind in kinds}
        self._owned: dict[tuple[str, str], dict[str, Object]] = {}
        self._named: dict[tuple[str, str, str], Object] = {}
        self._reflectors = {
            resources[kind]: self._reflector(client, kind, resources[kind]) for kind in self._objects
        }

    def _reflector(self, client: KubeClient, kind: str, resource: Resource[Any]) -> Reflector[Any]:
        return Reflector(client, resource, lambda change: self._take(kind, change), pace=_PACE)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for resource, reflector in self._reflectors.items():
                group.create_task(self._follow(resource, reflector), name="controllers: reflector")

    async def _follow(self, resource: Resource[Any], reflector: Reflector[Any]) -> None:
        """An API server older than the catalog lacks some kinds: there are no objects of those."""
        try:
            await self._client.list(resource)
        except NotFoundError:
            reflector.synced.set()
            return
        except KubeError:
            pass  # the reflector retries until it is stopped
        await reflector.run()

    async def synced(self) -> None:
        """Returns when every kind has been listed once."""
        await asyncio.gather(*(reflector.synced.wait() for reflector in self._reflectors.values()))

    def of(self, kind: str) -> Mapping[str, Object]:
        return self._objects[kind]

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        return self._named.get((kind, namespace, name))

    def owned(self, kind: str, uid: str) -> list[Object]:
        """Objects of ``kind`` that the owner with this uid controls, oldest name first."""
        found = self._owned.get((kind, uid), {}).values()
        return sorted(found, key=lambda obj: str(obj["metadata"]["name"]))

    def _take(self, kind: str, change: Change[Any]) -> None:
        obj = change.object
        if obj is None:
            return
        uid, gone = obj["metadata"]["uid"], change.kind is ChangeKind.DELETED
        self._forget(kind, uid)
        if not gone:
            self._objects[kind][uid] = obj
            self._named[(kind, *_key(obj))] = obj
            if owner := controller_uid(obj):
                self._owned.setdefault((kind, owner), {})[uid] = obj
        self._listen(kind, obj, gone)

    def _forget(self, kind: str, uid: str) -> None:
        old = self._objects[kind].pop(uid, None)
        if old is None:
            return
        self._named.pop((kind, *_key(old)), None)
        owner = controller_uid(old)
        held = self._owned.get((kind, owner), {})
        held.pop(uid, None)
        if owner and not held:
            self._owned.pop((kind, owner), None)


def _key(obj: Object) -> tuple[str, str]:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]


def collected_kinds() -> list[str]:
    """Kinds whose objects may own or be owned."""
    stored = {item.kind: item.store for item in standard_catalog().resources}
    return [kind for kind in known_kinds() if stored[kind] not in _LEFT_OUT]
