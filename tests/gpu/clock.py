"""What programs get of a card, by its own clock: each kernel notes when it began and ended.

Programs are `native/tests/clocked.c`. What a container did is the number of its kernels times what such a
kernel takes of the card when nobody else is there, in percent of the time.
"""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from tests.gpu.stage import BUILD, SIMULATED, Box, Process, Stage, bare_environment

SETTLE_S, MEASURE_S = (0.15, 0.25) if SIMULATED else (0.8, 1.5)
POINTS = 3.0
"""Virtual time promises two from what is due (tests/shares/test_share_turns.py); the time is short."""
FEW = 2 if SIMULATED else None
"""Rows of a table: what plays on the simulated driver is to work, its figures are worth nothing."""
NS_PER_US = 1000


class Record(NamedTuple):
    """One kernel: begin and end by the card, asked for and waited for by the host; all in ns."""

    begin: int
    end: int
    asked: int
    waited: int


@dataclass(frozen=True)
class Work:
    """What a program launches. `every_us`: a kernel that often, not as many as possible."""

    name: str
    kernel_us: int
    streams: int = 1
    one_by_one: bool = False
    pause_us: int = 0
    stall_us: int = 0
    every_us: int = 0
    settle_s: float = SETTLE_S
    least_s: float = MEASURE_S


QUEUED = Work("200 us, queued", 200)
SHORT = Work("500 us, one by one", 500, one_by_one=True)
LONGER = Work("2 ms, queued", 2000)
LONG = Work("20 ms, one by one", 20_000, one_by_one=True, least_s=3)
STREAMS = Work("500 us, four streams", 500, streams=4)
PAUSES = Work("500 us, pauses of 0.3 ms", 500, one_by_one=True, pause_us=300)
SECONDS = Work("1 s, one by one", 1_000_000, one_by_one=True, least_s=12)
MANY_STREAMS = Work("300 us, 16 streams", 300, streams=16)
ONE_STREAM = Work("300 us, queued", 300)
REQUESTS = Work("2 ms every 25 ms", 2000, one_by_one=True, every_us=25_000, least_s=4)

