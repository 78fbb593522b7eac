"""kube-scheduler's plugin for claims: what pods claim, whether it fits on a node, and writing the result.

A decision counts immediately, and is forgotten if it could not be written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.resources import RESOURCE_CLAIMS, RESOURCE_SLICES, Resource
from gpuslice.adapters.kube.watch import Change, ChangeKind, Reflector
from simcluster.cluster.amounts import Object
from simcluster.scheduler.allocator import AllocatorError, allocate, devices_of
from simcluster.scheduler.filters import Failure

FINALIZER = "resource.kubernetes.io/delete-protection"
CLAIMS = RESOURCE_CLAIMS.as_dict()
CLASSES: Resource[dict[str, Any]] = Resource(
    "resource.k8s.io/v1", "deviceclasses", "DeviceClass", dict, namespaced=False
)


@dataclass(slots=True)
class Reserved:
    """What a pod's claims get on its node, by uid: those without an allocation, and those it only joins."""

    allocations: dict[str, dict[str, Any]] = field(default_factory=dict)
    claims: list[Object] = field(default_factory=list)


def claim_names(pod: Object) -> list[str]:
    """For each of its claims; "" for one that is not created yet."""
    statuses = pod.get("status", {}).get("resourceClaimStatuses") or ()
    made = {each["name"]: each.get("resourceClaimName", "") for each in statuses}
    return [
        each.get("resourceClaimName") or made.get(each["name"], "")
        for each in pod["spec"].get("resourceClaims") or ()
    ]


class ClaimPlugin:
    """Follows claims, slices and classes. `changed` is called when pods that did not fit may fit now."""

    def __init__(self, client: KubeClient, changed: Callable[[], None]) -> None:
        self._client = client
        self._changed = changed
        self._assumed: dict[str, dict[str, Any]] = {}  # claim uid → allocation being written
        self._claims: Reflector[dict[str, Any]] = Reflector(client, CLAIMS, self._on_claim)
        self._slices: Reflector[dict[str, Any]] = Reflector(client, RESOURCE_SLICES, self._on_other)
        self._classes: Reflector[dict[str, Any]] = Reflector(client, CLASSES, self._on_other)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for reflector in (self._claims, self._slices, self._classes):
                group.create_task(reflector.run(), name="scheduler claims")

    async def synced(self) -> None:
        for reflector in (self._claims, self._slices, self._classes):
            await reflector.synced.wait()

    def _on_claim(self, change: Change[dict[str, Any]]) -> None:
        claim = change.object
        if claim is None:
            return
        if change.kind is ChangeKind.DELETED or claim.get("status", {}).get("allocation"):
            self._assumed.pop(claim["metadata"]["uid"], None)
        self._changed()

    def _on_other(self, _: Change[dict[str, Any]]) -> None:
        self._changed()

    # -- one pod --------------------------------------------------------------------------------------

    def are_made(self, pod: Object) -> bool:
        """Whether all its claims exist; before that, scheduling is not attempted."""
        return len(self._of(pod)) == len(claim_names(pod))

    def check(self, pod: Object, node: str) -> Failure | None:
        """Raises AllocatorError."""
        if not pod["spec"].get("resourceClaims"):
            return None
        if any(
            not _is_for(node, allocation) for allocation in map(self._allocation, self._of(pod)) if allocation
        ):
            return Failure(("resourceclaim not available on the node",), unresolvable=True)
        if self._decide(pod, node) is None:
            return Failure(("cannot allocate all claims",), unresolvable=True)
        return None

    def reserve(self, pod: Object, node: str) -> Reserved:
        """Count it from now on. Raises AllocatorError if it no longer fits."""
        found = self._decide(pod, node) if pod["spec"].get("resourceClaims") else Reserved()
        if found is None:
            raise AllocatorError(f"what the pod claims on {node} is not free any more")
        self._assumed |= found.allocations
        return found

    def forget(self, reserved: Reserved) -> None:
        for uid in reserved.allocations:
            self._assumed.pop(uid, None)

    async def write(self, pod: Object, reserved: Reserved) -> None:
        """The allocations, and the pod among those that may use them. Raises KubeError."""
        metadata = pod["metadata"]
        consumer = {"resource": "pods", "name": metadata["name"], "uid": metadata["uid"]}
        for each in reserved.claims:
            name, namespace = each["metadata"]["name"], each["metadata"]["namespace"]
            claim = await self._client.get(CLAIMS, name, namespace)
            if FINALIZER not in (claim["metadata"].get("finalizers") or ()):
                finalizers = [*(claim["metadata"].get("finalizers") or ()), FINALIZER]
                claim["metadata"] = {**claim["metadata"], "finalizers": finalizers}
                claim = await self._client.replace(CLAIMS, claim)
            status = claim.get("status") or {}
            users = status.get("reservedFor") or []
            if consumer not in users:
                status = {**status, "reservedFor": [*users, consumer]}
            if (allocation := reserved.allocations.get(claim["metadata"]["uid"])) is not None:
                status = {**status, "allocation": allocation}
            await self._client.replace(CLAIMS, {**claim, "status": status}, subresource="status")

    # -- deciding -------------------------------------------------------------------------------------

    def _of(self, pod: Object) -> list[Object]:
        namespace = pod["metadata"]["namespace"]
        named = ((namespace, name) for name in claim_names(pod))
        return [self._claims.objects[key] for key in named if key in self._claims.objects]

    def _allocation(self, claim: Object) -> dict[str, Any] | None:
        held = self._assumed.get(claim["metadata"]["uid"])
        return held or claim.get("status", {}).get("allocation")

    def _decide(self, pod: Object, node: str) -> Reserved | None:
        claims = self._of(pod)
        waiting = [each for each in claims if self._allocation(each) is None]
        devices = devices_of(self._slices.objects.values(), node)
        classes = {each["metadata"]["name"]: each for each in self._classes.objects.values()}
        found = allocate(waiting, devices, classes, self._results())
        if found is None:
            return None
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        allocations = {
            claim["metadata"]["uid"]: {
                "devices": {"results": results},
                "nodeSelector": {"nodeSelectorTerms": [term]},
            }
            for claim, results in zip(waiting, found, strict=True)
        }
        return Reserved(allocations, claims)

    def _results(self) -> Iterator[Object]:
        for claim in self._claims.objects.values():
            yield from ((self._allocation(claim) or {}).get("devices") or {}).get("results") or ()


def _is_for(node: str, allocation: Object) -> bool:
    """By the fields that this scheduler and a driver of one node write; none means any node."""
    terms = (allocation.get("nodeSelector") or {}).get("nodeSelectorTerms") or ()
    fields = [each for term in terms for each in term.get("matchFields") or ()]
    return all(node in each.get("values", ()) for each in fields)
