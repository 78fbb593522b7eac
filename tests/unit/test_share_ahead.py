"""Launches that are decided on while the kernel before them runs, in virtual time (tests/shares).

Their accounts are done behind the launch, as of when the program came back from waiting. So what is not over
by then must be seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shares.arithmetic import Arithmetic
from tests.shares.card import US, Card, Process
from tests.shares.play import Party, fair, play
from tests.shares.programs import Program, one_by_one, queued
from tests.shares.throttle import Steps, Throttle

PARTS = Path(__file__).resolve().parents[2] / "native/build/tests/libvirtual.so"
TURN, CHANGE = 2100 * US, 137 * US


@pytest.fixture(scope="module")
def arithmetic() -> Arithmetic:
    if not PARTS.exists():
        pytest.skip("native/build/tests is not built: make native")
    return Arithmetic(str(PARTS))


def waits_elsewhere(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
    """Waits for every other kernel; behind the others for an idle stream, and polls until they have ended."""
    while True:
        yield from throttle.launch(500 * US)
        yield from process.awaited()
        while process.has_work():
            yield 10 * US
        yield from throttle.launch(500 * US)
        yield None


def two_threads(own_ns: int, other_ns: int) -> tuple[Program, Program]:
    """Of one process, each with a stream of its own, on which it waits for each kernel."""
    shared: list[tuple[Throttle, Process]] = []

    def thread(stream: int, own_ns: int) -> Program:
        def run(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
            shared.append((throttle, process))
            yield 0
            throttle, process = shared[0]
            while True:
                yield from throttle.launch(own_ns, stream, stream)
                while process.has_work_on(stream):
                    yield 2 * US
                yield from process.awaited()
                yield 10 * US

        return run

    return thread(0, own_ns), thread(1, other_ns)


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda: (waits_elsewhere,), id="for an idle stream"),
        pytest.param(lambda: two_threads(500 * US, 370 * US), id="in two threads"),
        pytest.param(lambda: two_threads(900 * US, 50 * US), id="in two threads, one quicker"),
        pytest.param(lambda: (one_by_one(500 * US), one_by_one(300 * US)), id="in two processes"),
    ],
)
@pytest.mark.parametrize("slice_ns", [TURN, 0], ids=["in turns", "evenly"])
def test_who_waits_for_something_else_pays_for_what_it_used(
    arithmetic: Arithmetic, made: Callable[[], tuple[Program, ...]], slice_ns: int
) -> None:
    parties = [Party(30, made(), cap=100), fair(70, queued(200 * US))]
    found, _ = play(arithmetic, parties, 3, slice_ns=slice_ns, switch_ns=CHANGE if slice_ns else 0, meet=True)
    done = sum(process.done for process in found.processes)
    assert found.charged_ns == pytest.approx(done, rel=0.05)


def a_kernel(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
    """So little that others do not notice, but it does not rest yet."""
    yield from throttle.launch(US)


def test_behind_a_kernel_that_took_longer_than_known_the_next_is_decided_on_anew(
    arithmetic: Arithmetic,
) -> None:
    """It is longer itself, or others had the card in between."""
    cleared: list[int] = []

    def one_is_longer(throttle: Throttle, process: Process, card: Card, chance: random.Random) -> Steps:
        for own_ns in [500 * US] * 20 + [1500 * US] + [500 * US]:
            yield from throttle.launch(own_ns)
            cleared.append(throttle.cleared)
            yield None

    play(arithmetic, [fair(50, one_is_longer), fair(50, a_kernel)], 0.1, meet=True)
    *_, before, longer, behind = cleared
    assert longer == before + 1
    assert behind == longer


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("own_us", [500, 700, 900, 1500, 3000])
def test_two_processes_of_a_container_leave_the_other_its_share(
    arithmetic: Arithmetic, own_us: int, seed: int
) -> None:
    """Side by side they had up to 77 % and the other 13.

    Each launch was decided on a kernel too early, and the other's claim ended before the card had served it.
    """
    both = (one_by_one(own_us * US), one_by_one(own_us * US))
    parties = [fair(30, *both), fair(70, one_by_one(500 * US))]
    found = play(arithmetic, parties, 2, slice_ns=TURN, switch_ns=CHANGE, meet=True, seed=seed)
    means = [seen.mean(1) for seen in found]
    assert abs(means[0] - 0.3 * sum(means)) <= 2.5