PROMISED = (QUEUED, SHORT, LONGER, LONG, STREAMS)
MIXES = ((30, 70), (10, 20, 30), (50, 50), (10, 90), (5, 95))
Row = tuple[tuple[Work, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Part:
    """What one of the programs did, all in percent of the time but the last two."""

    work: float
    charged: float
    busy: float
    cut_per_s: float
    lost_ms: float
    waits_ms: list[float]


class Clock:
    """The card's, and what kernels take on it: `alone_us` of the card for each kernel of a work."""

    def __init__(self, stage: Stage, works: Sequence[Work]) -> None:
        self.stage = stage
        self.alone_us: dict[Work, float] = {}
        self.typical_us: dict[Work, float] = {}  # a kernel's length
        with Clocked(bare_environment(stage.card), stage.folder / "alone.log") as program:
            program.greet()
            self.rounds_per_ms = program.number("calibrate")
            for work in dict.fromkeys(works):
                self._learn(program, work)

    def _learn(self, program: Clocked, work: Work) -> None:
        self.alone_us[work] = self.typical_us[work] = float(work.kernel_us)
        if SIMULATED or work.kernel_us > 100_000:
            return
        records = program.work(work, self, 0.6 if work.kernel_us < 10_000 else 1.0)
        self.alone_us[work] = self.typical_us[work] = _median_ns(records) / NS_PER_US
        if work.streams > 1:  # side by side on the card: what it gets done by itself is all of it
            begin, end = records[len(records) // 5].end, records[-1].end
            done = sum(begin < record.end <= end for record in records)
            self.alone_us[work] = (end - begin) / NS_PER_US / max(done, 1)


def _median_ns(records: Sequence[Record]) -> float:
    return statistics.median(record.end - record.begin for record in records)


class Clocked(Process):
    """`clocked`, in a box or without the library."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        super().__init__([str(BUILD / "tests/clocked")], environment, log)
        self.file = log.with_suffix(".records")

    def greet(self) -> Self:
        """Until it can work. Contexts take a while, so several programs are started first."""
        greeting = self.hear(30)
        assert greeting == "ok", f'clocked says "{greeting}"'
        return self

    def number(self, command: str) -> int:
        self.say(command)
        return self.told()

    def told(self) -> int:
        answer = self.hear(60).split()
        assert answer[:1] == ["ok"], f"clocked says {answer}"
        return int(answer[1])

    def begin(self, work: Work, clock: Clock, seconds: float) -> None:
        rounds = work.kernel_us * clock.rounds_per_ms // 1000
        self.say(
            f"work {seconds} {rounds} {work.kernel_us} {work.streams} {int(work.one_by_one)} {work.pause_us} "
            f"{work.stall_us} {work.every_us} {self.file}"
        )

    def records(self) -> list[Record]:
        count = self.told()
        found = [Record(*numbers) for numbers in struct.iter_unpack("4Q", self.file.read_bytes())]
        assert len(found) == count > 0, f"{count} kernels, {len(found)} records"
        return found

    def work(self, work: Work, clock: Clock, seconds: float) -> list[Record]:
        self.begin(work, clock, seconds)
        return self.records()


@dataclass(frozen=True)
class Tenant:
    """A program of a row. Without a share it runs without the library."""

    work: Work
    share: int | None = None
    lent: bool = False
    build: Path = BUILD
    interactive: bool = False


def beside(clock: Clock, name: str, tenants: Sequence[Tenant]) -> list[Part]:
    """All of them at once, from the time when each has been at work for a while."""
    stage = clock.stage
    settle_s = SETTLE_S if SIMULATED else max(tenant.work.settle_s for tenant in tenants)
    measure_s = MEASURE_S if SIMULATED else max(tenant.work.least_s for tenant in tenants)
    names = [
        f"{name}/{number}" for number in range(len(tenants))
    ]  # in a folder of their own: nobody's old claims
    boxes = [box_of(stage, each, tenant) for each, tenant in zip(names, tenants, strict=True)]
    with ExitStack() as stack:
        programs = []
        for each, box in zip(names, boxes, strict=True):
            environment = box.environment if box else bare_environment(stage.card)
            programs.append(stack.enter_context(Clocked(environment, stage.folder / each / "program.log")))
        for program in programs:
            program.greet()
        began = time.monotonic()
        for program, tenant in zip(programs, tenants, strict=True):
            program.begin(tenant.work, clock, settle_s + measure_s + 0.1)
        time.sleep(settle_s)
        before, from_s = accounts_of(boxes), time.monotonic()
        time.sleep(max(0.0, began + settle_s + measure_s - time.monotonic()))
        after, to_s = accounts_of(boxes), time.monotonic()
        found = [program.records() for program in programs]
    window, passed = window_of(found, settle_s), 1e7 * (to_s - from_s)  # in hundredths of ns
    return [
        part_of(tenant.work, clock, records, window, ((to[0] - then[0]) / passed, (to[1] - then[1]) / passed))
        for tenant, records, then, to in zip(tenants, found, before, after, strict=True)
    ]


def box_of(stage: Stage, name: str, tenant: Tenant) -> Box | None:
    if tenant.share is None:
        (stage.folder / name).mkdir(parents=True)
        return None
    share = tenant.share or None  # 0: the library, and no share
    return stage.box(name, 8192, share, lent=tenant.lent, build=tenant.build, interactive=tenant.interactive)


def accounts_of(boxes: Sequence[Box | None]) -> list[tuple[int, int]]:
    """Charged and busy, in ns, of each."""
    cards = [box.compute_account() if box else None for box in boxes]
    return [(card.charged_ns, card.busy_ns) if card else (0, 0) for card in cards]


def window_of(found: Sequence[list[Record]], settle_s: float) -> tuple[int, int]:
    """From when all have worked for a while until the first ends, by the card; simulated, by the host."""
    if SIMULATED:
        begins, ends = [records[0].asked for records in found], [records[-1].asked for records in found]
    else:
        begins = [records[0].begin for records in found]
        ends = [max(record.end for record in records) for records in found]
    return max(begins) + int(settle_s * 1e9), min(ends)


def part_of(
    work: Work, clock: Clock, records: list[Record], window: tuple[int, int], used: tuple[float, float]
) -> Part:
    begin, end = window
    seconds, usual_ns = max(end - begin, 1) / 1e9, clock.typical_us[work] * NS_PER_US
    if SIMULATED:
        inside = [record for record in records if begin <= record.asked < end]
        done = float(len(inside))
    else:  # those that the window cuts count in part
        inside = [record for record in records if record.end > begin and record.begin < end]
        done = sum(
            (min(record.end, end) - max(record.begin, begin)) / max(record.end - record.begin, 1)
            for record in inside
        )
    cut = [took - usual_ns for record in inside if (took := record.end - record.begin) > 1.15 * usual_ns]
    return Part(
        work=done * clock.alone_us[work] / 1e4 / seconds,
        charged=used[0],
        busy=used[1],
        cut_per_s=len(cut) / seconds,
        lost_ms=statistics.median(cut) / 1e6 if cut else 0.0,
        waits_ms=[(record.waited - record.asked) / 1e6 for record in inside if record.waited],
    )


HEAD = (
    "| kernels | policy | shares | work | together | worst off | charged of busy | cut, lost |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |"
)


def line(policy: str, tenants: Sequence[Tenant], parts: Sequence[Part]) -> tuple[str, float | None]:
    """A row, and by how many points the worst off misses its due; None where nothing is promised."""
    shares = [tenant.share or 0 for tenant in tenants]
    works = [tenant.work for tenant in tenants]
    together, off = sum(part.work for part in parts), ""
    gap = None
    if all(shares) and len(set(works)) == 1 and works[0] in PROMISED:
        scale = together / sum(shares) if policy == "fair" or sum(shares) >= 100 else 1.0
        gaps = [part.work - share * scale for part, share in zip(parts, shares, strict=True)]
        gap = max(gaps, key=abs)
        off = f"{gap:+.1f}"
    cells = (
        " beside ".join(work.name for work in dict.fromkeys(works)),
        policy,
        " + ".join(f"{share} %" if share else "none" for share in shares),
        " / ".join(f"{part.work:.1f}" for part in parts) + " %",
        f"{together:.1f} %",
        off,
        ", ".join(
            f"{part.charged:.0f} of {part.busy:.0f}"
            for part, share in zip(parts, shares, strict=True)
            if share
        ),
        ", ".join(f"{part.cut_per_s:.0f}/s {part.lost_ms:.2f} ms" for part in parts),
    )
    return f"| {' | '.join(cells)} |", gap


class Table:
    """Rows, also on the output as they come: those of a case that does not end can still be read."""

    def __init__(self, head: str = HEAD) -> None:
        self.lines = [head]
        self.figures: dict[str, Any] = {}

    def add(self, name: str, text: str, figures: object) -> None:
        print(text, flush=True)
        self.lines.append(text)
        self.figures[name] = figures

    def row(
        self, clock: Clock, name: str, policy: str, tenants: Sequence[Tenant]
    ) -> tuple[list[Part], float | None]:
        parts = beside(clock, name, tenants)
        text, gap = line(policy, tenants, parts)
        self.add(
            " ".join(text.split(" | ")[:3]),
            text,
            [[part.work, part.charged, part.busy, part.cut_per_s, part.lost_ms] for part in parts],
        )
        return parts, gap

    def __str__(self) -> str:
        return "\n".join(self.lines)
