"""Threads and processes that get in between each other's steps within the library, in virtual time.

They read the clock, the claims and the region, record events and take the lock in any order; a thread may
lose its core at each of these steps, and a process may die there.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.shares.arithmetic import Arithmetic
from tests.shares.card import MS, US
from tests.shares.play import Party, Seen, play
from tests.shares.programs import Program, in_threads, killed, on_streams, one_by_one, queued

PARTS = Path(__file__).resolve().parents[2] / "native/build/tests/libvirtual.so"
TURN, CHANGE = 2100 * US, 137 * US
MIXES = ((30, 70), (50, 50), (20, 30, 50))


@pytest.fixture(scope="module")
def arithmetic() -> Arithmetic:
    if not PARTS.exists():
        pytest.skip("native/build/tests is not built: make native")
    return Arithmetic(str(PARTS))


def any_programs(chance: random.Random) -> tuple[Program, ...]:
    """What keeps a card busy in one way or another: one process or two, one thread or several."""
    return chance.choice(
        (
            (queued(200 * US),),
            (queued(2 * MS),),
            (on_streams(500 * US, 3),),
            (queued(200 * US), queued(2 * MS)),
            in_threads(300 * US, 3),
            (one_by_one(500 * US), queued(300 * US)),
        )
    )


def parties_of(chance: random.Random, victim: Program | None = None) -> list[Party]:
    mix = chance.choice(MIXES)
    parties = [Party(share, any_programs(chance), cap=100) for share in mix]
    if victim:
        parties[0] = Party(mix[0], (*parties[0].programs, victim), cap=100)
    return parties


def assert_fair(found: list[Seen], from_s: float) -> None:
    used = sum(seen.mean(from_s) for seen in found)
    assert used >= 90
    for seen in found:
        assert abs(seen.mean(from_s) - seen.share / 100 * used) <= 3
        assert min(seen.windows(from_s, 0.2)) > 0  # nobody starves


@pytest.mark.parametrize("seed", range(6))
def test_in_any_order_each_has_its_share_and_pays_for_it(arithmetic: Arithmetic, seed: int) -> None:
    parties = parties_of(random.Random(seed))
    found = play(
        arithmetic, parties, 1.5, slice_ns=TURN, switch_ns=CHANGE, meet=True, interleaved=True, seed=seed
    )
    assert_fair(found, 0.5)
    for seen in found:
        assert seen.charged_ns == pytest.approx(sum(process.done for process in seen.processes), rel=0.06)


@pytest.mark.parametrize("seed", range(6))
def test_who_dies_at_any_step_is_soon_of_no_weight(arithmetic: Arithmetic, seed: int) -> None:
    """What a dead process had in flight counted until one launch had waited for a tenth of a second: the card
    was idle for 12 to 18 %, and for good.
    """
    chance = random.Random(seed)
    victim = killed(queued(200 * US), 300 * MS + chance.randrange(10 * MS))
    parties = parties_of(chance, victim)
    found = play(
        arithmetic, parties, 2, slice_ns=TURN, switch_ns=CHANGE, meet=True, interleaved=True, seed=seed
    )
    assert_fair(found, 0.7)
