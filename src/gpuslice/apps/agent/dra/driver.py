"""From kubelet's claims to prepared ones: what each was given, its limits, and how the runtime applies them.

kubelet asks before it starts a pod's first container, and repeats that until it gets a good answer; after a
reboot it asks again for every pod of the node. So an answer may never depend on whether it was given before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.objects import ResourceClaim
from gpuslice.adapters.kube.resources import RESOURCE_CLAIMS
from gpuslice.adapters.kubelet.draplugin import DraService
from gpuslice.adapters.kubelet.proto import draplugin_pb2 as pb
from gpuslice.adapters.region.limits import LimitsError
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.dra.prepared import (
    CdiEdits,
    PreparedClaims,
    cdi_device,
    folder_name,
    valid_uid,
)
from gpuslice.apps.agent.dra.users import ClaimUser, users_of
from gpuslice.apps.agent.folders import Folders, refusal_of
from gpuslice.apps.agent.library import IsolationMissingError
from gpuslice.apps.agent.owner import Owner
from gpuslice.apps.agent.pods import NODE_PODS, AgentPod
from gpuslice.core.claims import ClaimAllocation, ClaimedSlice, claimed_slices, device_name, units_held
from gpuslice.core.contract import CLAIM_DRIVER, ENV_VISIBLE
from gpuslice.core.errors import ContractError, GpusliceError
from gpuslice.core.grant import Grant, GrantError, grant_of_units
from gpuslice.core.model import Tier
from gpuslice.core.units import MIB

_log = logging.getLogger(__name__)

HEALTH_EVERY_S = 10.0
"""kubelet marks a device as unknown after 30 s without news of it."""
HEALTH_POLL_S = 0.5
STATUS_S = 3.0
"""How long the first container may wait for the claim's status to be written."""


class UnpreparedError(GpusliceError):
    """A claim cannot be prepared now; kubelet shows the reason in the pod's events and retries."""


