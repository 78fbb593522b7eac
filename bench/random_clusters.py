"""The worst regret of `opportunity-cost` over clusters and workloads drawn at random.

    python bench/random_clusters.py --cases 0-99 --seeds 42-43 --json
    python bench/random_clusters.py --cases 17 --seeds 42-51 --others fgd

A case depends only on its number: nodes of one to four kinds (cards per node, size of the cards, CPU and
memory per card, or cards of all sizes on each node), pods (shares, single cards, several; cores, memory; some
bound to models, some without GPU) and the order in which they arrive. Half of the cases fill the cluster; in
the other half pods come and go. All policies get the same arrivals; `fgd` is given the mix,
`opportunity-cost` learns it (`--mix known`: both are given it, `--mix hidden`: both learn). Regret is how
much more the best of the others allocates, in percentage points of the cluster: at 100 and at 130 % arrived
while it fills, on average if pods come and go. Prints the cases by regret, the worst first, then its
distribution.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python bench/random_clusters.py` finds bench

from bench.other_workloads import MIXES, Result, results
from bench.placement import seeds_of
from bench.workloads import (
    CORES,
    MEMORY_MIB,
    Order,
    Random,
    Workload,
    drifting,
    drifting_back,
    in_waves,
    small_first,
)

from gpuslice.core.policy import DEFAULT_POLICY, FleetNode, Shape

OTHERS = "fgd,bestfit,binpack"
MEASURES = ("at 100 %", "at 130 %", "allocated")
CARDS = 400  # of a cluster, about
SHAPES = 4_000  # drawn for a case; the arrivals are drawn from these
SIZES = (8, 16, 24, 32, 40, 48, 80, 96, 141, 192)  # of cards, in GiB
CARDS_A_NODE = (1, 2, 4, 8, 8, 8, 16)
STEPS = 4  # requests for CPU and memory are multiples of a quarter of what a node has per card
COMMON = (0.1, 0.25, 0.5)  # shares that are requested more often than others
UNEVEN = (0.4, 0.6, 0.8, 1.0, 1.2, 2.0)  # times the mean CPU and memory that pods request


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster and its arrivals. `load` 0: it is filled; otherwise pods come and go at this load."""

    number: int
    told: str
    load: float
    workload: Workload


def case_of(number: int) -> Case:
    """The case with this number, the same each time."""
    random = np.random.default_rng([number, 2026])
    nodes, told = _nodes(random)
    requests, told_pods = _requests(random, nodes)
    order, told_order = _order(random)
    part = np.array([weight for _, weight in requests])
    drawn = random.choice(len(requests), size=SHAPES, p=part / part.sum())
    load = float(random.choice([0.0, 0.0, 0.0, 0.85, 0.95, 1.05]))
    how = f"churn {load:.2f}" if load else "filling"
    workload = Workload(nodes, [requests[line][0] for line in drawn], None if load else order)
    return Case(number, "; ".join([how, told, told_pods] + [told_order] * (not load)), load, workload)


