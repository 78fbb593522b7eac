"""How much placement allocates of a cluster if kube-scheduler's own filters run before the policy.

    python bench/behind_scheduler.py --trace default --seeds 42-43 --sees cpu

kube-scheduler excludes nodes without the CPU, memory or model that a pod needs, and places pods without GPU
itself, on the node with the largest fraction of CPU and memory free. `--sees` is what the extender's policy
knows: `cards` alone, `cpu` and memory too, or the allowed `models` as well. Filling unless `--churn LOAD`.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import msgspec
import numpy as np

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # `python bench/behind_scheduler.py` finds the others

from bench.churn import churn, churn_arrivals
from bench.placement import DATA_VARIABLE, DEFAULT_DATA, seeds_of
from bench.traces import find_pods

from gpuslice.core.policy import DEFAULT_POLICY, Fleet, FleetNode, Shape, fitting_rows, make_policy
from gpuslice.core.policy.fleet import Rows
from gpuslice.core.simulation.replay import FULL_DEMAND, Cluster, fill, filling_arrivals, shuffled_nodes
from gpuslice.core.simulation.trace import fleet_of
from gpuslice.diagnosis.simulate.facts import find_nodes, load_nodes, load_pods


@dataclass(slots=True)
class Scheduled(Cluster):
    """`truth` is the cluster, `fleet` what the policy sees of it."""

    truth: Fleet = None  # type: ignore[assignment]
    sees: str = "cpu"

    def offer(self, shape: Shape) -> tuple[int, tuple[int, ...]] | None:
        """One pod arrives: kube-scheduler's filters first, then, if it requests a card, the policy."""
        rows = fitting_rows(self.truth, shape, np.arange(self.truth.rows))
        seen = self._seen(shape)
        if shape.cards:
            self.policy.arrived(seen)
        if not len(rows):
            return None
        if not shape.cards:
            return self._take(self._emptiest(shape, rows), (), shape)
        row = self.policy.choose(seen, rows)
        assert row is not None, "what the policy sees is never less than there is"
        slots = self.policy.slots(seen, row)
        self.policy.placed(seen)
        self.allocated_units += shape.total_units
        return self._take(row, slots, shape)

    def remove(self, row: int, slots: tuple[int, ...], shape: Shape) -> None:
        """A pod leaves."""
        self.truth.give_back(row, slots, shape)
        self.fleet.give_back(row, slots, self._seen(shape))
        if shape.cards:
            self.policy.departed(self._seen(shape))
            self.allocated_units -= shape.total_units

    def _take(self, row: int, slots: tuple[int, ...], shape: Shape) -> tuple[int, tuple[int, ...]]:
        self.truth.take(row, slots, shape)
        self.fleet.take(row, slots, self._seen(shape))
        return row, slots

    def _seen(self, shape: Shape) -> Shape:
        if self.sees == "cards":
            return Shape(shape.units, shape.cards)
        return shape if self.sees == "models" else msgspec.structs.replace(shape, models=frozenset())

    def _emptiest(self, shape: Shape, rows: Rows) -> int:
        truth = self.truth
        cpu = (truth.cpu_left[rows] - shape.cpu_milli) / np.maximum(truth.cpu_milli[rows], 1)
        memory = (truth.memory_left[rows] - shape.memory_mib) / np.maximum(truth.memory_mib[rows], 1)
        return int(rows[(cpu + memory).argmax()])


def made(nodes: list[FleetNode], sees: str) -> Scheduled:
    """An empty cluster with the default policy."""
    seen = fleet_of([_without_host_resources(node) for node in nodes] if sees == "cards" else nodes)
    return Scheduled(seen, make_policy(DEFAULT_POLICY, seen), truth=fleet_of(nodes), sees=sees)


def _without_host_resources(node: FleetNode) -> FleetNode:
    return FleetNode(node.name, node.size, node.left, node.compute_left, node.model)


def main() -> None:
    """Print the mean over the seeds."""
    parser = argparse.ArgumentParser(description="Replay a trace with kube-scheduler before the policy.")
    parser.add_argument("--trace", required=True)
    parser.add_argument("--data", default=os.environ.get(DATA_VARIABLE, DEFAULT_DATA))
    parser.add_argument("--seeds", default="42-43")
    parser.add_argument("--churn", type=float, default=0.0, metavar="LOAD")
    parser.add_argument("--sees", choices=["cards", "cpu", "models"], default="cpu")
    options = parser.parse_args()
    pods = find_pods(options.trace, Path(options.data))
    trace, nodes = load_pods(pods), load_nodes(find_nodes(pods, None, Path(options.data)))
    capacity = sum(sum(node.size) for node in nodes)
    results = []
    for seed in seeds_of(options.seeds):
        cluster = made(shuffled_nodes(nodes, seed), options.sees)
        if options.churn:
            offered = churn_arrivals(trace.shapes, capacity, options.churn, seed)
            results.append(churn(cluster, offered, capacity).allocation_pct)
        else:
            fill(cluster, filling_arrivals(trace.shapes, capacity, seed, FULL_DEMAND), capacity)
            results.append(100 * cluster.allocated_units / capacity)
    print(f"{options.trace}, sees {options.sees}: {mean(results):.2f} % allocated")


if __name__ == "__main__":
    main()
