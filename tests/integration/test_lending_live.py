"""Containers with the real library on one simulated card, whose agent lends what they leave: random steps.

No allocation within a request is refused because of others, whatever they borrowed, and none waits longer
than a second of the agent's clock. GPUSLICE_LENDING_STEPS=100000 plays as many steps.
"""

from __future__ import annotations

import os
import random
import select
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from gpuslice.adapters.region.reader import read_region
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.lender import BACK_S, Lender
from gpuslice.apps.agent.limit_entries import entries
from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.watchdog import URGENT_S
from gpuslice.core.contract import device_id
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.grant import grant_to
from gpuslice.core.model import Card, ContainerRequest, Node, Request
from gpuslice.core.units import limit_bytes
from tests.builders import make_placement, make_pod
from tests.integration.isolation_rig import MIB, OUT_OF_MEMORY, Container, Machine, Worker, make_machine

STEPS = int(os.environ.get("GPUSLICE_LENDING_STEPS", "240"))
UNITS, MEMORY_MIB = 15, 16160
CONTEXT_MIB = 400
"""What the driver takes for itself in a process, at most."""
MOST_WAIT_S = 1.0
SIZES_MIB = (2, 30, 100, 500, 1000, 2500)


@dataclass
class Tenant:
    """A pod of one container with one program. `held`: MiB by number of its block. `greed`: how often it
    allocates when it could.
    """

    pod: NodePod
    ids: frozenset[str]
    box: Container
    greed: float
    worker: Worker | None = None
    held: dict[int, int] = field(default_factory=dict)
    asked_s: float | None = None

    @property
    def own_bytes(self) -> int:
        return limit_bytes(MEMORY_MIB, len(self.ids), UNITS)


