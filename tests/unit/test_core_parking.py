"""What authors may say of idle pods, and what is refused by a sentence."""

from __future__ import annotations

import pytest

from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.parking import Order, WhenIdle, check_parking, encode_parked, order, parked, when_idle

WHEN, AFTER, PARK, PARKED = (f"gpuslice.io/{each}" for each in ("when-idle", "idle-after", "park", "parked"))


@pytest.mark.parametrize(
    ("annotations", "wish"),
    [
        ({}, WhenIdle(False, 300.0)),
        ({WHEN: "keep", AFTER: "2h"}, WhenIdle(False, 7200.0)),
        ({WHEN: "park"}, WhenIdle(True, 300.0)),
        ({WHEN: "park", AFTER: "30s"}, WhenIdle(True, 30.0)),
        ({AFTER: "168h"}, WhenIdle(False, 604800.0)),
    ],
)
def test_an_author_says_whether_and_after_which_time(annotations: dict[str, str], wish: WhenIdle) -> None:
    assert when_idle(annotations) == wish
    check_parking(annotations)


@pytest.mark.parametrize(
    ("annotations", "words"),
    [
        ({WHEN: "sleep"}, "keep or park"),
        ({WHEN: "Park"}, "keep or park"),
        ({WHEN: ""}, "keep or park"),
        ({AFTER: "5"}, "such as 5m"),
        ({AFTER: "5 m"}, "such as 5m"),
        ({AFTER: "1.5h"}, "such as 5m"),
        ({AFTER: "1h30m"}, "such as 5m"),
        ({AFTER: "-5m"}, "such as 5m"),
        ({AFTER: "9s"}, "from 10s to 168h"),
        ({AFTER: "0m"}, "from 10s to 168h"),
        ({AFTER: "169h"}, "from 10s to 168h"),
        ({AFTER: "\u0665m"}, "such as 5m"),
        ({PARK: "now"}, "park or wake"),
        ({PARK: ""}, "park or wake"),
    ],
)
def test_what_the_agent_could_not_read_is_refused(annotations: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as refused:
        check_parking(annotations)
    assert next(iter(annotations)) in str(refused.value)


def test_an_order_is_to_park_or_to_wake() -> None:
    assert [order({}), order({PARK: "park"}), order({PARK: "wake"})] == [None, Order.PARK, Order.WAKE]


def test_what_is_recorded_is_read_back_and_nonsense_is_nothing() -> None:
    amounts = {"main": {"GPU-1": 1 << 30}, "side": {"GPU-1": 5}}
    text = encode_parked(amounts)
    assert text is not None
    assert parked({PARKED: text}) == amounts
    assert encode_parked({}) is None
    for nonsense in ("", "[]", '{"main":5}', '{"main":{"GPU-1":"5"}}'):
        assert parked({PARKED: nonsense}) == {}
