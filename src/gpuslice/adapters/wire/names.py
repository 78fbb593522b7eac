"""Lists of node names, from JSON to rows of the fleet and back, without a string for each name.

kube-scheduler sends every name of the cluster with every question, in an order of its own: at 5,000 nodes
that is 55 KB, and to make 5,000 strings, hash them and look them up costs more than to decide. Here the
names stay bytes. Each is hashed as 64-bit words straight from the body, all at once, and found in a table;
answers are put together from rows of ready-made JSON, padded with blanks to one width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from gpuslice.adapters.wire.errors import MalformedError

Rows = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

UNKNOWN = -1
_WORD = 8
_QUOTE = ord('"')
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
        longest = self._quoted.shape[1] // _WORD + 2
        self._factors = _odd_numbers(longest, seed)
        self._hash_of_row = np.zeros(size + 1, dtype=np.uint64)
        self._levels: list[tuple[int, Rows]] = []
        self._lines: dict[tuple[bytes, bytes], Bytes] = {}
        self._build()

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

    def _hashes(self, raw: bytes, starts: Rows, lengths: Rows) -> Words:
        """One 64-bit number for each name: the sum of its words, each times an odd number of its own."""
        hashes: Words = lengths.astype(np.uint64) * self._factors[-1]
        if not len(lengths):
            return hashes
        shortest, longest = int(lengths.min()), min(int(lengths.max()), (len(self._factors) - 1) * _WORD)
        padded = raw + bytes(longest + _WORD)
        words = np.ndarray((len(padded) - _WORD + 1,), dtype="<u8", buffer=padded, strides=(1,))
        for number, offset in enumerate(range(0, longest, _WORD)):
            word = words[starts + offset]
            if shortest < offset + _WORD:
                word &= _TAIL.take(lengths - offset, mode="clip")
            word *= self._factors[number]
            hashes += word
        return hashes

    def _look_up(self, hashes: Words) -> Rows:
        if not self._levels:
            return np.full(len(hashes), UNKNOWN, dtype=np.int64)
        rows = self._candidates(0, hashes)
        for level in range(1, len(self._levels)):
            waiting = np.flatnonzero(rows == UNKNOWN)
            if len(waiting):
                rows[waiting] = self._candidates(level, hashes[waiting])
        return rows

    def _candidates(self, level: int, hashes: Words) -> Rows:
        shift, table = self._levels[level]
        rows: Rows = table.take(_slots(hashes, shift))
        rows[self._hash_of_row.take(rows) != hashes] = (
            UNKNOWN  # an empty slot points to the hash 0 at the end
        )
        return rows

    def _build(self) -> None:
        """Tables of which each holds what the one before had no place for."""
        names, rows = list(self._row_of), np.array(list(self._row_of.values()), dtype=np.int64)
        if not names:
            return
        raw = msgspec.json.encode(names)
        bounds = _bounds(raw)
        assert bounds is not None, "node names are DNS labels"
        hashes = self._hashes(raw, *bounds)
        assert len(np.unique(hashes)) == len(names), "two node names with one 64-bit hash"
        self._hash_of_row[rows] = hashes
        while len(rows):
            bits = max(4, len(rows).bit_length() + 3)
            table = np.full(1 << bits, UNKNOWN, dtype=np.int64)
            slots = _slots(hashes, 64 - bits)
            table[slots] = rows
            self._levels.append((64 - bits, table))
            left = table[slots] != rows
            rows, hashes = rows[left], hashes[left]


def name_list(raw: bytes) -> list[str]:
    """The names themselves. Raises `MalformedError`."""
    try:
        return msgspec.json.decode(raw, type=list[str])
    except msgspec.DecodeError as error:
        raise MalformedError(f"the request body cannot be read: node names: {error}") from error


def _slots(hashes: Words, shift: int) -> npt.NDArray[np.uint64]:
    """Fibonacci hashing; another number for each table size, so that levels do not repeat collisions."""
    factor = np.uint64((0x9E3779B97F4A7C15 * (2 * shift + 1)) & (2**64 - 1))
    return (hashes * factor) >> np.uint64(shift)


def _bounds(raw: bytes) -> tuple[Rows, Rows] | None:
    """Where each name starts and how long it is; None when the list is not plain and compact.

    `raw` is known to be JSON: with one byte between each closing and the next opening quote, brackets around
    and no escapes it can only be a list of strings.
    """
    if b"\\" in raw or not (raw.startswith(b'["') and raw.endswith(b'"]')):
        return None
    quotes = np.flatnonzero(np.frombuffer(raw, dtype=np.uint8) == _QUOTE)
    opening, closing = quotes[::2], quotes[1::2]
    if len(opening) != len(closing) or not (opening[1:] - closing[:-1] == 2).all():
        return None
    return opening + 1, closing - opening - 1


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
