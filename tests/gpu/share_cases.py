"""Compute divided on a real card."""

from __future__ import annotations

import itertools
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from tests.gpu.driver import Skip
from tests.gpu.stage import SIMULATED, Box, Program, Seen, Stage, bare_environment, torch_python

BUSY_S = 1.0 if SIMULATED else 4.0
PLACES = {"torch": "matrix product", "driver": "arithmetic kernel"}
SETTLED_S = 2.0
MICROSECONDS = 1_000_000
POINTS = 30.0 if SIMULATED else 12.0  # a test machine may be busy with other things
"""How far from its share, in percent of the card, a container may be over some seconds."""


def one_share(stage: Stage) -> Seen:
    """A container with 30 % does about 30 % of the work of one without a share, alone on the card."""
    rows, gaps = [], []
    for kind in _kinds():
        whole = _rate(stage, kind, None)
        box = stage.box(f"part-{kind}", 8192, 30)
        percent = 100 * _rate(stage, kind, box) / whole
        waited = box.usage().throttled_ns / 1e9
        rows.append(f"| {PLACES[kind]} | {percent:.1f} % | {waited:.1f} s |")
        gaps.append(abs(percent - 30))
    table = "\n".join(["| work | of an unlimited run, at 30 % | waited |", "| --- | --- | --- |", *rows])
    assert max(gaps) <= POINTS, f"{max(gaps):.1f} points off:\n{table}"
    return Seen(f"at most {max(gaps):.1f} points from 30 %", table, {"gap_points": max(gaps)})


def split(stage: Stage) -> Seen:
    """Two containers with 30 % and 70 % busy at once do 30 % and 70 %, and the card is used."""
    kind = _kinds()[0]
    whole = _rate(stage, kind, None)
    boxes = [stage.box("thirty", 8192, 30), stage.box("seventy", 8192, 70)]
    with (
        _program(stage, kind, boxes[0]) as one,
        _program(stage, kind, boxes[1]) as two,
        ThreadPoolExecutor(2) as pool,
    ):
        for program in (one, two):
            program.answer(f"warm {PLACES[kind]}")
        rates = pool.map(lambda each: _settled_rate(each, kind), (one, two))
        small, large = (100 * rate / whole for rate in rates)
    text = f"{small:.1f} % and {large:.1f} % of an unlimited run, together {small + large:.1f} %"
    assert abs(small - 30) <= POINTS, text
    assert abs(large - 70) <= 1.5 * POINTS, text
    return Seen(f"{PLACES[kind]}: {text}", figures={"small_percent": small, "large_percent": large})


def _settled_rate(program: Program, kind: str) -> float:
    """After two seconds, in which the library learns from NVML's samples what is its own of busy time."""
    program.answer(f"busy {PLACES[kind]} {SETTLED_S}")
    return float(program.answer(f"busy {PLACES[kind]} {BUSY_S * 1.5}"))


def three(stage: Stage) -> Seen:
    """10 % beside 20 % and 30 %: the small one too gets what is due to it."""
    kind = _kinds()[0]
    whole = _rate(stage, kind, None)
    shares = (10, 20, 30)
    boxes = [stage.box(f"with-{share}", 8192, share) for share in shares]
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        programs = [stack.enter_context(_program(stage, kind, box)) for box in boxes]
        for program in programs:
            program.answer(f"warm {PLACES[kind]}")
        rates = list(pool.map(lambda each: _settled_rate(each, kind), programs))
    percents = [100 * rate / whole for rate in rates]
    text = " / ".join(f"{percent:.1f}" for percent in percents) + " % of an unlimited run"
    assert all(abs(got - due) <= POINTS for got, due in zip(percents, shares, strict=True)), text
    return Seen(f"{PLACES[kind]}: {text}", figures={"percents": percents})


def samples(stage: Stage) -> Seen:
    """What the division among busy neighbours rests on: how often NVML samples, how late, by which number."""
    kind = _kinds()[-1]
    strangers = {pid for pid, _, _ in stage.nvml.samples(stage.card.uuid, _now_us() - MICROSECONDS)}
    with _program(stage, kind, None) as program, ThreadPoolExecutor(1) as pool:
        program.answer(f"warm {PLACES[kind]}")
        running = pool.submit(program.answer, f"busy {PLACES[kind]} {SETTLED_S + BUSY_S}")
        found = _watched(stage, SETTLED_S + BUSY_S - 0.5)
        running.result()
    if len(found) < 3:
        raise Skip(f"NVML has no samples of processes here: {found}")
    times = sorted({at_us for _, at_us, _, _ in found})
    periods = [(later - earlier) / 1e6 for earlier, later in itertools.pairwise(times)]
    ages = [age_us / 1e6 for _, _, _, age_us in found]
    numbers = {pid for pid, _, _, _ in found} - strangers
    named = "our own number" if program.pid in numbers else f"other numbers, {sorted(numbers)}"
    busiest = max(percent for pid, _, percent, _ in found if pid in numbers or not numbers)
    text = (
        f"every {statistics.median(periods):.3f} s, {statistics.median(ages):.3f} s old when they come "
        f"(at most {max(ages):.3f}), by {named}; a process alone is busy for {busiest} %"
    )
    figures = {"period_s": statistics.median(periods), "age_s": statistics.median(ages), "percent": busiest}
    return Seen(text, figures=figures)


def _now_us() -> int:
    return time.time_ns() // 1000


def _watched(stage: Stage, for_s: float) -> list[tuple[int, int, int, int]]:
    """Each sample as it comes: pid, its time, percent, and how old it was when it came, in microseconds."""
    found: list[tuple[int, int, int, int]] = []
    newest, until = _now_us(), time.monotonic() + for_s
    while time.monotonic() < until:
        new = stage.nvml.samples(stage.card.uuid, newest)
        found += [(pid, at_us, percent, _now_us() - at_us) for pid, at_us, percent in new if at_us > newest]
        newest = max([newest, *(at_us for _, at_us, _ in new)])
        time.sleep(0.01)
    return found


def _kinds() -> tuple[str, ...]:
    try:
        torch_python()
    except Skip:
        return ("driver",)
    return ("torch", "driver")


def _program(stage: Stage, kind: str, box: Box | None) -> Program:
    environment = box.environment if box else bare_environment(stage.card)
    log = (box.folder if box else stage.folder) / f"{kind}.log"
    return Program(kind, environment, log)


def _rate(stage: Stage, kind: str, box: Box | None) -> float:
    with _program(stage, kind, box) as program:
        program.answer(f"warm {PLACES[kind]}")
        return float(program.answer(f"busy {PLACES[kind]} {BUSY_S}"))
