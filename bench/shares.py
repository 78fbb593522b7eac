"""How well shares of compute hold on the simulated driver: capped and lent, alone and with neighbours.

    python bench/shares.py [--seconds 6] [--json] [WORD ...]

Each line is a separate machine, on which every container wants the whole card. The device time that each has
used is read every 50 ms while the work runs. The mean share of the card is taken from the third second on;
`due` is what it should be: under `cap`, the share itself; under `fair`, the container's weight in the total
of all containers, and `used` says how much of the card that total is. `highest second` is the highest
percentage in any window of a second, from the start. Words select lines ("interactive", "launch" and "calls"
are the tables after the first).

Simulated kernels do nothing, but launching them takes a core: on a busy machine containers get less than
their shares. Therefore the load is printed, for the minute before the first line and for the last minute. All
lines take 16 minutes, with `--seconds 4` 14. A program that waits for each kernel computes nothing in
between: `alone` is what such a program gets of a card of its own, without any share. Needs `make native`.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.integration.isolation_rig import Machine, Worker, make_container, make_machine  # noqa: E402

from simcluster import gpu  # noqa: E402

STEP_S = 0.05
WARM_S = 2.0
WINDOW_S = 1.0
RESTS_AFTER_S = 1.5
# Containers exchange their claims on a tmpfs.
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass(frozen=True)
class Work:
    """What every container does: kernels of so many microseconds, and a wait after how many (0: never).

    `least_s`: how long it must run for means to be meaningful.
    """

    name: str
    kernel_us: float
    every: int = 0
    how: str = "kernel"
    least_s: float = 2 * WARM_S


QUEUED = Work("kernels of 200 us, queued", 200)
LONG = Work("kernels of 2 ms, queued", 2000)
ONE_BY_ONE = Work("kernels of 500 us, one by one", 500, 1)
HALF_SECOND = Work("kernels of 500 ms, one by one", 500_000, 1, least_s=40)
GRAPHS = Work("graphs, one by one", 1000, 1, "graph")
PAUSING = (ONE_BY_ONE, GRAPHS)
WORKS = (
    Work("kernels of 50 us, queued", 50),
    QUEUED,
    LONG,
    Work("kernels of 20 ms, one by one", 20000, 1),
    HALF_SECOND,
    ONE_BY_ONE,
    GRAPHS,
    Work("four streams", 500, 0, "streams"),
)
VERY_LONG = (
    Work("kernels of 3 s, one by one", 3_000_000, 1, least_s=180),
    Work("graphs of 3 s, one by one", 3_000_000, 1, "graph", least_s=180),
)
SPLITS = ((30, 70), (10, 20, 30), (50, 50), (10, 90), (5, 95), (25, 25, 25, 25))
CAP, FAIR = "cap", "fair"
RUNS = (
    *((work, (30,), CAP) for work in WORKS),
    *((work, split, policy) for policy in (CAP, FAIR) for split in SPLITS[:2] for work in WORKS[1:]),
    *((work, split, FAIR) for split in SPLITS[2:] for work in (QUEUED, LONG, ONE_BY_ONE)),
    *((work, (30, 70), FAIR) for work in VERY_LONG),
)


@dataclass(frozen=True)
class Kept:
    """One container of a run. `alone`: what it gets of a card of its own without any share, if requested."""

    work: str
    policy: str
    beside: str
    share: int
    mean: float
    due: float
    used: float
    highest: float
    alone: float | None = None

    @property
    def off(self) -> float:
        """Points from its due. No container can be given more than it uses by itself."""
        return self.mean - min(self.due, self.alone or 100)


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
    """The beginning of each window of a second, and the percentage of the card used in it."""
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


def means_of(
    work: Work, shares: tuple[int, ...], seconds: float, policy: str | None
) -> list[tuple[float, float]]:
    """For each container the mean from the third second on, and the highest second."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name, ExitStack() as stack:
        machine = make_machine(Path(name), kernel_us=work.kernel_us)
        cap = 100 if policy == FAIR else None
        boxes = [
            make_container(
                Path(name) / f"{i}", machine, share=share if policy else None, cap=cap if policy else None
            )
            for i, share in enumerate(shares)
        ]
        workers = [stack.enter_context(box.worker()) for box in boxes]
        for worker in workers:
            worker.ok("start 0")
        found = watched(machine, workers, work, seconds)
    return [(mean_of(series), max(percent for _, percent in window_shares(series))) for series in found]


