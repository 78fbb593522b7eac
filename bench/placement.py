"""How much of a cluster's GPU each placement policy allocates, on replayed traces.

    python bench/placement.py --trace default --policy fgd,opportunity-cost --seeds 42-51 --json
    python bench/placement.py --trace pods.csv --nodes nodes.csv --policy all --churn 0.95

Filling (the default) follows "Beware of Fragmentation" (USENIX ATC '23); `--churn LOAD` lets pods come and
go; load 1.0 is a demand for the whole cluster. For a seed, all policies see the same nodes and arrivals.
`fgd` is given the mix of the trace, as by its authors; `opportunity-cost` learns it from the arriving pods,
unless `--mix known`. Traces are searched for in `--data`, `$GPUSLICE_TRACE_DATA` or `data/openb`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python bench/placement.py` finds bench.traces

from bench.churn import churn, churn_arrivals
from bench.traces import find_pods

from gpuslice.core.errors import GpusliceError
from gpuslice.core.policy import POLICIES, Fgd, Policy
from gpuslice.core.policy.fleet import Fleet, FleetNode
from gpuslice.core.simulation.claims import SIMULATED, simulated_policy
from gpuslice.core.simulation.replay import (
    FULL_DEMAND,
    Cluster,
    Progress,
    fill,
    filling_arrivals,
    shuffled_nodes,
)
from gpuslice.core.simulation.trace import Trace, fleet_of
from gpuslice.diagnosis.simulate.facts import find_nodes, load_nodes, load_pods

DATA_VARIABLE = "GPUSLICE_TRACE_DATA"
DEFAULT_DATA = "data/openb"
PROGRESS_EVERY_S = 2.0
TIMING = "decision_us"  # differs from run to run, so it is left out of the JSON

Result = dict[str, float]
Report = dict[str, dict[str, object]]


@dataclass(frozen=True, slots=True)
class Case:
    """One replay: a policy and a seed. `churn_load` 0 means filling."""

    policy: str
    seed: int
    churn_load: float
    mix_known: bool


@dataclass(frozen=True, slots=True)
class Workload:
    """What is replayed."""

    trace: Trace
    nodes: list[FleetNode]

    @property
    def capacity_units(self) -> int:
        return sum(sum(node.size) for node in self.nodes)


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line says; returns 2 if that makes no sense."""
    options = _parser().parse_args(arguments)
    try:
        workload = _workload(options)
        cases = _cases(options)
    except (GpusliceError, OSError, ValueError) as error:
        print(f"placement: {error}", file=sys.stderr)
        return 2
    report = _report(cases, list(_results(workload, cases, options.jobs)))
    if options.json:
        report = {
            name: {key: measures[key] for key in measures if key != TIMING}
            for name, measures in report.items()
        }
    print(json.dumps(report, indent=2) if options.json else _table(report, workload))
    return 0


def run(workload: Workload, case: Case, progress: Progress | None = None) -> Result:
    """Replay one case; the keys are those of the report."""
    fleet = fleet_of(shuffled_nodes(workload.nodes, case.seed))
    cluster = Cluster(fleet, _policy(case, fleet, workload.trace))
    capacity = workload.capacity_units
    started = time.perf_counter()
    if case.churn_load:
        offered = churn_arrivals(workload.trace.shapes, capacity, case.churn_load, case.seed)
        outcome = churn(cluster, offered, capacity, progress)
        result = {"allocation_pct": outcome.allocation_pct, "refused_pct": outcome.refused_pct}
        decisions = len(offered.shapes)
    else:
        arrivals = filling_arrivals(workload.trace.shapes, capacity, case.seed, FULL_DEMAND)
        reached = fill(cluster, arrivals, capacity, progress).allocation_pct_at
        result = {
            "allocation_pct_at_100": reached[100],
            "allocation_pct_at_130": 100 * cluster.allocated_units / capacity,
        }
        decisions = len(arrivals)
    return result | {TIMING: 1e6 * (time.perf_counter() - started) / max(decisions, 1)}


def _policy(case: Case, fleet: Fleet, trace: Trace) -> Policy:
    knows = case.mix_known or case.policy == Fgd.name
    return simulated_policy(case.policy, fleet, Counter(trace.shapes) if knows else None)


