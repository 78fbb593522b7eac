"""How well shares of compute are kept on the simulated driver: by kind of work, alone and beside others.

    python bench/shares.py [--seconds 6] [--json]

Each line is a machine of its own. The device time that each container has used is read every 50 ms while the
work runs. After the first two seconds: the mean share of the card, and the mean distance of 1-second windows
from the container's share, in points. `settled` is when half-second windows stay within
five points for a second. Simulated kernels do nothing, but launching them takes a core: on a busy machine
containers get less than their shares, and never more. Needs `make native`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.integration.isolation_rig import Machine, Worker, make_container, make_machine  # noqa: E402

from gpuslice.sim import gpu  # noqa: E402

STEP_S = 0.05
WARM_S = 2.0
NEAR_POINTS = 5.0


@dataclass(frozen=True)
class Work:
    """What every container does: kernels of so many microseconds, and after how many it waits (0: never)."""

    name: str
    kernel_us: float
    every: int = 0
    how: str = "kernel"


SHORT = Work("kernels of 200 us, queued", 200)
WORKS = (
    Work("kernels of 50 us, queued", 50),
    SHORT,
    Work("kernels of 2 ms, queued", 2000),
    Work("kernels of 20 ms, one by one", 20000, 1),
    Work("kernels of 500 us, one by one", 500, 1),
    Work("graphs, one by one", 1000, 1, "graph"),
    Work("four streams", 500, 0, "streams"),
)
SPLITS = ((30,), (30, 70), (30, 60), (10, 20, 30))


@dataclass(frozen=True)
class Kept:
    """One container of a run."""

    work: str
    beside: str
    share: int
    mean: float
    distance: float
    settled_s: float | None


Series = list[tuple[float, int]]
"""Seconds since the start, nanoseconds of device time used so far."""


def worked_ns(machine: Machine, worker: Worker) -> int:
    with gpu.Machine(machine.state) as cards:
        return cards.worked_ns(worker.pid)


def watched(machine: Machine, workers: Sequence[Worker], work: Work, seconds: float) -> list[Series]:
    began = [worked_ns(machine, worker) for worker in workers]
    for worker in workers:
        worker.say(f"burn {int(seconds * 1000)} {work.every} 0 {work.how}")
    series: list[Series] = [[] for _ in workers]
    start = time.monotonic()
    while (now := time.monotonic() - start) < seconds:
        for each, worker, before in zip(series, workers, began, strict=True):
            each.append((now, worked_ns(machine, worker) - before))
        time.sleep(STEP_S)
    for worker in workers:
        worker.heard()
    return series


def window_shares(series: Series, from_s: float, length_s: float) -> list[tuple[float, float]]:
    """The beginning of each window, and the percent of the card in it."""
    found: list[tuple[float, float]] = []
    at = from_s
    while True:
        inside = [point for point in series if at <= point[0] <= at + length_s]
        if not inside or series[-1][0] < at + length_s:
            return found
        (begin_s, begin), (end_s, end) = inside[0], inside[-1]
        if end_s > begin_s:
            found.append((at, (end - begin) / (end_s - begin_s) / 1e7))
        at += length_s


def settled_s(series: Series, share: int) -> float | None:
    windows = window_shares(series, 0, 0.5)
    near = [abs(percent - share) <= NEAR_POINTS for _, percent in windows]
    return next((windows[i][0] for i in range(len(near) - 1) if near[i] and near[i + 1]), None)


def run(work: Work, shares: tuple[int, ...], seconds: float) -> list[Kept]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        machine = make_machine(Path(name), kernel_us=work.kernel_us)
        boxes = [make_container(Path(name) / f"{i}", machine, share=share) for i, share in enumerate(shares)]
        workers = [stack.enter_context(box.worker()) for box in boxes]
        for worker in workers:
            worker.ok("start 0")
        found = watched(machine, workers, work, seconds)
    return [kept(work, shares, share, series) for share, series in zip(shares, found, strict=True)]


def kept(work: Work, shares: tuple[int, ...], share: int, series: Series) -> Kept:
    late = [point for point in series if point[0] >= WARM_S]
    (begin_s, begin), (end_s, end) = late[0], late[-1]
    distances = [abs(percent - share) for _, percent in window_shares(series, WARM_S, 1.0)]
    beside = " + ".join(map(str, shares))
    mean = (end - begin) / (end_s - begin_s) / 1e7
    return Kept(work.name, beside, share, mean, statistics.mean(distances), settled_s(series, share))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="of work in each run (6)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    runs = [(work, (30,)) for work in WORKS] + [(work, split) for split in SPLITS[1:] for work in WORKS[1:]]
    found = [each for work, split in runs for each in run(work, split, options.seconds)]
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
        return
    print("| work | containers' shares | share | mean | distance | settled |\n" + "| --- " * 6 + "|")
    for each in found:
        settled = "no" if each.settled_s is None else f"{each.settled_s:.1f} s"
        cells = (
            each.work,
            each.beside,
            f"{each.share} %",
            f"{each.mean:.1f} %",
            f"{each.distance:.1f}",
            settled,
        )
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
