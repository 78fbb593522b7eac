"""Neighbours that claim what they do not do, in virtual time (tests/shares)."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

from tests.shares.arithmetic import Arithmetic
from tests.shares.card import EPOCH, MS, SECOND, US, Card, Process
from tests.shares.play import Seen, fair, play
from tests.shares.programs import Program, queued
from tests.shares.throttle import Steps, Throttle

PARTS = Path(__file__).resolve().parents[2] / "native/build/tests/libvirtual.so"
TURN, CHANGE = 2100 * US, 137 * US


@pytest.fixture(scope="module")
def arithmetic() -> Arithmetic:
    if not PARTS.exists():
        pytest.skip("native/build/tests is not built: make native")
    return Arithmetic(str(PARTS))


def claims(
    own_ns: int,
    every_ns: int,
    *,
    waits: bool = False,
    on_ns: int = 0,
    off_ns: int = 0,
    ahead: bool = False,
    weight: int | None = None,
    works: int = 0,
) -> Program:
    """Claims work, or a wish, again and again, with pauses; `works`: and does a little."""

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        while True:
            until = card.now + on_ns
            while True:
                said = int(card.now - EPOCH) * 100 if ahead else 0
                throttle.claim(own_ns, waits=waits, virtual_ns=said, weight=weight)
                if works:
                    process.launch(works, 0)
                yield every_ns
                if on_ns and card.now >= until:
                    break
            throttle.claim(0)
            yield off_ns

    return run


LIARS: dict[str, tuple[list[Program], float, float]] = {
    "always at work": ([claims(10 * MS, MS)], 8, 0.95),
    "endless work": ([claims(60 * SECOND, SECOND)], 30, 0.95),
    "endless work, and ahead": ([claims(60 * SECOND, SECOND, ahead=True)], 30, 0.95),
    "always waiting": ([claims(0, 5 * MS, waits=True)], 8, 0.93),
    "a weight of 100": ([claims(10 * MS, MS, weight=100)], 8, 0.88),
    "pauses of 1 ms": ([claims(20 * MS, MS, on_ns=200 * MS, off_ns=MS)], 8, 0.95),
    "pauses of 2 s": ([claims(60 * SECOND, 10 * MS, on_ns=2 * SECOND, off_ns=2 * SECOND)], 20, 0.95),
    "waits, with pauses": ([claims(0, 5 * MS, waits=True, on_ns=SECOND, off_ns=100 * MS)], 8, 0.93),
    "flaps": ([claims(10 * MS, MS, on_ns=MS, off_ns=MS)], 8, 0.95),
    "works a little": ([claims(10 * MS, 10 * MS, works=200 * US)], 8, 0.91),
    "three at once": (
        [claims(10 * MS, MS), claims(60 * SECOND, SECOND), claims(0, 5 * MS, waits=True)],
        30,
        0.94,
    ),
}
"""What they claim, for how many seconds, and the part of its share that each honest container gets."""


def longest_pause_ms(seen: Seen) -> int:
    """Without any work, at the longest; in steps of 50 ms."""
    pauses = [0]
    for before, after in pairwise([0.0, *seen.series]):
        pauses.append(0 if after > before else pauses[-1] + 50)
    return max(pauses)


@pytest.mark.parametrize("mix", [(30,), (30, 50)], ids=str)
@pytest.mark.parametrize("liar", LIARS)
def test_a_lie_costs_its_maker_what_the_work_would(
    arithmetic: Arithmetic, liar: str, mix: tuple[int, ...]
) -> None:
    """30 % had nothing for eleven seconds, and again after each pause of the liar."""
    programs, seconds, due = LIARS[liar]
    rest = (100 - sum(mix)) // len(programs)
    parties = [fair(share, queued(200 * US)) for share in mix] + [fair(rest, each) for each in programs]
    found = play(arithmetic, parties, seconds, slice_ns=TURN, switch_ns=CHANGE, meet=True)
    for honest in found[: len(mix)]:
        assert honest.mean(2) >= due * honest.share
        assert longest_pause_ms(honest) <= (4200 if seconds > 8 else 200)
