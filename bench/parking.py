"""What parking would lend, replaying GenTD26 (alibaba/clusterdata, cluster-trace-v2026-GenAI).

    python bench/parking.py --data FOLDER [--idle-after 60]

FOLDER has pod_gpu_duty_cycle_anon.tar.gz and pod_gpu_memory_used_bytes_anon.tar.gz. Each pod computed or not
in each minute. It is parked by the agent's own rule as soon as it may be, as where somebody always wants the
room, and woken by the first sample above 0 %: what is lent is a bound from above, the wakes are one from
below, since what happens between two samples is not known. After a gap in its samples nothing is.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import statistics
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from gpuslice.core.parking import LEFT_ALONE_S, Idle, due

GIB = 1 << 30
GAP_STEPS = 3
Sample = tuple[float, float, float]  # time in s, duty in percent, bytes


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench/parking.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    folder = Path(os.environ.get("GPUSLICE_PARKING_DATA", "data/gentd26"))
    parser.add_argument("--data", type=Path, default=folder, metavar="FOLDER")
    parser.add_argument("--idle-after", type=float, nargs="+", default=[60, 120, 300, 600], metavar="SECONDS")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    pods = samples(options.data)
    rows = [replay(pods, after_s) for after_s in options.idle_after]
    print(json.dumps(rows) if options.json else "\n".join(map(str, rows)))
    return 0


def table(path: Path) -> Iterator[tuple[tuple[str, float], float]]:
    with tarfile.open(path) as archive:
        for member in archive:
            found = archive.extractfile(member)
            for row in csv.DictReader(io.TextIOWrapper(found, "utf-8")) if found is not None else ():
                if "container_ip" in row:
                    yield (row["container_ip"], float(row["timestamp_anon"])), float(row["value"])


def samples(folder: Path) -> list[list[Sample]]:
    """Of each pod, in the order of time."""
    duty = dict(table(folder / "pod_gpu_duty_cycle_anon.tar.gz"))
    pods: dict[str, list[Sample]] = defaultdict(list)
    for key, held in table(folder / "pod_gpu_memory_used_bytes_anon.tar.gz"):
        if key in duty:
            pods[key[0]].append((key[1], duty[key], held))
    return [sorted(each) for each in pods.values()]


def replay(pods: list[list[Sample]], after_s: float) -> dict[str, float]:
    step_s = statistics.median(b[0] - a[0] for each in pods for a, b in pairwise(each))
    held = lent = wakes = count = 0.0
    for pod in pods:
        last_s, left_alone_s, before_s, parked, busy = pod[0][0], 0.0, pod[0][0], False, False
        for now_s, percent, size in pod:
            if now_s - before_s > GAP_STEPS * step_s:
                last_s, parked = now_s, False
            before_s = now_s
            if percent > 0 or busy:  # the first sample at 0 % says that it is idle since then
                last_s = now_s
            busy = percent > 0
            if busy:
                if parked:
                    wakes, parked, left_alone_s = wakes + 1, False, now_s + LEFT_ALONE_S
            else:
                parked = parked or bool(due([Idle(("", ""), last_s, after_s, left_alone_s)], now_s))
            count, held, lent = count + 1, held + size, lent + size * parked
    hours = step_s / 3600
    return {
        "idle_after_s": after_s,
        "pods": len(pods),
        "pod_hours": round(count * hours),
        "gib_hours_held": round(held / GIB * hours),
        "lent_pct": round(100 * lent / held, 1),
        "wakes_per_pod_hour": round(wakes / (count * hours), 2),
    }


if __name__ == "__main__":
    sys.exit(main())
