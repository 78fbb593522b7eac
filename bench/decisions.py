"""What one placement decision costs: the policy alone, without a scheduler around it.

    python bench/decisions.py --nodes 500,5000,20000 --json

Nodes of eight cards are filled with pods of 17 shapes; processor time, from the request to the changed fleet.
`first_us` is a shape's first decision, `begin_us` the very first of all, `piece_us` the longest piece of work
between requests, `victims_us` the time to choose the pods to evict from one node of 32 pods.
With `--linked` each node's cards are pairs joined by NVLink, behind two CPUs.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from itertools import product

import numpy as np

from gpuslice.core.card_links import CardLinks
from gpuslice.core.hold import Hold
from gpuslice.core.holds import NodeHolds
from gpuslice.core.model import Card, CardSlice, Node, Placement, Pod, Request
from gpuslice.core.policy import POLICIES, Fleet, FleetNode, Policy, Shape, make_policy
from gpuslice.core.preemption import eviction

CARD_UNITS = 15
PAIRS: CardLinks = tuple(
    tuple(3 if one // 2 == other // 2 else int(one // 4 == other // 4) for other in range(8))
    for one in range(8)
)
SHAPES = [*(Shape(units) for units in range(1, 16)), Shape(15, 2), Shape(15, 8)]


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each number of nodes."""
    parser = argparse.ArgumentParser(description="Measure placement decisions.")
    parser.add_argument("--nodes", default="500,2000,5000,20000")
    parser.add_argument("--pods", type=int, default=3000)
    parser.add_argument("--policy", default="opportunity-cost", choices=[policy.name for policy in POLICIES])
    parser.add_argument("--linked", action="store_true", help="cards are not all alike")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    links = PAIRS if options.linked else ()
    rows = [measure(options.policy, int(nodes), options.pods, links) for nodes in options.nodes.split(",")]
    if options.json:
        print(json.dumps(rows, indent=2))
    else:
        print("".join(f"{key:>14}" for key in rows[0]))
        for row in rows:
            print("".join(f"{value:14.0f}" for value in row.values()))
    return 0


def measure(name: str, nodes: int, pods: int, links: CardLinks = ()) -> dict[str, float]:
    """Costs in microseconds on a cluster of `nodes` nodes."""
    fleet = Fleet()
    for number in range(nodes):
        fleet.put(FleetNode(f"node-{number}", (CARD_UNITS,) * 8, (CARD_UNITS,) * 8, links=links))
    policy = make_policy(name, fleet, renew_when_asked=False)
    random = np.random.default_rng(42)
    decisions: list[float] = []
    first: list[float] = []
    pieces: list[float] = []
    known: set[Shape] = set()
    for _ in range(pods):
        shape = SHAPES[int(random.integers(len(SHAPES)))]
        policy.arrived(shape)
        spent_us = timed_us(lambda: decide(policy, shape))  # noqa: B023 called at once
        (decisions if shape in known else first).append(spent_us)
        known.add(shape)
        pieces.append(timed_us(policy.maintain))
    return {
        "nodes": nodes,
        "p50_us": float(np.percentile(decisions, 50)),
        "p99_us": float(np.percentile(decisions, 99)),
        "first_us": float(np.median(first)),
        "begin_us": max(first),
        "piece_us": max(pieces),
        "victims_us": victims_us(),
        "rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def victims_us(nodes: int = 100) -> float:
    """Processor time per node, for nodes of eight cards with four pods each, of four priorities."""
    holds = NodeHolds("n", Node("n", tuple(Card(card, "", 0, CARD_UNITS) for card in range(8))))
    for card, number in product(range(8), range(4)):
        uid, placement = f"{card}-{number}", Placement("n", (CardSlice(card, 3),))
        pod = Pod(uid, "default", uid, "n", Request(3), placement, priority=number)
        holds.by_uid[uid] = Hold(pod, placement)
    request = Request(10)
    return timed_us(lambda: [eviction(holds, request, 100) for _ in range(nodes)]) / nodes


def decide(policy: Policy, shape: Shape) -> None:
    """Choose, and allocate what was chosen."""
    row = policy.choose(shape)
    if row is None:
        return
    policy.fleet.take(row, policy.slots(shape, row), shape)
    policy.placed(shape)


def timed_us(what: Callable[[], object]) -> float:
    """Processor time of one call: what other programs do in the meantime does not count."""
    started = time.process_time_ns()
    what()
    return (time.process_time_ns() - started) / 1000


if __name__ == "__main__":
    sys.exit(main())
