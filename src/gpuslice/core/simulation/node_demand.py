"""Which nodes an autoscaler should add for the pods that wait, and which it could take away.

Autoscalers count a node's cards as one sum. What they add by themselves is counted here as well, by sums, so
that nobody asks for it a second time: what is left is hidden from them (`Demand.hidden`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from gpuslice.core.policy import Binpack, FleetNode, Shape, fitting_rows, make_policy
from gpuslice.core.policy.fleet import Flags, Rows
from gpuslice.core.simulation.capacity import empty
from gpuslice.core.simulation.trace import fleet_of

MOST_NODES = 100  # to add; the rest follows when those have come


@dataclass(frozen=True, slots=True)
class Waiting:
    """A pod that waits. `groups`: those whose nodes it may use, cards aside.

    `asked`: kube-scheduler has found a node for it by sums; another pod waits for a new node by sums too, or
    for something else.
    """

    uid: str
    shape: Shape
    groups: frozenset[str]
    asked: bool = True


@dataclass(frozen=True, slots=True)
class Demand:
    """Nodes to add, by group. `hidden`: those of them that nobody sees who counts cards as one sum.

    `group_of`: for each pod that takes one of them; `nowhere`: pods that no node of any group holds, even
    empty.
    """

    nodes: Mapping[str, int]
    hidden: Mapping[str, int]
    group_of: Mapping[str, str]
    nowhere: frozenset[str]


class _Filling:
    """Nodes that are filled with pods; where one fits nowhere, a node is added."""

    def __init__(
        self,
        nodes: Mapping[str, Sequence[FleetNode]],
        new: Mapping[str, FleetNode],
        policy: str,
        *,
        last: Collection[str] = (),
        most: int = MOST_NODES,
    ) -> None:
        names = [name for name, found in nodes.items() for _ in found]
        self.fleet = fleet_of([node for found in nodes.values() for node in found])
        self._policy = make_policy(policy, self.fleet)
        self._group = np.full(self.fleet.rows, "", dtype=object)
        self._group[: len(names)] = names
        self._new = {name: empty(node) for name, node in new.items()}
        self._last, self._most = last, most
        self._examples = {name: fleet_of([node]) for name, node in self._new.items()}
        self.added: Counter[str] = Counter()
        self._added_rows: set[int] = set()

    def holds(self, pod: Waiting) -> bool:
        return bool(len(fitting_rows(self.fleet, pod.shape, self._rows(pod))))

    def smallest(self, pod: Waiting) -> str:
        """The group with the fewest units on a node that holds the pod when empty; "" where there is none."""
        first = np.array([0])
        fitting = (
            (name in self._last, sum(node.size), name)
            for name, node in self._new.items()
            if name in pod.groups and len(fitting_rows(self._examples[name], pod.shape, first))
        )
        return min(fitting, default=(False, 0, ""))[-1]

    def put(self, pod: Waiting, group: str) -> str:
        """Place the pod, on another node of `group` if need be; the group of the new node that took it."""
        rows = self._rows(pod)
        is_new = np.isin(rows, list(self._added_rows))
        row = self._policy.choose(pod.shape, rows[~is_new])
        if row is None:
            row = self._policy.choose(pod.shape, rows[is_new])
        if row is None:
            if not group or self.added.total() >= self._most:
                return ""
            self.added[group] += 1
            row = self.fleet.put(replace(self._new[group], name=f"new {group} {self.added[group]}"))
            more = self.fleet.rows - len(self._group)
            self._group = np.concatenate([self._group, np.full(more, "", dtype=object)])
            self._group[row] = group
            self._added_rows.add(row)
        self.fleet.take(row, self._policy.slots(pod.shape, row), pod.shape)
        return str(self._group[row]) if row in self._added_rows else ""

    def _rows(self, pod: Waiting) -> Rows:
        return np.flatnonzero(np.isin(self._group, list(pod.groups)))


def demand(
    nodes: Mapping[str, Sequence[FleetNode]],
    new: Mapping[str, FleetNode],
    waiting: Sequence[Waiting],
    policy: str,
    *,
    last: Collection[str] = (),
    most: int = MOST_NODES,
) -> Demand:
    """What to add for these pods. `nodes`: those there are, by group; `new`: how a new one of a group is.

    `last`: groups to take only if no other will do; `most`: nodes to add in all. The largest pods come first,
    so that it is never more than they will take in another order.
    """
    cards = _Filling(nodes, new, policy, last=last, most=most)
    sums = _Filling(
        {name: [_as_sum(node) for node in found] for name, found in nodes.items()},
        {name: _as_sum(empty(node)) for name, node in new.items()},
        Binpack.name,
        most=most,
    )
    group_of, nowhere = dict[str, str](), set[str]()
    kept_back = {pod.uid for pod in waiting if not pod.asked and sums.holds(_in_sum(pod))}
    for pod in sorted(waiting, key=lambda each: (-each.shape.total_units, each.uid)):
        if pod.uid in kept_back:  # by something else than room
            continue
        group = cards.smallest(pod)
        if not group and not cards.holds(pod):
            nowhere.add(pod.uid)
            continue
        if taken_by := cards.put(pod, group):
            group_of[pod.uid] = taken_by
        sums.put(_in_sum(pod), group)
    hidden = cards.added - sums.added
    return Demand(cards.added, hidden, group_of, frozenset(nowhere))


def _as_sum(node: FleetNode) -> FleetNode:
    """How a node looks to whoever adds up its cards."""
    size, left = sum(node.size), sum(node.left)
    compute = (sum(node.compute_left),)
    return replace(node, size=(size,), left=(left,), compute_left=compute, links=(), packing="")


def _in_sum(pod: Waiting) -> Waiting:
    shape = msgspec.structs.replace(pod.shape, units=pod.shape.total_units, cards=min(1, pod.shape.cards))
    shape = msgspec.structs.replace(shape, compute_percent=pod.shape.compute_percent * pod.shape.cards)
    return replace(pod, shape=shape)


# -- nodes that could go -----------------------------------------------------------------------------------


def emptied(
    nodes: Mapping[str, Sequence[FleetNode]],
    pods: Mapping[str, Mapping[str, Shape]],
    policy: str,
) -> dict[str, dict[str, str]]:
    """Nodes that could be emptied, all of them together: node → pod → where it would go.

    `nodes` by group, `pods` (node → pod → shape) of those nodes that may be emptied, in the order in which
    they are tried. Pods move within their group, and not to a node that has none.
    """
    moves: dict[str, dict[str, str]] = {}
    for found in nodes.values():
        fleet = fleet_of(found)
        rules = make_policy(policy, fleet)
        name_of = {row: name for name, row in fleet.row_of.items()}
        used: Flags = ((fleet.left < fleet.size) & (fleet.size > 0)).any(axis=1)  # type: ignore[assignment]
        for name in (node for node in pods if node in fleet.row_of):
            own = fleet.row_of[name]
            if not used[own]:
                continue
            used[own] = False
            places: list[tuple[str, int, tuple[int, ...], Shape]] = []
            for pod, shape in sorted(pods[name].items(), key=lambda each: -each[1].total_units):
                row = rules.choose(shape, np.flatnonzero(used))
                if row is None:
                    break
                places.append((pod, row, rules.slots(shape, row), shape))
                fleet.take(row, places[-1][2], shape)
            if len(places) == len(pods[name]):
                moves[name] = {pod: name_of[row] for pod, row, *_ in places}
                continue
            used[own] = True
            for _, row, slots, shape in places:
                fleet.give_back(row, slots, shape)
    return moves