def _results(workload: Workload, cases: list[Case], jobs: int) -> Iterator[Result]:
    if jobs < 2:
        for number, case in enumerate(cases, start=1):
            yield run(workload, case, _Narrator(number, len(cases), case))
        return
    with ProcessPoolExecutor(jobs) as pool:
        for number, result in enumerate(pool.map(run, [workload] * len(cases), cases), start=1):
            print(f"placement: {number}/{len(cases)} done", file=sys.stderr)
            yield result


class _Narrator:
    """Reports the progress of a replay on stderr, every few seconds."""

    def __init__(self, number: int, count: int, case: Case) -> None:
        self._label = f"{number}/{count} {case.policy} seed {case.seed}"
        self._next_s = time.monotonic() + PROGRESS_EVERY_S

    def __call__(self, part: float) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + PROGRESS_EVERY_S
            print(f"placement: {self._label}: {part:.0%}", file=sys.stderr)


def _report(cases: list[Case], results: list[Result]) -> Report:
    """Policy → measure → the result for each seed, and the mean."""
    report: Report = {}
    for name in dict.fromkeys(case.policy for case in cases):
        mine = [result for case, result in zip(cases, results, strict=True) if case.policy == name]
        report[name] = {
            key: {"seeds": [round(result[key], 4) for result in mine], "mean": _mean(mine, key)}
            for key in mine[0]
        }
    return report


def _mean(results: list[Result], key: str) -> float:
    return round(mean(result[key] for result in results), 4)


def _table(report: Report, workload: Workload) -> str:
    keys = list(next(iter(report.values())))
    lines = [f"{workload.trace.name}: {workload.capacity_units / 1000:.0f} cards"]
    lines.append(f"{'policy':18}" + "".join(f"{key:>24}" for key in keys))
    for name, measures in report.items():
        means = [value["mean"] for value in measures.values() if isinstance(value, dict)]
        lines.append(f"{name:18}" + "".join(f"{value:24.2f}" for value in means))
    return "\n".join(lines)


def _workload(options: argparse.Namespace) -> Workload:
    data = Path(options.data)
    pods = find_pods(options.trace, data)
    return Workload(load_pods(pods), load_nodes(find_nodes(pods, options.nodes, data)))


def _cases(options: argparse.Namespace) -> list[Case]:
    if options.churn < 0:
        raise ValueError(f'--churn is "{options.churn}", must be a load such as 0.95 or 1')
    known = [policy.name for policy in SIMULATED]
    names = [policy.name for policy in POLICIES] if options.policy == "all" else options.policy.split(",")
    for name in names:
        if name not in known:
            raise ValueError(f'--policy names "{name}", must be one or more of {",".join(known)}')
    seeds = seeds_of(options.seeds)
    return [Case(name, seed, options.churn, options.mix == "known") for name in names for seed in seeds]


def seeds_of(text: str) -> list[int]:
    """`42-51`, `42` or `42,44`."""
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            seeds += range(int(first), int(last or first) + 1)
        except ValueError:
            raise ValueError(f'--seeds is "{text}", must be numbers such as 42-51 or 42,43') from None
    if not seeds:
        raise ValueError(f'--seeds is "{text}", must have the smaller number first')
    return seeds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Replay a trace with placement policies.")
    parser.add_argument("--trace", required=True, help="name in the data folder, or a CSV file of pods")
    parser.add_argument("--policy", default="all", help="all, or names with commas between")
    parser.add_argument("--seeds", default="42-51", help="such as 42-51 or 42,43")
    parser.add_argument("--json", action="store_true", help="print JSON with the result of each seed")
    parser.add_argument(
        "--data", default=os.environ.get(DATA_VARIABLE, DEFAULT_DATA), help="folder of traces"
    )
    parser.add_argument("--nodes", type=Path, help="CSV file of nodes, when it is not beside the trace")
    parser.add_argument("--churn", type=float, default=0.0, metavar="LOAD", help="let pods come and go")
    parser.add_argument("--mix", choices=["learned", "known"], default="learned")
    parser.add_argument("--jobs", type=int, default=1, help="replays at a time")
    return parser


if __name__ == "__main__":
    sys.exit(main())
