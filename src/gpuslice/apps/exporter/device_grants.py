"""What kubelet gave each container of each card: device assignments converted to grants in bytes.

Shared cards' ids carry the card (``<uuid>-_-<n>``). Whole cards are named by their uuid, or as ``nvidia<n>``
by Google's plugin. A replica number after ``::`` (Google: ``/vgpu``) is how these plugins name time slices of
one card: such a holder has the whole card together with others, and no limit. MIG devices are ``MIG-<uuid>``
or ``nvidia<n>/gi<instance>``. Claims of dynamic resource allocation name a pool and a device in it; the
driver's ResourceSlices show which card that is, or the name itself if it ends with the card's number.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from gpuslice.adapters.gpu.telemetry import CardSample
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError, NotFoundError
from gpuslice.adapters.kube.resources import DICT, Resource
from gpuslice.adapters.kubelet.podresources import Claimed
from gpuslice.apps.exporter.node_pods import NodePods
from gpuslice.core.attribution import ContainerKey
from gpuslice.core.contract import CLAIM_DRIVER, EXCLUSIVE_GPU, MEMORY_NAMES
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.grant import GrantError, units_per_card
from gpuslice.core.units import MIB, card_units, limit_mib

_log = logging.getLogger(__name__)
MIG_RESOURCE = "nvidia.com/mig-"
SHARED_RESOURCE = "nvidia.com/gpu.shared"  # NVIDIA's plugin renames time slices to this if configured
NVIDIA_DRIVER = "gpu.nvidia.com"  # of dynamic resource allocation
SLICE_VERSIONS = ("v1", "v1beta2", "v1beta1")
SLICES_RETRY_S = 30.0
_REPLICAS = ("::", "/vgpu")
_MIG_PREFIX = "MIG-"
_INSTANCE = re.compile(r"nvidia\d+/gi\d+")
_NUMBERED = re.compile(r"gpu-(\d+)")


class PreparedPart(msgspec.Struct, frozen=True):
    """What one request of a claim was given of one card; `units` is 0 if it takes nothing.

    `card`: its index when the claim was prepared.
    """

    request: str
    card: int
    units: int


class ClaimRecord(msgspec.Struct, frozen=True):
    """The agent's record of a claim. `uuids`: of its cards, by index."""

    namespace: str
    name: str
    slices: list[PreparedPart] = []
    uuids: dict[int, str] = {}

    def device(self, part: PreparedPart) -> str:
        """The card's uuid; its name if an older agent recorded none."""
        return self.uuids.get(part.card, f"nvidia{part.card}")


ClaimRecords = Mapping[tuple[str, str], ClaimRecord]
"""By namespace and name."""
_CLAIM_RECORD = msgspec.json.Decoder(ClaimRecord)


class ShareMode(StrEnum):
    EXCLUSIVE = "exclusive"
    SHARE = "share"
    MIG = "mig"


