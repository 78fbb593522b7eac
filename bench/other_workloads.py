"""What `opportunity-cost` allocates on workloads that it was not tuned on, compared with other policies.

    python bench/other_workloads.py --only "cores tight,whole cards" --seeds 42-44
    python bench/other_workloads.py --churn 0.95 --data FOLDER

Generated workloads need no data; those derived from a trace (`--data`) modify the pods of `default` on the
openb nodes. Prints what the policy allocates and the paired difference to the others, in % of the cluster, ±
standard error over the seeds: while filling, at 100 and 130 % arrived; with `--churn LOAD`, allocated and
refused. `fgd` is given the mix, the policy learns it; with `--mix known` both are given it, with `--mix
hidden` neither is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `python bench/other_workloads.py` finds bench

from bench.churn import churn, churn_arrivals
from bench.placement import DATA_VARIABLE, DEFAULT_DATA, seeds_of
from bench.workloads import Bent, Workload, made

from gpuslice.core.policy import DEFAULT_POLICY, make_policy
from gpuslice.core.simulation.replay import FULL_DEMAND, Cluster, fill, filling_arrivals, shuffled_nodes
from gpuslice.core.simulation.trace import fleet_of

OTHERS = ("fgd", "bestfit")
MIXES = ("learned", "known", "hidden")
SEED = 7  # of the workloads themselves

Result = dict[str, float]


def results(workload: Workload, policy: str, seed: int, load: float, mix: str) -> Result:
    """One replay."""
    capacity = workload.capacity_units
    fleet = fleet_of(shuffled_nodes(workload.nodes, seed))
    known = mix == "known" or (mix == "learned" and policy == "fgd")
    cluster = Cluster(fleet, make_policy(policy, fleet, Counter(workload.pods) if known else None))
    random = np.random.default_rng([seed, 3])
    if load:
        offered = churn_arrivals(workload.pods, capacity, load, seed)
        if workload.order:
            offered = replace(offered, shapes=tuple(workload.order(list(offered.shapes), random)))
        outcome = churn(cluster, offered, capacity)
        return {"allocated": outcome.allocation_pct, "refused": outcome.refused_pct}
    arrivals = filling_arrivals(workload.pods, capacity, seed, FULL_DEMAND)
    arrivals = workload.order(arrivals, random) if workload.order else arrivals
    reached = fill(cluster, arrivals, capacity).allocation_pct_at
    last = 100 * cluster.allocated_units / capacity
    return {"at 100 %": reached.get(100, last), "at 130 %": last}


def difference(mine: list[Result], theirs: list[Result], key: str) -> tuple[float, float]:
    """Mean of the paired difference and its standard error."""
    pairs = [own[key] - other[key] for own, other in zip(mine, theirs, strict=True)]
    return mean(pairs), stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else 0.0


def main() -> int:
    """Print a line for each workload."""
    options = _parser().parse_args()
    cases = list(made(np.random.default_rng(SEED)))
    if Path(options.data).is_dir():
        cases += Bent(Path(options.data), np.random.default_rng(SEED)).all()
    wanted = [part for part in options.only.split(",") if part]
    for name, make in cases:
        workload = make()  # also if it is skipped: the next one is drawn from the same generator
        if wanted and not any(part in name for part in wanted):
            continue
        print(f"{name:62}", end="", flush=True)
        print(_line(workload, options), flush=True)
    return 0


def _line(workload: Workload, options: argparse.Namespace) -> str:
    seeds = seeds_of(options.seeds)

    def of(policy: str) -> list[Result]:
        return [results(workload, policy, seed, options.churn, options.mix) for seed in seeds]

    mine = of(DEFAULT_POLICY)
    text = "".join(f" {mean(result[key] for result in mine):6.2f}" for key in mine[0])
    for other in options.others.split(","):
        theirs = of(other)
        for key in mine[0]:
            gain, error = difference(mine, theirs, key)
            text += f"  {gain:+6.2f} ±{error:5.2f}"
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Replay workloads that nothing was chosen on.")
    parser.add_argument("--only", default="", help="parts of names, with commas between")
    parser.add_argument("--others", default=",".join(OTHERS))
    parser.add_argument("--seeds", default="42-44")
    parser.add_argument("--churn", type=float, default=0.0, metavar="LOAD")
    parser.add_argument("--mix", choices=MIXES, default="learned")
    parser.add_argument(
        "--data", default=os.environ.get(DATA_VARIABLE, DEFAULT_DATA), help="folder of traces"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
