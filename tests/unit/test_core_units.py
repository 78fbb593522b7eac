"""Units and the limit formula: what rounding down loses is shared out again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.core.units import card_units, limit_bytes, limit_mib


@pytest.mark.parametrize(
    ("total_mib", "request_units", "limit"),
    [
        (16130, 4, 4301),
        (16130, 3, 3226),
        (16130, 2, 2150),
        (15079, 4, 4308),
        (15079, 3, 3231),
        (15360, 3, 3072),
        (23028, 8, 8373),
    ],
)
def test_limits_are_the_published_ones(total_mib: int, request_units: int, limit: int) -> None:
    assert limit_mib(total_mib, request_units, card_units(total_mib)) == limit


def test_a_limit_in_bytes_is_a_whole_number_of_mib() -> None:
    assert limit_bytes(16130, 4, 15) == 4509925376 == 4301 << 20


def test_a_unit_of_a_mib_cuts_a_card_into_what_it_has() -> None:
    assert card_units(16130, "MiB") == 16130
    assert limit_mib(16130, 4301, 16130) == 4301


@given(st.integers(1024, 1_000_000))
def test_all_units_together_are_the_whole_card(total_mib: int) -> None:
    units = card_units(total_mib)
    assert limit_mib(total_mib, units, units) == total_mib
    assert limit_mib(total_mib, 0, units) == 0


def test_a_card_smaller_than_a_unit_cannot_be_divided() -> None:
    assert card_units(1023) == 0
    with pytest.raises(ValueError, match="a card of 1023 MiB with 0 units cannot be divided"):
        limit_mib(1023, 0, card_units(1023))


@pytest.mark.parametrize("request_units", [-1, 16])
def test_more_than_a_card_or_less_than_nothing_is_no_request(request_units: int) -> None:
    with pytest.raises(ValueError, match=f"{request_units} units are not within a card of 15"):
        limit_mib(16130, request_units, 15)