class ClaimDriver(DraService):
    """The driver of one node. `obstacle` returns why no claim may be prepared here, "" if it may."""

    def __init__(
        self,
        client: KubeClient,
        state: AllocationState,
        folders: Folders,
        prepared: PreparedClaims,
        *,
        unit: Callable[[], str],
        cdi_kind: str,
        obstacle: Callable[[], str],
        unhealthy: Callable[[], dict[int, str]],
    ) -> None:
        self.prepared = prepared
        self.changed = asyncio.Event()  # what claims hold
        self._client = client
        self._state = state
        self._folders = folders
        self._unit = unit
        self._cdi_kind = cdi_kind
        self._obstacle = obstacle
        self._unhealthy = unhealthy
        self._one_at_a_time = asyncio.Lock()

    # -- kubelet's questions --------------------------------------------------------------------------

    async def node_prepare_resources(
        self, request: pb.NodePrepareResourcesRequest
    ) -> pb.NodePrepareResourcesResponse:
        answers = {}
        for claim in request.claims:
            try:
                async with self._one_at_a_time:
                    allocation = await self._prepared(claim)
            except (UnpreparedError, KubeError, IsolationMissingError, LimitsError, OSError) as error:
                about = {"claim": f"{claim.namespace}/{claim.name}", "error": refusal_of(error)}
                _log.warning("claim not prepared", extra=about)
                answers[claim.uid] = pb.NodePrepareResourceResponse(error=refusal_of(error))
                continue
            await self._tell(allocation)
            answers[claim.uid] = pb.NodePrepareResourceResponse(devices=self._devices(allocation))
        return pb.NodePrepareResourcesResponse(claims=answers)

    async def node_unprepare_resources(
        self, request: pb.NodeUnprepareResourcesRequest
    ) -> pb.NodeUnprepareResourcesResponse:
        """Also succeeds for an unknown claim, since kubelet asks until it does."""
        answers = {}
        for claim in request.claims:
            try:
                async with self._one_at_a_time:
                    self.prepared.remove(claim.uid)
            except OSError as error:
                answers[claim.uid] = pb.NodeUnprepareResourceResponse(error=str(error))
                continue
            self.changed.set()
            _log.info("claim let go", extra={"claim": f"{claim.namespace}/{claim.name}"})
            answers[claim.uid] = pb.NodeUnprepareResourceResponse()
        return pb.NodeUnprepareResourcesResponse(claims=answers)

    async def node_watch_resources(
        self, request: pb.NodeWatchResourcesRequest
    ) -> AsyncGenerator[pb.NodeWatchResourcesResponse]:
        while True:
            sent, sent_s = self._unhealthy(), time.monotonic()
            yield pb.NodeWatchResourcesResponse(
                devices=[
                    pb.DeviceHealth(
                        device=pb.DeviceIdentifier(
                            pool_name=self._state.node.name, device_name=device_name(card)
                        ),
                        health=pb.UNHEALTHY if card.index in sent else pb.HEALTHY,
                        last_updated_time=int(time.time()),
                        message=sent.get(card.index, "")[:1024],
                    )
                    for card in self._state.node.cards
                ]
            )
            while self._unhealthy() == sent and time.monotonic() - sent_s < HEALTH_EVERY_S:  # noqa: ASYNC110
                await asyncio.sleep(HEALTH_POLL_S)

    # -- preparing ------------------------------------------------------------------------------------

    @property
    def _uuids(self) -> dict[int, str]:
        """Of the node's cards, by the index that each has now."""
        return {card.index: card.uuid for card in self._state.node.cards}

    async def _prepared(self, claim: pb.Claim) -> ClaimAllocation:
        """The claim's allocation, after putting in place all that its containers need."""
        found = await self._client.get(RESOURCE_CLAIMS, claim.name, claim.namespace)
        allocation = self._allocation(claim, found)
        uuids = self._uuids
        users = await self._users(found)
        self._check_users(allocation, users)
        if self.prepared.in_place(allocation):
            record = self.prepared.get(allocation.uid)
            for index, uuid in record.uuids.items() if record else ():
                if uuids[index] != uuid:
                    raise UnpreparedError(
                        f"claim {allocation.key} was prepared on card {uuid}, and gpu-{index} is now "
                        f"{uuids[index]}, as the driver counts: delete the claim's pods, and the claim"
                    )
            return allocation
        if obstacle := self._obstacle():
            raise UnpreparedError(obstacle)
        self._check_room(allocation)
        edits = [self._edits(allocation, name, users) for name in allocation.by_request()]
        self.prepared.write(allocation, edits, uuids)
        self.changed.set()
        _log.info("claim prepared", extra={"claim": allocation.key, "slices": len(allocation.slices)})
        return allocation

    def _check_users(self, allocation: ClaimAllocation, users: Iterable[ClaimUser]) -> None:
        """Also of a claim that is in place: pods may come to share it."""
        claims = {
            record.name
            for record in self.prepared.all()
            if record.namespace == allocation.namespace and record.uid != allocation.uid
        }
        for user in users:
            if user.hiding:
                raise UnpreparedError(f"pod {user.namespace}/{user.pod}: {user.hiding}")
            # a container has the limits of one request of one claim: of two, the last would hold for both
            about = f"container {user.container} of pod {user.namespace}/{user.pod} uses"
            if len(user.requests) > 1:
                raise UnpreparedError(
                    f"{about} the requests {', '.join(sorted(user.requests))} of shared cards at once, and "
                    f"has limits for one only: let it name one request; one with count: 2 is of two cards"
                )
            if user.other_claims & claims:
                raise UnpreparedError(
                    f"{about} a second claim of shared cards, and has limits for one only: let one claim ask "
                    f"for all that it needs"
                )

    def _check_room(self, allocation: ClaimAllocation) -> None:
        """The allocator counts by itself; this check catches cards or units that changed since."""
        now = self._uuids
        held: Counter[str] = Counter()  # by uuid: since a claim was prepared its index may be another card's
        for record in self.prepared.all():
            if record.uid != allocation.uid:
                for index, units in units_held([record.allocation]).items():
                    held[record.uuids.get(index) or now.get(index, "")] += units
        asked = units_held([allocation])
        for card in self._state.node.cards:
            would_hold = held[card.uuid] + asked.get(card.index, 0)
            if would_hold > card.units:
                raise UnpreparedError(
                    f"card {card.index} of node {self._state.node.name} has {card.units} units, and prepared "
                    f"claims with this one would hold {would_hold}; it is prepared once others end"
                )

    def _allocation(self, claim: pb.Claim, found: ResourceClaim) -> ClaimAllocation:
        if found.metadata.uid != claim.uid or not valid_uid(claim.uid):
            raise UnpreparedError(
                f"claim {claim.namespace}/{claim.name} is another one now: its uid is {found.metadata.uid}, "
                f"and kubelet asks for {claim.uid}"
            )
        if found.status.allocation is None:
            raise UnpreparedError(f"claim {claim.namespace}/{claim.name} is not allocated")
        node = self._state.node
        results = found.status.allocation.devices.results or ()
        try:
            slices = claimed_slices(results, node.name, node.cards, self._unit())
        except ContractError as error:
            raise UnpreparedError(f"claim {claim.namespace}/{claim.name}: {error}") from error
        if not slices:
            raise UnpreparedError(
                f"claim {claim.namespace}/{claim.name} was given nothing of driver {CLAIM_DRIVER} on node "
                f"{node.name}"
            )
        return ClaimAllocation(claim.uid, claim.namespace, claim.name, slices)

    async def _users(self, found: ResourceClaim) -> list[ClaimUser]:
        """The containers of this node's pods that use the claim, or also another one of ours."""
        users: list[ClaimUser] = []
        for consumer in found.status.reserved_for or ():
            if consumer.resource != "pods":
                continue
            try:
                pod: AgentPod = await self._client.get(NODE_PODS, consumer.name, found.metadata.namespace)
            except NotFoundError:
                continue
            if (pod.metadata.uid, pod.spec.node_name) == (consumer.uid, self._state.node.name):
                users += users_of(pod, found)
        return users

    def _edits(self, allocation: ClaimAllocation, request: str, users: list[ClaimUser]) -> CdiEdits:
        """What a container gets for one request; its folder is ready for the first instruction."""
        slices = allocation.by_request()[request]
        if slices[0].admin:
            return self._admin_edits(request, slices)
        grant = self._grant(allocation, slices)
        mine = [each for each in users if request in each.requests]
        owner = Owner([])
        if len(mine) == 1:
            (user,) = mine
            owner = Owner([], user.uid, user.namespace, user.pod, user.container)
        name = folder_name(allocation.uid, request)
        # of containers that share a request the driver would give each all of it; the library sums them up
        by_driver = (
            bool(owner.uid) and {each.card.uuid for each in grant.limits} <= self._state.by_driver.cards
        )
        mounts = self._folders.start_claim(name, grant.limits, owner, self._state.rules, hooked=by_driver)
        return CdiEdits(request, grant.environment, mounts, self._folders.records[name])

    def _admin_edits(self, request: str, slices: tuple[ClaimedSlice, ...]) -> CdiEdits:
        uuids = self._uuids
        return CdiEdits(request, {ENV_VISIBLE: ",".join(uuids[each.card] for each in slices)})

    def _grant(self, allocation: ClaimAllocation, slices: tuple[ClaimedSlice, ...]) -> Grant:
        """The sum of a request's slices: kube-scheduler 1.34 may allocate several on one card."""
        uuids = self._uuids
        units: Counter[str] = Counter()
        percents: Counter[str] = Counter()
        for each in slices:
            units[uuids[each.card]] += each.units
            percents[uuids[each.card]] += each.compute_percent
        whole = sum(each.units for each in allocation.slices)
        percent = min(percents.values())  # one value for all cards of a container, granted on each of them
        try:
            return grant_of_units(units, self._state.node, pod_units=whole, compute_percent=percent)
        except GrantError as error:
            raise UnpreparedError(str(error)) from error

    def _devices(self, allocation: ClaimAllocation) -> list[pb.Device]:
        """What kubelet is told. A request's CDI device covers all its cards and comes with the first."""
        uuids = self._uuids
        devices = []
        for request, slices in allocation.by_request().items():
            for position, each in enumerate(slices):
                ids = [] if position else [cdi_device(allocation.uid, request)]
                if self._cdi_kind:
                    ids.append(f"{self._cdi_kind}={uuids[each.card]}")
                devices.append(
                    pb.Device(
                        request_names=[request],
                        pool_name=self._state.node.name,
                        device_name=f"gpu-{each.card}",
                        cdi_device_ids=ids,
                        share_id=each.share_id or None,
                    )
                )
        return devices

    async def _tell(self, allocation: ClaimAllocation) -> None:
        """Write in the claim's status what is in force. A claim is prepared even if this is not written."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        devices = []
        for slices in allocation.by_request().values():
            limits = (
                {}
                if slices[0].admin
                else {each.card.index: each for each in self._grant(allocation, slices).limits}
            )
            for each in slices:
                data: dict[str, Any] = {"tier": "none"}
                if each.card in limits:
                    data = {
                        "tier": self._tier(allocation, each.request).word,
                        "units": each.units,
                        "memoryLimitBytes": limits[each.card].memory_mib * MIB,
                        "computePercent": each.compute_percent,
                    }
                devices.append(
                    {
                        "driver": CLAIM_DRIVER,
                        "pool": self._state.node.name,
                        "device": f"gpu-{each.card}",
                        **({"shareID": each.share_id} if each.share_id else {}),
                        "conditions": [
                            {
                                "type": "Ready",
                                "status": "True",
                                "reason": "Prepared",
                                "message": "limits are in place",
                                "lastTransitionTime": now,
                            }
                        ],
                        "data": data,
                    }
                )
        document = {
            "metadata": {"namespace": allocation.namespace, "name": allocation.name, "uid": allocation.uid},
            "status": {"devices": devices},
        }
        try:
            async with asyncio.timeout(STATUS_S):
                await self._client.apply(RESOURCE_CLAIMS, document, force=True, subresource="status")
        except (KubeError, TimeoutError) as error:
            _log.warning("claim's status not written", extra={"claim": allocation.key, "error": str(error)})

    def _tier(self, allocation: ClaimAllocation, request: str) -> Tier:
        """What enforces the limits of the container that uses a request."""
        owner = self._folders.records.get(folder_name(allocation.uid, request))
        return Tier.DRIVER if owner is not None and owner.hooked else Tier.LIBRARY

    # -- taking away ------------------------------------------------------------------------------------

    async def forget_vanished(self) -> None:
        """Remove what was prepared for claims that no longer exist, and what a crash left half prepared.

        kubelet does not ask for that if it lost its own checkpoint. Raises KubeError and OSError.
        """
        for record in self.prepared.all():
            try:
                found = await self._client.get(RESOURCE_CLAIMS, record.name, record.namespace)
            except NotFoundError:
                found = None
            if found is None or found.metadata.uid != record.uid:
                async with self._one_at_a_time:
                    self.prepared.remove(record.uid)
                self.changed.set()
                _log.info("claim is gone, let go", extra={"claim": f"{record.namespace}/{record.name}"})
        async with self._one_at_a_time:
            for uid in list(self.prepared.leftovers()):
                if not await self._adopted(uid):
                    self.prepared.remove(uid)

    async def _adopted(self, uid: str) -> bool:
        """Whether a claim without a record is in use here: then it is recorded again, from what is there."""
        names = [each for each in self._folders.of_claims() if each.startswith(folder_name(uid, ""))]
        owner = next((each for name in names if (each := self._folders.owner(name)).pod), None)
        if owner is None:
            return False
        try:
            pod: AgentPod = await self._client.get(NODE_PODS, owner.pod, owner.namespace)
            for name in {each.claim for each in pod.used_requests}:
                found = await self._client.get(RESOURCE_CLAIMS, name, owner.namespace)
                if found.metadata.uid == uid and pod.metadata.uid == owner.uid:
                    asked = pb.Claim(uid=uid, name=name, namespace=owner.namespace)
                    allocation = self._allocation(asked, found)
                    edits = [self._found_edits(allocation, each) for each in allocation.by_request()]
                    self.prepared.write(allocation, edits, self._uuids)
                    return True
        except (NotFoundError, UnpreparedError):
            pass
        return False

    def _found_edits(self, allocation: ClaimAllocation, request: str) -> CdiEdits:
        """As `_edits`, of containers that may be running: their folder is left as it is."""
        slices = allocation.by_request()[request]
        if slices[0].admin:
            return self._admin_edits(request, slices)
        name = folder_name(allocation.uid, request)
        owner = self._folders.owner(name)
        mounts = self._folders.mounts(name, owner.cards, owner.library)
        return CdiEdits(request, self._grant(allocation, slices).environment, mounts, owner)
