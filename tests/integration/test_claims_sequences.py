"""A node of claims under any order of events: prepared, let go, killed at a write, rebooted, switched, swept.

The model knows what kubelet may rely on: a claim whose preparing was answered is prepared until its letting
go was answered. A claim whose answer was lost may be either, and is put right by the next question.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kubelet.proto import draplugin_pb2 as pb
from gpuslice.adapters.region.limits import read_limits
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.dra.driver import ClaimDriver, UnpreparedError
from gpuslice.apps.agent.dra.prepared import PreparedClaims, folder_name
from gpuslice.apps.agent.folders import Folders
from gpuslice.core.claims import ClaimAllocation, units_held
from gpuslice.core.mode import Rules
from gpuslice.core.model import Card, Node, NodeMode
from gpuslice.core.units import limit_bytes
from tests.integration.agent_bench import NODE, uuid
from tests.integration.claims_rig import result
from tests.integration.test_claims_crashes import KilledError, killed_at
from tests.unit.kube_wire import ScriptedTransport, answer, failure

CARD_MIB, UNITS, CARDS = 16130, 15, 2
SWITCHED = "the node's labels say so"
DIES_AT = st.one_of(st.just(0), st.just(0), st.just(0), st.integers(1, 24))
"""At which of its writes the agent is killed; 0: at none, as it mostly is."""

LARGE_OR_SMALL = st.sampled_from([UNITS, 12, 8, 4, 1])
"""Mostly more than half a card: what is counted wrong is then too much for it."""


@dataclass(frozen=True)
class Given:
    """A claim as kube-scheduler allocated it."""

    uid: str
    name: str
    card: int
    units: int

    @property
    def document(self) -> dict[str, Any]:
        devices = {"results": [result(f"{self.units}Gi", card=self.card)]}
        metadata = {"name": self.name, "namespace": "default", "uid": self.uid}
        return {"metadata": metadata, "status": {"allocation": {"devices": devices}}}

    @property
    def message(self) -> pb.Claim:
        return pb.Claim(namespace="default", name=self.name, uid=self.uid)


class ClaimApi(ScriptedTransport):
    """An API server that knows claims, and takes their status."""

    def __init__(self) -> None:
        super().__init__()
        self.claims: dict[str, Given] = {}  # by name

    async def request(self, request: ApiRequest) -> ApiResponse:
        name = request.path.partition("/resourceclaims/")[2].partition("/")[0]
        found = self.claims.get(name)
        if found is None:
            return failure(404, "NotFound")
        return answer(found.document if request.method == "GET" else json.loads(request.body))


class NodeOfClaims(RuleBasedStateMachine):
    driver_type: type[ClaimDriver] = ClaimDriver

    def __init__(self) -> None:
        super().__init__()
        self.disk = tempfile.TemporaryDirectory(prefix="gs-claims-")
        self.folder = Path(self.disk.name) / "node"
        self.folder.mkdir()
        self.library = self.folder / "libgpuslice.so"
        self.library.write_bytes(b"the library")
        self.api = ClaimApi()
        self.boots, self.made = 0, 0
        self.obstacle = ""
        self.prepared: dict[str, Given] = {}  # kubelet was told so
        self.unsure: dict[str, Given] = {}  # the answer was lost
        self.in_boot: set[str] = set()  # prepared in this run of the machine
        self.start()

    def teardown(self) -> None:
        for claim in [*self.prepared.values(), *self.unsure.values()]:
            self.let_go(claim)
        root = self.folder / "root"
        left = [*root.glob("containers/claim-*"), *root.glob("claims/*"), *(self.folder / "cdi").glob("*")]
        self.disk.cleanup()
        assert left == []

    # -- the parts ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new process of the agent, on the disk as it is."""
        folders = Folders(self.folder / "root", boot=f"boot-{self.boots}")
        folders.library.install(str(self.library))
        cards = tuple(Card(index, uuid(index), CARD_MIB, UNITS) for index in range(CARDS))
        state = AllocationState(Node(NODE, cards))
        state.rules = Rules(NodeMode.CLAIMS, divides_compute=True)
        self.folders = folders
        self.driver = self.driver_type(
            KubeClient(self.api),
            state,
            folders,
            PreparedClaims(self.folder / "root", self.folder / "cdi", folders),
            unit=lambda: "GiB",
            cdi_kind="",
            obstacle=lambda: self.obstacle,
            unhealthy=dict,
        )

    def ask(self, question: Coroutine[Any, Any, Any], dies_at: int = 0) -> Any:
        """kubelet's question; None where the process died over it, and a new one is there."""
        try:
            with killed_at(self.folder, dies_at):
                return asyncio.run(question)
        except KilledError:
            self.start()
            return None

    def prepare(self, claim: Given, dies_at: int = 0) -> str | None:
        """The error, "" for none; None where the answer was lost."""
        request = pb.NodePrepareResourcesRequest(claims=[claim.message])
        found = self.ask(self.driver.node_prepare_resources(request), dies_at)
        return None if found is None else found.claims[claim.uid].error

    def let_go(self, claim: Given, dies_at: int = 0) -> bool:
        request = pb.NodeUnprepareResourcesRequest(claims=[claim.message])
        found = self.ask(self.driver.node_unprepare_resources(request), dies_at)
        if found is None:
            self.prepared.pop(claim.uid, None)
            self.unsure[claim.uid] = claim
            return False
        assert found.claims[claim.uid].error == ""
        for known in (self.prepared, self.unsure):
            known.pop(claim.uid, None)
        self.in_boot.discard(claim.uid)
        return True

    def held(self, but: str) -> dict[int, int]:
        """Units by card, of what may be prepared."""
        claims = {**self.unsure, **self.prepared}
        return {
            card: sum(each.units for each in claims.values() if each.card == card and each.uid != but)
            for card in range(CARDS)
        }

    # -- what happens ---------------------------------------------------------------------------------------

    @rule(card=st.integers(0, CARDS - 1), units=LARGE_OR_SMALL)
    def allocate_one(self, card: int, units: int) -> None:
        self.allocate(card, units)

    def allocate(self, card: int, units: int) -> Given | None:
        """kube-scheduler counts what is allocated, and no more: the claim, where it fits by that."""
        if units + sum(each.units for each in self.api.claims.values() if each.card == card) > UNITS:
            return None
        self.made += 1
        claim = Given(f"00000000-0000-0000-0000-{self.made:012}", f"c{self.made}", card, units)
        self.api.claims[claim.name] = claim
        return claim

    @precondition(lambda self: self.api.claims)
    @rule(data=st.data(), dies_at=DIES_AT)
    def kubelet_prepares(self, data: st.DataObject, dies_at: int) -> None:
        claims = sorted(self.api.claims.values(), key=lambda each: each.uid)
        self.asks_to_prepare(data.draw(st.sampled_from(claims)), dies_at)

    def asks_to_prepare(self, claim: Given, dies_at: int = 0) -> None:
        again = claim.uid in self.prepared and claim.uid in self.in_boot
        error = self.prepare(claim, dies_at)
        if error is None:
            if not again:
                self.prepared.pop(claim.uid, None)
                self.unsure[claim.uid] = claim
        elif error:
            full = self.held(claim.uid)[claim.card] + claim.units > UNITS
            assert (self.obstacle and self.obstacle in error) or (full and "once others end" in error), error
            assert not again, "what is prepared stays so"
        else:
            self.unsure.pop(claim.uid, None)
            self.prepared[claim.uid] = claim
            self.in_boot.add(claim.uid)

    @precondition(lambda self: self.prepared or self.unsure)
    @rule(data=st.data(), dies_at=DIES_AT, ends=st.booleans())
    def kubelet_lets_go(self, data: st.DataObject, dies_at: int, ends: bool) -> None:
        claims = {**self.prepared, **self.unsure}
        claim = claims[data.draw(st.sampled_from(sorted(claims)))]
        if self.let_go(claim, dies_at) and ends:
            self.api.claims.pop(claim.name, None)

    @rule()
    def agent_restarts(self) -> None:
        self.start()

    @rule()
    def node_reboots(self) -> None:
        """The CDI files are gone, the records are not; kubelet will ask for every claim again."""
        for file in (self.folder / "cdi").glob("*"):
            file.unlink()
        self.boots += 1
        self.in_boot = set()
        self.start()

    @rule(obstacle=st.sampled_from(["", "", "", SWITCHED]))
    def label_changes(self, obstacle: str) -> None:
        self.obstacle = obstacle

    @precondition(lambda self: self.api.claims)
    @rule(data=st.data(), units=LARGE_OR_SMALL, down=st.booleans(), starts=st.booleans(), dies_at=DIES_AT)
    def claim_vanishes(self, data: st.DataObject, units: int, down: bool, starts: bool, dies_at: int) -> None:
        """Deleted with its pod while the node was `down` or kubelet had lost its checkpoint; its card is
        allocated again.

        Where the next pod `starts` at once, the agent is asked for more than it has let go.
        """
        if down:
            self.node_reboots()
        held = [each.name for each in self.api.claims.values() if each.uid in self.prepared]
        gone = self.api.claims.pop(data.draw(st.sampled_from(sorted(held or self.api.claims))))
        following = self.allocate(gone.card, units) or self.allocate(gone.card, gone.units)
        if starts and following is not None:
            self.asks_to_prepare(following, dies_at)

    @rule()
    def agent_sweeps(self) -> None:
        asyncio.run(self.driver.forget_vanished())
        alive = {each.uid for each in self.api.claims.values()}
        for known in (self.prepared, self.unsure):
            for uid in known.keys() - alive:
                del known[uid]
        self.in_boot &= alive

    # -- what holds -----------------------------------------------------------------------------------------

    @invariant()
    def kubelet_finds_what_it_was_told(self) -> None:
        records = PreparedClaims(self.folder / "root", self.folder / "cdi", self.folders)
        on_disk = {each.uid: each for each in records.all()}
        assert self.prepared.keys() <= on_disk.keys() <= self.prepared.keys() | self.unsure.keys()
        for uid in self.prepared.keys() & self.in_boot:
            claim = self.prepared[uid]
            assert records.in_place(on_disk[uid].allocation)
            assert len(list((self.folder / "cdi").glob(f"*{uid}.json"))) == 1
            folder = self.folder / "root" / "containers" / folder_name(uid, "gpu")
            (entry,) = read_limits(folder / "etc" / "limits") or ()
            assert (entry.uuid, entry.memory_bytes) == (
                uuid(claim.card),
                limit_bytes(CARD_MIB, claim.units, UNITS),
            )

    @invariant()
    def no_card_is_promised_twice(self) -> None:
        records = PreparedClaims(self.folder / "root", self.folder / "cdi", self.folders)
        sums: Mapping[int, int] = {
            card: sum(part.units for each in records.all() for part in each.slices if part.card == card)
            for card in range(CARDS)
        }
        assert all(units <= UNITS for units in sums.values()), sums


