"""The nodes of one question: which rows of the fleet they are, and answers about them as JSON."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import compress

import msgspec

from gpuslice.adapters.wire.names import UNKNOWN, NameTable, Rows, joined, name_list
from gpuslice.core.policy.fleet import Flags, Fleet

EXPECTED = 4  # filters whose prioritize may still come

Reason = tuple[Flags, str]
"""Which of the nodes asked about, and the text for all of them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """`raw` is the JSON list of names as it came; `rows` their rows, `UNKNOWN` for strangers."""

    table: NameTable
    raw: bytes
    rows: Rows

    @property
    def known(self) -> Flags:
        known: Flags = self.rows != UNKNOWN
        return known

    def names(self, which: Flags) -> list[str]:
        """The names as strings: only for few, or where each gets words of its own."""
        return list(compress(name_list(self.raw), which.tolist()))

    def names_json(self, which: Flags) -> msgspec.Raw:
        """A JSON list of the names of `which`, of which none is a stranger unless all are meant."""
        return msgspec.Raw(self.raw if which.all() else self.table.names(self.rows[which]))

    def part(self, which: Flags, raw: bytes) -> Asked:
        """The question that will come about `which`, whose names are `raw`."""
        return self if which.all() else Asked(self.table, raw, self.rows[which])

    def reasons_json(self, reasons: Iterable[Reason], own: dict[str, str]) -> msgspec.Raw:
        """A JSON object from names to texts: `reasons` for known nodes, `own` for those with their own."""
        parts = [self.table.pairs(self.rows[which], text) for which, text in reasons if which.any()]
        if own:
            parts.append(msgspec.json.encode(own)[1:-1])
        return msgspec.Raw(joined(parts, b"{", b"}"))

    def scores_json(self, scores: Rows) -> bytes:
        """A list of hosts with their scores; strangers have 0."""
        known = self.known
        parts = [self.table.scores(self.rows[known], scores[known])]
        if not known.all():
            strangers = [{"Host": name, "Score": 0} for name in self.names(~known)]
            parts.append(msgspec.json.encode(strangers)[1:-1])
        return joined(parts, b"[", b"]")


@dataclass(slots=True)
class Names:
    """The name table of a fleet, made anew when nodes came or went."""

    fleet: Fleet
    _table: NameTable = field(default_factory=lambda: NameTable({}))
    _version: tuple[int, int] = (-1, -1)
    _expected: deque[Asked] = field(default_factory=lambda: deque(maxlen=EXPECTED))

    def asked(self, raw: bytes) -> Asked:
        """Raises `MalformedError` when `raw` is no JSON list of strings."""
        self.renew()
        for each in self._expected:
            if each.raw == raw:
                return each
        return Asked(self._table, raw, self._table.rows(raw))

    def renew(self) -> None:
        """Make a new table if nodes came or went since the last."""
        version = (self.fleet.cards_version, len(self.fleet.row_of))
        if version != self._version:
            self._table, self._version = NameTable(self.fleet.row_of), version
            self._expected.clear()

    def expect(self, asked: Asked) -> None:
        """kube-scheduler prioritizes what filter let pass, in the very same order and words."""
        self._expected.appendleft(asked)
