"""What kubelet gave out of each card: its own book of device ids, turned into bytes.

Shared cards' ids carry the card (``<uuid>-_-<n>``). Whole cards are named by their uuid, also with a replica
number behind ``::``, which is how NVIDIA's plugin names time slices of one card: such a holder has the whole
card beside others, and no limit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from gpuslice.core.attribution import ContainerKey
from gpuslice.core.contract import EXCLUSIVE_GPU, GPU_MEM
from gpuslice.core.grant import GrantError, units_per_card
from gpuslice.core.holding import Holding
from gpuslice.core.units import MIB, card_units, limit_mib

MIG_PREFIX = "nvidia.com/mig-"
REPLICA = "::"


class ShareMode(StrEnum):
    EXCLUSIVE = "exclusive"
    SHARE = "share"


@dataclass(frozen=True, slots=True)
class Promise:
    """What a container was given of one card. `units` counts ``aliyun.com/gpu-mem``; 0 for a whole card."""

    resource: str
    mode: ShareMode
    units: int = 0


@dataclass(frozen=True, slots=True)
class Book:
    """uuid → container → promise; and ids that name no card we understand, one sentence each."""

    promises: Mapping[str, Mapping[ContainerKey, Promise]]
    problems: tuple[str, ...] = ()

    def of(self, uuid: str) -> Mapping[ContainerKey, Promise]:
        return self.promises.get(uuid, {})

    def containers(self) -> dict[str, tuple[str, ...]]:
        """``namespace/pod`` → names of its containers with an allocation."""
        found: dict[str, set[str]] = defaultdict(set)
        for held in self.promises.values():
            for key in held:
                found[f"{key.namespace}/{key.pod}"].add(key.container)
        return {pod: tuple(sorted(names)) for pod, names in found.items()}


def is_ours(resource: str, more: Iterable[str] = ()) -> bool:
    """Whether a resource stands for cards."""
    return resource in {GPU_MEM, EXCLUSIVE_GPU} or resource in set(more)


def book_of(holdings: Mapping[str, Iterable[Holding]]) -> Book:
    """kubelet's holdings by resource as promises."""
    promises: dict[str, dict[ContainerKey, Promise]] = defaultdict(dict)
    problems: list[str] = []
    for resource, held in holdings.items():
        for holding in held:
            key = ContainerKey(holding.namespace, holding.pod, holding.container)
            try:
                for uuid, promise in _promises(resource, holding.ids):
                    promises[uuid][key] = promise
            except GrantError as error:
                problems.append(f"{resource} of {key.namespace}/{key.pod}: {error}")
    return Book(promises, tuple(problems))


def allocated_bytes(promise: Promise, total_bytes: int | None, unit: str) -> int | None:
    """The memory that a promise stands for on a card of `total_bytes`; None when that is unknown."""
    if total_bytes is None:
        return None
    if not promise.units:
        return total_bytes
    total_mib = total_bytes // MIB
    units = card_units(total_mib, unit)
    return limit_mib(total_mib, min(promise.units, units), units) * MIB if units else None


def _promises(resource: str, ids: frozenset[str]) -> Iterable[tuple[str, Promise]]:
    if resource == GPU_MEM:
        for uuid, units in units_per_card(ids).items():
            yield uuid, Promise(resource, ShareMode.SHARE, units)
        return
    for identifier in ids:
        uuid, replica, _ = identifier.partition(REPLICA)
        yield uuid, Promise(resource, ShareMode.SHARE if replica else ShareMode.EXCLUSIVE)
