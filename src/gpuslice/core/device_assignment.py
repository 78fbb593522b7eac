"""Who holds which device ids, as kubelet lists it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceAssignment:
    """The device ids of one container. kubelet names the pod without its uid, so a name may be used again."""

    namespace: str
    pod: str
    container: str
    ids: frozenset[str]

    @property
    def pod_key(self) -> str:
        return f"{self.namespace}/{self.pod}"


Receiver = tuple[str, str]
"""A pod's key and the name of its container."""


def still_true(
    assignments: Iterable[DeviceAssignment], given: Mapping[frozenset[str], Receiver | None]
) -> tuple[DeviceAssignment, ...]:
    """Those that stand after later grants. `given`: ids, and to whom as far as that is known.

    kubelet gives only what is free, so whoever had such ids had ended. The name may be a new pod's by then.
    """

    def ended(each: DeviceAssignment, ids: frozenset[str], receiver: Receiver | None) -> bool:
        is_that = each.ids == ids and receiver in {None, (each.pod_key, each.container)}
        return not is_that and not each.ids.isdisjoint(ids)

    return tuple(each for each in assignments if not any(ended(each, *grant) for grant in given.items()))


@dataclass(frozen=True, slots=True)
class Match:
    """The assignment that a set of device ids belongs to. `exact`: the sets are equal."""

    assignment: DeviceAssignment
    exact: bool


def holder_of(ids: frozenset[str], assignments: Iterable[DeviceAssignment]) -> Match | None:
    """The container that these ids were given to; None when kubelet lists nobody with any of them.

    kubelet lists no ordinary init containers, but the pod's app containers use its ids again: where no
    set is equal, the one that shares the most ids belongs to the same pod.
    """
    matches = [Match(each, each.ids == ids) for each in assignments if each.ids & ids]
    return max(matches, key=lambda match: (match.exact, len(match.assignment.ids & ids)), default=None)
