"""`end_to_end` for clusters and queues of many sizes: the table of docs/results/scheduling.md.

    KUBEBUILDER_ASSETS=/path/to/binaries python bench/end_to_end_sizes.py --into build/sizes.jsonl
    … python bench/end_to_end_sizes.py --into build/sizes.jsonl --minutes 40 --kinds bare
    python bench/end_to_end_sizes.py --into build/sizes.jsonl --table

Each round of each size and kind of pods (of nobody, of ReplicaSets, of Jobs, 50 to an owner) has a control
plane of its own, and is a line of the file as soon as it is measured. What is in the file is not measured
again, so that the same command continues where it was stopped. All rows have one round before any has two.
Sizes whose pods request more than nine tenths of the cards are skipped, with a message: some pods would never
be bound, and the turn would wait for its timeout.
At the end, and with `--table`, medians over the rounds are printed as Markdown:

    of sampled    pods a second, of those that the sampling kube-scheduler of the same round did
    its CPU       CPU of the whole control plane for each pod, as a multiple of that round's; what etcd and
                  kube-apiserver use while idle is subtracted
    s             that a round took, all of it
    load          of the machine when the round ended: above 3, on two cores, others were busy too
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from bench.big_api import UNITS, pending_pods  # noqa: E402 - after the path to it
from bench.end_to_end import ALL, GPUSLICE, PLAIN, SAMPLED, Size, measure  # noqa: E402
from tests.e2e import control_plane  # noqa: E402

from gpuslice.core.contract import GPU_MEM  # noqa: E402

SIZES = "50x500,500x500,1000x500,5000x500,10000x500,500x4000,1000x4000,5000x4000,10000x4000"
KINDS = {"bare": (0, "ReplicaSet"), "ReplicaSet": (50, "ReplicaSet"), "Job": (50, "Job")}
HEADINGS = (
    "nodes × 8, pods|rounds|plain|sampled|gpuslice|of sampled|CPU ms a pod: sampled / gpuslice"
    "|of it kube-apiserver|its CPU|refused|unbound|s|load"
)
CARDS, FULL = 8, 0.9
Figures = dict[str, Any]


class Round(NamedTuple):
    """What is measured at a time: one line of the file."""

    kind: str
    nodes: int
    pods: int
    number: int


def rounds(sizes: str, kinds: str, count: int) -> Iterator[Round]:
    """Ordered by usefulness, for runs that are stopped early."""
    for number in range(count):
        for kind in kinds.split(","):
            for size in sizes.split(","):
                nodes, pods = (int(each) for each in size.split("x"))
                yield Round(kind, nodes, pods, number)


def fills(one: Round) -> float:
    """The fraction of the cluster's cards that the pods of a round request."""
    units = sum(
        int(each["spec"]["containers"][0]["resources"]["limits"][GPU_MEM])
        for each in pending_pods(one.pods, one.number + 1)
    )
    return units / (one.nodes * CARDS * UNITS)


def round_of(line: Figures) -> Round:
    return Round(line["kind"], line["nodes"], line["pods"], line["seed"] - 1)


def read(file: Path) -> list[Figures]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def measured(one: Round, plain: bool) -> Figures:
    replicas, owner = KINDS[one.kind]
    ways = [*([PLAIN] if plain else []), SAMPLED, GPUSLICE]
    size, began = Size(one.nodes, CARDS, one.pods, 1, one.number + 1, replicas, owner), time.monotonic()
    found = asyncio.run(measure(size, ways))
    took_s = round(time.monotonic() - began)
    return {"kind": one.kind, **found, "took_s": took_s, "load": round(os.getloadavg()[0], 1)}


def table(lines: Iterable[Figures]) -> str:
    """One row for each size and kind."""
    headings = HEADINGS.split("|")
    shown = [f"| {' | '.join(headings)} |", f"|{'---|' * len(headings)}"]
    by_row: dict[tuple[str, int, int], list[Figures]] = defaultdict(list)
    for line in lines:
        by_row[line["kind"], line["pods"], line["nodes"]].append(line)
    order = list(KINDS)
    for _, own in sorted(by_row.items(), key=lambda each: (order.index(each[0][0]), *each[0][1:])):
        shown.append(f"| {' | '.join(cells(own))} |")
    return "\n".join(shown)


def cells(lines: list[Figures]) -> list[str]:
    def median(of: Callable[[Figures], float], decimals: int) -> str:
        values = [of(line) for line in lines]
        return f"{statistics.median(values):.{decimals}f}"

    def both(of: Callable[[Figures, str], float]) -> str:
        return " / ".join(
            median(lambda line, name=way.name: of(line, name), 1)  # type: ignore[misc]
            for way in (SAMPLED, GPUSLICE)
        )

    first, key = lines[0], "{}_cpu_ms_per_pod"
    rate = [way.name + "_pods_per_s" for way in (PLAIN, SAMPLED, GPUSLICE)]
    idle_out = [f"{way.name}_cpu_ms_per_pod_without_idle" for way in (GPUSLICE, SAMPLED)]
    return [
        f"{first['nodes']:,}, {first['pods']:,} {first['kind']}",
        str(len(lines)),
        *(
            median(lambda line, name=name: line[name], 0) if name in first else "–"  # type: ignore[misc]
            for name in rate
        ),
        median(lambda line: line["of_sampled"], 2),
        both(lambda line, way: line[key.format(way)][ALL]),
        both(lambda line, way: line[key.format(way)]["kube-apiserver"]),
        median(lambda line: line[idle_out[0]] / line[idle_out[1]], 2),
        str(sum(int(line["gpuslice_ms_per_pod"]["binds refused, in all"]) for line in lines)),
        str(sum(line["gpuslice_unbound"] for line in lines)),
        median(lambda line: line.get("took_s", 0), 0),
        median(lambda line: line["load"], 1),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--into", type=Path, required=True, help="file that the rounds are added to")
    parser.add_argument("--sizes", default=SIZES, help="nodes x pods, separated by commas")
    parser.add_argument("--kinds", default=",".join(KINDS), help="of pods")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=0, help="begin no round after so long; 0: no limit")
    parser.add_argument("--plain", action="store_true", help="kube-scheduler without sampling as well")
    parser.add_argument("--table", action="store_true", help="measure nothing, print what is in the file")
    chosen = parser.parse_args()
    if not chosen.table:
        if why_not := control_plane.missing():
            raise SystemExit(f"no real control plane here: {why_not}")
        chosen.into.parent.mkdir(parents=True, exist_ok=True)
        done, began = {round_of(line) for line in read(chosen.into)}, time.monotonic()
        for one in rounds(chosen.sizes, chosen.kinds, chosen.rounds):
            if one in done:
                continue
            if (part := fills(one)) > FULL:
                print(
                    f"{one.nodes} nodes, {one.pods} pods: left out, {part:.0%} of the cards", file=sys.stderr
                )
                continue
            if chosen.minutes and time.monotonic() - began >= 60 * chosen.minutes:
                print("the time is over; the same command goes on here", file=sys.stderr)
                break
            print(f"{one.nodes} nodes, {one.pods} pods, {one.kind}, {one.number + 1}", file=sys.stderr)
            with chosen.into.open("a") as file:
                file.write(json.dumps(measured(one, chosen.plain)) + "\n")
    print(table(read(chosen.into)))


if __name__ == "__main__":
    main()
