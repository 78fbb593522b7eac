"""The most GPU that any policy could allocate on a trace: an upper bound by linear programming.

    python bench/bound.py --trace default --seeds 42-46 --accepted 0,90

Same arrivals as `bench/placement.py` (filling, 130 % of the cluster). Cards are cut into patterns, found by
column generation; CPU and memory are summed over equal nodes, and pods may be split, so no policy can do
better. With `--accepted 90` every pod of at most one card among the first 90 % of the demand must be placed,
as by any policy that refuses no pod while there is room; with 0 any pod may be refused. "so far" is the bound
if all pods must be placed that arrived before the policy itself first refused one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import numpy as np
from scipy.optimize import linprog
from scipy.sparse import coo_array

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python bench/bound.py` finds bench.traces

from bench.placement import DATA_VARIABLE, DEFAULT_DATA, seeds_of
from bench.traces import find_pods

from gpuslice.core.policy import DEFAULT_POLICY, FleetNode, Shape, make_policy
from gpuslice.core.policy.cutting_stock import best_pattern
from gpuslice.core.simulation.replay import FULL_DEMAND, Cluster, filling_arrivals, shuffled_nodes
from gpuslice.core.simulation.trace import CARD_MILLI, fleet_of
from gpuslice.diagnosis.simulate.facts import find_nodes, load_nodes, load_pods

Pattern = tuple[tuple[int, int], ...]  # size → pieces
ENOUGH = 1e-6  # a pattern worth at most a card does not improve the bound


@dataclass
class Rows:
    """Rows of a linear program, each `≤` its limit, as they are added."""

    limits: list[float] = field(default_factory=list)
    entries: list[tuple[int, int, float]] = field(default_factory=list)  # row, column, factor

    def add(self, limit: float, factors: list[tuple[int, float]]) -> int:
        """Add a row; returns its number."""
        self.entries += [(len(self.limits), column, factor) for column, factor in factors]
        self.limits.append(limit)
        return len(self.limits) - 1


def bound(nodes: list[FleetNode], arrivals: list[Shape], accepted: float) -> float:
    """The most units that can be allocated; pods of up to one card in the first part `accepted` must be."""
    kinds = Counter((len(node.size), node.model, node.cpu_milli, node.memory_mib) for node in nodes)
    capacity = sum(sum(node.size) for node in nodes)
    counts, least, units = Counter(arrivals), Counter[Shape](), 0
    for shape in arrivals:
        units += shape.total_units
        if units <= accepted * capacity and shape.cards <= 1:
            least[shape] += 1
    shares = sorted({shape.units for shape in counts if 0 < shape.units < CARD_MILLI})
    patterns: dict[Pattern, None] = {((size, CARD_MILLI // size),): None for size in shares}
    while True:
        best, worths = _solve(kinds, counts, least, shares, list(patterns))
        known = len(patterns)
        for prices, card in worths:
            value, pieces = best_pattern(CARD_MILLI, np.array(shares), prices)
            if value > card + ENOUGH:
                patterns[tuple((shares[at], number) for at, number in pieces.items())] = None
        if len(patterns) == known:
            return best


def _solve(
    kinds: Counter[tuple[int, str, float, float]],
    counts: Counter[Shape],
    least: Counter[Shape],
    shares: list[int],
    patterns: list[Pattern],
) -> tuple[float, list[tuple[np.ndarray, float]]]:
    """The bound for these patterns, and the dual values of pieces and of a card for each kind of node."""
    rows = Rows()
    gain: list[float] = []
    places: dict[Shape, list[tuple[int, float]]] = {shape: [] for shape in counts}
    of_kind = []
    for (cards, model, cpu, memory), number in kinds.items():
        pieces: dict[int, list[tuple[int, float]]] = {size: [] for size in shares}
        on_cards, on_cpu, on_memory = [], [], []
        for shape in counts:
            fits = shape.cards <= cards and shape.cpu_milli <= cpu and shape.memory_mib <= memory
            if not fits or (shape.cards and shape.models and model not in shape.models):
                continue
            column = len(gain)
            gain.append(-float(shape.total_units))
            places[shape].append((column, 1.0))
            on_cpu.append((column, shape.cpu_milli / 1000))
            on_memory.append((column, shape.memory_mib / 1024))
            if shape.units in pieces:
                pieces[shape.units].append((column, 1.0))
            elif shape.cards:
                on_cards.append((column, float(shape.cards)))
        for pattern in patterns:
            column = len(gain)
            gain.append(0.0)
            on_cards.append((column, 1.0))
            for size, pieces_each in pattern:
                pieces[size].append((column, -float(pieces_each)))
        rows.add(number * cpu / 1000, on_cpu)
        rows.add(number * memory / 1024, on_memory)
        of_kind.append((rows.add(number * cards, on_cards), [rows.add(0.0, pieces[size]) for size in shares]))
    for shape, columns in places.items():
        rows.add(counts[shape], columns)
        if least[shape]:
            rows.add(-least[shape], [(column, -1.0) for column, _ in columns])
    lines, columns_of, factors = zip(*rows.entries, strict=True)
    matrix = coo_array((factors, (lines, columns_of)), shape=(len(rows.limits), len(gain))).tocsr()
    found = linprog(gain, A_ub=matrix, b_ub=rows.limits, method="highs")
    if not found.success:
        raise SystemExit(f"bound: {found.message}")
    prices = -found.ineqlin.marginals
    return -found.fun, [(prices[each], float(prices[cards])) for cards, each in of_kind]


def replayed(nodes: list[FleetNode], arrivals: list[Shape], seed: int) -> tuple[float, float]:
    """What the default policy allocates, and how much of the demand had arrived when it first refused a pod
    of at most one card, both in % of the cluster.
    """
    fleet = fleet_of(shuffled_nodes(nodes, seed))
    cluster = Cluster(fleet, make_policy(DEFAULT_POLICY, fleet))
    capacity, units, first = int(fleet.size.sum()), 0, 0
    for shape in arrivals:
        placed = cluster.offer(shape)
        if placed is None and shape.cards <= 1 and not first:
            first = units
        units += shape.total_units
    return 100 * cluster.allocated_units / capacity, 100 * (first or units) / capacity


def main() -> None:
    """Print a line for each seed, and the mean."""
    parser = argparse.ArgumentParser(description="Bound what can be allocated of a trace.")
    parser.add_argument("--trace", required=True)
    parser.add_argument("--data", default=os.environ.get(DATA_VARIABLE, DEFAULT_DATA))
    parser.add_argument("--seeds", default="42-44")
    parser.add_argument("--accepted", default="0,90", help="%% of the demand, with commas between")
    options = parser.parse_args()
    pods = find_pods(options.trace, Path(options.data))
    trace, nodes = load_pods(pods), load_nodes(find_nodes(pods, None, Path(options.data)))
    capacity = sum(sum(node.size) for node in nodes)
    parts = [float(part) for part in options.accepted.split(",")]
    heads = [*(f"{part:g} %" for part in parts), "so far"]
    print(f"{'seed':>6}{'policy':>9}{'refuses at':>12}" + "".join(f"{head:>9}" for head in heads))
    lines = []
    for seed in seeds_of(options.seeds):
        arrivals = filling_arrivals(trace.shapes, capacity, seed, FULL_DEMAND)
        allocated, first = replayed(nodes, arrivals, seed)
        bounds = [100 * bound(nodes, arrivals, part / 100) / capacity for part in (*parts, first)]
        lines.append([allocated, first, *bounds])
        print(_line(str(seed), lines[-1]), flush=True)
    print(_line("mean", [mean(column) for column in zip(*lines, strict=True)]))


def _line(name: str, values: list[float]) -> str:
    allocated, refused, *bounds = values
    return f"{name:>6}{allocated:9.2f}{refused:12.1f}" + "".join(f"{value:9.2f}" for value in bounds)


if __name__ == "__main__":
    main()
