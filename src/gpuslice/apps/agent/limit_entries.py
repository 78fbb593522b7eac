"""What a container's limits file says to the library."""

from __future__ import annotations

from collections.abc import Iterable

from gpuslice.adapters.region import limits as limits_file
from gpuslice.core.grant import CardLimit
from gpuslice.core.mode import ComputePolicy
from gpuslice.core.units import MIB


def entries(
    limits: Iterable[CardLimit],
    *,
    limited: bool = True,
    policy: ComputePolicy = ComputePolicy.CAP,
    interactive: bool = False,
) -> list[limits_file.LimitsEntry]:
    """What the library reads."""
    if not limited:
        return [limits_file.LimitsEntry(limit.card.uuid, None) for limit in limits]
    return [_of_library(limit, policy, interactive) for limit in limits]


def _of_library(limit: CardLimit, policy: ComputePolicy, interactive: bool) -> limits_file.LimitsEntry:
    """Of one card. 0 percent means here that compute is not divided.

    Where compute is lent, a container without a percentage weighs as much as its part of the card's memory.
    """
    percent = limit.compute_percent
    if policy is ComputePolicy.FAIR:
        percent = percent or max(1, 100 * limit.units // limit.card.units)
    if policy is ComputePolicy.OFF or not percent:
        return limits_file.LimitsEntry(limit.card.uuid, limit.memory_mib * MIB)
    most = 100 if policy is ComputePolicy.FAIR and percent < 100 else None
    return limits_file.LimitsEntry(limit.card.uuid, limit.memory_mib * MIB, percent, most, interactive)