def mean_of(series: Series) -> float:
    late = [point for point in series if point[0] >= WARM_S]
    (begin_s, begin), (end_s, end) = late[0], late[-1]
    return (end - begin) / (end_s - begin_s) / 1e7


@functools.cache
def alone_on_card(work: Work) -> float:
    return means_of(work, (100,), 6, None)[0][0]


def run(work: Work, shares: tuple[int, ...], policy: str, seconds: float) -> list[Kept]:
    found = means_of(work, shares, seconds, policy)
    alone = alone_on_card(work) if work in PAUSING else None
    used, beside = sum(mean for mean, _ in found), " + ".join(map(str, shares))
    return [
        Kept(
            work.name,
            policy,
            beside,
            share,
            mean,
            share if policy == CAP else used * share / sum(shares),
            used,
            highest,
            alone,
        )
        for share, (mean, highest) in zip(shares, found, strict=True)
    ]


def row(found: list[Kept]) -> str:
    """One run: the containers' figures in their order."""

    def each(figure: Callable[[Kept], str]) -> str:
        return " / ".join(figure(one) for one in found)

    cells = (
        found[0].work,
        found[0].policy,
        f"{found[0].beside} %",
        f"{each(lambda one: f'{one.mean:.1f}')} %",
        f"{max((one.off for one in found), key=abs):+.1f}",
        f"{found[0].used:.1f} %",
        f"{each(lambda one: f'{one.highest:.1f}')} %",
    )
    return f"| {' | '.join(cells)} |"


# ---- small requests next to a batch


@dataclass(frozen=True)
class Answered:
    """How long requests of one kernel took beyond the kernel, and what the batch tenant did meanwhile."""

    batch: str
    policy: str
    requests: int
    p50_ms: float
    p99_ms: float
    batch_percent: float
    used_percent: float


REQUEST_US, REQUEST_EVERY_S = 2000, 0.02
BATCHES = (
    Work("kernels of 200 us, queued", 200),
    Work("kernels of 2 ms, queued", 2000),
    Work("kernels of 20 ms, queued", 20000),
)


def answered(batch: Work, policy: str | None, seconds: float) -> Answered:
    """One kernel of 2 ms about every 20 ms, with 20 % of the card's compute, next to a batch tenant with 80
    %.
    """
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name, ExitStack() as stack:
        machine = make_machine(Path(name), kernel_us=batch.kernel_us)
        small, large = (20, 80) if policy else (None, None)
        cap, kernel = 100 if policy == FAIR else None, str(REQUEST_US)
        boxes = [
            make_container(
                Path(name) / "asks",
                machine,
                share=small,
                cap=cap,
                interactive=policy is not None,
                GPUSLICE_SIM_KERNEL_US=kernel,
            ),
            make_container(Path(name) / "works", machine, share=large, cap=cap),
        ]
        asks, works = (stack.enter_context(box.worker()) for box in boxes)
        for worker in (asks, works):
            worker.ok("start 0")
        works.say(f"burn {int((seconds + 1) * 1000)} {batch.every} 0 {batch.how}")
        time.sleep(1)
        began, before = time.monotonic(), [worked_ns(machine, each) for each in (asks, works)]
        took = []
        while time.monotonic() - began < seconds:
            time.sleep(REQUEST_EVERY_S)
            took.append(asks.ok("request")[0] / 1e6 - REQUEST_US / 1e3)
        passed = time.monotonic() - began
        done = [worked_ns(machine, each) for each in (asks, works)]
        works.heard()
    percents = [(after - start) / passed / 1e7 for start, after in zip(before, done, strict=True)]
    tail = statistics.quantiles(took, n=100)
    return Answered(batch.name, policy or "none", len(took), tail[49], tail[98], percents[1], sum(percents))


# ---- the cost of a launch


@dataclass(frozen=True)
class Paid:
    """An empty launch, compared with one without any library. `others`: containers that also have the card,
    with the same policy: at rest, or, if `at_work`, with work of their own.
    """

    policy: str
    others: int
    at_work: bool
    added_ns: float


