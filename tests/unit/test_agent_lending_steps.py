"""Random steps of containers that borrow, start, grow and end on one card: nobody lacks what it requested.

Programs take whatever their limits file allows at that moment; what is past a smaller limit is ended once it
is called back, as the watchdog does. GPUSLICE_LENDING_STEPS=1000000 plays as many steps.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from pathlib import Path

from gpuslice.adapters.region.limits import read_limits
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.lender import Lender
from gpuslice.apps.agent.limit_entries import entries
from gpuslice.apps.agent.live_limits import LOOKED_S
from gpuslice.apps.agent.pods import NodePod
from gpuslice.core.contract import device_id
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.grant import grant_to
from gpuslice.core.model import ContainerRequest, Request
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
        pod = NodePod(view, came=self.made, running=frozenset({"main"}))
        self.containers.append(Container(pod, frozenset(free[:units])))
        self.state.pod_changed(pod)

    def start(self, each: Container) -> None:
        """As PreStartContainer: not before what it requested is lent to nobody."""
        self.lender.check()
        if self.lender.is_settled({CARD.uuid}):
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
        self.now_s += self.dice.choice((0.1, 0.2, LOOKED_S))
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
