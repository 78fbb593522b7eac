"""kubelet's topology manager: from which NUMA nodes a container's devices and CPUs are to come.

It follows pkg/kubelet/cm/topologymanager of Kubernetes 1.36. A manager of resources gives hints: sets of NUMA
nodes that would do, each preferred or not. One hint of each is merged by intersection, and the best result
decides. No hints for a resource (None) means any NUMA node; an empty list means that no set would do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

NumaNodes = frozenset[int]


class Policy(StrEnum):
    NONE = "none"
    BEST_EFFORT = "best-effort"
    RESTRICTED = "restricted"
    SINGLE_NUMA_NODE = "single-numa-node"


class Scope(StrEnum):
    """Whether each container is aligned on its own, or the pod as a whole."""

    CONTAINER = "container"
    POD = "pod"


class Hint(NamedTuple):
    """`nodes`: None if any will do."""

    nodes: NumaNodes | None
    preferred: bool


Hints = Mapping[str, Sequence[Hint] | None]  # by resource


@dataclass(frozen=True, slots=True)
class TopologyManager:
    """The settings topologyManagerPolicy and topologyManagerScope, and the machine's NUMA nodes."""

    policy: Policy = Policy.NONE
    scope: Scope = Scope.CONTAINER
    numa_nodes: tuple[int, ...] = (0,)

    def merged(self, hints: Iterable[Hints]) -> Hint | None:
        """Where the container or pod has to get its resources from; None if it is not admitted."""
        if self.policy is Policy.NONE:
            return Hint(None, True)
        offered = [_choices(found) for each in hints for found in (each.values() or (None,))]
        single = self.policy is Policy.SINGLE_NUMA_NODE
        if single:
            offered = [
                [hint for hint in each if hint.preferred and (hint.nodes is None or len(hint.nodes) == 1)]
                for each in offered
            ]
        every = frozenset(self.numa_nodes)
        best = _best(offered, every)
        if single and best.nodes == every:
            best = Hint(None, best.preferred)
        return best if best.preferred or self.policy is Policy.BEST_EFFORT else None


def numa_sets(numa_nodes: Sequence[int]) -> Iterator[NumaNodes]:
    """Every combination of NUMA nodes, smaller ones first."""
    for size in range(1, len(numa_nodes) + 1):
        yield from map(frozenset, itertools.combinations(numa_nodes, size))


def device_hints(
    places: Mapping[str, tuple[int, ...] | None],
    numa_nodes: Sequence[int],
    free: Set[str],
    reusable: Set[str],
    needed: int,
) -> list[Hint]:
    """Every set of NUMA nodes with enough devices that are free, and with all that must be used again.

    `places`: by device, the NUMA nodes that its plugin named. Preferred are those as small as the machine
    would allow if all its devices were free.
    """
    must = {one for one in reusable if places.get(one) is not None}
    smallest, found = len(numa_nodes), []
    for numa in numa_sets(numa_nodes):
        inside = {one for one, named in places.items() if numa.intersection(named or ())}
        if len(inside) >= needed:
            smallest = min(smallest, len(numa))
        if must <= inside and len(must) + len(free & inside) >= needed:
            found.append(numa)
    return [Hint(numa, len(numa) == smallest) for numa in found]


def by_affinity(
    places: Mapping[str, tuple[int, ...] | None], wanted: NumaNodes | None, available: Set[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """The available devices of the wanted NUMA nodes, and those of others; both empty if any will do."""
    if wanted is None:
        return frozenset(), frozenset()
    placed = frozenset(one for one in available if places[one])
    aligned = frozenset(one for one in placed if wanted.intersection(places[one] or ()))
    return aligned, placed - aligned


def _choices(hints: Sequence[Hint] | None) -> Sequence[Hint]:
    if hints is None:
        return [Hint(None, True)]
    return hints or [Hint(None, False)]


def _best(offered: Sequence[Sequence[Hint]], every: NumaNodes) -> Hint:
    # what no intersection can be narrower than, if nothing preferred is found
    smallest = [
        min((len(hint.nodes) for hint in each if hint.nodes is not None), default=0) for each in offered
    ]
    aimed = max(smallest, default=0) or len(every)
    best: Hint | None = None
    for one in itertools.product(*offered):
        sets = [each.nodes for each in one if each.nodes is not None]
        alike = all(each == sets[0] for each in sets)
        hint = Hint(every.intersection(*sets), alike and all(each.preferred for each in one))
        if hint.nodes and (best is None or _rank(hint, aimed) < _rank(best, aimed)):
            best = hint
    return best or Hint(every, False)


def _rank(hint: Hint, aimed: int) -> tuple[bool, int, int]:
    """Lower is better: preferred, then narrower ones; without any, those nearest below `aimed` NUMA nodes."""
    nodes = hint.nodes or frozenset()
    size, mask = len(nodes), sum(1 << one for one in nodes)
    if not hint.preferred and size <= aimed:
        size = -size
    return (not hint.preferred, size, mask)
