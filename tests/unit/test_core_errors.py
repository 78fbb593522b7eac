"""What somebody wrote is repeated in logs, events and terminals: so that it is one line of words there."""

from __future__ import annotations

import pytest

from gpuslice.core.errors import LONGEST_VALUE, ContractError, InvalidRequestError
from gpuslice.core.nesting import TooDeepError, checked_depth


@pytest.mark.parametrize("kind", [ContractError, InvalidRequestError])
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("0,x", "0,x"),
        (4.5, "4.5"),
        ("ünï", "ünï"),
        ("\x1b[2J\n\u2028red\x07", "?[2J??red?"),
        ("7" * 5000, "7" * LONGEST_VALUE + "…"),
        ("http://me:se@cret@host/a@b", "http://…@host/a@b"),
    ],
)
def test_a_value_is_shown_as_one_line_that_nothing_obeys(
    kind: type[ContractError | InvalidRequestError], value: object, shown: str
) -> None:
    assert str(kind("field", value, "a number")) == f'field is "{shown}", must be a number'


@pytest.mark.parametrize("sign", [b"[", b'{"a":', b"- ", b"? "])
def test_what_is_nested_deeper_than_anybody_writes_is_refused_before_it_is_parsed(sign: bytes) -> None:
    """libyaml follows it with its stack, which ends the process: no parser may see it."""
    with pytest.raises(TooDeepError, match="more than 400 levels"):
        checked_depth(sign * 60_000)
    assert checked_depth(b"[" * 300 + b"]" * 300)
    assert checked_depth(b"a: [b]\n" * 10_000)
