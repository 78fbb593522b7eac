"""Random steps of containers that borrow, start, grow and end on one card: nobody lacks what it requested.

Programs take whatever their limits file allows at that moment; what is past a smaller limit is ended once it
is called back, as the watchdog does. GPUSLICE_LENDING_STEPS=1000000 plays as many steps.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.region.limits import read_limits
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.lender import Lender
from gpuslice.apps.agent.limit_entries import entries
from gpuslice.apps.agent.pods import NodePod
from gpuslice.core.contract import device_id
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.grant import grant_to
from gpuslice.core.model import ContainerRequest, Request, Tier
from gpuslice.core.units import MIB, limit_bytes
from tests.builders import make_card, make_node, make_placement, make_pod

STEPS = int(os.environ.get("GPUSLICE_LENDING_STEPS", "1200"))
UNITS = 15
CARD = make_card(0, UNITS)
TOTAL = CARD.memory_mib * MIB


@dataclass
class Container:
    """One pod with one container. `used_bytes`: what its programs hold; `started`: its file was written."""

    pod: NodePod
    ids: frozenset[str]
    used_bytes: int = 0
    started: bool = False

    @property
    def uid(self) -> str:
        return self.pod.view.uid

    @property
    def own_bytes(self) -> int:
        return limit_bytes(CARD.memory_mib, len(self.ids), UNITS)


class Node:
    """A card, its containers, and the lender; time passes only by steps."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.now_s = 0.0
        self.state = AllocationState(
            replace(make_node(cards=(UNITS,)), cards=(CARD,)), clock=lambda: self.now_s
        )
        self.folders = Folders(folder, boot="this")
        self.lender = Lender(self.state, self.folders, enabled=True, clock=lambda: self.now_s)
        self.containers: list[Container] = []
        self.made = self.ended = 0

    def limit_bytes(self, each: Container) -> int:
        path = self.folders.region(self.folders.current(each.ids)).parents[1] / "etc" / "limits"
        (found,) = read_limits(path) or ()
        return found.memory_bytes or 0

    def tell(self) -> None:
        """What kubelet and the driver say."""
        self.lender.live.reported = {
            (each.uid, "main", CARD.uuid): each.used_bytes for each in self.containers if each.used_bytes
        }
        listed = [
            DeviceAssignment("default", each.pod.view.name, "main", each.ids) for each in self.containers
        ]
        self.state.assignments_read(listed, self.now_s)

    def come(self) -> None:
        taken = frozenset[str]().union(*(each.ids for each in self.containers))
        free = [one for one in (device_id(CARD.uuid, unit) for unit in range(UNITS)) if one not in taken]
        units = self.dice.randint(1, 8)
        if len(free) < units:
            return
        self.made += 1
        limit = self.dice.choice((0, 0, UNITS, units + 2))
        request = Request(units, containers=(ContainerRequest("main", 0, units, limit=limit),))
        view = make_pod(f"p{self.made}", units, node="n1", priority=self.dice.randint(0, 2))
        view = replace(view, request=request, placement=make_placement("n1", units, 0), assigned=True)
        # interactive: what it requested is never lent (the other case: tests/integration/test_lending_live)
        pod = NodePod(view, came=self.made, running=frozenset({"main"}), interactive=True)
        self.containers.append(Container(pod, frozenset(free[:units])))
        self.state.pod_changed(pod)

    def start(self, each: Container) -> None:
        """As PreStartContainer: not before what it requested is lent to nobody."""
        self.lender.check()
        if self.lender.is_settled({CARD.uuid}, each.pod.view):
            (container,) = each.pod.view.request.containers if each.pod.view.request else ()
            grant = grant_to(container, each.ids, self.state.node)
            self.folders.start(each.ids, entries(grant.limits), self.state.owner(each.ids))
            each.started = True

    def end(self, each: Container) -> None:
        self.containers.remove(each)
        self.state.pod_gone(each.uid)
        self.folders.discard(self.folders.current(each.ids))

    def call_back(self) -> None:
        """The watchdog: what is past a limit that became smaller is ended, and nothing else."""
        for each in self.containers:
            past = each.started and each.used_bytes > self.limit_bytes(each)
            if past and self.lender.calls_back(each.uid, "main", CARD.uuid):
                self.ended += 1
                each.used_bytes = self.limit_bytes(each)

    def step(self) -> None:
        self.now_s += self.dice.choice((0.1, 0.2, 1.5))
        each = self.dice.choice(self.containers) if self.containers else None
        match self.dice.randrange(8):
            case 0 | 1:
                self.come()
            case 2 if each is not None:
                self.end(each)
            case 3 | 4 | 5 if each is not None and each.started:
                each.used_bytes = self.dice.randint(0, self.limit_bytes(each))
            case 6:
                self.call_back()
        self.tell()
        for each in [each for each in self.containers if not each.started]:
            self.start(each)
        self.lender.check()


