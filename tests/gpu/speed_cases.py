"""What the library costs: the same work with and without it, block by block in turns, as ratios.

Two processes live side by side, one with the library; only one of them works at a time, and who begins
changes with each pair. Processes of one program differ by a percent among themselves, so there are several
such couples, and the interval is drawn over couples and pairs (bootstrap).
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from tests.gpu.stage import SIMULATED, Program, Seen, Stage, bare_environment, torch_python

COUPLES = {"torch": 3, "driver": 2 if SIMULATED else 8}
"""Calls of a microsecond differ more from process to process than with and without the library."""
PAIRS = 2 if SIMULATED else 10
AIM = 1.01
SAMPLES = 2000


@dataclass(frozen=True)
class Row:
    """One work: seconds a call, and the ratio with its 95 % interval."""

    work: str
    without_s: float
    with_s: float
    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        if self.high <= AIM:
            return "within"
        return "beyond" if self.low > AIM else "unclear"

    def line(self) -> str:
        times = f"{self.without_s * 1e6:.2f} µs | {self.with_s * 1e6:.2f} µs"
        ratio = f"{self.ratio:.4f} | {self.low:.4f} … {self.high:.4f}"
        return f"| {self.work} | {times} | {ratio} | {self.verdict} |"


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
    measured: dict[str, list[list[tuple[float, float]]]] = {}
    for couple in range(COUPLES[kind]):
        box = stage.box(f"couple-{couple}", stage.card.memory_mib)
        with (
            Program(kind, bare_environment(stage.card), stage.folder / f"bare-{couple}.log") as bare,
            Program(kind, box.environment, box.folder / "held.log") as held,
        ):
            for work in bare.works:
                measured.setdefault(work, []).append(_pairs(bare, held, work))
        assert box.usage(), "the library was not in the program"
    rows = [_row(work, couples) for work, couples in measured.items()]
    head = f"| {title} | without | with | ratio | 95 % | aim {AIM} |\n| --- | --- | --- | --- | --- | --- |"
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


def _pairs(bare: Program, held: Program, work: str) -> list[tuple[float, float]]:
    for program in (bare, held):
        program.answer(f"warm {work}")
    pairs = []
    for number in range(PAIRS):
        first, second = (bare, held) if number % 2 == 0 else (held, bare)
        times = {each: float(each.answer(f"time {work}")) for each in (first, second)}
        pairs.append((times[bare], times[held]))
    return pairs


def _row(work: str, couples: list[list[tuple[float, float]]]) -> Row:
    every = [pair for couple in couples for pair in couple]
    ratios = [[held / bare for bare, held in couple] for couple in couples]
    low, high = _interval(ratios)
    return Row(
        work,
        statistics.median(bare for bare, _ in every),
        statistics.median(held for _, held in every),
        statistics.median(ratio for couple in ratios for ratio in couple),
        low,
        high,
    )


def _interval(ratios: list[list[float]]) -> tuple[float, float]:
    """Of the median: couples are drawn with replacement, and pairs within them."""
    draw = random.Random(1)
    medians = sorted(
        statistics.median(
            ratio
            for couple in draw.choices(ratios, k=len(ratios))
            for ratio in draw.choices(couple, k=len(couple))
        )
        for _ in range(SAMPLES)
    )
    return medians[SAMPLES // 40], medians[-SAMPLES // 40]
