"""Launches that nobody times, because no other container has wanted the card for a second, in virtual time.

What is launched untimed is not charged. So it must end as soon as another begins, and be little by then.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shares.arithmetic import Arithmetic
from tests.shares.card import EPOCH, MS, SECOND, US, Card, Process
from tests.shares.play import fair, party, play
from tests.shares.programs import Program, between, one_by_one, queued, requests
from tests.shares.throttle import Steps, Throttle

PARTS = Path(__file__).resolve().parents[2] / "native/build/tests/libvirtual.so"
TURN, CHANGE = 2100 * US, 137 * US
CARDS = pytest.mark.parametrize("slice_ns", [TURN, 0], ids=["in turns", "evenly"])


@pytest.fixture(scope="module")
def arithmetic() -> Arithmetic:
    if not PARTS.exists():
        pytest.skip("native/build/tests is not built: make native")
    return Arithmetic(str(PARTS))


def idle(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
    yield 0


def noting(program: Program, into: list[tuple[float, bool]]) -> Program:
    """Notes of each launch when it was made, and whether it went untimed."""

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        launched = untimed = 0
        for step in program(throttle, process, card, chance):
            if throttle.launches > launched:
                into.append((card.now - EPOCH, throttle.untimed > untimed))
                launched, untimed = throttle.launches, throttle.untimed
            yield step

    return run


def part_untimed(launches: list[tuple[float, bool]], from_s: float = 0, to_s: float = 1e9) -> float:
    found = [untimed for at, untimed in launches if from_s * SECOND <= at < to_s * SECOND]
    return sum(found) / len(found)


def playing(slice_ns: int) -> dict[str, Any]:
    return {"slice_ns": slice_ns, "switch_ns": CHANGE if slice_ns else 0}


@CARDS
@pytest.mark.parametrize("own_us", [5, 50, 500])
def test_beside_one_that_rests_few_launches_are_timed(
    arithmetic: Arithmetic, own_us: int, slice_ns: int
) -> None:
    launches: list[tuple[float, bool]] = []
    parties = [fair(30, noting(one_by_one(own_us * US), launches)), fair(70, idle)]
    play(arithmetic, parties, 1, meet=True, **playing(slice_ns))
    assert part_untimed(launches) > 0.7


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(requests(US, 800 * MS), id="that works now and then"),
        pytest.param(between(one_by_one(4 * SECOND), 0, SECOND), id="with a kernel of seconds"),
        pytest.param(between(one_by_one(3 * SECOND), 2 * SECOND, 2 * SECOND + MS), id="that begins"),
    ],
)
def test_beside_one_that_does_not_rest_each_launch_is_timed(arithmetic: Arithmetic, other: Program) -> None:
    launches: list[tuple[float, bool]] = []
    parties = [fair(30, noting(one_by_one(500 * US), launches)), fair(70, other)]
    play(arithmetic, parties, 4, meet=True, **playing(TURN))
    assert part_untimed(launches, 2.1, 4) == 0


def test_a_share_that_is_also_a_cap_is_always_timed(arithmetic: Arithmetic) -> None:
    launches: list[tuple[float, bool]] = []
    parties = [party(30, noting(one_by_one(500 * US), launches)), fair(70, idle)]
    play(arithmetic, parties, 1, meet=True)
    assert part_untimed(launches) == 0


def test_work_that_is_unknown_or_long_is_always_timed(arithmetic: Arithmetic) -> None:
    """What is on the card untimed when another begins is not charged."""
    launches: list[tuple[float, bool]] = []

    def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        for key in range(100):
            yield from throttle.launch(50 * US, key=key)
            yield None
        for _ in range(100):
            yield from throttle.launch(7 * MS, key=1000)
            yield None

    play(arithmetic, [fair(30, noting(run, launches)), fair(70, idle)], 3, meet=True)
    assert len(launches) == 200
    assert part_untimed(launches) == 0


@CARDS
@pytest.mark.parametrize(
    "made", [lambda: queued(200 * US), lambda: queued(2 * MS), lambda: one_by_one(500 * US)]
)
@pytest.mark.parametrize("weight", [30, 70])
def test_who_begins_has_its_share_at_once(
    arithmetic: Arithmetic, made: Callable[[], Program], weight: int, slice_ns: int
) -> None:
    launches: list[tuple[float, bool]] = []
    begins = between(made(), 2 * SECOND, 4 * SECOND)
    parties = [fair(100 - weight, noting(made(), launches)), fair(weight, begins)]
    found = play(arithmetic, parties, 4, meet=True, **playing(slice_ns))
    assert part_untimed(launches, 2.02) == 0
    used = sum(seen.mean(2, 2.2) for seen in found)
    assert found[1].mean(2, 2.2) == pytest.approx(weight / 100 * used, abs=6)


@CARDS
@pytest.mark.parametrize("own_us", [50, 200, 2000])
def test_who_asks_after_a_rest_waits_no_longer_than_for_one_that_is_timed(
    arithmetic: Arithmetic, own_us: int, slice_ns: int
) -> None:
    """A request every two seconds, or so often that each launch beside it is timed. With three times as much
    untimed some waited 45 ms.
    """
    longest = []
    for every_ns in (2 * SECOND, 200 * MS):
        parties = [fair(80, queued(own_us * US)), fair(20, requests(2 * MS, every_ns))]
        found = play(arithmetic, parties, 16, meet=True, **playing(slice_ns))
        longest.append(max(found[1].processes[0].delays))
    assert longest[0] <= longest[1] + 3 * MS


@CARDS
@pytest.mark.parametrize("apart_ns", [0, 3 * US, 400 * US, 5 * MS, 30 * MS])
def test_two_that_begin_together_never_both_take_themselves_to_be_alone(
    arithmetic: Arithmetic, apart_ns: int, slice_ns: int
) -> None:
    """After a rest of both, again and again; what is left of it when one ends is for the other alone."""
    noted: list[list[float]] = [[], []]

    def now_and_then(number: int) -> Program:
        def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
            for again in range(4):
                yield int(EPOCH + (3 * again + 1) * SECOND + number * apart_ns - card.now)
                for _ in range(2000):
                    untimed = throttle.untimed
                    for step in throttle.launch(50 * US):
                        if throttle.untimed > untimed:
                            noted[number].append(card.now)
                            untimed = throttle.untimed
                        yield step
                    yield None

        return run

    parties = [fair(40, now_and_then(0)), fair(60, now_and_then(1))]
    play(arithmetic, parties, 12, meet=True, **playing(slice_ns))
    assert not {round(at / (20 * MS)) for at in noted[0]} & {round(at / (20 * MS)) for at in noted[1]}
