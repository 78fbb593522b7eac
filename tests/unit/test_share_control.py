"""Shares of compute in virtual time: the library's own arithmetic on a modelled card (tests/shares).

Windows of a second begin every 50 ms. A container's due is its share; how far it may be off counts in points,
percent of the card.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuslice.adapters.region import layout
from tests.shares.arithmetic import Arithmetic, Busy, Claim, Neighbourhood, Past, Run, Sample, Share
from tests.shares.card import EPOCH, MS, SECOND, US
from tests.shares.play import Party, Seen, party, play
from tests.shares.programs import (
    Program,
    between,
    in_blocks,
    killed,
    mixed,
    on_and_off,
    one_by_one,
    queued,
    slower,
)
from tests.shares.throttle import as_it_is, nobody_known

PARTS = Path(__file__).resolve().parents[2] / "native/build/tests/libvirtual.so"
SHORT = queued(200 * US)
PROGRAMS: Mapping[str, Program] = {
    "50 us, queued": queued(50 * US),
    "200 us, queued": SHORT,
    "2 ms, queued": queued(2 * MS),
    "500 us, one by one": one_by_one(500 * US),
    "50 us to 5 ms": mixed(50 * US, 5 * MS),
}
MIXES = ((30, 70), (10, 20, 30), (50, 50), (10, 90), (5, 95), (25, 25, 25, 25))
ABOVE = 3.0
"""Points over its share at most, in any second: two of credit, and what a launch may overdraw."""
SLICE = 2 * MS


@pytest.fixture(scope="module")
def arithmetic() -> Arithmetic:
    if not PARTS.exists():
        pytest.skip("native/build/tests is not built: make native")
    return Arithmetic(str(PARTS))


def near(share: int) -> float:
    return max(2.0, share / 10)


def assert_kept(seen: Seen, from_s: float = 1.0, kernel_points: float = 0.0) -> None:
    """Never above; from then on near the share in every second. `kernel_points`: one kernel in a second."""
    assert max(seen.windows(0)) <= seen.share + ABOVE + kernel_points
    off = [abs(percent - seen.share) for percent in seen.windows(from_s)]
    assert max(off) <= 2 * near(seen.share) + kernel_points
    assert sum(off) / len(off) <= near(seen.share)


@pytest.mark.parametrize("share", [5, 30, 50, 95])
@pytest.mark.parametrize("name", PROGRAMS)
def test_alone_a_share_is_kept_from_the_first_second_on(
    arithmetic: Arithmetic, share: int, name: str
) -> None:
    (seen,) = play(arithmetic, [party(share, PROGRAMS[name])], 3)
    least = (
        share if name != "500 us, one by one" else min(share, 85)
    )  # between two kernels it computes itself
    assert max(seen.windows(0)) <= share + 1
    assert min(seen.windows(0)) >= least - 1.5


@pytest.mark.parametrize("slice_ns", [0, SLICE], ids=["at once", "in turns"])
@pytest.mark.parametrize("name", ["200 us, queued", "2 ms, queued", "50 us to 5 ms"])
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_busy_containers_get_their_shares_within_two_seconds(
    arithmetic: Arithmetic, mix: tuple[int, ...], name: str, slice_ns: int
) -> None:
    for seen in play(arithmetic, [party(share, PROGRAMS[name]) for share in mix], 5, slice_ns=slice_ns):
        assert_kept(seen, from_s=2.0)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_mix_of_shares_and_work_is_kept(arithmetic: Arithmetic, data: st.DataObject) -> None:
    """Of nine tenths of the card at most: of a full one the last points depend on how soon each launches."""
    count = data.draw(st.integers(2, 4))
    shares = [5 * data.draw(st.integers(1, 18 // count)) for _ in range(count)]
    names = [data.draw(st.sampled_from(sorted(PROGRAMS))) for _ in range(count)]
    slice_ns = data.draw(st.sampled_from([0, SLICE]))
    parties = [party(share, PROGRAMS[name]) for share, name in zip(shares, names, strict=True)]
    found = play(arithmetic, parties, 5, slice_ns=slice_ns, seed=data.draw(st.integers(0, 99)))
    for seen, name in zip(found, names, strict=True):
        assert max(seen.windows(0)) <= seen.share + 2 * ABOVE
        assert seen.mean(1) <= seen.share + 1
        if name != "500 us, one by one":  # which waits for a turn with each of its kernels
            assert seen.mean(1) >= seen.share - near(seen.share)


def inflated(percents: Mapping[int, int], mine: set[int]) -> tuple[int, int, int]:
    """Percents that hold the wait for a turn, too: together they are more than the card."""
    own, others, listed = as_it_is(percents, mine)
    return min(100, 3 * own), min(100 * (listed - 1), 3 * others), listed


READINGS = pytest.mark.parametrize(
    "reading", [as_it_is, nobody_known, inflated], ids=lambda reading: reading.__name__
)
Reading = Callable[[Mapping[int, int], set[int]], tuple[int, int, int]]


@READINGS
@pytest.mark.parametrize("mix", [(30, 70), (10, 20, 30)], ids=str)
def test_beside_strangers_nobody_pays_for_the_wait_for_its_turn(
    arithmetic: Arithmetic, mix: tuple[int, ...], reading: Reading
) -> None:
    """While the wait was charged, 30 % beside 70 came to 18 on a card that runs one process at a time."""
    boxes = [Party(share, (in_blocks(190 * US, 52),), reading) for share in mix]
    blind = reading is not as_it_is
    for seen in play(arithmetic, boxes, 4, slice_ns=SLICE, meet=False):
        least = 8 if blind and seen.share == 70 else 4  # its own queue spans the others' turns
        most = 4 if blind and sum(mix) == 100 else 1  # what the other of a full card does not take
        assert seen.share - least <= seen.mean(2) <= seen.share + most


@READINGS
@pytest.mark.parametrize("mix", [(30, 70), (50, 50), (10, 90), (10, 20, 30)], ids=str)
def test_beside_neighbours_that_tell_nobody_pays_for_their_turns(
    arithmetic: Arithmetic, mix: tuple[int, ...], reading: Reading
) -> None:
    """Nor for those that cut its kernels in two; changing from one to another takes an H100 137 us."""
    boxes = [Party(share, (in_blocks(190 * US, 52),), reading) for share in mix]
    for switch_ns, part in ((0, 0.97), (137 * US, 0.95)):  # for so long that a block is a tenth of a point
        for seen in play(arithmetic, boxes, 12, slice_ns=SLICE, switch_ns=switch_ns, meet=True):
            assert part * seen.share <= seen.mean(2) <= seen.share + 1


@pytest.mark.parametrize("meet", [False, True], ids=["strangers", "neighbours"])
def test_what_a_card_loses_between_turns_is_lost_by_those_that_fill_it(
    arithmetic: Arithmetic, meet: bool
) -> None:
    """Of a card with room every share is reached; of a full one they are divided as far as it goes."""
    for mix in ((30, 70), (10, 20, 30)):
        boxes = [party(share, in_blocks(190 * US, 52)) for share in mix]
        found = play(arithmetic, boxes, 4, slice_ns=SLICE, switch_ns=100 * US, meet=meet)
        for seen in found[: 1 if sum(mix) == 100 else 3]:
            assert abs(seen.mean(2) - seen.share) <= 1
        assert sum(seen.mean(2) for seen in found) >= (sum(mix) if sum(mix) < 100 else 94) - 1


def test_beside_unlimited_neighbours_it_gets_its_share(arithmetic: Arithmetic) -> None:
    limited, *_ = play(arithmetic, [party(30, SHORT), party(100, queued(MS)), party(100, queued(MS))], 5)
    assert_kept(limited, from_s=2.0)


def test_kernels_of_many_milliseconds_are_kept_to_within_one_of_them(arithmetic: Arithmetic) -> None:
    for seen in play(arithmetic, [party(share, one_by_one(20 * MS)) for share in (10, 20, 30)], 8):
        assert_kept(seen, kernel_points=2.0)
        assert abs(seen.mean(1) - seen.share) <= near(seen.share)


@pytest.mark.parametrize("program", [one_by_one(500 * MS), queued(500 * MS)], ids=["one by one", "queued"])
def test_kernels_longer_than_a_seconds_share_are_paid_back(arithmetic: Arithmetic, program: Program) -> None:
    """None is stopped, so one of half a second takes half a second; then its container waits for five."""
    long, short = play(arithmetic, [party(10, program), party(60, queued(2 * MS))], 21)
    assert abs(long.mean(1) - 10) <= 2.5
    assert abs(short.mean(2) - 60) <= 6


def test_a_flood_of_unknown_work_does_not_get_ahead(arithmetic: Arithmetic) -> None:
    """Before anything has finished nobody knows how long it takes."""
    (seen,) = play(arithmetic, [party(30, queued(20 * MS, ahead=1000))], 3)
    assert max(seen.windows(0)) <= 30 + 1 + 2


def test_a_neighbour_that_comes_and_goes_changes_little(arithmetic: Arithmetic) -> None:
    """Until the next sample, a sixth of a second, the old part of busy time is charged."""
    guest = between(queued(MS), 2 * SECOND, 4 * SECOND)
    stays, also, _ = play(arithmetic, [party(30, SHORT), party(20, queued(500 * US)), party(40, guest)], 7)
    for seen in (stays, also):
        assert max(seen.windows(0)) <= seen.share + 5
        assert min(seen.windows(0)) >= seen.share - 5
        assert abs(seen.mean(1) - seen.share) <= 1
        assert abs(seen.mean(5) - seen.share) <= 1


def test_a_neighbour_in_bursts_changes_little(arithmetic: Arithmetic) -> None:
    steady, _ = play(arithmetic, [party(30, SHORT), party(70, on_and_off(MS, 400 * MS, 400 * MS))], 6)
    assert abs(steady.mean(1) - 30) <= 1
    assert all(abs(percent - 30) <= 5 for percent in steady.windows(1))


def test_what_was_not_used_is_not_saved_up(arithmetic: Arithmetic) -> None:
    """After any pause a second holds no more than a point beyond the share."""
    (seen,) = play(arithmetic, [party(30, on_and_off(300 * US, 700 * MS, 1300 * MS))], 8)
    assert max(seen.windows(0)) <= 30 + 1
    assert seen.mean(0) >= 0.9 * 30 * 700 / 2000


def test_all_processes_of_a_container_share_one_share(arithmetic: Arithmetic) -> None:
    (alone,) = play(arithmetic, [party(30, SHORT, one_by_one(2 * MS), one_by_one(500 * US))], 4)
    assert_kept(alone)
    several = party(30, SHORT, one_by_one(2 * MS), one_by_one(500 * US))
    one, other = play(arithmetic, [several, party(60, queued(MS), SHORT)], 8)
    assert abs(one.mean(2) - 30) <= 3
    assert abs(other.mean(2) - 60) <= 6


def test_a_process_killed_with_work_under_way_holds_nobody_up(arithmetic: Arithmetic) -> None:
    boxes = [party(30, killed(queued(5 * MS), 1500 * MS), SHORT), party(40, SHORT)]
    for seen in play(arithmetic, boxes, 5):
        assert_kept(seen, from_s=2.0)


def test_a_card_that_slows_down_is_divided_all_the_same(arithmetic: Arithmetic) -> None:
    for seen in play(arithmetic, [party(share, slower(MS, 2 * SECOND, 3.0)) for share in (20, 50)], 5):
        assert abs(seen.mean(1) - seen.share) <= near(seen.share)
        assert max(seen.windows(0)) <= seen.share + ABOVE


# ---- what NVML says may be late, missing or wrong


@pytest.mark.parametrize(("age_ns", "points"), [(300 * MS, 1.0), (SECOND, 2.0)], ids=["0.3 s", "1 s"])
@pytest.mark.parametrize("mix", [(30, 70), (10, 20, 30), (25, 25, 25, 25)], ids=str)
def test_samples_may_come_late(
    arithmetic: Arithmetic, mix: tuple[int, ...], age_ns: int, points: float
) -> None:
    """They are held against the account of their own time, so lateness is no reason to swing."""
    for seen in play(arithmetic, [party(share, SHORT) for share in mix], 8, sample_age_ns=age_ns):
        assert abs(seen.mean(4) - seen.share) <= points
        assert max(seen.windows(4)) - min(seen.windows(4)) <= (1 + points) * near(seen.share)


def test_where_nvml_cannot_tell_nobody_gets_more(arithmetic: Arithmetic) -> None:
    blind = [Party(share, (SHORT,), nobody_known) for share in (10, 20, 30)]
    for seen in play(arithmetic, blind, 4):
        assert max(seen.windows(0)) <= seen.share + 1
        assert seen.mean(1) >= seen.share / 3  # no less than its turn at the card
    (alone,) = play(arithmetic, blind[:1], 4)
    assert_kept(alone)


def too_much(percents: Mapping[int, int], mine: set[int]) -> tuple[int, int, int]:
    _, others, listed = as_it_is(percents, mine)
    return 100, others, listed


def taken_for_another(percents: Mapping[int, int], mine: set[int]) -> tuple[int, int, int]:
    own, others, listed = as_it_is(percents, mine)
    return others, own, listed


def half(percents: Mapping[int, int], mine: set[int]) -> tuple[int, int, int]:
    own, others, listed = as_it_is(percents, mine)
    return own // 2, others, listed


@pytest.mark.parametrize("wrong", [too_much, taken_for_another, half], ids=lambda wrong: wrong.__name__)
def test_wrong_figures_never_take_away_more_than_missing_ones(arithmetic: Arithmetic, wrong) -> None:  # type: ignore[no-untyped-def]
    (alone,) = play(arithmetic, [Party(30, (SHORT,), wrong)], 4)
    assert_kept(alone)  # alone nothing is believed: the one that is busy is the one at work
    told, other = play(arithmetic, [Party(10, (SHORT,), wrong), party(30, SHORT)], 5)
    assert 10 / 2 - 1 <= told.mean(1) <= 2 * 10 + ABOVE
    assert abs(other.mean(1) - 30) <= 3


def test_after_nvml_fell_silent_busy_time_is_charged_in_full_again(arithmetic: Arithmetic) -> None:
    until = {"samples": 12}

    def silent(percents: Mapping[int, int], mine: set[int]) -> tuple[int, int, int]:
        until["samples"] -= 1
        return as_it_is(percents, mine) if until["samples"] > 0 else nobody_known(percents, mine)

    told, _ = play(arithmetic, [Party(30, (SHORT,), silent), party(40, between(SHORT, 0, 3 * SECOND))], 6)
    assert max(told.windows(0)) <= 30 + ABOVE
    assert abs(told.mean(4) - 30) <= 1


WORDS = [name for name, _ in layout.RegionCard._fields_ if name.endswith(("_ns", "_us"))]
ANY = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1, EPOCH]))


@given(
    words=st.lists(ANY, min_size=len(WORDS), max_size=len(WORDS)),
    others=st.lists(ANY, min_size=9, max_size=9),
)
def test_no_bytes_in_the_region_lead_astray(
    arithmetic: Arithmetic, words: list[int], others: list[int]
) -> None:
    """The tenant can write there: whatever it is, credit and waits stay within bounds."""
    card, past, beside = layout.RegionCard(), Past(), Neighbourhood()
    for name, word in zip(WORDS, words, strict=True):
        setattr(card, name, word)
    at, share = ctypes.pointer(card), Share(30, 30, False)
    minute = 60 * SECOND
    busy, in_flight, own, theirs, listed, until_us, until, credit, due = others
    card.cap.ns, card.due.ns = ctypes.c_int64(credit).value, ctypes.c_int64(due).value
    card.cap.at_ns, card.due.at_ns = due, credit
    for now in range(EPOCH, EPOCH + SECOND, 100 * MS):
        claim = Claim(0, 0, *others[:7])
        neighbour = arithmetic.heard(claim, now)
        arithmetic.update(beside, at, now, ctypes.pointer(neighbour), 1, Run(own, in_flight))
        part = arithmetic.own_part(at, now, beside)
        assert 0 <= part.part <= 1
        arithmetic.charge(at, share, Busy(busy, own))
        headroom = arithmetic.headroom(at, share, now, in_flight, bool(due % 2))
        assert -2 * minute <= headroom <= 2 * minute
        assert 50 * US <= arithmetic.share_wait(share, headroom) <= 5 * MS
        arithmetic.owed(at, share, now, in_flight, bool(credit % 2))
        arithmetic.wake(at, now, 0, beside)
        arithmetic.lead(at, share, in_flight, beside, 0, 0)
        arithmetic.note(past, at, now)
        how = arithmetic.ask(at, now, now // US)
        sample = Sample(until_us, own % 200, theirs % 300, listed % 2**32)
        arithmetic.learn(at, share, now, in_flight, past, sample, until, how)
        until_us, until = now // US, now
    assert -2 * minute <= card.cap.ns <= 2 * minute + 2 * SECOND
