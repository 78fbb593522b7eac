"""Compute that is lent, long work and several streams, in virtual time (tests/shares)."""

from __future__ import annotations

import ctypes
import statistics
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuslice.adapters.region import layout
from tests.shares.arithmetic import Arithmetic, Busy, Neighbour, Neighbourhood, Report, Run, Share
from tests.shares.card import EPOCH, MS, SECOND, US, Card, Process
from tests.shares.play import Party, Seen, fair, party, play
from tests.shares.programs import (
    Program,
    between,
    grids,
    long_beside_short,
    mixed,
    on_and_off,
    on_streams,
    one_by_one,
    queued,
    requests,
)
from tests.shares.throttle import Container, Throttle, nobody_known

PARTS = Path(__file__).resolve().parents[2] / "native/build/tests/libvirtual.so"
BUSY = 97.0
"""Percent of the card that is used whenever somebody wants it."""
WORKS: dict[str, Program] = {
    "200 us, queued": queued(200 * US),
    "2 ms, queued": queued(2 * MS),
    "20 ms, one by one": one_by_one(20 * MS),
    "50 us to 5 ms": mixed(50 * US, 5 * MS),
    "four streams": on_streams(500 * US, 4, ahead=64),
}


@pytest.fixture(scope="module")
def arithmetic() -> Arithmetic:
    if not PARTS.exists():
        pytest.skip("native/build/tests is not built: make native")
    return Arithmetic(str(PARTS))


def assert_fair(found: list[Seen], from_s: float, points: float = 2.0, busy: float = BUSY) -> None:
    """Nothing idle, and each has its part of it by weight."""
    weights, means = sum(each.share for each in found), [each.mean(from_s) for each in found]
    assert sum(means) >= busy
    for each, mean in zip(found, means, strict=True):
        assert abs(100 * mean / sum(means) - 100 * each.share / weights) <= points


@pytest.mark.parametrize("slice_ns", [0, 2 * MS], ids=["at once", "in turns"])
@pytest.mark.parametrize("name", WORKS)
@pytest.mark.parametrize("mix", [(30, 70), (10, 20, 30), (5, 95)], ids=str)
def test_the_whole_card_is_divided_by_weight(
    arithmetic: Arithmetic, mix: tuple[int, ...], name: str, slice_ns: int
) -> None:
    seconds = 9 if name == "20 ms, one by one" else 3
    found = play(
        arithmetic, [fair(share, WORKS[name]) for share in mix], seconds, slice_ns=slice_ns, meet=True
    )
    # Programs pause by themselves; of several streams' kernels each counts in full towards what is under way.
    assert_fair(found, from_s=1, busy=90 if name == "four streams" else 96)


@pytest.mark.parametrize("mix", [(30, 70), (10, 20, 30), (25, 25, 25, 25)], ids=str)
def test_who_has_waited_for_long_wakes_up_when_a_turn_can_end(
    arithmetic: Arithmetic, mix: tuple[int, ...]
) -> None:
    """Once in eight milliseconds or so; those who then slept for another one left 2 % of the card idle."""
    parties = [fair(share, one_by_one(500 * US, 10 * US)) for share in mix]
    assert_fair(play(arithmetic, parties, 3, meet=True), from_s=1)


@pytest.mark.parametrize(("kernel_ns", "seconds"), [(500 * MS, 40), (3 * SECOND, 150)], ids=["500 ms", "3 s"])
@pytest.mark.parametrize("mix", [(30, 70), (10, 20, 30)], ids=str)
def test_long_kernels_are_divided_too(
    arithmetic: Arithmetic, mix: tuple[int, ...], kernel_ns: int, seconds: int
) -> None:
    """Nobody asks NVML while a program waits for one: neighbours know who had work meanwhile."""
    found = play(arithmetic, [fair(share, one_by_one(kernel_ns)) for share in mix], seconds, meet=True)
    assert_fair(found, from_s=kernel_ns / SECOND * 4, points=3.0)


def test_alone_a_container_is_lent_the_whole_card(arithmetic: Arithmetic) -> None:
    (seen,) = play(arithmetic, [fair(10, queued(200 * US))], 2, meet=True)
    assert min(seen.windows(0)) >= BUSY


