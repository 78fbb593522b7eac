"""Compute divided on a real card, by the card's own clock (clock.py)."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tests.gpu.clock import (
    FEW,
    LONG,
    LONGER,
    MANY_STREAMS,
    MIXES,
    ONE_STREAM,
    PAUSES,
    POINTS,
    PROMISED,
    QUEUED,
    REQUESTS,
    SECONDS,
    SHORT,
    STREAMS,
    Clock,
    Clocked,
    Row,
    Table,
    Tenant,
    Work,
    beside,
    box_of,
)
from tests.gpu.stage import BUILD, SIMULATED, Seen, Stage, bare_environment


def _table(stage: Stage, policy: str, rows: Sequence[Row]) -> Seen:
    clock, table, gaps = Clock(stage, [work for works, _ in rows for work in works]), Table(), []
    for number, (works, shares) in enumerate(rows[:FEW]):
        tenants = [
            Tenant(work, share or None, lent=policy == "fair")
            for work, share in zip(works * (len(shares) // len(works)), shares, strict=True)
        ]
        _, gap = table.row(clock, f"row-{number}", policy, tenants)
        gaps += [gap] if gap is not None else []
    missed = [gap for gap in gaps if abs(gap) > POINTS]
    assert SIMULATED or not missed, f"{len(missed)} rows over {POINTS} points from what is due:\n{table}"
    alone = ", ".join(f"{work.name}: {took:.1f} us" for work, took in clock.alone_us.items())
    judged = f"at most {max(map(abs, gaps)):.1f} points from what is due; " if gaps else ""
    return Seen(f"{judged}kernels take {alone}", str(table), table.figures)


def unlimited(stage: Stage) -> Seen:
    """Without the library: one, two and three."""
    rows: tuple[Row, ...] = (
        *(((QUEUED,), (0,) * count) for count in (1, 2, 3)),
        ((LONG,), (0, 0)),
        ((PAUSES,), (0,)),
        ((PAUSES,), (0, 0)),
        ((MANY_STREAMS, ONE_STREAM), (0, 0)),
    )
    return _table(stage, "none", rows)


def capped_alone(stage: Stage) -> Seen:
    """A container by itself on the card, capped."""
    return _table(stage, "cap", tuple(((work,), (30,)) for work in (*PROMISED, PAUSES)))


def capped(stage: Stage) -> Seen:
    """Busy at once, capped."""
    rows = [((QUEUED,), mix) for mix in MIXES] + [((work,), (30, 70)) for work in (*PROMISED[1:], PAUSES)]
    return _table(stage, "cap", tuple(rows))


def lent_queued(stage: Stage) -> Seen:
    """Busy at once, and what nobody uses is lent: programs that queue."""
    rows: list[Row] = [((QUEUED,), mix) for mix in MIXES]
    rows += [((work,), mix) for work in (LONGER, STREAMS) for mix in ((30, 70), (10, 20, 30), (5, 95))]
    return _table(stage, "fair", tuple(rows))


def lent_waiting(stage: Stage) -> Seen:
    """The same for programs that wait for each kernel."""
    mixes = ((30, 70), (10, 20, 30), (5, 95))
    rows: list[Row] = [((work,), mix) for work in (SHORT, LONG) for mix in mixes]
    rows += [((PAUSES,), mix) for mix in ((50, 50), (30, 70))]
    rows += [((PAUSES, QUEUED), (50, 50)), ((SHORT, LONG), (50, 50))]
    return _table(stage, "fair", tuple(rows))


def long_kernels(stage: Stage) -> Seen:
    """Kernels of a second, which nothing interrupts."""
    return _table(stage, "fair", (((SECONDS,), (30, 70)),))


def streams(stage: Stage) -> Seen:
    """16 streams beside one, equal weights; also by another build, where the environment names one."""
    other = os.environ.get("GPUSLICE_OTHER_BUILD")
    builds = {"this": BUILD}
    if other and (Path(other) / "lib/libgpuslice.so").exists():
        builds["the other"] = Path(other)
    clock, table, used = Clock(stage, (MANY_STREAMS, ONE_STREAM)), Table(), []
    for policy in ("fair", "cap"):
        for name, build in builds.items():
            tenants = [
                Tenant(work, 50, lent=policy == "fair", build=build) for work in (MANY_STREAMS, ONE_STREAM)
            ]
            parts, _ = table.row(clock, f"{name.replace(' ', '-')}-{policy}", f"{policy}, {name}", tenants)
            used.append(f"{policy}, {name} library: {sum(part.work for part in parts):.0f} %")
    return Seen(f"used together: {'; '.join(used)}", str(table), table.figures)


def strangers(stage: Stage) -> Seen:
    """Beside a container without a share, which takes no part."""
    works = [replace(work, settle_s=2.0) for work in (QUEUED, SHORT)]
    clock, table = Clock(stage, works), Table()
    for work in works:
        for policy in ("cap", "fair"):
            tenants = [Tenant(work, 30, lent=policy == "fair"), Tenant(works[0])]
            table.row(clock, f"{work.kernel_us}-{policy}", policy, tenants)
    return Seen("a container of 30 % beside one without the library", str(table), table.figures)


def interactive(stage: Stage) -> Seen:
    """A kernel of 2 ms every 25 ms beside one that queues all it can."""
    clock = Clock(stage, (REQUESTS, QUEUED, LONGER))
    head = "| batch of | policy | p50 | p99 | slowest | batch | charged for |"
    table = Table(f"{head}\n| --- | --- | --- | --- | --- | --- | --- |")
    for batch in (QUEUED, LONGER)[: FEW and 1]:
        for policy in ("none", "cap", "fair"):
            shared, lent = policy != "none", policy == "fair"
            asking = Tenant(REQUESTS, 20 if shared else None, lent=lent, interactive=shared)
            asks, works = beside(
                clock,
                f"{batch.kernel_us}-{policy}",
                (asking, Tenant(batch, 80 if shared else None, lent=lent)),
            )
            waits = sorted(asks.waits_ms)
            p50, p99 = statistics.median(waits), waits[len(waits) * 99 // 100]
            times = f"{p50:.2f} ms | {p99:.2f} ms | {waits[-1]:.2f} ms of {len(waits)}"
            charged = f"{asks.charged:.1f} for {asks.work:.1f}"
            table.add(
                f"{batch.name}, {policy}",
                f"| {batch.name} | {policy} | {times} | {works.work:.1f} % | {charged} |",
                [p50, p99, works.work, asks.charged, asks.work],
            )
    return Seen("the time until the result is there, with the kernel's own 2 ms", str(table), table.figures)


STOPS = ((2000, 0), (200, 500), (200, 2000), (200, 5000), (200, 20_000), (2000, 5000))


def stalls(stage: Stage) -> Seen:
    """One that stops within each launch, after it was given its turn, beside one that queues all it can."""
    works = [
        Work(
            f"{kernel / 1000:g} ms, stops for {stall / 1000:g} ms",
            kernel,
            one_by_one=True,
            stall_us=stall,
            settle_s=2.0,
            least_s=2.5,
        )
        for kernel, stall in STOPS
    ]
    clock, table, least = Clock(stage, (QUEUED, *works)), Table(), 100.0
    for work in works[:FEW]:
        for policy in ("fair", "cap") if work.stall_us in (0, 5000) else ("fair",):
            tenants = [Tenant(each, 50, lent=policy == "fair") for each in (work, QUEUED)]
            parts, _ = table.row(clock, f"{work.kernel_us}-{work.stall_us}-{policy}", policy, tenants)
            least = min(least, parts[1].work)
    return Seen(
        f"the one beside it does at least {least:.1f} % of the card's work", str(table), table.figures
    )


def prices(stage: Stage) -> Seen:
    """What a launch costs: the best of 6,000 times 64 empty kernels, beside others that rest or work.

    In three rounds: processes of one program differ by half a microsecond.
    """
    clock = Clock(stage, ())
    found: dict[tuple[str, int, bool], float] = {}
    for number in range(1 if SIMULATED else 3):
        for name, others, at_work in PRICED[:FEW]:
            share = {"without the library": None, "no share": 0}.get(name, 20)
            own = Tenant(QUEUED, share, lent=name == "fair")
            folder = f"{name.replace(' ', '-')}-{others}-{at_work}-{number}"
            took_ns = _price_ns(clock, folder, own, others, at_work=at_work)
            found[name, others, at_work] = min(took_ns, found.get((name, others, at_work), took_ns))
    table = Table("| | others | ns a launch | added |\n| --- | --- | --- | --- |")
    plain_ns = found[PRICED[0]]
    for (name, others, at_work), took_ns in found.items():
        beside_it = f"{others}, {'at work' if at_work else 'at rest'}" if others else "0"
        text = f"| {name} | {beside_it} | {took_ns:.0f} | {took_ns - plain_ns:+.0f} |"
        table.add(f"{name}, {beside_it}", text, took_ns)
    return Seen(f"{plain_ns:.0f} ns without the library", str(table), table.figures)


PRICED = (
    ("without the library", 0, False),
    ("no share", 0, False),
    ("fair", 0, False),
    ("fair", 1, False),
    ("fair", 4, False),
    ("fair", 1, True),
    ("cap", 0, False),
    ("cap", 1, False),
    ("cap", 1, True),
)
"""With which share, beside how many others, and whether these are at work."""


def _price_ns(clock: Clock, name: str, tenant: Tenant, others: int, *, at_work: bool) -> float:
    stage = clock.stage
    boxes = [stage.box(f"{name}/other-{number}", 4096, 20, lent=tenant.lent) for number in range(others)]
    with ExitStack() as stack:
        programs = [
            stack.enter_context(Clocked(box.environment, box.folder / "program.log")) for box in boxes
        ]
        for program in programs:
            program.greet().work(QUEUED, clock, 0.1)
        own = box_of(stage, f"{name}/own", tenant)
        log = stage.folder / name / "own" / "program.log"
        measured = stack.enter_context(Clocked(own.environment if own else bare_environment(stage.card), log))
        measured.greet()
        if at_work:
            for program in programs:
                program.begin(QUEUED, clock, 3.0)
        elif others:
            time.sleep(1.2)  # others rest if none has wanted the card for a second
        return measured.number(f"price {20 if SIMULATED else 2000}") / 1000
