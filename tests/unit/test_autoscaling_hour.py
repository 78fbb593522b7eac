"""An hour of pods that come and go beside an autoscaler that adds up cards: nodes come, few in vain."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from gpuslice.core.contract import LABEL_SHARED
from gpuslice.core.ledger import shape_of
from gpuslice.core.policy import make_policy
from tests.builders import api_node
from tests.unit.test_extender_autoscaling import PODS, TYPE, Stage

CARDS = (16, 16)
COMES_S, CARDS_S = 90, 30  # from the request for a node until it is there, and until it has its cards
IDLE_S = 600  # after which a node is taken away
LOOKS_EVERY_S, STEP_S = 10, 5


@dataclass
class Autoscaler:
    """Makes room by sums for whatever is unschedulable, placeholders included."""

    stage: Stage
    sums: dict[str, int] = field(default_factory=dict)  # units free, of nodes with cards
    coming: dict[str, float] = field(default_factory=dict)  # when its cards are there
    idle_since: dict[str, float] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    in_vain: list[str] = field(default_factory=list)
    made: int = 0

    def look(self, waiting: list[int]) -> None:
        placeholders = [sum(CARDS)] * len(self.stage.all(PODS))
        room = [*self.sums.values(), *(sum(CARDS) for _ in self.coming)]
        for units in sorted([*waiting, *placeholders], reverse=True):
            fits = next((at for at, free in enumerate(room) if free >= units), None)
            if fits is None:
                room.append(sum(CARDS))
                fits = len(room) - 1
                self.made += 1
                self.coming[f"m{self.made}"] = self.stage.now + COMES_S + CARDS_S
            room[fits] -= units

    def pass_time(self) -> None:
        now = self.stage.now
        for name, at in [*self.coming.items()]:
            if at - CARDS_S <= now < at - CARDS_S + STEP_S:
                self.stage.node(name)
            if at <= now:
                del self.coming[name]
                self.sums[name] = sum(CARDS)
                self.stage.see(name, ready(name))
        for name, free in [*self.sums.items()]:
            if free < sum(CARDS):
                self.used.add(name)
                self.idle_since[name] = now
            elif now - self.idle_since.setdefault(name, now) >= IDLE_S:
                self.in_vain += [name] if name not in self.used else []
                del self.sums[name]
                self.stage.call("DELETE", f"/api/v1/nodes/{name}")
                self.stage.ledger.remove_node(name)
                self.stage.groups.node_gone(name)


def ready(name: str) -> Any:
    return api_node(name, sum(CARDS), len(CARDS), labels={TYPE: "pair", LABEL_SHARED: "true"})


@pytest.mark.parametrize("seed", range(3))
async def test_nodes_come_for_all_pods_and_hardly_any_in_vain(seed: int) -> None:
    dice = random.Random(seed)
    stage = Stage()
    stage.node("n0", *CARDS)
    scaler = Autoscaler(stage, {"n0": sum(CARDS)})
    waiting: dict[str, tuple[int, float]] = {}
    running: dict[str, tuple[str, int, float]] = {}
    waited: list[float] = []
    for tick in range(3600 // STEP_S):
        stage.now += STEP_S
        for name in [name for name, (*_, until) in running.items() if until <= stage.now]:
            node, units, _ = running.pop(name)
            stage.end(name)
            scaler.sums[node] += units
        scaler.pass_time()
        if dice.random() < 0.15 and tick < 500:
            waiting[f"p{tick}"] = (dice.choice([3, 6, 7, 9, 12, 16]), stage.now)
        policy = make_policy("bestfit", stage.ledger.flush())
        for name, (units, since) in [*waiting.items()]:
            asked = any(free >= units for free in scaler.sums.values())
            stage.wait(name, units, asked=asked)
            pod = stage.ledger.pods[f"uid-{name}"]
            assert pod.request is not None
            row = policy.choose(shape_of(pod.request))
            if row is None:
                continue
            fleet = stage.ledger.flush()
            node = next(each for each, at in fleet.row_of.items() if at == row)
            (slot,) = policy.slots(shape_of(pod.request), row)
            stage.hold(name, node, slot, units)
            stage.up.pod_gone(f"uid-{name}", None)
            scaler.sums[node] -= units
            running[name] = (node, units, stage.now + dice.uniform(60, 1800))
            waited.append(stage.now - since)
            del waiting[name]
            policy = make_policy("bestfit", stage.ledger.flush())
        await stage.up.check()
        if tick % (LOOKS_EVERY_S // STEP_S) == 0:
            scaler.look([units for units, _ in waiting.values()])
    assert not waiting
    assert len(scaler.in_vain) <= 2  # whose pods found room elsewhere while these came
    assert max(waited) <= COMES_S + CARDS_S + 30