def test_what_is_lent_is_taken_back_at_once(arithmetic: Arithmetic) -> None:
    """A neighbour comes after two seconds and goes after four: within a tenth of a second all has changed."""
    guest = between(queued(MS), 2 * SECOND, 4 * SECOND)
    stays, comes = play(arithmetic, [fair(30, queued(200 * US)), fair(70, guest)], 6, meet=True)
    assert stays.mean(0.5, 2) >= BUSY
    assert comes.windows(2.0, 0.1)[1] >= 60  # the very first tenth is what was under way
    assert abs(stays.mean(2.1, 4) - 30) <= 2
    assert stays.mean(4.1) >= BUSY


def test_pauses_of_milliseconds_are_lent(arithmetic: Arithmetic) -> None:
    """Half of the card is what the one that pauses leaves. Where only claims ran out 80 % was used."""
    found = play(
        arithmetic, [fair(50, queued(200 * US)), fair(50, on_and_off(MS, 20 * MS, 20 * MS))], 4, meet=True
    )
    assert sum(each.mean(1) for each in found) >= 95


def test_a_cap_holds_beside_idle_neighbours_that_tell(arithmetic: Arithmetic) -> None:
    seen, _ = play(
        arithmetic, [party(30, queued(200 * US)), party(70, on_and_off(MS, 20 * MS, 500 * MS))], 4, meet=True
    )
    assert abs(seen.mean(1) - 30) <= 1


@pytest.mark.parametrize("kernel_ns", [200 * US, 2 * MS, 20 * MS], ids=["200 us", "2 ms", "20 ms"])
def test_an_interactive_tenant_waits_for_no_more_than_a_kernel(
    arithmetic: Arithmetic, kernel_ns: int
) -> None:
    """99 of 100 requests are answered within a batch kernel and 5 ms, and the card stays busy."""
    batch = queued(kernel_ns)
    asks, works = play(
        arithmetic, [fair(20, requests(2 * MS, 20 * MS), interactive=True), fair(80, batch)], 6, meet=True
    )
    delays = asks.processes[0].delays
    assert statistics.quantiles(delays, n=100)[98] <= kernel_ns + 5 * MS
    assert asks.mean(1) + works.mean(1) >= 93
    assert asks.charged_ns == pytest.approx(asks.processes[0].done, rel=0.1)  # it came to 0.4 and 0.6 of that


# ---- long work, several streams, unknown work


@pytest.mark.parametrize("share", [10, 30])
def test_queued_kernels_of_three_seconds_are_charged_in_full(arithmetic: Arithmetic, share: int) -> None:
    (seen,) = play(arithmetic, [party(share, queued(3 * SECOND, ahead=8))], 120)
    assert abs(seen.mean(0) - share) <= 3  # one kernel is 2.5 points of two minutes


def test_nobody_waits_for_another_streams_kernel(arithmetic: Arithmetic) -> None:
    """While a kernel of two seconds runs, what runs beside it takes nothing more of the card."""
    (seen,) = play(arithmetic, [party(50, long_beside_short(2 * SECOND, 200 * US))], 12)
    assert seen.processes[0].done_on[2] >= 1000 * 12 * 0.3
    assert seen.mean(0) <= 50 + 10


@pytest.mark.parametrize("short_ns", [20 * US, 200 * US])
def test_short_kernels_hide_no_longer_ones_beside_them(arithmetic: Arithmetic, short_ns: int) -> None:
    """The short ones end first; what has run until then on the other stream is charged all the same."""
    (seen,) = play(arithmetic, [Party(30, (long_beside_short(9 * MS, short_ns),), nobody_known)], 6)
    assert 25 <= seen.mean(1) <= 33


def test_streams_side_by_side_keep_to_the_share(arithmetic: Arithmetic) -> None:
    (seen,) = play(arithmetic, [party(30, on_streams(500 * US, 4))], 3)
    assert 26 <= seen.mean(1) <= 31


def test_a_flood_of_unknown_kernels_keeps_no_launch_waiting_for_minutes(arithmetic: Arithmetic) -> None:
    (seen,) = play(arithmetic, [party(10, grids(1500 * MS, 62))], 120)
    assert seen.mean(0) <= 10 + 3
    assert all(delay <= 61 * SECOND for delay in seen.processes[0].delays)