def launch_ns(
    folder: Path,
    share: int | None,
    cap: int | None,
    others: int = 0,
    *,
    at_work: bool = False,
    preload: bool = True,
) -> float:
    machine = make_machine(folder)
    box, *besides = (
        make_container(folder / f"{number}", machine, share=share, cap=cap) for number in range(1 + others)
    )
    if not preload:
        box.environment["LD_PRELOAD"] = ""
    best, periods = float("inf"), 300
    with box.worker() as worker, ExitStack() as stack:
        for each in (worker, *(stack.enter_context(beside.worker()) for beside in besides)):
            each.ok("start 0")
            each.ok("burn 20 0 0 kernel")
        if at_work:
            each.say(f"burn {periods * 6} 0 0 kernel")
        elif others:
            time.sleep(RESTS_AFTER_S)
        worker.ok("burn 50 0 0 kernel")  # until it has noticed the others
        for _ in range(periods):
            launched = int(worker.ok("burn 4 0 0 kernel")[0])
            best = min(best, 4e6 / launched)
        if at_work:
            each.heard()
    return best


def paid() -> list[Paid]:
    """The best of 300 periods of 4 ms, some of which a busy machine leaves alone; without the driver's own
    time.
    """
    kinds = (("no share", None, None), (FAIR, 99, 100), (CAP, 99, None))  # no launch has to wait
    found = []
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:

        def measured(word: str, *arguments: Any, **options: bool) -> float:
            (folder := Path(name) / word.replace(" ", "-")).mkdir()
            return launch_ns(folder, *arguments, **options)

        driver = measured("none", None, None, preload=False)
        for policy, share, cap in kinds:
            for others, at_work in ((0, False), (1, False), (4, False), (1, True))[: 4 if share else 1]:
                word = f"{policy} {others} {at_work}"
                added = measured(word, share, cap, others, at_work=at_work) - driver
                found.append(Paid(policy, others, at_work, added))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("words", nargs="*", help="only lines with all of these in them")
    parser.add_argument("--seconds", type=float, default=6.0, help="of work in each run, at the least (6)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    began, load_before = time.monotonic(), os.getloadavg()[0]

    def wanted(title: str) -> bool:
        return all(word in title for word in options.words)

    def say(line: str) -> None:
        if not options.json:
            print(line, flush=True)

    runs = [each for each in RUNS if wanted(f"{each[0].name} {each[2]} {' + '.join(map(str, each[1]))} %")]
    table: list[list[Kept]] = []
    if runs:
        say("| work | policy | shares | mean | worst off | used | highest second |\n" + "| --- " * 7 + "|")
    for work, split, policy in runs:
        table.append(run(work, split, policy, max(options.seconds, work.least_s)))
        say(row(table[-1]))
    waits: list[Answered] = []
    if wanted("interactive"):
        say("\n| batch tenant | policy | p50 | p99 | batch | used |\n" + "| --- " * 6 + "|")
        for batch in BATCHES:
            for kind in (None, CAP, FAIR):
                waits.append(one := answered(batch, kind, max(options.seconds, 10)))
                delays = f"{one.p50_ms:.1f} ms | {one.p99_ms:.1f} ms"
                say(
                    f"| {one.batch} | {one.policy} | {delays} | {one.batch_percent:.1f} % |"
                    f" {one.used_percent:.1f} % |"
                )
    costs = paid() if wanted("launch") else []
    if costs:
        say("\n| policy | other containers | a launch pays |\n| --- | --- | --- |")
    for cost in costs:
        doing = ", at work" if cost.at_work else ", at rest" if cost.others else ""
        say(f"| {cost.policy} | {cost.others}{doing} | {cost.added_ns:.0f} ns |")
    busy = {
        "load_before": round(load_before, 1),
        "load_after": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
        "took_s": round(time.monotonic() - began),
    }
    say(f"\n{', '.join(f'{name} {value}' for name, value in busy.items())}")
    if options.json:
        kept = [asdict(one) | {"off": one.off} for found in table for one in found]
        found = {
            "machine": busy,
            "shares": kept,
            "interactive": [asdict(one) for one in waits],
            "launch": [asdict(one) for one in costs],
        }
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
