"""How well shares of compute are kept on the simulated driver: by kind of work, alone and beside others.

    python bench/shares.py [--seconds 6] [--json] [WORD ...]

Each line is a machine of its own, on which every container wants all of the card. The device time that each
has used is read every 50 ms while the work runs. The mean share of the card counts from the third second on;
`highest second` is the highest percentage of any second, wherever it begins, from the first on; `settled` is
when the seconds begin that all lie within a tenth of the share, or two points. Words choose lines. Simulated
kernels do nothing, but launching them takes a core: on a busy machine containers get less than their shares.
Needs `make native`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.integration.isolation_rig import Machine, Worker, make_container, make_machine  # noqa: E402

from simcluster import gpu  # noqa: E402

STEP_S = 0.05
WARM_S = 2.0
WINDOW_S = 1.0
NEAR_POINTS, NEAR_PART = 2.0, 0.1


@dataclass(frozen=True)
class Work:
    """What every container does: kernels of so many microseconds, and after how many it waits (0: never).

    `least_s`: how long it must run for means to mean something.
    """

    name: str
    kernel_us: float
    every: int = 0
    how: str = "kernel"
    least_s: float = 2 * WARM_S


QUEUED = Work("kernels of 200 us, queued", 200)
LONG = Work("kernels of 2 ms, queued", 2000)
ONE_BY_ONE = Work("kernels of 500 us, one by one", 500, 1)
WORKS = (
    Work("kernels of 50 us, queued", 50),
    QUEUED,
    LONG,
    Work("kernels of 20 ms, one by one", 20000, 1),
    Work("kernels of 500 ms, one by one", 500000, 1, least_s=32),
    ONE_BY_ONE,
    Work("graphs, one by one", 1000, 1, "graph"),
    Work("four streams", 500, 0, "streams"),
)
SPLITS = ((30, 70), (10, 20, 30), (50, 50), (10, 90), (5, 95), (25, 25, 25, 25))
RUNS = (
    *((work, (30,)) for work in WORKS),
    *((work, (30, 70)) for work in WORKS[1:]),
    *((work, (10, 20, 30)) for work in WORKS[1:]),
    *((work, split) for split in SPLITS[2:] for work in (QUEUED, LONG, ONE_BY_ONE)),
)


@dataclass(frozen=True)
class Kept:
    """One container of a run."""

    work: str
    beside: str
    share: int
    mean: float
    highest: float
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


def window_shares(series: Series) -> list[tuple[float, float]]:
    """The beginning of each window of a second, and the percent of the card in it."""
    found = []
    last = 0
    for begin_s, begin in series:
        while last < len(series) and series[last][0] < begin_s + WINDOW_S - STEP_S / 2:
            last += 1
        if last == len(series):
            break
        end_s, end = series[last]
        found.append((begin_s, (end - begin) / (end_s - begin_s) / 1e7))
    return found


def settled_s(windows: list[tuple[float, float]], share: int) -> float | None:
    """When the windows begin that all are near the share."""
    near = max(NEAR_POINTS, NEAR_PART * share)
    far = [number for number, (_, percent) in enumerate(windows) if abs(percent - share) > near]
    if not far:
        return 0.0
    return windows[far[-1] + 1][0] if far[-1] + 1 < len(windows) else None


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
    windows = window_shares(series)
    beside = " + ".join(map(str, shares))
    mean = (end - begin) / (end_s - begin_s) / 1e7
    highest = max(percent for _, percent in windows)
    return Kept(work.name, beside, share, mean, highest, settled_s(windows, share))


def row(found: list[Kept]) -> str:
    """One run: the containers' figures in their order."""

    def each(figure: Callable[[Kept], str], unit: str) -> str:
        return f"{' / '.join(figure(one) for one in found)} {unit}"

    def settled(one: Kept) -> str:
        return "never" if one.settled_s is None else f"{one.settled_s:.1f} s"

    cells = (
        found[0].work,
        f"{found[0].beside} %",
        each(lambda one: f"{one.mean:.1f}", "%"),
        each(lambda one: f"{one.highest:.1f}", "%"),
        each(settled, "").rstrip(),
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("words", nargs="*", help="only lines with all of these in them")
    parser.add_argument("--seconds", type=float, default=6.0, help="of work in each run, at the least (6)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    table: list[list[Kept]] = []
    if not options.json:
        print("| work | shares | mean | highest second | settled after |\n" + "| --- " * 5 + "|")
    for work, split in RUNS:
        title = f"{work.name} {' + '.join(map(str, split))} %"
        if not all(word in title for word in options.words):
            continue
        table.append(run(work, split, max(options.seconds, work.least_s)))
        if not options.json:
            print(row(table[-1]), flush=True)
    if options.json:
        print(json.dumps([asdict(one) for found in table for one in found], indent=2))


if __name__ == "__main__":
    main()