NodeOfClaims.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestNodeOfClaims = NodeOfClaims.TestCase


# -- what it notices --------------------------------------------------------------------------------------


class NeverCounts(ClaimDriver):
    def _check_room(self, allocation: ClaimAllocation) -> None:
        pass


class ForgetsOverReboots(ClaimDriver):
    def _check_room(self, allocation: ClaimAllocation) -> None:
        known = [each for each in self.prepared.all() if each.boot == self.prepared.boot]
        held = units_held([*(each.allocation for each in known if each.uid != allocation.uid), allocation])
        if max(held.values()) > UNITS:
            raise UnpreparedError("it is prepared once others end")


@pytest.mark.parametrize("driver", [NeverCounts, ForgetsOverReboots])
def test_a_driver_that_counts_wrong_is_noticed(driver: type[ClaimDriver]) -> None:
    machine = type(driver.__name__, (NodeOfClaims,), {"driver_type": driver})
    found_soon = settings(  # the search ends where it finds it: 60 examples were enough for five seeds of six
        NodeOfClaims.TestCase.settings,
        max_examples=2000,
        phases=[Phase.generate],
        derandomize=True,
        database=None,
    )
    with pytest.raises(AssertionError, match=r"\{0: \d+, 1: \d+\}"):  # the units promised of each card
        run_state_machine_as_test(machine, settings=found_soon)
