"""Lists of node names, from JSON to rows of the fleet and back, without a string for each name.

kube-scheduler sends every name of the cluster with every question, in an order of its own: at 5,000 nodes
that is 55 KB, and to make 5,000 strings, hash them and look them up costs more than to decide. Here the
names stay bytes. Each is hashed as 64-bit words straight from the body, all at once, and found in a table;
answers are put together from rows of ready-made JSON, padded with blanks to one width.

A hash stands for its name: every step of it can be undone, so names that differ in one word never share one,
and of names that differ in several about one pair in 2⁶⁴ does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from gpuslice.adapters.wire.errors import UNREADABLE, MalformedError

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

UNKNOWN = -1
_WORD = 8
_SHIFT = np.uint64(29)
_SPARE_BITS = 2  # a table has four to eight places for each name
_QUOTE, _COMMA = ord('"'), ord(",")
_EDGE, _EDGE_BYTES = int.from_bytes(b'","', "little"), 0xFFFFFF
"""What stands between two names, and which bytes of a little-endian word that starts there are looked at."""
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
        longest = self._quoted.shape[1] // _WORD + 2
        self._factors = _odd_numbers(longest, seed)
        self._hash_of_row = np.zeros(
            size + 1, dtype=np.uint64
        )  # an empty place in a table points to the last
        self._fill_table()

    def rows(self, raw: bytes) -> Rows:
        """The row of each name in a JSON list of strings, `UNKNOWN` for names that are none of ours.

        Raises `MalformedError` when `raw` is not such a list.
        """
        found = _bounds(raw)
        if found is None:  # anything unusual goes the plain way
            get = self._row_of.get
            return np.array([get(name, UNKNOWN) for name in name_list(raw)], dtype=np.int64)
        return self._look_up(self._hashes(raw, *found))

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
            lines = self._lines[before, after] = _framed(self._quoted, before, after)
        cells: Bytes = lines.take(rows, axis=0)  # four times as fast as lines[rows]
        return cells

    # -- hashing ---------------------------------------------------------------------------------------------

    def _hashes(self, raw: bytes, starts: Rows | slice, lengths: Rows) -> Words:
        """One 64-bit number for each name: its length, then one word after the other stirred in."""
        *factors, length_factor = self._factors
        words, shortest = _words(raw, starts, len(factors)), int(lengths.min())
        hashes: Words = np.empty(len(words), dtype=np.uint64)
        hashes[:] = lengths.astype(np.uint64) * length_factor
        for number, factor in enumerate(factors):
            word, end = words[:, number], (number + 1) * _WORD
            if shortest < end:
                word = word & _TAIL.take(lengths - end + _WORD, mode="clip")
            hashes ^= word
            hashes *= factor
            hashes ^= hashes >> _SHIFT
        return hashes

    def _look_up(self, hashes: Words) -> Rows:
        rows = self._table.take(hashes >> self._shift).astype(np.int64)
        missed = np.flatnonzero(self._hash_of_row.take(rows) != hashes)
        if len(missed):
            places = np.searchsorted(self._crowded[:-1], hashes[missed])
            found = self._crowded[places] == hashes[missed]
            rows[missed] = np.where(found, self._crowded_rows[places], UNKNOWN)
        return rows

    def _fill_table(self) -> None:
        """A table by the first bits of a hash, and in order those for which it has no place."""
        names, rows = list(self._row_of), np.array(list(self._row_of.values()), dtype=np.int32)
        bits = max(4, len(names).bit_length() + _SPARE_BITS)
        self._shift = np.uint64(64 - bits)
        self._table = np.full(1 << bits, UNKNOWN, dtype=np.int32)
        raw = msgspec.json.encode(names)
        bounds = _bounds(raw)
        assert bounds is not None or not names, "node names are DNS labels"
        hashes = self._hashes(raw, *bounds) if bounds is not None else np.zeros(0, dtype=np.uint64)
        self._hash_of_row[rows] = hashes
        self._table[hashes >> self._shift] = rows
        left = np.flatnonzero(self._table.take(hashes >> self._shift) != rows)
        left = left[np.argsort(hashes[left])]
        self._crowded = np.append(hashes[left], np.uint64(0))  # one more, for what is larger than all
        self._crowded_rows = np.append(rows[left], np.int32(UNKNOWN))


def name_list(raw: bytes) -> list[str]:
    """The names themselves. Raises `MalformedError`."""
    try:
        return msgspec.json.decode(raw, type=list[str])
    except UNREADABLE as error:
        raise MalformedError(f"the request body cannot be read: node names: {error}") from error


def _bounds(raw: bytes) -> tuple[Rows | slice, Rows] | None:
    """Where each name starts, how long it is or all are; None when the list is not plain and compact.

    With brackets around, a quote before and after each comma, no other quotes than these and no escapes it
    can only be a list of strings. They are not looked at here: what no JSON may hold is no node's name.
    """
    if b"\\" in raw or not (raw.startswith(b'["') and raw.endswith(b'"]')):
        return None
    text = np.frombuffer(raw, dtype=np.uint8)
    return _even_bounds(text, raw.find(b",")) or _uneven_bounds(text)


def _even_bounds(text: Bytes, width: int) -> tuple[slice, Rows] | None:
    """Where all names have one length, as in many clusters, they need not be looked for."""
    count, rest = divmod(len(text) - 1, width)
    if width < 3 or rest:
        return None
    edges = np.ndarray((count - 1,), dtype="<u4", buffer=text, offset=width - 1, strides=(width,))
    if not ((edges & _EDGE_BYTES) == _EDGE).all() or np.count_nonzero(text == _QUOTE) != 2 * count:
        return None
    return slice(2, len(text), width), np.array([width - 3])


def _uneven_bounds(text: Bytes) -> tuple[Rows, Rows] | None:
    commas = np.flatnonzero(text == _COMMA)
    quoted = (text.take(commas - 1) == _QUOTE).all() and (text.take(commas + 1) == _QUOTE).all()
    if not quoted or np.count_nonzero(text == _QUOTE) != 2 * len(commas) + 2:
        return None
    starts = np.append(2, commas + 2)
    return starts, np.append(commas, len(text) - 1) - starts - 1


def _words(raw: bytes, starts: Rows | slice, count: int) -> Words:
    """[name, number] The first `count` 64-bit words from each of `starts` on."""
    size = count * _WORD
    everywhere = np.ndarray((len(raw),), dtype=f"V{size}", buffer=raw + bytes(size), strides=(1,))
    found = np.ascontiguousarray(everywhere[starts])
    return found.view("<u8").reshape(-1, count)


def _framed(quoted: Bytes, before: bytes, after: bytes) -> Bytes:
    size, width = quoted.shape
    lines = np.empty((size, len(before) + width + len(after)), dtype=np.uint8)
    lines[:, : len(before)] = np.frombuffer(before, dtype=np.uint8)
    lines[:, len(before) : len(before) + width] = quoted
    lines[:, len(before) + width :] = np.frombuffer(after, dtype=np.uint8)
    return lines


def _matrix(row_of: Mapping[str, int], size: int) -> Bytes:
    """Each row's name in quotes, padded with blanks to a common width."""
    quoted = {row: msgspec.json.encode(name) for name, row in row_of.items()}
    width = max((len(name) for name in quoted.values()), default=2)
    blank = b'""'.ljust(width)
    lines = [quoted.get(row, blank).ljust(width) for row in range(size)]
    return np.frombuffer(b"".join(lines), dtype=np.uint8).reshape(size, width)


def _odd_numbers(count: int, seed: int) -> Words:
    numbers = np.random.default_rng(seed).integers(0, 2**63, size=count, dtype=np.uint64)
    return numbers * np.uint64(2) + np.uint64(1)


def joined(parts: Sequence[bytes | memoryview], opening: bytes, closing: bytes) -> bytes:
    """Parts that are not empty, with commas between."""
    between = [piece for part in parts if part for piece in (b",", part)]
    return b"".join([opening, *between[1:], closing])


def _without_last(cells: Bytes) -> memoryview:
    """All bytes but the comma at the end, without a copy."""
    return cells.reshape(-1)[:-1].data
