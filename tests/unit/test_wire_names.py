"""Node names as bytes mean the same as node names as strings."""

from __future__ import annotations

import contextlib
from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.adapters.wire.errors import MalformedError
from gpuslice.adapters.wire.extender import FilterResult, NodeList
from gpuslice.adapters.wire.names import UNKNOWN, NameTable, framed

NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,60}[a-z0-9])?", fullmatch=True)


def plain(row_of: dict[str, int], names: list[str]) -> list[int]:
    return [row_of.get(name, UNKNOWN) for name in names]


@given(st.lists(NAMES, unique=True, max_size=60), st.lists(NAMES, max_size=30), st.randoms())
def test_rows_are_those_of_a_dictionary(known: list[str], others: list[str], dice: object) -> None:
    row_of = {name: row for row, name in enumerate(reversed(known))}
    table = NameTable(row_of)
    asked = known[::2] + others + known[1::2]
    dice.shuffle(asked)  # type: ignore[attr-defined]
    assert table.rows(msgspec.json.encode(asked)).tolist() == plain(row_of, asked)


def test_thousands_of_names_that_differ_in_a_digit_are_told_apart() -> None:
    names = [f"ip-10-{a}-{b}.eu-west-1.compute.internal" for a in range(100) for b in range(100)]
    row_of = {name: row for row, name in enumerate(names)}
    table = NameTable(row_of)
    asked = [*names[5000:], "ip-10-100-1.eu-west-1.compute.internal", *names[:5000]]
    assert table.rows(msgspec.json.encode(asked)).tolist() == plain(row_of, asked)


def test_names_that_differ_eight_letters_apart_are_told_apart() -> None:
    names = [f"gpu-r{a}{b}-{c}-node{d}{e}" for a, b, c, d, e in product("0123456789", repeat=5)][:20_000]
    row_of = {name: row for row, name in enumerate(names)}
    table = NameTable(row_of)
    assert table.rows(msgspec.json.encode(names)).tolist() == list(range(len(names)))
    assert set(table.rows(msgspec.json.encode([f"{name}x" for name in names])).tolist()) == {UNKNOWN}


@given(st.integers(1, 20), st.data())
def test_names_of_one_length_are_read_like_any(length: int, data: st.DataObject) -> None:
    name = st.text("ab-\u00e4", min_size=length, max_size=length)
    names = data.draw(st.lists(name, min_size=1, max_size=20))
    row_of = {each: row for row, each in enumerate(dict.fromkeys(names[::2])) if each.isascii()}
    assert NameTable(row_of).rows(msgspec.json.encode(names)).tolist() == plain(row_of, names)


@given(st.binary(max_size=40), st.integers(0, 30), st.integers(0, 5))
def test_what_is_no_list_is_an_error_or_names_nobody(junk: bytes, at: int, cut: int) -> None:
    """Where bytes in place of others make it no JSON, no node may be taken for one that was asked about."""
    whole = b'["node-a","node-b","node-c"]'
    raw = whole[:at] + junk + whole[at + cut :]
    table = NameTable({"node-a": 0, "node-b": 1, "node-c": 2})
    try:
        expected = plain({"node-a": 0, "node-b": 1, "node-c": 2}, msgspec.json.decode(raw, type=list[str]))
    except (msgspec.DecodeError, UnicodeDecodeError):
        with contextlib.suppress(MalformedError):
            assert UNKNOWN in table.rows(raw).tolist()
    else:
        assert table.rows(raw).tolist() == expected


@pytest.mark.parametrize(
    ("raw", "rows"),
    [
        (b"[]", []),
        (b' ["a"]', [0]),
        (b'[ "a" ,\n "b" , "x"]', [0, 2, -1]),
        (b'["\\u0061"]', [0]),
        (b'["a,b","b"]', [-1, 2]),
        (b'["","a"]', [-1, 0]),
        ('["ä"]'.encode(), [-1]),
    ],
)
def test_any_json_list_of_strings_is_read(raw: bytes, rows: list[int]) -> None:
    assert NameTable({"a": 0, "b": 2}).rows(raw).tolist() == rows


@pytest.mark.parametrize("raw", [b"[1,2]", b'{"a":1}', b'[{"a":"b"}]', b'["a",1]', b'[["a"]]', b"3"])
def test_anything_else_is_an_error(raw: bytes) -> None:
    with pytest.raises(MalformedError):
        NameTable({"a": 0}).rows(raw)


def test_without_nodes_every_name_is_unknown() -> None:
    assert NameTable({}).rows(b'["a"]').tolist() == [UNKNOWN]


@given(st.lists(NAMES, unique=True, min_size=1, max_size=40))
def test_what_is_written_is_json_that_says_so(names: list[str]) -> None:
    table = NameTable({name: row for row, name in enumerate(names)})
    rows = np.arange(len(names))[::-1]
    expected = names[::-1]
    scores = rows % 11
    assert msgspec.json.decode(table.names(rows)) == expected
    assert msgspec.json.decode(
        b"".join(framed([table.pairs(rows, 'no "room"')], b"{", b"}"))
    ) == dict.fromkeys(expected, 'no "room"')
    hosts = msgspec.json.decode(b"".join(framed([table.scores(rows, scores), b""], b"[", b"]")))
    assert [(each["Host"], each["Score"]) for each in hosts] == list(
        zip(expected, scores.tolist(), strict=True)
    )
    nobody = rows[:0]
    assert table.names(nobody) == b"[]"
    assert bytes(table.pairs(nobody, "x")) == bytes(table.scores(nobody, nobody)) == b""


def test_the_answer_of_filter_has_the_fields_of_the_protocol() -> None:
    nothing = {"Nodes": None, "NodeNames": None, "FailedNodes": None, "FailedAndUnresolvableNodes": None}
    whole = FilterResult(NodeList(items=[msgspec.Raw(b'{"a":1}')]), b'["n"]', error='no "pod"')
    failed = FilterResult(failed_nodes=(b"{", b'"n":"no"', b"}"))
    for result, said in (
        (FilterResult(), {**nothing, "Error": ""}),
        (failed, {**nothing, "FailedNodes": {"n": "no"}, "Error": ""}),
        (
            whole,
            {
                **nothing,
                "Nodes": {"metadata": {}, "items": [{"a": 1}]},
                "NodeNames": ["n"],
                "Error": 'no "pod"',
            },
        ),
    ):
        assert msgspec.json.decode(b"".join(result.pieces())) == said
