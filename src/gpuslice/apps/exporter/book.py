"""What kubelet gave out of each card: its own book of device ids, turned into bytes.

Shared cards' ids carry the card (``<uuid>-_-<n>``). Whole cards are named by their uuid, or as ``nvidia<n>``
by Google's plugin. A replica number behind ``::`` (Google: ``/vgpu``) is how these plugins name time slices
of one card: such a holder has the whole card beside others, and no limit. MIG devices are ``MIG-<uuid>`` or
``nvidia<n>/gi<instance>``. Claims of dynamic resource allocation name a pool and a device in it; what card
that is, the driver's ResourceSlices tell, or the name itself where it ends in the card's number.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from gpuslice.adapters.gpu.mig import MigSample
from gpuslice.adapters.gpu.telemetry import CardSample
from gpuslice.adapters.kubelet.podresources import Claimed
from gpuslice.core.attribution import ContainerKey
from gpuslice.core.contract import EXCLUSIVE_GPU, GPU_MEM
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.grant import GrantError, units_per_card
from gpuslice.core.units import MIB, card_units, limit_mib

MIG_RESOURCE = "nvidia.com/mig-"
SHARED_RESOURCE = "nvidia.com/gpu.shared"  # what NVIDIA's plugin renames time slices to, if told to
NVIDIA_DRIVER = "gpu.nvidia.com"  # of dynamic resource allocation
_REPLICAS = ("::", "/vgpu")
_MIG_PREFIX = "MIG-"
_INSTANCE = re.compile(r"nvidia\d+/gi\d+")
_NUMBERED = re.compile(r"gpu-(\d+)")


class ShareMode(StrEnum):
    EXCLUSIVE = "exclusive"
    SHARE = "share"
    MIG = "mig"


@dataclass(frozen=True, slots=True)
class Promise:
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
        """The whole card, alone or beside others."""
        return not self.units and self.mode is not ShareMode.MIG


Held = Mapping[ContainerKey, Promise]
_NOBODY: Held = {}


@dataclass(frozen=True, slots=True)
class Book:
    """Name of a card or MIG device → container → promise; and ids that name neither, one sentence each."""

    promises: Mapping[str, Held]
    problems: tuple[str, ...] = ()
    other_names: bool = field(init=False, default=False)  # any but a card's uuid
    containers: Mapping[str, tuple[str, ...]] = field(init=False, default_factory=dict)
    """``namespace/pod`` → names of its containers with an allocation."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "other_names", any(not name.startswith("GPU-") for name in self.promises))
        object.__setattr__(self, "containers", _containers(self.promises))

    def of(self, card: CardSample) -> Held:
        """Who holds the card or a part of it, by whatever name."""
        held = self.promises.get(card.uuid, _NOBODY)
        if not self.other_names:
            return held
        number = f"nvidia{card.index}"
        found = {**held, **self.promises.get(number, _NOBODY)}
        for device in card.mig:
            for key, promise in self.of_mig(card, device).items():
                before = found[key].mig if key in found else ()
                found[key] = replace(promise, mig=(*before, device.uuid))
        return found

    def of_mig(self, card: CardSample, device: MigSample) -> Held:
        """Who holds one MIG device."""
        instance = self.promises.get(f"nvidia{card.index}/gi{device.gpu_instance}", _NOBODY)
        return {**self.promises.get(device.uuid, _NOBODY), **instance}


def _containers(promises: Mapping[str, Held]) -> Mapping[str, tuple[str, ...]]:
    found: dict[str, set[str]] = defaultdict(set)
    for held in promises.values():
        for key in held:
            found[f"{key.namespace}/{key.pod}"].add(key.container)
    return {pod: tuple(sorted(names)) for pod, names in found.items()}


def is_ours(resource: str, more: Iterable[str] = ()) -> bool:
    """Whether a resource stands for cards or MIG devices."""
    known = resource in {GPU_MEM, EXCLUSIVE_GPU, SHARED_RESOURCE} or resource.startswith(MIG_RESOURCE)
    return known or resource in set(more)


def book_of(
    assignments: Mapping[str, Iterable[DeviceAssignment]],
    claims: Iterable[Claimed] = (),
    devices: Mapping[tuple[str, str], str] = {},
) -> Book:
    """kubelet's holdings by resource, and claims, as promises. `devices`: (pool, device) → uuid."""
    promises: dict[str, dict[ContainerKey, Promise]] = defaultdict(dict)
    problems: list[str] = []
    for resource, held in assignments.items():
        for assignment in held:
            key = ContainerKey(assignment.namespace, assignment.pod, assignment.container)
            try:
                for uuid, promise in _promises(resource, assignment.ids):
                    promises[uuid][key] = promise
            except GrantError as error:
                problems.append(f"{resource} of {key.namespace}/{key.pod}: {error}")
    for claim in claims:
        if claim.driver != NVIDIA_DRIVER:
            continue
        name = devices.get((claim.pool, claim.device)) or _by_number(claim.device)
        key = ContainerKey(claim.namespace, claim.pod, claim.container)
        if name:
            promises[name][key] = Promise(claim.driver, _mode_of(name, ""), claim=claim)
        else:
            problems.append(f"claim {claim.claim}: no ResourceSlice tells what {claim.device} is")
    _share_claims(promises)
    return Book(promises, tuple(problems))


def _share_claims(promises: Mapping[str, dict[ContainerKey, Promise]]) -> None:
    """A claim that several containers use is a card that they share."""
    for held in promises.values():
        whole = [key for key, promise in held.items() if promise.claim and promise.whole]
        for key in whole if len(held) > 1 else ():
            held[key] = replace(held[key], mode=ShareMode.SHARE)


def _by_number(device: str) -> str:
    """The card that a device of NVIDIA's driver is by its name: ``gpu-<minor>``; "" for any other."""
    numbered = _NUMBERED.fullmatch(device)
    return f"nvidia{numbered[1]}" if numbered else ""


def allocated_bytes(promise: Promise, total_bytes: int | None, unit: str) -> int | None:
    """The memory that a promise stands for on a card of `total_bytes`; None when that is unknown.

    Not of MIG devices, which have a size of their own: `mig_bytes`.
    """
    if total_bytes is None:
        return None
    if not promise.units:
        return total_bytes
    total_mib = total_bytes // MIB
    units = card_units(total_mib, unit)
    return limit_mib(total_mib, min(promise.units, units), units) * MIB if units else None


def mig_bytes(promise: Promise, devices: Iterable[MigSample]) -> int:
    """The memory of the MIG devices of a promise; devices of one GPU instance share theirs."""
    sizes = {each.gpu_instance: each.total_bytes for each in devices if each.uuid in promise.mig}
    return sum(sizes.values())


def _promises(resource: str, ids: frozenset[str]) -> Iterable[tuple[str, Promise]]:
    if resource == GPU_MEM:
        for uuid, units in units_per_card(ids).items():
            yield uuid, Promise(resource, ShareMode.SHARE, units)
        return
    for identifier in sorted(ids):
        name, replica = identifier, ""
        for separator in _REPLICAS:
            if separator in identifier:
                name, _, replica = identifier.partition(separator)
        yield name, Promise(resource, _mode_of(name, replica), replica=replica)


def _mode_of(name: str, replica: str) -> ShareMode:
    if name.startswith(_MIG_PREFIX) or _INSTANCE.fullmatch(name):
        return ShareMode.MIG
    return ShareMode.SHARE if replica else ShareMode.EXCLUSIVE