class LentCard:
    """A card, its tenants and the node's lender, whose time passes by steps."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.dice, self.now_s, self.folder = random.Random(seed), 0.0, folder
        self.machine: Machine = make_machine(folder, profile="V100-SXM2-16GB")
        self.card = Card(0, self.machine.uuid(), MEMORY_MIB, UNITS)
        self.state = AllocationState(Node("n1", (self.card,)), clock=lambda: self.now_s)
        self.folders = Folders(folder / "agent", boot="this")
        self.lender = Lender(self.state, self.folders, enabled=True, clock=lambda: self.now_s)
        self.tenants: list[Tenant] = []
        self.made = self.waited = self.ended = self.borrowed = self.lent = self.within = 0

    def listed(self) -> None:
        found = [DeviceAssignment("default", each.pod.view.name, "main", each.ids) for each in self.tenants]
        self.state.assignments_read(found, self.now_s)

    def come(self) -> None:
        taken = frozenset[str]().union(*(each.ids for each in self.tenants))
        free = [one for one in (device_id(self.card.uuid, unit) for unit in range(UNITS)) if one not in taken]
        units = self.dice.randint(2, 6)
        if len(free) < units:
            return
        self.made += 1
        limit = self.dice.choice((0, UNITS, UNITS, units + 3))
        request = Request(units, containers=(ContainerRequest("main", 0, units, limit=limit),))
        view = make_pod(f"p{self.made}", units, node="n1", priority=self.dice.randint(0, 2))
        view = replace(view, request=request, placement=make_placement("n1", units, 0), assigned=True)
        pod, ids = NodePod(view, came=self.made, running=frozenset({"main"})), frozenset(free[:units])
        self.state.pod_changed(pod)
        tenant = Tenant(
            pod,
            ids,
            Container(self.folder / f"box{self.made}", self.machine, []),
            self.dice.choice((0.05, 0.95)),
        )
        self.tenants.append(tenant)
        self.listed()
        while not self.lender.is_settled({self.card.uuid}, view):
            self.passes()
        self.folders.start(
            ids, entries(grant_to(request.containers[0], ids, self.state.node).limits), self.state.owner(ids)
        )
        place = self.folders.region(self.folders.current(ids)).parents[1]
        for inside, part in (("etc/gpuslice", "etc"), ("var/lib/gpuslice", "var")):
            shutil.rmtree(tenant.box.root / inside)
            (tenant.box.root / inside).symlink_to(place / part)
        self.begins(tenant)

    def begins(self, tenant: Tenant) -> None:
        tenant.worker, tenant.held, tenant.asked_s = tenant.box.worker(), {}, None
        assert self.answer(tenant, "start 0") == "ok"

    def ends(self, tenant: Tenant) -> None:
        assert tenant.worker is not None
        tenant.worker.kill()
        self.tenants.remove(tenant)
        self.state.pod_gone(tenant.pod.view.uid)
        self.folders.discard(self.folders.current(tenant.ids))
        self.listed()

    def passes(self) -> None:
        """A round of the agent; whoever was asked to give back does so or is ended, as by the watchdog."""
        self.now_s += BACK_S / 2
        self.lender.check()
        for each in self.tenants:
            asked = each.worker and self.lender.calls_back(each.pod.view.uid, "main", self.card.uuid)
            if not asked:
                each.asked_s = None
                continue
            each.asked_s = self.now_s if each.asked_s is None else each.asked_s
            excess = self.used(each) - self.limit(each)
            if excess > 0 and each.held and self.dice.random() < 0.1:
                self.free(each)
            elif excess > 0 and self.now_s - each.asked_s >= URGENT_S and each.worker:
                self.ended += 1
                each.worker.kill()
                self.begins(each)

    def answer(self, tenant: Tenant, command: str) -> str:
        """What the program says, while the agent goes on; it waits for no more than a second."""
        assert tenant.worker is not None
        tenant.worker.say(command)
        output, asked_s = tenant.worker._process.stdout, self.now_s
        assert output is not None
        while not select.select([output], [], [], 0.02)[0]:
            self.waited += 1
            self.passes_beside(tenant)
            account = self.lender.live.accounts(tenant.pod, "main").get(self.card.uuid)
            assert account is None or not account.wanted_bytes or self.now_s - asked_s <= MOST_WAIT_S
        return tenant.worker.heard()

    def passes_beside(self, tenant: Tenant) -> None:
        worker, tenant.worker = tenant.worker, None  # it is in the middle of a call: it gives nothing back
        try:
            self.passes()
        finally:
            tenant.worker = worker

    def used(self, tenant: Tenant) -> int:
        reading = read_region(self.folders.region(self.folders.current(tenant.ids)))
        return reading.cards[0].used_bytes if reading and reading.cards else 0

    def limit(self, tenant: Tenant) -> int:
        return self.lender.live.in_force(tenant.pod, "main")[self.card.uuid]

    def free(self, tenant: Tenant) -> None:
        number = self.dice.choice(sorted(tenant.held))
        del tenant.held[number]
        assert self.answer(tenant, f"free {number}") == "ok"

    def allocate(self, tenant: Tenant) -> None:
        number, size = max(tenant.held, default=-1) + 1, self.dice.choice(SIZES_MIB)
        kind = self.dice.choice(("plain", "plain", "physical", "pitch"))
        ask = f"pitch {number} {1 << 20} {size}" if kind == "pitch" else f"alloc {number} {kind} {size * MIB}"
        before = sum(tenant.held.values())
        is_within = (before + size + CONTEXT_MIB) * MIB <= tenant.own_bytes
        answer = self.answer(tenant, ask)
        assert answer in ("ok", OUT_OF_MEMORY)
        self.within += is_within
        assert answer == "ok" or not is_within, (
            f"{size} MiB beside {before} within {tenant.own_bytes // MIB} MiB"
        )
        if answer == "ok":
            tenant.held[number] = size

    def step(self) -> None:
        each = self.dice.choice(self.tenants) if self.tenants else None
        chance = self.dice.random()
        if each is None or (chance < 0.08 and len(self.tenants) < 5):
            self.come()
        elif chance < 0.1:
            self.ends(each)
        elif chance < 0.25 and each.held:
            self.free(each)
        elif self.dice.random() < each.greed:
            self.allocate(each)
        for _ in range(self.dice.choice((1, 1, 10, 60))):
            self.passes()
        leases = [self.lender.lease_bytes(each.pod.view.uid, "main", self.card.uuid) for each in self.tenants]
        self.borrowed += any(lease > 0 for lease in leases)
        self.lent += any(lease < 0 for lease in leases)
        assert sum(self.used(each) for each in self.tenants) <= MEMORY_MIB * MIB


@pytest.mark.parametrize("seed", range(2))
def test_an_allocation_within_a_request_is_never_refused_for_anothers_sake(tmp_path: Path, seed: int) -> None:
    card = LentCard(tmp_path, seed)
    try:
        for _ in range(STEPS // 2):
            card.step()
    finally:
        for each in card.tenants:
            if each.worker is not None:
                each.worker.kill()
    counts = "{0.within} within requests; steps: {0.borrowed} borrowed, {0.lent} lent; {0.ended} ended"
    print(counts.format(card))
    assert card.within
    assert card.borrowed
    assert card.lent
