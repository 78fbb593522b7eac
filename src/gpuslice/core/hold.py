"""What keeps cards of a node for a pod.

Every reason to keep cards is one record, a `Hold`; its kind says what it counts for. Most count as placed:
nobody finds the cards free. Cards that others still hold are only *reserved*: a pod that does not come first
must leave them free, once they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf

from gpuslice.core.model import Placement, Pod

NOBODY = 1 << 62
"""As what a hold gives way to: above every priority."""

Taken = Mapping[int, tuple[int, int]]
"""Units and percent of compute that are kept for others, by card."""
NOTHING_TAKEN: Taken = {}


class HoldKind(StrEnum):
    """Why cards are kept for a pod. It has at most one hold that counts as placed, and one that does not.

    A kind is no more than its counting rule: whether others find the cards free, and whom it gives way to.
    """

    BOUND = "bound"  # it is on the node, until it is finished or gone
    GROWING = "growing"  # bound, and being granted more: until another version of the pod is seen
    ASSUMED = "assumed"  # its binding is in flight, and holds until the API server shows it or refuses
    NOMINATED = "nominated"  # before kube-scheduler asks: no promise, the first to come takes the cards
    PROMISED = "promised"  # filter has answered, and the bind has not come yet
    GROUP = "group"  # for a member of a pod group, until the others have theirs too
    ADMITTED = "admitted"  # for a pod that a queue has admitted, also before it exists
    RESERVED = "reserved"  # for a pod for which others were evicted, or whose status names the node

    @property
    def counts_as_placed(self) -> bool:
        """Whether nobody else finds the cards free."""
        return self is not HoldKind.RESERVED

    @property
    def is_tentative(self) -> bool:
        """Whether the cards are the pod's only until kube-scheduler decides otherwise."""
        return self in (HoldKind.NOMINATED, HoldKind.PROMISED, HoldKind.GROUP, HoldKind.ADMITTED)


@dataclass(frozen=True, slots=True)
class Hold:
    """Cards kept for a pod. `placement` is None if it is not known on which cards of its node the pod is.

    `gives_way_to`: pods of this priority or a higher one may have the cards instead. `until_s`: when it ends
    if nothing happens, by the clock of whoever made it.
    """

    pod: Pod
    placement: Placement | None
    kind: HoldKind = HoldKind.BOUND
    gives_way_to: int = NOBODY
    until_s: float = inf

    @property
    def node(self) -> str:
        return self.placement.node if self.placement is not None else self.pod.node

    @property
    def is_bound(self) -> bool:
        return self.kind in (HoldKind.BOUND, HoldKind.GROWING)

    @property
    def unplaced_units(self) -> int:
        if self.placement is not None or self.pod.request is None:
            return 0
        return self.pod.request.units

    def is_kept_from(self, uid: str, priority: int) -> bool:
        """Whether a pod must leave these cards free."""
        return priority < self.gives_way_to and self.pod.uid != uid

    def takes_as_much_as(self, other: Hold) -> bool:
        """Whether the node has the same left with one instead of the other."""
        return (
            self.node == other.node
            and self.placement == other.placement
            and self.unplaced_units == other.unplaced_units
            and self.pod.host == other.pod.host
        )


def reservation(pod: Pod, placement: Placement, until_s: float = inf) -> Hold:
    """Kept from pods that are not more important: kube-scheduler's rule for nominated pods."""
    return Hold(pod, placement, HoldKind.RESERVED, pod.priority + 1, until_s)


def hold_of(pod: Pod, before: Hold | None) -> Hold | None:
    """What `pod` holds by its own annotations; before it is bound only what was decided here counts."""
    if not pod.node:
        return replace(before, pod=pod) if before is not None and not before.is_bound else None
    if before is not None and before.kind is HoldKind.GROWING and 0 < pod.version <= before.pod.version:
        return before  # the grant is conditional on this version, and on its way
    return Hold(pod, pod.placement) if pod.placement is not None or pod.request is not None else None


def kept_from(holds: Iterable[Hold], uid: str, priority: int) -> Taken:
    """What of one node's cards a pod must leave free for these."""
    return by_card(each for each in holds if each.is_kept_from(uid, priority))


def by_card(holds: Iterable[Hold]) -> dict[int, tuple[int, int]]:
    """Units and percent of compute of all of them, by card."""
    sums: dict[int, tuple[int, int]] = {}
    for each in holds:
        for part in each.placement.slices if each.placement is not None else ():
            units, core = sums.get(part.card, (0, 0))
            sums[part.card] = (units + part.units, core + part.compute_percent)
    return sums
