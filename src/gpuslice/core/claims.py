"""Claims of dynamic resource allocation: how a node's cards appear there, and what a claim was given.

A card is one device that many claims may share. Its memory is given out in units of ``aliyun.com/gpu-mem``,
so that a claim of 4Gi has exactly the limit of a pod that asks for 4 of them. Source of the rules about
fields: ``ResourceSlice`` of resource.k8s.io/v1.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from gpuslice.core.card_links import Link
from gpuslice.core.contract import CLAIM_COMPUTE, CLAIM_DRIVER, CLAIM_MEMORY, CLAIM_SLOTS, CLAIM_TAINT
from gpuslice.core.errors import ContractError
from gpuslice.core.model import Card, Tier
from gpuslice.core.quantity import whole_number
from gpuslice.core.request import WHOLE_CORE_PERCENT
from gpuslice.core.units import MIB, UNIT_MIB

MOST_DEVICES = 64
"""In one ResourceSlice whose devices may have taints."""
LONGEST_ATTRIBUTE = 64
_SUFFIX = {"GiB": "Gi", "MiB": "Mi"}
_DEVICE = re.compile(r"gpu-(\d{1,4})")


@dataclass(frozen=True, slots=True)
class ClaimedSlice:
    """A part of one card that a claim was given for one of its requests.

    `admin`: it sees the card and holds nothing of it.
    """

    request: str
    card: int
    units: int
    compute_percent: int = 0
    share_id: str = ""
    admin: bool = False


@dataclass(frozen=True, slots=True)
class ClaimAllocation:
    """What a claim was given on the cards of one node."""

    uid: str
    namespace: str
    name: str
    slices: tuple[ClaimedSlice, ...]

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    def by_request(self) -> dict[str, tuple[ClaimedSlice, ...]]:
        found: dict[str, tuple[ClaimedSlice, ...]] = {}
        for each in self.slices:
            found[each.request] = (*found.get(each.request, ()), each)
        return found


class ResultLike(Protocol):
    """One device of an allocated claim, as decoded by any adapter."""

    @property
    def request(self) -> str: ...
    @property
    def driver(self) -> str: ...
    @property
    def pool(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def share_id(self) -> str | None: ...
    @property
    def consumed_capacity(self) -> Mapping[str, object] | None: ...
    @property
    def admin_access(self) -> bool | None: ...


def claimed_slices(
    results: Iterable[ResultLike], pool: str, cards: Sequence[Card], unit: str
) -> tuple[ClaimedSlice, ...]:
    """The part of an allocation that is of this driver and of the node whose pool is `pool`.

    Raises `ContractError` for a device that the node does not have, or an amount that is not whole units.
    """
    by_index = {card.index: card for card in cards}
    found = []
    for result in results:
        if result.driver != CLAIM_DRIVER or result.pool != pool:
            continue
        index = device_index(result.device)
        card = by_index.get(index) if index is not None else None
        if card is None:
            known = ", ".join(device_name(each) for each in cards) or "none"
            raise ContractError(f'request "{result.request}": device', result.device, f"one of {known}")
        if result.admin_access:
            found.append(ClaimedSlice(result.request, card.index, 0, admin=True))
            continue
        consumed = result.consumed_capacity or {}
        units, percent = card.units, 0
        if CLAIM_MEMORY in consumed:
            amount = consumed[CLAIM_MEMORY]
            units, rest = divmod(whole_number(amount) or 0, UNIT_MIB[unit] * MIB)
            if rest or units < 1:
                must_be = f"a multiple of 1{_SUFFIX[unit]}, which is one unit of this node"
                raise ContractError(f'request "{result.request}": {CLAIM_MEMORY}', amount, must_be)
        if CLAIM_SLOTS in consumed and not whole_number(consumed[CLAIM_SLOTS]):
            must_be = "1 or more: none is for requests with adminAccess alone"
            raise ContractError(f'request "{result.request}": {CLAIM_SLOTS}', consumed[CLAIM_SLOTS], must_be)
        if CLAIM_COMPUTE in consumed:
            percent = whole_number(consumed[CLAIM_COMPUTE]) or 0
        found.append(ClaimedSlice(result.request, card.index, units, percent, result.share_id or ""))
    return tuple(found)


def memory_quantity(units: int, unit: str) -> str:
    """This many units as an amount of capacity ``memory``."""
    return f"{units}{_SUFFIX[unit]}"


def units_held(allocations: Iterable[ClaimAllocation]) -> dict[int, int]:
    """Units by card."""
    held: dict[int, int] = defaultdict(int)
    for allocation in allocations:
        for each in allocation.slices:
            held[each.card] += each.units
    return dict(held)


# -- what is published ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CardLocation:
    """Where a card is in its machine; "" and None if unknown."""

    pcie_root: str = ""
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """How the cards of one node are offered. `unhealthy`: why cards must not be given out, by index.

    `links`: how two cards reach each other, by their uuids, as far as known.
    """

    node: str
    cards: tuple[Card, ...]
    unit: str = "GiB"
    divides_compute: bool = True
    by_driver: Set[str] = frozenset()  # uuids of cards whose driver enforces limits
    driver_version: str = ""
    slots: int = 48
    unhealthy: Mapping[int, str] = field(default_factory=dict)
    locations: Mapping[int, CardLocation] = field(default_factory=dict)
    links: Mapping[frozenset[str], Link] = field(default_factory=dict)

    def devices(self, held: Mapping[int, int], *, spread: bool = False) -> list[dict[str, Any]]:
        """The devices in the order in which kube-scheduler should take them: it takes the first that fits.

        The fullest card first gives the tightest fit; the emptiest first spreads pods.
        """
        sign, devices = -1 if spread else 1, []
        free = {card.index: card.units - held.get(card.index, 0) for card in self.cards}
        for card in sorted(self.cards, key=lambda card: (sign * free[card.index], card.index)):
            device: dict[str, Any] = {
                "name": device_name(card),
                "allowMultipleAllocations": True,
                "attributes": self._attributes(card),
                "capacity": {
                    # a request without an amount of memory means a whole card
                    CLAIM_MEMORY: _capacity(card.units, default=card.units, suffix=_SUFFIX[self.unit]),
                    CLAIM_SLOTS: _capacity(self.slots, default=1),
                },
            }
            if self.divides_compute:
                device["capacity"][CLAIM_COMPUTE] = _capacity(WHOLE_CORE_PERCENT, default=0)
            if (reason := self.unhealthy.get(card.index)) is not None:
                value = re.sub(r"[^A-Za-z0-9_.-]+", "-", reason)[:63].strip("-_.")  # a label value
                device["taints"] = [{"key": CLAIM_TAINT, "value": value, "effect": "NoSchedule"}]
            devices.append(device)
        return devices

    def _attributes(self, card: Card) -> dict[str, dict[str, Any]]:
        where = self.locations.get(card.index, CardLocation())
        found: dict[str, dict[str, Any]] = {
            "uuid": {"string": card.uuid[:LONGEST_ATTRIBUTE]},
            "minor": {"int": card.index},
            "memoryMiB": {"int": card.memory_mib},
            "tier": {"string": (Tier.DRIVER if card.uuid in self.by_driver else Tier.LIBRARY).word},
        }
        if card.model:
            found["model"] = {"string": card.model[:LONGEST_ATTRIBUTE]}
        if version := semantic_version(self.driver_version):
            found["driverVersion"] = {"version": version}
        if where.numa_node is not None:
            found["numaNode"] = {"int": where.numa_node}
        if where.pcie_root:
            found["resource.kubernetes.io/pcieRoot"] = {"string": where.pcie_root}
        joined = [
            each.index
            for each in self.cards
            if each is card or self.links.get(frozenset((card.uuid, each.uuid))) is Link.NVLINK
        ]
        # Includes the card itself, so that `matchAttribute` holds for cards that all reach each other.
        peers = ",".join(map(str, joined))
        if len(joined) > 1 and len(peers) <= LONGEST_ATTRIBUTE:
            found["nvlinkPeers"] = {"string": peers}
        return found


def same_devices(ours: Any, theirs: Any) -> bool:
    """Whether two lists of devices are equivalent; the API server writes 1024Gi as 1Ti, and dates taints."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        theirs = {name: value for name, value in theirs.items() if name != "timeAdded"}
        return ours.keys() == theirs.keys() and all(same_devices(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same_devices, ours, theirs))
    return bool(ours == theirs) or (
        isinstance(ours, str)
        and isinstance(theirs, str)
        and (amount := whole_number(ours)) is not None
        and amount == whole_number(theirs)
    )


def device_name(card: Card) -> str:
    return f"gpu-{card.index}"


def device_index(name: str) -> int | None:
    """Which card a device is; None for a name that is no card's."""
    named = _DEVICE.fullmatch(name)
    return int(named[1]) if named else None


def semantic_version(text: str) -> str:
    """A driver's version as in ResourceSlices: three numbers without leading zeros; "" for others."""
    parts = text.split(".")
    if not 1 <= len(parts) <= 3 or not all(part.isascii() and part.isdecimal() for part in parts):
        return ""
    return ".".join(str(int(part)) for part in [*parts, "0", "0"][:3])


def _capacity(most: int, *, default: int, suffix: str = "") -> dict[str, Any]:
    """Its range starts at zero, although a claim for nothing is refused when it is prepared.

    kube-scheduler requires room for admin access too, so whoever only monitors a full card must be able to
    ask for nothing.
    """
    valid = {"min": "0", "max": f"{most}{suffix}", "step": f"1{suffix}"}
    policy = {"default": f"{default}{suffix}", "validRange": valid}
    return {"value": f"{most}{suffix}", "requestPolicy": policy}
