"""Who borrows how much of a card, and who loses it first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuslice.core.lending import LEAST_STEP, Borrower, kept, leases

GIB = 1 << 30


def borrower(name: str, used: int = 0, most: int = 40 * GIB, priority: int = 0, came: int = 0) -> Borrower:
    return Borrower((name, "main"), used, most, priority, came)


def of(found: dict[tuple[str, str], int]) -> dict[str, int]:
    return {uid: lease // GIB for (uid, _), lease in found.items()}


def test_what_nobody_requested_is_divided_evenly_up_to_what_each_may_have() -> None:
    found = leases([borrower("a"), borrower("b", most=4 * GIB), borrower("c")], 24 * GIB)
    assert of(found) == {"a": 10, "b": 4, "c": 10}


def test_what_is_in_use_stays_before_the_rest_is_divided() -> None:
    assert of(leases([borrower("a", 10 * GIB), borrower("b")], 16 * GIB)) == {"a": 13, "b": 3}


def test_the_lowest_priority_loses_first_and_no_more_than_is_missing() -> None:
    found = leases([borrower("low", 8 * GIB, priority=-1), borrower("high", 9 * GIB)], 12 * GIB)
    assert of(found) == {"high": 9, "low": 3}


def test_of_equal_priority_the_one_with_the_most_beyond_its_request_loses_first() -> None:
    assert of(leases([borrower("more", 9 * GIB), borrower("less", 5 * GIB)], 6 * GIB)) == {
        "less": 5,
        "more": 1,
    }


def test_of_equals_the_youngest_loses_first() -> None:
    found = leases([borrower("young", 5 * GIB, came=2), borrower("old", 5 * GIB, came=1)], 5 * GIB)
    assert of(found) == {"old": 5, "young": 0}


sizes = st.integers(0, 80).map(lambda gib: gib * GIB)
crowds = st.lists(st.tuples(sizes, sizes, st.integers(-2, 2), st.integers(0, 5)), max_size=6).map(
    lambda rows: [
        Borrower((f"p{number}", "main"), min(used, most), most, priority, came)
        for number, (used, most, priority, came) in enumerate(rows)
    ]
)


@given(crowds, sizes)
def test_no_more_is_lent_than_is_free_and_whoever_loses_comes_last(crowd: list[Borrower], free: int) -> None:
    found = leases(crowd, free)
    assert sum(found.values()) <= free
    assert all(0 <= found[each.name] <= each.most_bytes for each in crowd)
    losers = [each for each in crowd if found[each.name] < each.used_bytes]
    lost = sum(each.used_bytes - found[each.name] for each in losers)
    assert lost == max(0, sum(each.used_bytes for each in crowd) - free)  # the excess alone

    def rank(each: Borrower) -> tuple[int, int, int, tuple[str, str]]:
        return -each.priority, each.used_bytes, each.came, each.name

    keepers = [each for each in crowd if each not in losers and each.used_bytes]
    assert not losers or not keepers or max(map(rank, keepers)) < min(map(rank, losers))


@given(crowds, sizes, sizes)
def test_leases_stay_as_long_as_they_suffice(crowd: list[Borrower], before: int, free: int) -> None:
    now = leases(crowd, before)
    then = kept(now, crowd, free)
    assert sum(then.values()) <= free
    assert kept(then, crowd, free) == then


def test_a_lease_moves_to_whoever_is_at_the_end_of_its_own() -> None:
    crowd = [borrower("a"), borrower("b")]
    now = leases(crowd, 20 * GIB)
    assert kept(now, [borrower("a", 8 * GIB), borrower("b")], 20 * GIB) == now
    assert of(kept(now, [borrower("a", 9 * GIB), borrower("b")], 20 * GIB)) == {"a": 14, "b": 5}
    assert LEAST_STEP < GIB
