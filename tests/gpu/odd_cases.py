"""Programs that use a card in other ways than by plain launches, beside one that queues kernels of 200 us."""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from tests.gpu.clock import (
    QUEUED,
    Clock,
    Clocked,
    Part,
    Table,
    Tenant,
    accounts_of,
    box_of,
    part_of,
    window_of,
)
from tests.gpu.driver import Skip
from tests.gpu.stage import HERE, SIMULATED, Box, Process, Seen, Stage, bare_environment


@dataclass(frozen=True)
class Kind:
    """A kind of `odd.cu`; how long it runs under a share before it is watched, and how long it is watched."""

    name: str
    settle_s: float = 1.5
    seconds: float = 2.0


KINDS = (
    Kind("graph of 1,000 kernels"),
    Kind("graph that launches itself"),
    Kind("graph that launches others"),
    Kind("kernels that launch kernels"),
    Kind("kernels that launch their successors"),
    Kind("cooperative launches"),
    Kind("programmatic dependent launches"),
    Kind("kernels, then host functions of 1 ms"),
    Kind("a stream of high priority"),
    Kind("copies to the card"),
    Kind("copies within the card"),
    Kind("memsets"),
    Kind("graphs of memsets"),
    Kind("kernel that stays for 5 s", 0.5, 12.0),
)
HEAD = (
    "| | beside it without the library | fair, 50 + 50 % | cap, 50 + 50 % | charged of busy, fair | cap |\n"
    "| --- | --- | --- | --- | --- | --- |"
)


class Odd(Process):
    """`odd`, in a box or without the library."""

    def __init__(self, program: Path, kind: str, environment: dict[str, str], log: Path) -> None:
        super().__init__([str(program), kind], environment, log)

    def greet(self) -> None:
        greeting = self.hear(30)
        assert greeting == "ok", f'odd says "{greeting}"'

    def begin(self, settle_s: float, seconds: float, clock: Clock) -> None:
        self.say(f"work {settle_s} {seconds} {clock.rounds_per_ms // 5}")  # kernels of about 200 us

    def done(self) -> int:
        answer = self.hear(60).split()
        assert answer[:1] == ["ok"], f"odd says {answer}"
        return int(answer[1])


def beside_odd(stage: Stage) -> Seen:
    """What each does, in percent of what it does alone without the library, and the one beside it."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise Skip("no nvcc here")
    if SIMULATED:
        raise Skip("the CUDA runtime wants NVIDIA's own driver, this one is simulated")
    program = _compiled(nvcc, stage.folder)
    clock, table = Clock(stage, (QUEUED,)), Table(HEAD)
    least, worst = 100.0, ""
    for kind in KINDS:
        try:
            text, figures = _row(clock, program, kind)
        except AssertionError as error:  # the others are worth their time
            text, figures = f"| {kind.name} | {' '.join(str(error).split())[:300]} | | | | |", []
        table.add(kind.name, text, figures)
        if figures and figures[1][1] < least:
            least, worst = figures[1][1], kind.name
    return Seen(
        f"beside {worst} the other got {least:.1f} % of the card's work under fair", str(table), table.figures
    )


def _compiled(nvcc: str, folder: Path) -> Path:
    program = folder / "odd"
    flags = [
        "-std=c++17",
        "-rdc=true",
        "-arch=native",
        "-o",
        str(program),
        str(HERE / "odd.cu"),
        "-lcudadevrt",
    ]
    made = subprocess.run([nvcc, *flags], capture_output=True, text=True, check=False, timeout=80)
    assert made.returncode == 0, f"nvcc: {made.stdout[-400:]} {made.stderr[-800:]}"
    return program


def _row(clock: Clock, program: Path, kind: Kind) -> tuple[str, list[list[float]]]:
    stage, folder = clock.stage, kind.name.replace(" ", "-").replace(",", "")
    (stage.folder / folder).mkdir()
    log = stage.folder / folder / "alone.log"
    with Odd(program, kind.name, bare_environment(stage.card), log) as odd:
        odd.greet()
        odd.begin(0.5, 1.0, clock)
        per_s = float(odd.done())
    assert per_s > 0, "does nothing by itself"
    cells, accounts, figures = [], [], []
    for policy in ("none", "fair", "cap"):
        timed = replace(kind, settle_s=0.5, seconds=1.0) if policy == "none" else kind
        units, other, used = _pair(clock, program, timed, f"{folder}/{policy}")
        own = 100 * units / timed.seconds / per_s
        cells.append(f"{own:.1f} / {other.work:.1f} %")
        accounts.append(f"{used[0]:.0f} of {used[1]:.0f}")
        figures.append([own, other.work, *used])
    return f"| {kind.name} | {' | '.join(cells)} | {' | '.join(accounts[1:])} |", figures


def _pair(clock: Clock, program: Path, kind: Kind, name: str) -> tuple[int, Part, tuple[float, float]]:
    """What the odd one did, what the other did, and what the odd one was charged and busy, in percent."""
    stage, policy = clock.stage, name.rpartition("/")[2]
    tenant = Tenant(QUEUED, None if policy == "none" else 50, lent=policy == "fair")
    boxes = [box_of(stage, f"{name}/{each}", tenant) for each in ("odd", "other")]
    environments = [box.environment if box else bare_environment(stage.card) for box in boxes]
    logs = [stage.folder / name / each / "program.log" for each in ("odd", "other")]
    with ExitStack() as stack:
        odd = stack.enter_context(Odd(program, kind.name, environments[0], logs[0]))
        other = stack.enter_context(Clocked(environments[1], logs[1]))
        odd.greet()
        other.greet()
        odd.begin(kind.settle_s, kind.seconds, clock)
        other.begin(QUEUED, clock, kind.settle_s + kind.seconds + 0.1)
        time.sleep(kind.settle_s)
        before = _account(boxes[0])
        time.sleep(kind.seconds)
        after = _account(boxes[0])
        units, records = odd.done(), other.records()
    part = part_of(QUEUED, clock, records, window_of([records], kind.settle_s), (0.0, 0.0))
    used = (after[0] - before[0]) / 1e7 / kind.seconds, (after[1] - before[1]) / 1e7 / kind.seconds
    return units, part, used


def _account(box: Box | None) -> tuple[int, int]:
    return accounts_of([box])[0]
