"""Twelve clusters for an autoscaler: what would be right, and what it does without our part.

The table of docs/operate/autoscaling.md is made of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuslice.core.contract import GATE_POD_GROUP, GPU_COUNT, LABEL_GROUP_MIN, LABEL_GROUP_NAME
from tests.e2e.cluster import Object, pod
from tests.e2e.cluster_autoscaler import QUIET_LOOPS, Group, Held, Outcome

PLAIN = Group("plain")
SMALL, LARGE = Group("small", cards=4, units=8, cpu=16), Group("large", cards=1, units=32)


@dataclass(frozen=True)
class Scenario:
    """A cluster and the pods that wait for it.

    `right`: what an autoscaler would do that knew the cards; `alone`: what it does without our part.
    """

    name: str
    groups: Sequence[Group]
    pods: Sequence[Object]
    right: Outcome
    alone: Outcome
    nodes: Sequence[str] = ()  # their groups: the first is called n0
    held: Sequence[Held] = ()
    removes: bool = False
    quiet: int = QUIET_LOOPS


def asking(units: int, count: int = 1, **spec: object) -> list[Object]:
    made = [pod(f"waits-{number}", units) for number in range(count)]
    for each in made:
        each["spec"] |= spec
    return made


def on_two_cards(units: int) -> list[Object]:
    (made,) = asking(units)
    made["metadata"]["labels"] = {GPU_COUNT: "2"}
    return [made]


def together(units: int, count: int) -> list[Object]:
    made = asking(units, count, schedulingGates=[{"name": GATE_POD_GROUP}])
    for each in made:
        each["metadata"]["labels"] = {LABEL_GROUP_NAME: "gang", LABEL_GROUP_MIN: str(count)}
    return made


def changed(waiting: int = 0, **nodes: int) -> Outcome:
    return Outcome(nodes, waiting)


DEDICATED = {"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}
TOLERATION = {"key": "dedicated", "operator": "Exists"}
TAINTED = Group("tainted", taints=[DEDICATED])
T4 = Group("t4", labels={"model": "t4"}, cpu=16)
A100 = Group("a100", units=80, labels={"model": "a100"})
FOUR = Group("four", cards=4)
IN_PIECES = (Held("n0", 0, 12), Held("n0", 1, 12))
LIMITED = Group("limited", most=2)
GATED = 50  # loops: for half a minute a group without room is behind its gates
IDLE = 40  # loops: a node must have been idle for a quarter of a minute
SCENARIOS = [
    Scenario(
        "in pieces",
        [PLAIN],
        asking(6),
        right=changed(plain=1),
        alone=changed(1),
        nodes=["plain"],
        held=IN_PIECES,
    ),
    Scenario(
        "several cards",
        [FOUR],
        on_two_cards(32),
        right=changed(four=1),
        alone=changed(1),
        nodes=["four"],
        held=[Held("n0", card, 8) for card in range(4)],
    ),
    Scenario(
        "two models",
        [T4, A100],
        asking(24, nodeSelector={"model": "a100"}),
        right=changed(a100=1),
        alone=changed(1),
        nodes=["t4", "a100"],
        held=[Held("n1", 0, 60), Held("n1", 1, 60)],
    ),
    Scenario("from zero", [PLAIN], asking(8, 3), right=changed(plain=1), alone=changed(plain=1)),
    Scenario("gang", [PLAIN], together(9, 3), right=changed(plain=2), alone=changed(3, plain=1), quiet=GATED),
    Scenario(
        "a node that works",
        [PLAIN],
        [],
        right=changed(),
        alone=changed(1, plain=-1),
        nodes=["plain", "plain"],
        held=[*IN_PIECES, Held("n1", 0, 6)],
        removes=True,
        quiet=IDLE,
    ),
    Scenario(
        "a node that could be emptied",
        [PLAIN],
        [],
        right=changed(plain=-1),
        alone=changed(plain=-1),
        nodes=["plain", "plain"],
        held=[Held("n0", 0, 12), Held("n0", 1, 8), Held("n1", 0, 6)],
        removes=True,
        quiet=IDLE,
    ),
    Scenario(
        "taints",
        [TAINTED],
        [*asking(6, tolerations=[TOLERATION]), pod("refused", 6)],
        right=changed(1, tainted=1),
        alone=changed(2),
        nodes=["tainted"],
        held=IN_PIECES,
    ),
    Scenario(
        "different cards",
        [SMALL, LARGE],
        asking(20),
        right=changed(large=1),
        alone=changed(1),
        nodes=["small", "large"],
        held=[Held("n1", 0, 32)],
    ),
    Scenario("larger than any card", [FOUR], asking(40), right=changed(1), alone=changed(1), nodes=["four"]),
    Scenario(
        "quota",
        [LIMITED],
        asking(6, 9),
        right=changed(5, limited=1),
        alone=changed(5, limited=1),
        nodes=["limited"],
        held=IN_PIECES,
    ),
]


CLAIMS_RIGHT = CLAIMS_ALONE = changed(plain=1)
