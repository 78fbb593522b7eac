"""Lists of node names, from JSON to rows of the fleet and back, without a string for each name.

kube-scheduler sends every name of the cluster with every question, in its own order: with 5,000 nodes that is
55 KB, and creating, hashing and looking up 5,000 strings costs more than the decision. Here the names stay
bytes. All of them are hashed at once as 64-bit words from the body and looked up in a table; answers are
composed of rows of prepared JSON, padded with blanks to one width.

A hash represents its name: every step of it is reversible, so that names which differ in one word never
collide, and of names that differ in several words one pair in 2⁶⁴ does. What follows a name in the list is
hashed with it: if every name is found, the list needs no further check.
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
"""JSON in pieces that are not joined: they are so large that each copy matters."""

UNKNOWN = -1
_WORD = 8
_SHIFT = np.uint64(29)
LONGEST_NAME = 300  # in bytes, with a margin: a node's name has at most 253
_SPARE_BITS = 3  # a table has eight to sixteen places per name
_QUOTE, _COMMA = ord('"'), ord(",")
_EDGE = b'","'  # what separates two names, and is assumed after the last one too
_NUMBERS = np.array([list(b"%2d" % number) for number in range(20)], dtype=np.uint8)
_KEPT_TEXTS = 8
_TAIL = np.array([(1 << (8 * count)) - 1 for count in range(_WORD)] + [(1 << 64) - 1], dtype=np.uint64)
"""Masks that keep the first bytes of a little-endian word."""


class NameTable:
    """The names of the fleet's rows for one state of the fleet; remade when nodes are added or removed."""

    def __init__(self, row_of: Mapping[str, int], seed: int = 0) -> None:
        self._row_of = dict(row_of)
        size = max(row_of.values(), default=-1) + 1
        self._quoted = _matrix(self._row_of, size)
        self._lines: dict[tuple[bytes, bytes], Bytes] = {}
        self._longest = self._quoted.shape[1] - 2 + len(_EDGE)
        words = -(-self._longest // _WORD)
        numbers = np.random.default_rng(seed).integers(0, 2**63, size=words, dtype=np.uint64)
        self._factors = numbers * np.uint64(2) + np.uint64(1)  # odd, so that multiplication is reversible
        self._hash_of_row = np.zeros(size + 1, dtype=np.uint64)  # empty places refer to the last

        # a table indexed by the first bits of a hash, and a sorted list of those without a place
        names, rows = list(self._row_of), np.array(list(self._row_of.values()), dtype=np.int32)
        bits = max(4, len(names).bit_length() + _SPARE_BITS)
        self._shift = np.uint64(64 - bits)
        narrow = np.int16 if len(self._hash_of_row) < 1 << 15 else np.int32  # half the memory to search
        self._table = np.full(1 << bits, UNKNOWN, dtype=narrow)
        raw = msgspec.json.encode(names)
        hashes = self._hashes(raw, _uneven_cut(raw)) if names else np.zeros(0, dtype=np.uint64)
        self._hash_of_row[rows] = hashes
        self._table[self._places(hashes)] = rows
        left = np.flatnonzero(self._table.take(self._places(hashes)) != rows)
        left = left[np.argsort(hashes[left])]
        self._crowded = np.append(hashes[left], np.uint64(0))  # one more, for hashes larger than all
        self._crowded_rows = np.append(rows[left], np.int32(UNKNOWN))

    def rows(self, raw: Json) -> Rows:
        """The row of each name in a JSON list of strings, `UNKNOWN` for unknown names.

        Raises `MalformedError` if `raw` is not such a list.
        """
        if raw[:2] == b'["' and raw[-2:] == b'"]':
            for cut_of in (_even_cut, _uneven_cut):
                if (cut := cut_of(raw)) is not None:
                    rows = self._look_up(self._hashes(raw, cut), cut)
                    if rows.min() != UNKNOWN or _is_plain(raw, cut):
                        return rows
        get = self._row_of.get  # anything unusual takes the slow path
        return np.array([get(name, UNKNOWN) for name in name_list(raw)], dtype=np.int64)

    def names(self, rows: Rows) -> bytes:
        """A JSON list of these rows' names, as compact as Go's."""
        padded = self._cells(rows, b"", b",").tobytes()
        compact = padded.translate(None, b" ") if b" " in padded else padded
        return b"[" + compact[:-1] + b"]"

    def pairs(self, rows: Rows, text: str) -> memoryview:
        """``"name":"text"`` for each row, separated by commas: the inside of a JSON object."""
        return _without_last(self._cells(rows, b"", b":" + msgspec.json.encode(text) + b","))

    def scores(self, rows: Rows, scores: Rows) -> memoryview:
        """``{"Host":"name","Score":n}`` for each row, separated by commas; scores 0…19."""
        cells = self._cells(rows, b'{"Host":', b',"Score": 0},')
        cells[:, -4:-2] = _NUMBERS.take(scores, axis=0)
        return _without_last(cells)

    def _cells(self, rows: Rows, before: bytes, after: bytes) -> Bytes:
        """One line per row: its quoted name between two texts; the lines of all rows are cached."""
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
        """The index in the table, from the first bits."""
        return (hashes >> self._shift).view(np.int64)


def name_list(raw: Json) -> list[str]:
    """The names themselves. Raises `MalformedError`."""
    try:
        return msgspec.json.decode(raw, type=list[str])
    except UNREADABLE as error:
        raise MalformedError(f"the request body cannot be read: node names: {error}") from error


@dataclass(frozen=True, slots=True)
class _Cut:
    """Where each name of a list starts, and the length of it or of each with the `_EDGE` after it."""

    starts: Rows | slice
    lengths: Rows


def _even_cut(raw: Json) -> _Cut | None:
    """For names that all have the length of the first, as in many clusters: no search is needed."""
    width = bytes(raw[:LONGEST_NAME]).find(b",")
    if width < len(_EDGE) or (len(raw) - 1) % width:
        return None
    return _Cut(slice(2, len(raw), width), np.array([width]))


def _uneven_cut(raw: Json) -> _Cut:
    """Assuming a comma between any two names."""
    commas = np.flatnonzero(np.frombuffer(raw, dtype=np.uint8) == _COMMA)
    starts = np.append(2, commas + 2)
    return _Cut(starts, np.append(commas + 2, len(raw) + 1) - starts)


def _is_plain(raw: Json, cut: _Cut) -> bool:
    """Whether it is a compact list of strings that was cut correctly.

    With brackets around it, a quote before and after each comma, no other quotes and no escapes, it can be
    nothing else. The strings themselves are not checked here: what JSON does not allow is not a node's name.
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
    """The nonempty parts, separated by commas."""
    between = [piece for part in parts if part for piece in (b",", part)]
    return (opening, *between[1:], closing)


def _without_last(cells: Bytes) -> memoryview:
    """All bytes except the comma at the end, without a copy."""
    return cells.reshape(-1)[:-1].data
