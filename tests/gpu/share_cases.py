"""Compute divided on a real card."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from gpuslice.adapters.region.layout import RegionCard
from tests.gpu.driver import Skip
from tests.gpu.driver_program import ROUNDS
from tests.gpu.stage import BUILD, SIMULATED, Box, Program, Seen, Stage, bare_environment, torch_python

BUSY_S = 1.0 if SIMULATED else 4.0
PLACES = {"torch": "matrix product", "driver": "arithmetic kernel"}
SETTLED_S = 2.0
MICROSECONDS = 1_000_000
POINTS = 6.0
"""How far from its share, in percent of the card, a container may be over some seconds."""


def one_share(stage: Stage) -> Seen:
    """A container with 30 % does about 30 % of the work of one without a share, alone on the card."""
    rows, gaps = [], []
    for kind in _kinds():
        whole = _whole_rate(stage, kind)
        box = stage.box(f"part-{kind}", 8192, 30)
        with _program(stage, kind, box) as program:
            program.answer(f"warm {PLACES[kind]}")
            before, began = box.compute_account(), time.monotonic()
            percent = 100 * float(program.answer(f"busy {PLACES[kind]} {BUSY_S}")) / whole
            wanted = _wanted_percent(before, box.compute_account(), time.monotonic() - began)
        waited = box.usage().throttled_ns / 1e9
        rows.append(f"| {PLACES[kind]} | {percent:.1f} % | {waited:.1f} s |")
        gaps.append(max(percent - 30, min(30, wanted) - percent))
    table = "\n".join(["| work | of an unlimited run, at 30 % | waited |", "| --- | --- | --- |", *rows])
    assert max(gaps) <= POINTS, f"{max(gaps):.1f} points off:\n{table}"
    return Seen(f"at most {max(gaps):.1f} points from 30 %", table, {"gap_points": max(gaps)})


def capped(stage: Stage) -> Seen:
    """Containers with 30 % and 70 %, and with 10, 20 and 30 %, busy at once: each does what is due to it."""
    return _divided(stage, ((30, 70), (10, 20, 30)), lent=False)


def lent(stage: Stage) -> Seen:
    """The same where what nobody uses is lent: all of the card is used, divided by weight."""
    return _divided(stage, ((30, 70), (10, 20, 30)), lent=True)


def _divided(stage: Stage, mixes: tuple[tuple[int, ...], ...], *, lent: bool) -> Seen:
    kind = _kinds()[0]
    whole = _whole_rate(stage, kind)
    rows, worst, figures = [], 0.0, {}
    for shares in mixes:
        together, percents, wanted, accounts = _together(stage, kind, shares, whole, lent=lent)
        of_what = together / sum(shares) if lent or sum(shares) >= 100 else 1.0
        due = [share * of_what for share in shares]
        gap = max(
            max(got - most, min(most, want) - got)
            for got, most, want in zip(percents, due, wanted, strict=True)
        )
        worst = max(worst, gap)
        name = " + ".join(str(share) for share in shares)
        reached = " / ".join(f"{got:.1f}" for got in percents)
        rows.append(f"| {name} % | {reached} % | {together:.1f} % | {gap:.1f} | {' ; '.join(accounts)} |")
        figures[name] = percents
    head = "| shares | of an unlimited run | together | points off | charged of busy, sampled % |"
    table = "\n".join([head, "| --- | --- | --- | --- | --- |", *rows])
    assert worst <= POINTS, f"{worst:.1f} points off:\n{table}"
    return Seen(f"{PLACES[kind]}: at most {worst:.1f} points off", table, figures)


def turns(stage: Stage) -> Seen:
    """The same mixes by this library and by another build of it, which the environment names."""
    other = os.environ.get("GPUSLICE_OTHER_BUILD")
    if not other or not (Path(other) / "lib/libgpuslice.so").exists():
        raise Skip("GPUSLICE_OTHER_BUILD names no native/build of another commit to compare with")
    rows, figures = [], {}
    mixes = [((30, 70), True), ((30, 70), False), ((10, 20, 30), True)][: 1 if SIMULATED else 3]
    for work in ("arithmetic kernel", "kernels with pauses"):
        whole = _rate(stage, "driver", None, work)
        for shares, lent in mixes:
            cells = []
            for name, build in (("this", BUILD), ("other", Path(other))):
                together, percents, _, _ = _together(
                    stage, "driver", shares, whole, lent=lent, build=build, work=work, prefix=f"{work}-{name}"
                )
                cells.append(f"{' / '.join(f'{got:.1f}' for got in percents)} = {together:.1f} %")
                policy, mix = "fair" if lent else "cap", " + ".join(map(str, shares))
                figures[f"{work}, {policy}, {mix}, {name}"] = percents
            rows.append(f"| {work} | {policy} | {mix} % | {' | '.join(cells)} |")
    head = "| work | policy | shares | this library | the other build |\n| --- | --- | --- | --- | --- |"
    return Seen(
        "of an unlimited run, by this library and by another build", "\n".join([head, *rows]), figures
    )


def _together(
    stage: Stage,
    kind: str,
    shares: tuple[int, ...],
    whole: float,
    *,
    lent: bool,
    build: Path = BUILD,
    work: str = "",
    prefix: str = "",
) -> tuple[float, list[float], list[float], list[str]]:
    """What all of them did, what each did and would have done, in percent of an unlimited run, and each one's
    account.

    A card loses time by changing between processes: of a full one each is due its part of the rest.
    """
    work = work or PLACES[kind]
    name = f"{prefix.replace(' ', '-')}{'lent' if lent else 'capped'}-{len(shares)}"
    boxes = [stage.box(f"{name}-{share}", 8192, share, lent=lent, build=build) for share in shares]
    with ExitStack() as stack, ThreadPoolExecutor(len(shares)) as pool:
        programs = [stack.enter_context(_program(stage, kind, box)) for box in boxes]
        for program in programs:
            program.answer(f"warm {work}")
        before, began = [box.compute_account() for box in boxes], time.monotonic()
        running = [pool.submit(_settled_rate, program, work) for program in programs]
        found = _watched(stage, SETTLED_S + BUSY_S)
        percents = [100 * each.result() / whole for each in running]
        after, took_s = [box.compute_account() for box in boxes], time.monotonic() - began
    took_ns, accounts = 1e9 * took_s, []
    for then, now, program in zip(before, after, programs, strict=True):
        charged, busy = now.charged_ns - then.charged_ns, now.busy_ns - then.busy_ns
        sampled = [percent for pid, _, percent, _ in found if pid == program.pid] or [0]
        accounts.append(
            f"{100 * charged / took_ns:.0f} of {100 * busy / took_ns:.0f}, {statistics.mean(sampled):.0f}"
        )
    wanted = [_wanted_percent(then, now, took_s) for then, now in zip(before, after, strict=True)]
    return sum(percents), percents, wanted, accounts


def _wanted_percent(then: RegionCard, now: RegionCard, took_s: float) -> float:
    """For how much of the time the container had work on the card or was made to wait. What it lacks else is
    the machine's doing, which had other things to do than run its program.
    """
    wanted_ns = now.busy_ns - then.busy_ns + now.throttled_ns - then.throttled_ns
    return float(wanted_ns) / 1e7 / took_s


def _settled_rate(program: Program, work: str) -> float:
    """After two seconds, in which the library learns from NVML's samples what is its own of busy time."""
    program.answer(f"busy {work} {SETTLED_S}")
    return float(program.answer(f"busy {work} {BUSY_S * 1.5}"))


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


def _whole_rate(stage: Stage, kind: str) -> float:
    """What one without a share does. On a simulated card a kernel takes as long as it says; a program that is
    kept from running does less.
    """
    return _rate(stage, kind, None) if not SIMULATED else 1e9 / ROUNDS


def _rate(stage: Stage, kind: str, box: Box | None, work: str = "") -> float:
    work = work or PLACES[kind]
    with _program(stage, kind, box) as program:
        program.answer(f"warm {work}")
        return float(program.answer(f"busy {work} {BUSY_S}"))
