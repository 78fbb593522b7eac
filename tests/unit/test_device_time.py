"""Who had how much of a card's time: charges decide where the samples include waits, and no lie pays."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpuslice.core.attribution import ContainerKey, Owner, Stranger
from gpuslice.core.device_time import TimeAccount, divide_time

A, B, C = (ContainerKey("default", name, "app") for name in "abc")
ratios = st.floats(0, 1)
cards = st.dictionaries(st.sampled_from([A, B, C, Stranger.HOST]), ratios, min_size=1)
charges = st.dictionaries(st.sampled_from([A, B, C]), st.floats(0, 3))
SECOND = 10**9


def about(expected: dict[Owner, float], points: float = 1.0) -> object:
    return pytest.approx(expected, abs=points / 100)


@given(ratios, cards, charges)
def test_the_cards_time_is_divided_and_nobody_had_more_than_was_sampled(
    time: float, sampled: dict[Owner, float], charged: dict[Owner, float]
) -> None:
    had = divide_time(time, sampled, charged)
    assert had.keys() == sampled.keys()
    assert sum(had.values()) == pytest.approx(min(time, sum(sampled.values())), abs=1e-9)
    assert all(-1e-9 <= had[user] <= sampled[user] + 1e-9 for user in sampled)


@given(cards, st.data())
def test_charges_that_are_complete_are_the_answer(sampled: dict[Owner, float], data: st.DataObject) -> None:
    true = {user: data.draw(st.floats(0, ratio)) for user, ratio in sampled.items()}
    assert divide_time(sum(true.values()), sampled, true) == pytest.approx(true, abs=1e-9)


@given(ratios, cards, charges, ratios)
def test_who_writes_a_lower_charge_has_nothing_added_and_the_others_nothing_taken(
    time: float, sampled: dict[Owner, float], charged: dict[Owner, float], lie: float
) -> None:
    honest = divide_time(time, sampled, charged)
    lied = divide_time(time, sampled, {**charged, A: lie * charged.get(A, 0.0)})
    if A in sampled:
        assert lied[A] <= honest[A] + 1e-9
    assert all(lied[user] >= honest[user] - 1e-9 for user in sampled if user != A)


@given(st.floats(0.01, 1), st.floats(0.01, 1), ratios, ratios)
def test_what_a_liar_writes_moves_no_more_than_the_samples_leave_open(
    of_liar: float, of_honest: float, one: float, other: float
) -> None:
    """Written as 0, its charge hides none of its time; too high, it takes none from the honest one."""
    true = {A: one * of_liar, B: other * of_honest}
    sampled: dict[Owner, float] = {A: of_liar, B: of_honest}
    time = sum(true.values())
    assume(0 < time <= 1)
    for user, lie in ((A, 0.0), (B, 1e9)):
        found = divide_time(time, sampled, {A: lie, B: true[B]})
        by_samples = time * sampled[user] / (of_liar + of_honest)
        assert found[user] >= min(true[user], by_samples) - 1e-9


def account(
    steps: int,
    card: float,
    sampled: dict[Owner, float],
    charged: dict[Owner, float],
    *,
    of: TimeAccount | None = None,
    step_s: float = 1.0,
    begin_ns: int = 0,
) -> dict[Owner, float]:
    """What is shown after steps that are all the same; `charged` in seconds a second."""
    of, found = of or TimeAccount(), dict(sampled)
    for step in range(steps):
        totals = {user: begin_ns + int(rate * step_s * step * SECOND) for user, rate in charged.items()}
        found = of.divide(card, sampled, totals, step_s if step else 0.0)
    return found


def test_two_containers_with_shares_of_30_and_70_as_an_h100_showed_them() -> None:
    assert account(30, 1.0, {A: 0.57, B: 0.96}, {A: 0.29, B: 0.71}) == about({A: 0.29, B: 0.71})


def test_a_liar_of_these_two_hides_nothing() -> None:
    assert account(30, 1.0, {A: 0.57, B: 0.96}, {A: 0.0, B: 0.70}) == about({A: 0.30, B: 0.70})
    assert account(30, 1.0, {A: 0.57, B: 0.96}, {A: 0.30, B: 0.0}) == about({A: 0.37, B: 0.63})


def test_shares_that_leave_the_card_idle_do_not_add_up_to_all_of_it() -> None:
    assert account(30, 0.6, {A: 0.5, B: 0.55}, {A: 0.3, B: 0.3}) == about({A: 0.3, B: 0.3})


def test_samples_that_fit_together_are_shown_as_they_are_whatever_is_charged() -> None:
    sampled: dict[Owner, float] = {A: 0.3, B: 0.72}
    assert account(30, 1.0, {A: 0.3, B: 0.68}, {A: 1.0, B: 0.0}) == {A: 0.3, B: 0.68}
    assert account(30, 1.0, {A: 0.95}, {}) == {A: 0.95}
    assert sum(account(30, 1.0, sampled, {}).values()) == pytest.approx(1.0)


def test_who_is_not_charged_has_the_rest() -> None:
    sampled: dict[Owner, float] = {A: 0.57, B: 0.99, Stranger.HOST: 0.99}
    assert account(30, 1.0, sampled, {A: 0.3}) == about({A: 0.3, B: 0.35, Stranger.HOST: 0.35})
    assert account(30, 1.0, {B: 0.99, C: 0.99}, {}) == about({B: 0.5, C: 0.5})


def test_kernels_of_seconds_are_charged_at_their_end() -> None:
    """Each container's every fourth step charges for the whole time since the last."""
    shown, accounts = [], TimeAccount()
    for step in range(120):
        ends = {A: step // 4 * 4, B: (step + 2) // 4 * 4}
        totals: dict[Owner, int] = {A: int(0.3 * ends[A] * SECOND), B: int(0.7 * ends[B] * SECOND)}
        shown.append(accounts.divide(1.0, {A: 0.57, B: 0.96}, totals, 1.0)[A])
    assert sum(shown[40:]) / 80 == pytest.approx(0.3, abs=0.02)
    assert all(0.2 < ratio < 0.4 for ratio in shown[40:])


@pytest.mark.parametrize("step_s", [0.1, 1.0, 30.0])
def test_the_time_between_two_samples_does_not_matter(step_s: float) -> None:
    steps = max(5, int(60 / step_s))
    found = account(steps, 1.0, {A: 0.57, B: 0.96}, {A: 0.29, B: 0.71}, step_s=step_s)
    assert found == about({A: 0.29, B: 0.71})


def test_a_new_exporter_takes_no_earlier_total_for_the_last_second() -> None:
    first = account(1, 1.0, {A: 0.57, B: 0.96}, {A: 0.3, B: 0.7}, begin_ns=3600 * SECOND)
    assert first == about({A: 0.37, B: 0.63})
    second = account(30, 1.0, {A: 0.57, B: 0.96}, {A: 0.3, B: 0.7}, begin_ns=3600 * SECOND)
    assert second == about({A: 0.3, B: 0.7})


def test_nor_is_it_taken_so_where_a_container_works_again_after_a_rest() -> None:
    accounts = TimeAccount()
    account(30, 1.0, {B: 0.96}, {B: 0.7}, of=accounts)
    accounts.divide(1.0, {A: 0.57, B: 0.96}, {A: 3600 * SECOND, B: int(0.7 * 30 * SECOND)}, 1.0)
    assert accounts.charged[A] == 0


def test_a_restart_and_a_refund_are_no_work() -> None:
    accounts = TimeAccount()
    account(30, 1.0, {A: 0.57, B: 0.96}, {A: 0.3, B: 0.7}, of=accounts)
    before = dict(accounts.charged)
    accounts.divide(1.0, {A: 0.57, B: 0.96}, {A: 0, B: int(0.7 * 30 * SECOND)}, 1.0)
    assert accounts.charged[A] == pytest.approx(before[A] * 0.905, rel=0.01)
    found = accounts.divide(1.0, {A: 0.57, B: 0.96}, {A: int(0.3 * SECOND), B: int(0.7 * 31 * SECOND)}, 1.0)
    assert found == about({A: 0.3, B: 0.7}, 4)


def test_a_total_that_a_tenant_makes_up_counts_for_no_more_than_all_the_time() -> None:
    accounts = TimeAccount()
    account(30, 1.0, {A: 0.57, B: 0.96}, {A: 0.3, B: 0.7}, of=accounts)
    accounts.divide(1.0, {A: 0.57, B: 0.96}, {A: 1 << 62, B: int(0.7 * 30 * SECOND)}, 1.0)
    assert accounts.charged[A] <= 1.0
    assert account(40, 1.0, {A: 0.57, B: 0.96}, {A: 0.3, B: 0.7}, of=accounts) == about({A: 0.3, B: 0.7}, 3)


def test_who_comes_to_a_card_in_use_is_shown_within_its_time_at_once_and_who_left_is_forgotten() -> None:
    accounts = TimeAccount()
    assert account(30, 0.99, {A: 0.99}, {}, of=accounts) == {A: 0.99}
    assert sum(accounts.divide(0.99, {A: 0.99, B: 0.99}, {}, 1.0).values()) <= 1.0 + 1e-9
    for _ in range(100):
        accounts.divide(0.99, {B: 0.99}, {}, 1.0)
    assert accounts.sampled.keys() == accounts.charged.keys() == {B}
    assert accounts.divide(0.99, {B: 0.99}, {}, 1.0) == {B: 0.99}


def test_a_card_that_rested_begins_anew() -> None:
    accounts = TimeAccount()
    account(30, 1.0, {A: 0.99}, {}, of=accounts)
    account(100, 0.0, {}, {}, of=accounts)
    found = account(3, 0.6, {A: 0.5, B: 0.55}, {A: 0.3, B: 0.3}, of=accounts)
    assert found == about({A: 0.3, B: 0.3}, 4)


def test_bursts_of_containers_in_turn_are_not_taken_for_waits() -> None:
    """The card's own sample is of another moment than the processes'; over some seconds they agree."""
    accounts, shown = TimeAccount(), 0.0
    for step in range(200):
        card = 0.8 if (step + 1) % 4 < 2 else 0.0  # a step late
        sampled: dict[Owner, float] = {A: 0.8 if step % 4 == 0 else 0.0, B: 0.8 if step % 4 == 1 else 0.0}
        shown += sum(accounts.divide(card, sampled, {}, 1.0).values())
    assert shown == pytest.approx(200 * 0.4, rel=0.02)
