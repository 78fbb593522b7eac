"""Placement policies: which node and which cards a pod gets.

A policy ranks the rows of a `Fleet` for a `Shape`, and is notified of what happens to pods:

    fleet.put(FleetNode(...))          nodes and what is free on them, whenever that changes
    policy = make_policy(name, fleet)
    policy.arrived(shape)              once for each pod, when it is first seen
    policy.choose(shape, rows)         the best of these rows, or None; `policy.keys(shape)` ranks all rows
    policy.slots(shape, row)           the cards to use on that row
    fleet.take(row, slots, shape)      the caller allocates them …
    policy.placed(shape)               … and reports that; at the end `fleet.give_back` and `policy.departed`

The same code serves the scheduler extender and the replay of traces.
"""

from __future__ import annotations

from collections.abc import Mapping

from gpuslice.core.policy.fgd import Fgd
from gpuslice.core.policy.fit import fitting_rows
from gpuslice.core.policy.fleet import UNLIMITED, Fleet, FleetNode, Shape
from gpuslice.core.policy.opportunity import OpportunityCost
from gpuslice.core.policy.packing import BestFit, Binpack, Spread
from gpuslice.core.policy.ranking import NEVER, Policy

__all__ = [
    "DEFAULT_POLICY",
    "NEVER",
    "POLICIES",
    "UNLIMITED",
    "BestFit",
    "Binpack",
    "Fgd",
    "Fleet",
    "FleetNode",
    "OpportunityCost",
    "Policy",
    "Shape",
    "Spread",
    "fitting_rows",
    "make_policy",
]

POLICIES: tuple[type[Policy], ...] = (Binpack, Spread, BestFit, Fgd, OpportunityCost)
DEFAULT_POLICY = OpportunityCost.name


def make_policy(
    name: str, fleet: Fleet, counts: Mapping[Shape, float] | None = None, *, renew_when_asked: bool = True
) -> Policy:
    """Return the policy of this name for a fleet; ValueError lists the valid names.

    `counts` tells a policy that takes the workload into account how many pods of each shape to expect;
    without it such a policy learns from the pods that arrive. If `renew_when_asked` is False,
    `Policy.maintain` applies what was learned, so that no request has to wait for it.
    """
    if name == OpportunityCost.name:
        return OpportunityCost(fleet, counts, renew_when_asked=renew_when_asked)
    for policy in POLICIES:
        if policy.name == name:
            return Fgd(fleet, counts) if policy is Fgd else policy(fleet)
    known = ", ".join(policy.name for policy in POLICIES)
    raise ValueError(f'placement policy "{name}" is unknown, must be one of {known}')