def _nodes(random: Random) -> tuple[list[FleetNode], str]:
    kinds = int(random.choice([1, 1, 2, 3, 4]))
    sizes = random.choice(SIZES, size=kinds, replace=False).tolist()
    if random.random() < 0.4:
        sizes = [1000] * kinds  # equal cards, divided into thousandths
    mixed = kinds > 1 and sizes[0] != 1000 and random.random() < 0.25
    nodes: list[FleetNode] = []
    told = []
    for kind in range(kinds):
        cards = int(random.choice(CARDS_A_NODE))
        host = float(np.exp(random.normal(0.0, 0.35)))
        size = (
            tuple(sizes[card * kinds // cards] for card in range(cards)) if mixed else (sizes[kind],) * cards
        )
        count = max(2, round(CARDS / kinds / cards * random.uniform(0.5, 1.5)))
        cpu, memory = CORES * cards * host, MEMORY_MIB * cards * host
        nodes += [
            FleetNode(f"{kind}-{number}", size, size, (), f"model-{kind}", cpu, memory, cpu, memory)
            for number in range(count)
        ]
        told.append(f"{count}×{cards}×{'/'.join(map(str, sorted(set(size))))} host {host:.2f}")
    return nodes, ", ".join(told)


def _requests(random: Random, nodes: list[FleetNode]) -> tuple[list[tuple[Shape, float]], str]:
    """Shapes with their weights: fractions of the demand for shares, single cards and several cards."""
    sizes = sorted({size for node in nodes for size in node.size})
    classes = random.dirichlet([1.0, 0.7, 0.7])
    models = sorted({node.model for node in nodes})
    bound = float(random.choice([0.0, 0.0, 0.2, 0.5])) if len(models) > 1 else 0.0
    cpu, memory = float(np.exp(random.normal(-0.5, 0.4))), float(np.exp(random.normal(-0.7, 0.4)))
    plain = float(random.choice([0.0, 0.1, 0.5]))
    host = sum(node.cpu_milli for node in nodes) / sum(len(node.size) for node in nodes) / CORES
    largest = {size: max(node.size.count(size) for node in nodes) for size in sizes}
    total_units = sum(sum(node.size) for node in nodes)
    held = {size: sum(node.size.count(size) for node in nodes) * size / total_units for size in sizes}
    drawn: list[tuple[Shape, float]] = []
    for part, kind in zip(classes, ("share", "single", "several"), strict=True):
        for _ in range(int(random.integers(2, 13)) if kind == "share" else int(random.integers(2, 7))):
            size = int(random.choice(sizes, p=[held[size] for size in sizes]))
            cards, units = 1, size
            if kind == "share":
                units = max(1, round(size * float(random.choice([random.uniform(0.02, 0.98), *COMMON]))))
            elif kind == "several":
                most = [count for count in (2, 3, 4, 8, 16) if count <= largest[size]]
                if not most:
                    continue
                cards = int(random.choice(most))
                units = size if random.random() < 0.85 else max(1, size // 2)
            gpu = units / size * cards
            cpu_milli, memory_mib = (
                round(gpu * host * ratio * float(random.choice(UNEVEN)) * STEPS) * of_card // STEPS
                for of_card, ratio in ((CORES, cpu), (MEMORY_MIB, memory))
            )
            chosen = frozenset([str(random.choice(models))]) if random.random() < bound else frozenset()
            shape = Shape(units, cards, cpu_milli, memory_mib, chosen)
            if any(_holds(node, shape) for node in nodes):
                drawn.append((shape, part * random.uniform(0.2, 1.0) / shape.total_units))
    pods = sum(weight for _, weight in drawn)
    drawn += [
        (Shape(0, 0, round(CORES * amount), round(MEMORY_MIB * amount)), plain * pods / 4)
        for amount in ((0.25, 0.5, 1.0, 2.0) if plain else ())
    ]
    demand = sum(weight * shape.total_units for shape, weight in drawn)
    several = sum(weight * shape.total_units for shape, weight in drawn if shape.cards > 1) / demand
    whole = sum(weight * shape.units for shape, weight in drawn if shape.cards == 1 and shape.units in sizes)
    told = f"{several:.0%} of the demand on several cards, {whole / demand:.0%} on one"
    return drawn, f"{told}; CPU {cpu:.2f}, memory {memory:.2f}, without GPU {plain}, bound {bound}"


def _holds(node: FleetNode, shape: Shape) -> bool:
    """Whether the shape fits on this node when it is empty."""
    fits = sum(size >= shape.units for size in node.size) >= shape.cards
    fits = fits and shape.cpu_milli <= node.cpu_milli and shape.memory_mib <= node.memory_mib
    return fits and (not shape.models or node.model in shape.models)


def _order(random: Random) -> tuple[Order | None, str]:
    orders: list[tuple[Order | None, str]] = [(None, "random order")] * 4
    orders += [(drifting, "more and more shares"), (drifting_back, "fewer and fewer shares")]
    orders += [(small_first, "small first"), (in_waves, "in waves"), (_abrupt, "an abrupt change")]
    return orders[int(random.integers(len(orders)))]


def _abrupt(shapes: list[Shape], random: Random) -> list[Shape]:
    """Half of the shapes in the first half, the others in the second."""
    kinds = sorted(
        set(shapes), key=lambda shape: (shape.units, shape.cards, shape.cpu_milli, shape.memory_mib)
    )
    early = {kind for kind in kinds if random.random() < 0.5}
    return sorted(shapes, key=lambda shape: shape not in early)


@dataclass(frozen=True, slots=True)
class Replay:
    """One of a case's replays."""

    number: int
    policy: str
    seed: int
    mix: str


def replayed(replay: Replay) -> Result:
    """What the policy allocates, at each measure of the case."""
    case = case_of(replay.number)
    result = results(case.workload, replay.policy, replay.seed, case.load, replay.mix)
    return {key: amount for key, amount in result.items() if key != "refused"}


def regrets(
    case: Case, replays: dict[Replay, Result], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """For each measure of a case: what the policy reaches, and how much more the others reach."""
    seeds = seeds_of(options.seeds)
    mine = [replays[Replay(case.number, DEFAULT_POLICY, seed, options.mix)] for seed in seeds]
    for key in mine[0]:
        beyond: dict[str, list[float]] = {}
        for other in options.others.split(","):
            theirs = [replays[Replay(case.number, other, seed, options.mix)] for seed in seeds]
            each = [their[key] - own[key] for own, their in zip(mine, theirs, strict=True)]
            error = stdev(each) / len(each) ** 0.5 if len(each) > 1 else 0.0
            beyond[other] = [round(mean(each), 3), round(error, 3)]
        best = max(beyond, key=lambda other: beyond[other][0])
        yield {
            "case": case.number,
            "measure": key,
            "allocated": round(mean(own[key] for own in mine), 3),
            "regret": beyond[best][0],
            "error": beyond[best][1],
            "best": best,
            "beyond": beyond,
            "told": case.told,
        }


def main(arguments: list[str] | None = None) -> int:
    """Replay the cases and print them by regret."""
    options = _parser().parse_args(arguments)
    cases = [case_of(number) for number in seeds_of(options.cases)]
    policies = [DEFAULT_POLICY, *options.others.split(",")]
    todo = [
        Replay(case.number, policy, seed, options.mix)
        for case in cases
        for policy in policies
        for seed in seeds_of(options.seeds)
    ]
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs) as pool:
            found = dict(zip(todo, pool.map(replayed, todo, chunksize=4), strict=True))
    else:
        found = {replay: replayed(replay) for replay in todo}
    lines = [line for case in cases for line in regrets(case, found, options)]
    lines.sort(key=lambda line: -float(line["regret"]))
    spread = {key: _spread([line["regret"] for line in lines if line["measure"] == key]) for key in MEASURES}
    if options.json:
        print(json.dumps({"spread": spread, "cases": lines}, indent=1))
        return 0
    for line in lines:
        print(
            "{case:4} {measure:9} {allocated:6.2f} {regret:+6.2f} ±{error:4.2f} {best:8} {told}".format(
                **line
            )
        )
    for key, figures in spread.items():
        print(f"{key:9}", ", ".join(f"{name} {figure:g}" for name, figure in figures.items()))
    return 0


def _spread(regret: list[float]) -> dict[str, float]:
    """The distribution of the regret over cases; "positive" is its mean with gains counted as 0."""
    if not regret:
        return {}
    return {
        "cases": len(regret),
        "mean": round(mean(regret), 2),
        "positive": round(mean(max(0.0, each) for each in regret), 2),
        "worst": round(max(regret), 2),
        "over 0.5": sum(each > 0.5 for each in regret),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The worst regret over random clusters.")
    parser.add_argument("--cases", default="0-99", help="such as 0-99 or 3,17")
    parser.add_argument("--seeds", default="42-43")
    parser.add_argument("--others", default=OTHERS)
    parser.add_argument("--mix", choices=MIXES, default="learned")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="replays at a time")
    return parser


if __name__ == "__main__":
    sys.exit(main())