def test_an_allocation_within_a_request_never_fails_for_anothers_sake(tmp_path: Path) -> None:
    borrowed = ended = 0
    for seed in range(STEPS // 200):
        node = Node(tmp_path / str(seed), seed)
        for _ in range(200):
            node.step()
            borrowed += all_have_what_they_requested(node)
        ended += node.ended
    assert borrowed
    assert ended


def all_have_what_they_requested(node: Node) -> int:
    """Checks that; returns how many of them borrow."""
    running = [each for each in node.containers if each.started]
    for each in running:
        others = sum(max(other.used_bytes, other.own_bytes) for other in running if other is not each)
        assert others + each.own_bytes <= TOTAL
        assert node.limit_bytes(each) >= each.own_bytes
        (container,) = each.pod.view.request.containers if each.pod.view.request else ()
        if not container.borrowable:  # it is never touched
            assert node.limit_bytes(each) == each.own_bytes
    return sum(each.used_bytes > each.own_bytes for each in running)


def grown_beside(
    folder: Path, *, by_driver: bool = False, **beside: Any
) -> tuple[Node, Container, Container]:
    """A container that uses all that it may have, and an idle one that may borrow, too; `beside`: of that."""
    node = Node(folder, 1)
    for number, (units, more) in enumerate(((4, {}), (8, beside))):
        request = Request(units, containers=(ContainerRequest("main", 0, units, limit=UNITS),))
        placement = make_placement("n1", units, 0)
        view = replace(make_pod(f"p{number}", units, node="n1"), request=request, placement=placement)
        ids = frozenset(device_id(CARD.uuid, 5 * number + unit) for unit in range(units))
        pod = NodePod(view, came=number + 1, running=frozenset({"main"}), **more)
        node.containers.append(Container(pod, ids))
        node.state.pod_changed(pod)
    if by_driver:
        node.state.by_driver.cards = frozenset({CARD.uuid})
    greedy, idle = node.containers
    for _ in range(6):
        node.now_s += 0.2
        node.tell()
        for each in (each for each in node.containers if not each.started):
            node.start(each)
        node.lender.check()
        greedy.used_bytes = node.limit_bytes(greedy) if greedy.started else 0
    return node, greedy, idle


def test_what_is_requested_and_not_used_is_lent_and_comes_back_when_it_is_used(tmp_path: Path) -> None:
    node, greedy, idle = grown_beside(tmp_path)
    assert node.limit_bytes(idle) < idle.own_bytes
    assert node.limit_bytes(idle) + node.limit_bytes(greedy) <= TOTAL
    again = Lender(node.state, node.folders, enabled=True, clock=lambda: node.now_s)  # a new agent's
    again.live.reported = node.lender.live.reported
    again.check()
    assert again.lease_bytes(idle.uid, "main", CARD.uuid) < 0
    idle.used_bytes = node.limit_bytes(idle)
    for _ in range(3):
        node.tell()
        node.lender.check()
        assert node.limit_bytes(idle) < idle.own_bytes  # as long as the other one uses it
    node.call_back()
    node.tell()
    node.lender.check()
    assert node.limit_bytes(idle) >= idle.own_bytes
    assert node.ended == 1


@pytest.mark.parametrize(
    "beside",
    [
        {"interactive": True},
        {"unlimited": frozenset({"main"})},
        {"tiers": {"main": Tier.WATCHDOG}},
        {"by_driver": True},
    ],
    ids=["interactive", "exempt", "without the library", "by the driver"],
)
def test_it_is_lent_only_where_the_library_is_in_every_program_on_the_card(
    tmp_path: Path, beside: dict[str, Any]
) -> None:
    node, _, idle = grown_beside(tmp_path, **beside)
    assert node.limit_bytes(idle) >= idle.own_bytes