# ---- the parts alone


def test_what_running_work_still_needs_is_what_it_has_not_had_of_the_card(arithmetic: Arithmetic) -> None:
    """A kernel of 20 ms beside another's: after ten of them it needs 15 more. It told of ten."""
    card = Card(arithmetic)
    boxes = [Container(Share(50, 100, False), arithmetic, card) for _ in range(2)]
    for box in boxes:
        box.meet(boxes)
    processes = [Process(card) for _ in boxes]
    one, other = (Throttle(*each, lambda: 0.0) for each in zip(processes, boxes, strict=True))

    def launch(throttle: Throttle, own_ns: int) -> None:
        for step in throttle.launch(own_ns):
            card.advance(card.now + (step or 0))

    launch(one, 20 * MS)  # nobody knows its length before
    card.advance(card.now + 30 * MS)
    one.look_now()
    launch(one, 20 * MS)
    other.claim(500 * MS)
    processes[1].launch(500 * MS, 0)
    card.advance(card.now + 10 * MS)
    assert not list(one.awaited())  # from something else: the card is as busy as before
    assert boxes[0].under_way_ns() == pytest.approx(15 * MS, rel=0.05)


@settings(max_examples=60, deadline=None)
@given(
    launches=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 3000), st.integers(0, 2000)), min_size=1, max_size=60
    )
)
@example(
    launches=[(0, 2, 0), (0, 262, 252), (1, 2, 0), (0, 1, 0)]
)  # the short one ends while the long one runs
def test_time_is_charged_once_whatever_finishes_first(
    arithmetic: Arithmetic, launches: list[tuple[int, int, int]]
) -> None:
    """On any streams, in any order: what is charged is the time in which any of it ran."""
    card = Card(arithmetic)
    process = Process(card)
    box = Container(Share(99, 99, False), arithmetic, card)
    throttle = Throttle(process, box, lambda: 0.0)
    for stream, own_us, pause_us in launches:
        for step in throttle.launch(own_us * US, key=own_us, stream=stream):
            card.advance(card.now + (step or 0))
        card.advance(card.now + pause_us * US)
    while process.has_work():
        card.advance(card.now + MS)
        throttle.look_now()
    throttle.look_now()
    throttle.look_now()
    launched = len(launches)
    assert box.under_way_ns() == 0
    assert abs(box.entry.charged_ns - process.done) <= 60 * US * launched + 0.05 * process.done


@given(
    used=st.lists(st.integers(0, 10 * SECOND), min_size=2, max_size=8),
    weights=st.lists(st.integers(1, 99), min_size=8, max_size=8),
)
def test_somebody_may_always_go(arithmetic: Arithmetic, used: list[int], weights: list[int]) -> None:
    """The one furthest behind of those that want the card waits for nobody: none starves."""
    leads = []
    for me, own in enumerate(used):
        card = layout.RegionCard(virtual_ns=own)
        others = [
            Neighbour(i, theirs, 0, weights[i], False, True) for i, theirs in enumerate(used) if i != me
        ]
        beside = Neighbourhood(count=len(others))
        for i, other in enumerate(others):
            beside.others[i] = other
        leads.append(arithmetic.lead(ctypes.pointer(card), Share(weights[me], 100, False), 0, beside, 0, 0))
    assert min(leads) <= 0


def test_a_neighbour_that_lies_takes_only_what_is_lent(arithmetic: Arithmetic) -> None:
    """It says that it wants the card and never had any: what others are due they get all the same."""
    at = ctypes.pointer(layout.RegionCard(virtual_ns=100 * SECOND))
    share, beside = Share(30, 100, False), Neighbourhood(count=1)
    beside.others[0] = Neighbour(0, 0, 0, 1, True, True)
    assert arithmetic.lead(at, share, 0, beside, 0, 0) > SECOND
    used = 0
    for now in range(EPOCH, EPOCH + 10 * SECOND, MS):
        if arithmetic.owed(at, share, now, 0, False) > 0:
            arithmetic.charge(at, share, Busy(MS, MS))
            used += MS
    assert 0.26 <= used / (10 * SECOND) <= 0.3


