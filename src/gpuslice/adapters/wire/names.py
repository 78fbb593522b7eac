"""Lists of node names, from JSON to rows of the fleet and back, without a string for each name.

kube-scheduler sends every name of the cluster with every question, in an order of its own: at 5,000 nodes
that is 55 KB, and to make 5,000 strings, hash them and look them up costs more than to decide. Here the
names stay bytes. Each is hashed as 64-bit words straight from the body, all at once, and found in a table;
answers are put together from rows of ready-made JSON, padded with blanks to one width.

A hash stands for its name: every step of it can be undone, so names that differ in one word never share one,
and of names that differ in several about one pair in 2⁶⁴ does. What follows a name in the list is hashed with
it: where every name is found, the list needs no other proof that it is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from gpuslice.adapters.wire.errors import UNREADABLE, MalformedError

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]
Json = bytes | memoryview
Pieces = tuple[Json, ...]
"""JSON, in pieces that are not put together: they are large enough that each copy of them counts."""

UNKNOWN = -1
_WORD = 8
_SHIFT = np.uint64(29)
LONGEST_NAME = 300  # in bytes, and more than that: a node's name has 253 at most
_SPARE_BITS = 3  # a table has eight to sixteen places for each name
_QUOTE, _COMMA = ord('"'), ord(",")
_EDGE = b'","'  # what stands between two names, and is taken to stand after the last as well
_NUMBERS = np.array([list(b"%2d" % number) for number in range(20)], dtype=np.uint8)
_KEPT_TEXTS = 8
_TAIL = np.array([(1 << (8 * count)) - 1 for count in range(_WORD)] + [(1 << 64) - 1], dtype=np.uint64)
"""Masks that keep the first bytes of a little-endian word."""


class NameTable:
    """The names of the fleet's rows, for one state of the fleet; make a new one when nodes come or go."""

    def __init__(self, row_of: Mapping[str, int], seed: int = 0) -> None:
        self._row_of = dict(row_of)
        size = max(row_of.values(), default=-1) + 1
        self._quoted = _matrix(self._row_of, size)
        self._lines: dict[tuple[bytes, bytes], Bytes] = {}
        self._longest = self._quoted.shape[1] - 2 + len(_EDGE)
        words = -(-self._longest // _WORD)
        numbers = np.random.default_rng(seed).integers(0, 2**63, size=words, dtype=np.uint64)
        self._factors = numbers * np.uint64(2) + np.uint64(1)  # odd: what they multiply can be told again
        self._hash_of_row = np.zeros(size + 1, dtype=np.uint64)  # empty places of a table point to the last

        # a table by the first bits of a hash, and in order those for which it has no place
        names, rows = list(self._row_of), np.array(list(self._row_of.values()), dtype=np.int32)
        bits = max(4, len(names).bit_length() + _SPARE_BITS)
        self._shift = np.uint64(64 - bits)
        narrow = np.int16 if len(self._hash_of_row) < 1 << 15 else np.int32  # half the memory to look up in
        self._table = np.full(1 << bits, UNKNOWN, dtype=narrow)
        raw = msgspec.json.encode(names)
        hashes = self._hashes(raw, _uneven_cut(raw)) if names else np.zeros(0, dtype=np.uint64)
        self._hash_of_row[rows] = hashes
        self._table[self._places(hashes)] = rows
        left = np.flatnonzero(self._table.take(self._places(hashes)) != rows)
        left = left[np.argsort(hashes[left])]
        self._crowded = np.append(hashes[left], np.uint64(0))  # one more, for what is larger than all
        self._crowded_rows = np.append(rows[left], np.int32(UNKNOWN))

    def rows(self, raw: Json) -> Rows:
        """The row of each name in a JSON list of strings, `UNKNOWN` for names that are none of ours.

        Raises `MalformedError` when `raw` is not such a list.
        """
        if raw[:2] == b'["' and raw[-2:] == b'"]':
            for cut_of in (_even_cut, _uneven_cut):
                if (cut := cut_of(raw)) is not None:
                    rows = self._look_up(self._hashes(raw, cut), cut)
                    if rows.min() != UNKNOWN or _is_plain(raw, cut):
                        return rows
        get = self._row_of.get  # anything unusual goes the plain way
        return np.array([get(name, UNKNOWN) for name in name_list(raw)], dtype=np.int64)

    def names(self, rows: Rows) -> bytes:
        """A JSON list of these rows' names, as compact as Go writes it."""
        padded = self._cells(rows, b"", b",").tobytes()
        compact = padded.translate(None, b" ") if b" " in padded else padded
        return b"[" + compact[:-1] + b"]"

    def pairs(self, rows: Rows, text: str) -> memoryview:
        """``"name":"text"`` for each row, with commas between: the inside of a JSON object."""
        return _without_last(self._cells(rows, b"", b":" + msgspec.json.encode(text) + b","))

    def scores(self, rows: Rows, scores: Rows) -> memoryview:
        """``{"Host":"name","Score":n}`` for each row, with commas between; scores 0…19."""
        cells = self._cells(rows, b'{"Host":', b',"Score": 0},')
        cells[:, -4:-2] = _NUMBERS.take(scores, axis=0)
        return _without_last(cells)

    def _cells(self, rows: Rows, before: bytes, after: bytes) -> Bytes:
        """One line for each row: its quoted name between two texts; the lines of all rows are kept."""
        lines = self._lines.get((before, after))
        if lines is None:
            if len(self._lines) >= _KEPT_TEXTS:
                self._lines.clear()
            size, width = self._quoted.shape
            lines = np.empty((size, len(before) + width + len(after)), dtype=np.uint8)
            lines[:, : len(before)] = np.frombuffer(before, dtype=np.uint8)
            lines[:, len(before) : len(before) + width] = self._quoted
            lines[:, len(before) + width :] = np.frombuffer(after, dtype=np.uint8)
            self._lines[before, after] = lines
        cells: Bytes = lines.take(rows, axis=0)  # four times as fast as lines[rows]
        return cells

    # -- hashing ---------------------------------------------------------------------------------------------

    def _hashes(self, raw: Json, cut: _Cut) -> Words:
        """One 64-bit number for each name, from the last word to the first: a last word 0 changes nothing."""
        text = b"".join((memoryview(raw)[:-1], _EDGE[1:], bytes(_WORD * len(self._factors))))
        longest, shortest = int(cut.lengths.max()), int(cut.lengths.min())
        hashes: Words | None = None
        for number in reversed(range(min(-(-longest // _WORD), len(self._factors)))):
            start = number * _WORD
            everywhere = np.ndarray((len(raw),), dtype="<u8", buffer=text, offset=start, strides=(1,))
            word = everywhere[cut.starts].copy()
            if shortest < start + _WORD:
                word &= _TAIL.take(cut.lengths - start, mode="clip")
            if hashes is not None:
                hashes ^= hashes >> _SHIFT
                word ^= hashes
            hashes = word
            hashes *= self._factors[number]
        assert hashes is not None, "a cut has a length"
        return hashes

    def _look_up(self, hashes: Words, cut: _Cut) -> Rows:
        rows = self._table.take(self._places(hashes)).astype(np.int64)
        missed = (self._hash_of_row.take(rows) != hashes).nonzero()[0]
        if len(missed):
            places = self._crowded[:-1].searchsorted(hashes[missed])
            found = self._crowded[places] == hashes[missed]
            rows[missed] = np.where(found, self._crowded_rows[places], UNKNOWN)
        if cut.lengths.max() > self._longest:
            rows[np.broadcast_to(cut.lengths > self._longest, rows.shape)] = UNKNOWN
        return rows

    def _places(self, hashes: Words) -> Rows:
        """In the table, by the first bits."""
        return (hashes >> self._shift).view(np.int64)


def name_list(raw: Json) -> list[str]:
    """The names themselves. Raises `MalformedError`."""
    try:
        return msgspec.json.decode(raw, type=list[str])
    except UNREADABLE as error:
        raise MalformedError(f"the request body cannot be read: node names: {error}") from error


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where each name of a list starts, and how long it or each of them is with the `_EDGE` after it."""

    starts: Rows | slice
    lengths: Rows


def _even_cut(raw: Json) -> _Cut | None:
    """As if all names had the length of the first, as in many clusters: then they need not be looked for."""
    width = bytes(raw[:LONGEST_NAME]).find(b",")
    if width < len(_EDGE) or (len(raw) - 1) % width:
        return None
    return _Cut(slice(2, len(raw), width), np.array([width]))


def _uneven_cut(raw: Json) -> _Cut:
    """As if a comma always stood between two names."""
    commas = np.flatnonzero(np.frombuffer(raw, dtype=np.uint8) == _COMMA)
    starts = np.append(2, commas + 2)
    return _Cut(starts, np.append(commas + 2, len(raw) + 1) - starts)


def _is_plain(raw: Json, cut: _Cut) -> bool:
    """Whether it is a compact list of strings, cut where they end.

    With brackets around, a quote before and after each comma, no other quotes than these and no escapes it
    can only be that. The strings are not looked at here: what no JSON may hold is no node's name.
    """
    text = np.frombuffer(raw, dtype=np.uint8)
    starts = np.arange(len(raw))[cut.starts]
    between = [(text.take(starts[1:] - len(_EDGE) + at) == byte).all() for at, byte in enumerate(_EDGE)]
    return all(between) and np.count_nonzero(text == _QUOTE) == 2 * len(starts) and b"\\" not in bytes(raw)


def _matrix(row_of: Mapping[str, int], size: int) -> Bytes:
    """Each row's name in quotes, padded with blanks to a common width."""
    quoted = {row: msgspec.json.encode(name) for name, row in row_of.items()}
    width = max((len(name) for name in quoted.values()), default=2)
    blank = b'""'.ljust(width)
    lines = [quoted.get(row, blank).ljust(width) for row in range(size)]
    return np.frombuffer(b"".join(lines), dtype=np.uint8).reshape(size, width)


def framed(parts: Sequence[Json], opening: bytes, closing: bytes) -> Pieces:
    """Parts that are not empty, with commas between."""
    between = [piece for part in parts if part for piece in (b",", part)]
    return (opening, *between[1:], closing)


def _without_last(cells: Bytes) -> memoryview:
    """All bytes but the comma at the end, without a copy."""
    return cells.reshape(-1)[:-1].data