@dataclass(frozen=True, slots=True)
class DeviceGrant:
    """What a container was given of one card, or of MIG devices on it.

    `units` counts ``aliyun.com/gpu-mem``; 0 for whole cards and devices. `replica`: which time slice.
    `claim`: by dynamic resource allocation. `mig`: uuids of the MIG devices, known once the card's are.
    """

    resource: str
    mode: ShareMode
    units: int = 0
    replica: str = ""
    claim: Claimed | None = None
    mig: tuple[str, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it is the whole card, alone or together with others."""
        return not self.units and self.mode is not ShareMode.MIG

    def memory_bytes(self, card: CardSample, unit: str) -> int | None:
        """The memory that it represents on `card`; None if unknown.

        MIG devices have a size of their own; devices of one GPU instance share theirs.
        """
        if self.mode is ShareMode.MIG:
            mine = (each for each in card.mig if each.uuid in self.mig)
            return sum({each.gpu_instance: each.total_bytes for each in mine}.values())
        if card.total_bytes is None or not self.units:
            return card.total_bytes
        total_mib = card.total_bytes // MIB
        units = card_units(total_mib, unit)
        return limit_mib(total_mib, min(self.units, units), units) * MIB if units else None


CardGrants = Mapping[ContainerKey, DeviceGrant]
_NOBODY: CardGrants = {}


@dataclass(frozen=True, slots=True)
class DeviceGrants:
    """Name of a card or MIG device → container → grant; and ids that name neither, in one sentence each."""

    by_device: Mapping[str, CardGrants]
    problems: tuple[str, ...] = ()
    other_names: bool = field(init=False, default=False)  # any name other than a card's uuid
    containers: Mapping[str, tuple[str, ...]] = field(init=False, default_factory=dict)
    """``namespace/pod`` → names of its containers with an allocation."""

    def __post_init__(self) -> None:
        containers: dict[str, set[str]] = defaultdict(set)
        for grants in self.by_device.values():
            for key in grants:
                containers[f"{key.namespace}/{key.pod}"].add(key.container)
        named = {pod: tuple(sorted(names)) for pod, names in containers.items()}
        object.__setattr__(self, "containers", named)
        object.__setattr__(self, "other_names", any(not name.startswith("GPU-") for name in self.by_device))

    def of(self, card: CardSample) -> CardGrants:
        """Who holds the card or a part of it, under any of its names."""
        grants = self.by_device.get(card.uuid, _NOBODY)
        if not self.other_names:
            return grants
        number = f"nvidia{card.index}"
        found = {**grants, **self.by_device.get(number, _NOBODY)}
        for device in card.mig:
            instance = self.by_device.get(f"{number}/gi{device.gpu_instance}", _NOBODY)
            for key, grant in {**self.by_device.get(device.uuid, _NOBODY), **instance}.items():
                before = found[key].mig if key in found else ()
                found[key] = replace(grant, mig=(*before, device.uuid))
        return found


def is_card_resource(resource: str, more: Iterable[str] = ()) -> bool:
    """Whether a resource represents cards or MIG devices."""
    known = resource in {*MEMORY_NAMES, EXCLUSIVE_GPU, SHARED_RESOURCE} or resource.startswith(MIG_RESOURCE)
    return known or resource in set(more)


def grants_of(
    assignments: Mapping[str, Iterable[DeviceAssignment]],
    claims: Iterable[Claimed] = (),
    devices: Mapping[tuple[str, str], str] = {},
    parts: Mapping[tuple[ContainerKey, str], tuple[int, Claimed]] = {},
    added: Mapping[ContainerKey, int] = {},
) -> DeviceGrants:
    """kubelet's device assignments by resource, and claims, as grants. `devices`: (pool, device) → uuid.

    `parts`: the units of a card that a container has from our own driver, see `claimed_parts`. `added`: units
    that it was granted beyond its ids, evenly on its cards.
    """
    grants: dict[str, dict[ContainerKey, DeviceGrant]] = defaultdict(dict)
    problems: list[str] = []
    for resource, assigned in assignments.items():
        for assignment in assigned:
            key = ContainerKey(assignment.namespace, assignment.pod, assignment.container)
            try:
                for name, grant in _grants_by_device(resource, assignment.ids, added.get(key, 0)):
                    grants[name][key] = grant
            except GrantError as error:
                problems.append(f"{resource} of {key.namespace}/{key.pod}: {error}")
    for (key, card), (units, claim) in parts.items():
        grants[card][key] = DeviceGrant(claim.driver, ShareMode.SHARE, units, claim=claim)
    for claim in claims:
        if claim.driver != NVIDIA_DRIVER:
            continue
        numbered = _NUMBERED.fullmatch(claim.device)  # NVIDIA's driver names a card gpu-<minor>
        name = devices.get((claim.pool, claim.device)) or (f"nvidia{numbered[1]}" if numbered else "")
        if name:
            key = ContainerKey(claim.namespace, claim.pod, claim.container)
            grants[name][key] = DeviceGrant(claim.driver, _mode_of(name, ""), claim=claim)
        else:
            problems.append(f"claim {claim.claim}: no ResourceSlice tells what {claim.device} is")
    for by_container in grants.values():  # a claim used by several containers is a card that they share
        whole = [key for key, grant in by_container.items() if grant.claim and grant.whole]
        for key in whole if len(by_container) > 1 else ():
            by_container[key] = replace(by_container[key], mode=ShareMode.SHARE)
    return DeviceGrants(grants, tuple(problems))


def claimed_parts(
    claims: Iterable[Claimed], prepared: ClaimRecords, pods: NodePods
) -> dict[tuple[ContainerKey, str], tuple[int, Claimed]]:
    """(container, card's uuid or name) → its units by claims of our driver, and the claim.

    Of a claim with several requests, a container has those that its pod names; nothing until that is known.
    """
    found: dict[tuple[ContainerKey, str], tuple[int, Claimed]] = {}
    ours = (each for each in claims if each.driver == CLAIM_DRIVER)
    by_container = {(each.namespace, each.pod, each.container, each.claim): each for each in ours}
    for claim in by_container.values():
        record = prepared.get((claim.claim_namespace, claim.claim))
        if record is None:
            continue
        pod = pods.pod(claim.namespace, claim.pod)
        uses = (
            pod.requests.get((claim.container, claim.claim), frozenset()) if pod is not None else frozenset()
        )
        if "" in uses or len({each.request for each in record.slices}) == 1:
            uses = frozenset(each.request.partition("/")[0] for each in record.slices)
        for each in record.slices:
            if each.units and each.request.partition("/")[0] in uses:  # an alternative is named gpu/small
                key = ContainerKey(claim.namespace, claim.pod, claim.container), record.device(each)
                before = found[key][0] if key in found else 0
                found[key] = before + each.units, claim
    return found


def _grants_by_device(resource: str, ids: frozenset[str], added: int) -> Iterable[tuple[str, DeviceGrant]]:
    """(name of the card or MIG device, what part of it) for each that `ids` name."""
    if resource in MEMORY_NAMES:
        for uuid, units in (cards := units_per_card(ids)).items():
            yield uuid, DeviceGrant(resource, ShareMode.SHARE, units + added // len(cards))
        return
    for identifier in sorted(ids):
        name, replica = identifier, ""
        for separator in _REPLICAS:
            if separator in identifier:
                name, _, replica = identifier.partition(separator)
        yield name, DeviceGrant(resource, _mode_of(name, replica), replica=replica)


def _mode_of(name: str, replica: str) -> ShareMode:
    if name.startswith(_MIG_PREFIX) or _INSTANCE.fullmatch(name):
        return ShareMode.MIG
    return ShareMode.SHARE if replica else ShareMode.EXCLUSIVE


# -- claims of dynamic resource allocation ----------------------------------------------------------------


class DeviceSlices:
    """(pool, device) → uuid, from the ResourceSlices of this node; without a `client` nothing is known.

    They are read when kubelet names a claim whose device is unknown, so a node without claims never reads
    them. Source of the attributes: NVIDIA's driver ``gpu.nvidia.com`` gives each device its ``uuid``.
    """

    def __init__(
        self, client: KubeClient | None, node: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._node = node
        self._clock = clock
        self._known: dict[tuple[str, str], str] = {}
        self._due_s = 0.0
        self._logged = False

    async def of(self, claims: Iterable[Claimed]) -> Mapping[tuple[str, str], str]:
        """What is known; reads the API server first if a device of `claims` is unknown."""
        ours = {(each.pool, each.device) for each in claims if each.driver == NVIDIA_DRIVER}
        if self._client is None or self._clock() < self._due_s or not ours - self._known.keys():
            return self._known
        self._due_s = self._clock() + SLICES_RETRY_S
        try:
            for version in SLICE_VERSIONS:
                slices = Resource(
                    f"resource.k8s.io/{version}", "resourceslices", "ResourceSlice", DICT, namespaced=False
                )
                try:
                    found = await self._client.list(slices, fields=f"spec.nodeName={self._node}")
                except NotFoundError:  # this server does not have the version
                    continue
                self._known |= {key: uuid for each in found.items or () for key, uuid in devices_of(each)}
                break
        except KubeError as error:
            if not self._logged:
                _log.warning("ResourceSlices not read", extra={"error": str(error)})
            self._logged = True
        return self._known


def devices_of(document: Mapping[str, Any]) -> Iterable[tuple[tuple[str, str], str]]:
    """((pool, device), uuid) of one slice, of any version of the API."""
    spec = document.get("spec", {})
    if spec.get("driver") != NVIDIA_DRIVER:
        return
    for device in spec.get("devices") or ():
        attributes = (device.get("basic") or device).get("attributes") or {}
        uuid = (attributes.get("uuid") or attributes.get(f"{NVIDIA_DRIVER}/uuid") or {}).get("string", "")
        if uuid:
            yield (spec.get("pool", {}).get("name", ""), device.get("name", "")), uuid


def claim_records(root: Path) -> ClaimRecords:
    """Every claim that is prepared below the agent's `root`, by its records, without unreadable ones.

    kubelet does not report how much of a card a claim was given: it lists all of a claim for each container
    that uses a part of it, and has distinguished shares only since 1.35 (its container manager's
    `GetDynamicResources`).
    """
    found = {}
    for path in (root / "claims").glob("*.json"):
        with contextlib.suppress(OSError, ValueError):  # it is being replaced, or its disk fails
            record = _CLAIM_RECORD.decode(path.read_bytes())
            found[record.namespace, record.name] = record
    return found