def test_what_neighbours_did_stays_known_when_they_have_gone(arithmetic: Arithmetic) -> None:
    """It was 0 once nobody was there and samples told: work under way since then was charged nothing."""
    card = layout.RegionCard(recent_busy_ns=SECOND, recent_own_ns=SECOND // 2, learned_at_ns=SECOND)
    assert arithmetic.own_part(card, SECOND, Neighbourhood(busy_ns=5 * SECOND)).others_ns == 5 * SECOND


def heard(claims: list[tuple[int, int]]) -> Neighbourhood:
    """Neighbours that told at the one time of so much work."""
    beside = Neighbourhood(count=len(claims))
    for i, (at_ns, work_ns) in enumerate(claims):
        report = Report(at_ns, work_ns, 0, EPOCH + 1000 * SECOND, Run(), bool(work_ns), False)
        beside.others[i] = Neighbour(i, 0, 0, 50, False, True, False, at_ns + work_ns, 0, report)
    return beside


@pytest.mark.parametrize(
    ("claims", "own", "ends"),
    [
        ([(0, 20)], (0, 0), [20]),
        ([(0, 20)], (5, 15), [25]),
        ([(0, 20)], (0, 100), [40]),
        ([(0, 20), (10, 20)], (0, 0), [30, 40]),
        ([(0, 20), (30, 20)], (25, 35), [20, 52.5]),
        ([(0, 30), (0, 30)], (0, 30), [70, 70]),
    ],
)
def test_work_ends_later_by_what_others_had_of_the_card_meanwhile(
    arithmetic: Arithmetic, claims: list[tuple[int, int]], own: tuple[int, int], ends: list[float]
) -> None:
    beside = heard([(EPOCH + at * MS, work * MS) for at, work in claims])
    arithmetic.divide(beside, EPOCH + 100 * MS, Run(*(EPOCH + at * MS for at in own)))
    found = [(beside.others[i].ends_ns - EPOCH) / MS for i in range(len(claims))]
    assert found == pytest.approx(ends, abs=0.001)


def test_work_ends_later_by_what_others_had_that_have_ended_since(arithmetic: Arithmetic) -> None:
    beside = heard([(EPOCH, 20 * MS), (EPOCH + 30 * MS, 20 * MS)])
    beside.others[1].report.ran = Run(EPOCH + 5 * MS, EPOCH + 15 * MS)
    arithmetic.divide(beside, EPOCH + 100 * MS, Run())
    found = [(beside.others[i].ends_ns - EPOCH) / MS for i in range(2)]
    assert found == pytest.approx([25, 50], abs=0.001)


@given(
    claims=st.lists(st.tuples(st.integers(0, SECOND), st.integers(0, SECOND)), min_size=1, max_size=32),
    own=st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
)
def test_no_work_ends_before_it_would_alone_nor_after_all_the_others(
    arithmetic: Arithmetic, claims: list[tuple[int, int]], own: tuple[int, int]
) -> None:
    beside = heard([(EPOCH + at, work) for at, work in claims])
    arithmetic.divide(beside, EPOCH + SECOND, Run(*own))
    latest = max(EPOCH + at for at, _ in claims) + 2 * sum(work for _, work in claims) + len(claims)
    for i, (at, work) in enumerate(claims):
        assert EPOCH + at + work <= beside.others[i].ends_ns <= max(latest, EPOCH + at + work)


def test_where_nvml_cannot_tell_neighbours_do(arithmetic: Arithmetic) -> None:
    blind = [Party(share, (queued(MS),), nobody_known, cap=100) for share in (30, 70)]
    assert_fair(play(arithmetic, blind, 5, meet=True), from_s=1, points=3.0)


@given(waits=st.integers(0, 2**64 - 1), headroom=st.integers(-(2**62), 2**62))
def test_a_wait_is_short_whatever_is_asked(arithmetic: Arithmetic, waits: int, headroom: int) -> None:
    assert 50 * US <= arithmetic.share_wait(Share(waits % 101, waits % 101, False), headroom) <= 5 * MS
