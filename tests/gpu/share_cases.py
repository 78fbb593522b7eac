"""Compute divided on a real card."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.gpu.driver import Skip
from tests.gpu.stage import SIMULATED, Box, Program, Seen, Stage, bare_environment, torch_python

BUSY_S = 1.0 if SIMULATED else 4.0
PLACES = {"torch": "matrix product", "driver": "arithmetic kernel"}
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
    """The second of two: what the controller learns from NVML's samples takes it some seconds."""
    order = f"busy {PLACES[kind]} {BUSY_S * 1.5}"
    program.answer(order)
    return float(program.answer(order))


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
