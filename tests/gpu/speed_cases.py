"""What the library costs: the same work with and without it, block by block in turns, as ratios.

Three processes live side by side, one with the library and two without; only one of them works at a time, and
who begins changes with each round. Processes of one program differ by percents among themselves, so there are
many such trios, and intervals are drawn over trios and rounds (bootstrap). The second process without the
library is the control: how far its ratio strays from 1 is what these processes differ by anyway.
"""

from __future__ import annotations

import random
import statistics
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

from tests.gpu.stage import SIMULATED, Program, Seen, Stage, bare_environment, torch_python

TRIOS = {"torch": 6, "driver": 2 if SIMULATED else 12}
"""With three of them, a bootstrap once called chance a cost: 2.8 % of a step of 3 ms, most of it Python's."""
ROUNDS = 2 if SIMULATED else 5
TRIO_MIB = 4096
"""What three processes with PyTorch hold of a card, and some more."""
AIM = 1.01
SAMPLES = 2000


@dataclass(frozen=True)
class Row:
    """One work: seconds a call, the ratio with its 95 % interval, and the control's interval."""

    work: str
    without_s: float
    with_s: float
    ratio: float
    low: float
    high: float
    control_low: float
    control_high: float

    @property
    def verdict(self) -> str:
        if self.high <= AIM:
            return "within"
        return "beyond" if self.low > max(AIM, self.control_high) else "unclear"

    def line(self) -> str:
        times = f"{self.without_s * 1e6:.2f} µs | {self.with_s * 1e6:.2f} µs"
        ratio = f"{self.ratio:.4f} | {self.low:.4f} … {self.high:.4f}"
        control = f"{self.control_low:.4f} … {self.control_high:.4f}"
        return f"| {self.work} | {times} | {ratio} | {control} | {self.verdict} |"


def overhead_torch(stage: Stage) -> Seen:
    """PyTorch: a matrix product, a transformer's step, small launches, a graph, allocations."""
    torch_python()
    return _compare(stage, "torch", "PyTorch")


def overhead_driver(stage: Stage) -> Seen:
    """The driver's own interface: kernels, small launches, questions, short copies."""
    return _compare(stage, "driver", "the driver interface")


WITH_A_PRICE = ("cuMemGetInfo", "cuMemAlloc and cuMemFree", "cuMemAllocAsync and cuMemFreeAsync")
"""What is asked of the driver beside these calls is in the table; the aim is for launches and copies."""


def share_price(stage: Stage) -> Seen:
    """What launches cost under a share that hardly makes them wait: 99 % of the card, little of it used."""
    rows = []
    for name, share in (("without the library", None), ("without a share", 0), ("under a share of 99 %", 99)):
        if share is None:
            environment = bare_environment(stage.card)
        else:
            environment = stage.box(f"share-{share}", stage.card.memory_mib, share or None).environment
        with Program("driver", environment, stage.folder / f"price-{share}.log") as program:
            program.answer("warm empty kernels")
            took = min(float(program.answer("time empty kernels")) for _ in range(5))
        rows.append((name, took * 1e6))
    lines = [f"| {name} | {took:.2f} |" for name, took in rows]
    table = "\n".join(["| empty kernels, one after the other | µs a launch |", "| --- | --- |", *lines])
    more = rows[2][1] - rows[1][1]
    return Seen(f"a launch takes {more:.2f} µs more under a share", table, dict(rows))


def _compare(stage: Stage, kind: str, title: str) -> Seen:
    count = min(TRIOS[kind], stage.card.memory_mib // TRIO_MIB)
    boxes = [stage.box(f"trio-{number}", stage.card.memory_mib) for number in range(count)]
    bare = bare_environment(stage.card)
    places = [
        (environment, stage.folder / f"{name}-{number}.log")
        for number, box in enumerate(boxes)
        for name, environment in (("bare", bare), ("held", box.environment), ("again", bare))
    ]
    measured: dict[str, list[list[Times]]] = {}
    with ExitStack() as stack, ThreadPoolExecutor(2 if SIMULATED else len(places)) as pool:
        started = pool.map(lambda place: Program(kind, *place), places)
        programs = [stack.enter_context(program) for program in started]
        for work in programs[0].works:  # what the first call of each brings takes seconds
            list(pool.map(lambda program, work=work: program.answer(f"warm {work}"), programs))
        for trio in zip(programs[::3], programs[1::3], programs[2::3], strict=True):
            for work in trio[0].works:
                measured.setdefault(work, []).append(_rounds(trio, work))
        assert all(box.usage() for box in boxes), "the library was not in the program"
    rows = [_row(work, trios) for work, trios in measured.items()]
    head = f"| {title} | without | with | ratio | 95 % | control, 95 % | aim {AIM} |\n{'| --- ' * 7}|"
    table = "\n".join([head, *(row.line() for row in rows)])
    beyond = [
        f"{row.work} {row.ratio:.3f}"
        for row in rows
        if row.verdict == "beyond" and row.work not in WITH_A_PRICE
    ]
    figures = {row.work: [row.ratio, row.low, row.high] for row in rows}
    assert SIMULATED or not beyond, f"beyond {AIM}: {', '.join(beyond)}\n{table}\n{figures}"
    verdicts = [row.verdict for row in rows]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in ("within", "unclear", "beyond"))
    return Seen(f"of {len(rows)} works, by a ratio of {AIM}: {counts}", table, figures)


Times = tuple[float, float, float]
"""Seconds a call in one round: without the library, with it, and without it once more."""


def _rounds(trio: tuple[Program, Program, Program], work: str) -> list[Times]:
    for program in trio:
        program.answer(f"warm {work}")
    rounds = []
    for number in range(ROUNDS):
        order = sorted(range(3), key=lambda each: (each + number) % 3)
        times = {each: float(trio[each].answer(f"time {work}")) for each in order}
        rounds.append((times[0], times[1], times[2]))
    return rounds


def _row(work: str, trios: list[list[Times]]) -> Row:
    every = [times for trio in trios for times in trio]
    ratios = [[held / bare for bare, held, _ in trio] for trio in trios]
    control = [[again / bare for bare, _, again in trio] for trio in trios]
    return Row(
        work,
        statistics.median(bare for bare, _, _ in every),
        statistics.median(held for _, held, _ in every),
        statistics.median(ratio for trio in ratios for ratio in trio),
        *_interval(ratios),
        *_interval(control),
    )


def _interval(ratios: list[list[float]]) -> tuple[float, float]:
    """Of the median: trios are drawn with replacement, and rounds within them."""
    draw = random.Random(1)
    medians = sorted(
        statistics.median(
            ratio for trio in draw.choices(ratios, k=len(ratios)) for ratio in draw.choices(trio, k=len(trio))
        )
        for _ in range(SAMPLES)
    )
    return medians[SAMPLES // 40], medians[-SAMPLES // 40]
