"""`end_to_end` for clusters and queues of many sizes: a row for each, as in docs/results/scheduling.md.

    KUBEBUILDER_ASSETS=/path/to/binaries python bench/end_to_end_sizes.py --rounds 3
    … python bench/end_to_end_sizes.py --sizes 500x2000 --kinds bare --rounds 1 --json

Each size and kind of pods (of nobody, of ReplicaSets, of Jobs, 50 to an owner) has a control plane of its
own, and is printed as soon as it is measured. `without idle` leaves out what etcd and kube-apiserver use when
nobody asks them anything, of which a slow turn pays more for each pod.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from bench.end_to_end import ALL, GPUSLICE, PLAIN, SAMPLED, Size, measure  # noqa: E402 - after the path to it
from tests.e2e import control_plane  # noqa: E402

SIZES = "50x500,500x500,1000x500,500x2000,500x4000,5000x500,5000x4000,10000x500"
KINDS = {"bare": (0, "ReplicaSet"), "ReplicaSet": (50, "ReplicaSet"), "Job": (50, "Job")}
HEADINGS = (
    "nodes × 8, pods|plain|sampled|gpuslice|of sampled|CPU ms a pod: sampled / gpuslice|without idle|refused"
)


def row(kind: str, found: dict[str, Any]) -> str:
    rates = [f"{found[f'{way.name}_pods_per_s']:.0f}" for way in (PLAIN, SAMPLED, GPUSLICE)]
    cpu = [found[f"{way.name}_cpu_ms_per_pod"][ALL] for way in (SAMPLED, GPUSLICE)]
    busy = [found[f"{way.name}_cpu_ms_per_pod_without_idle"] for way in (SAMPLED, GPUSLICE)]
    cells = [
        f"{found['nodes']:,}, {found['pods']:,} {kind}",
        *rates,
        f"{found['of_sampled']:.2f}",
        " / ".join(f"{each:.1f}" for each in cpu),
        " / ".join(f"{each:.1f}" for each in busy),
        f"{found['gpuslice_ms_per_pod']['binds refused, in all']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=SIZES, help="nodes x pods, separated by commas")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of pods")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one object for each row, with all figures")
    chosen = parser.parse_args()
    if why_not := control_plane.missing():
        raise SystemExit(f"no real control plane here: {why_not}")
    if not chosen.json:
        headings = HEADINGS.split("|")
        print(f"| {' | '.join(headings)} |\n|{'---|' * len(headings)}", flush=True)
    for size in chosen.sizes.split(","):
        nodes, pods = (int(each) for each in size.split("x"))
        for kind in chosen.kinds.split(","):
            replicas, owner = KINDS[kind]
            measured = Size(nodes, 8, pods, chosen.rounds, chosen.seed, replicas, owner)
            found = asyncio.run(measure(measured, [PLAIN, SAMPLED, GPUSLICE]))
            print(json.dumps({"kind": kind, **found}) if chosen.json else row(kind, found), flush=True)


if __name__ == "__main__":
    main()
