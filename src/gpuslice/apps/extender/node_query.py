"""The nodes in one question: their rows in the fleet, and answers about them as JSON."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import numpy.typing as npt

from gpuslice.adapters.wire.extender import Pod
from gpuslice.adapters.wire.names import UNKNOWN, Json, NameTable, Pieces, Rows, framed, name_list
from gpuslice.core.policy.fleet import Fleet, Ints

EXPECTED = 4  # filter answers whose prioritize may still come
MOST_PASSED_ROWS = 1_000_000  # remembered for all pods together: 4 MB
MOST_PASSED_PODS = 20_000  # each costs some 300 bytes besides its rows

Positions = npt.NDArray[np.int64]
"""Some of the nodes in a question, as positions in its list of names, in order."""

Reason = tuple[Positions, str]
"""Nodes in a question, and the text for all of them."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """The ranks of the nodes in a question about `pod`, at a `clock` of the fleet."""

    pod: Pod
    clock: int
    keys: Ints


@dataclass(frozen=True, slots=True)
class NodeQuery:
    """`raw` is the JSON list of names as received; `rows` are the nodes' rows, `UNKNOWN` at `unknown`."""

    table: NameTable
    raw: Json
    rows: Rows
    unknown: Positions
    ranked: Ranked | None = None  # by the filter that let these nodes pass

    @classmethod
    def of(cls, table: NameTable, raw: Json) -> NodeQuery:
        """Raises `MalformedError` if `raw` is not a JSON list of strings."""
        rows = table.rows(raw)
        return cls(table, raw, rows, (rows == UNKNOWN).nonzero()[0])

    @property
    def everyone(self) -> Positions:
        return np.arange(len(self.rows))

    def known(self, which: Positions) -> Positions:
        """Those of `which` that have a row."""
        return which[self.rows.take(which) != UNKNOWN] if len(self.unknown) else which

    def all_names(self) -> bytes:
        """All names as JSON. Raises `MalformedError` if there were none."""
        return msgspec.json.encode(name_list(self.raw))

    def names(self, which: Positions) -> list[str]:
        """The names as strings; only for few nodes, or where each gets a text of its own."""
        names = name_list(self.raw)
        return [names[position] for position in which.tolist()]

    def part(self, which: Positions) -> NodeQuery:
        """The question as kube-scheduler would send it for `which` alone, none of them unknown."""
        if len(which) == len(self.rows):
            return self
        rows = self.rows.take(which)
        return NodeQuery(self.table, self.table.names(rows), rows, self.unknown[:0])

    def reasons_json(self, reasons: Iterable[Reason], own: dict[str, str]) -> Pieces:
        """A JSON object from names to texts: `reasons` for known nodes, `own` for single ones."""
        parts: list[Json] = [
            self.table.pairs(self.rows.take(which), text) for which, text in reasons if len(which)
        ]
        if own:
            parts.append(msgspec.json.encode(own)[1:-1])
        return framed(parts, b"{", b"}")

    def scores_json(self, scores: Rows) -> bytes:
        """A list of hosts with their scores; unknown nodes have 0."""
        if not len(self.unknown):
            return b"".join(framed([self.table.scores(self.rows, scores)], b"[", b"]"))
        known = self.known(self.everyone)
        unknown = [{"Host": name, "Score": 0} for name in self.names(self.unknown)]
        ours = self.table.scores(self.rows[known], scores[known])
        return b"".join(framed([ours, msgspec.json.encode(unknown)[1:-1]], b"[", b"]"))


@dataclass(slots=True)
class NodeNames:
    """The name table of a fleet, remade when nodes are added or removed."""

    fleet: Fleet
    _table: NameTable = field(default_factory=lambda: NameTable({}))
    _version: tuple[int, int] = (-1, -1)
    _expected: deque[NodeQuery] = field(default_factory=lambda: deque(maxlen=EXPECTED))
    _last: NodeQuery | None = None  # all feasible nodes, of which kube-scheduler asks again and again

    def query(self, raw: Json) -> NodeQuery:
        """Raises `MalformedError` if `raw` is not a JSON list of strings."""
        self.refresh()
        for each in self._expected:
            if each.raw == raw:
                return each
        if self._last is None or self._last.raw != raw:
            self._last = replace(NodeQuery.of(self._table, raw), raw=bytes(raw))
        return self._last

    def refresh(self) -> None:
        """Make a new table if nodes were added or removed since the last."""
        version = self.fleet.nodes_version
        if version != self._version:
            self._table, self._version = NameTable(self.fleet.row_of), version
            self._expected.clear()
            self._last = None

    def expect(self, query: NodeQuery, ranked: Ranked) -> None:
        """kube-scheduler's prioritize repeats exactly the names, in the same order, that filter let pass."""
        self._expected.appendleft(replace(query, ranked=ranked))


class PassedNodes:
    """Which nodes filter let pass for each pod when it was last asked, as rows of the fleet."""

    def __init__(self) -> None:
        self._rows: OrderedDict[str, npt.NDArray[np.int32]] = OrderedDict()  # by uid
        self._count = 0

    def note(self, uid: str, rows: Rows) -> None:
        """filter let these nodes pass for a pod, and no others."""
        self._count += len(rows) - len(self._rows.pop(uid, ()))
        if len(rows):
            self._rows[uid] = rows.astype(np.int32)
        while self._count > MOST_PASSED_ROWS or len(self._rows) > MOST_PASSED_PODS:
            self._count -= len(self._rows.popitem(last=False)[1])

    def count(self, uid: str) -> int:
        """How many nodes filter let pass for the pod."""
        return len(self._rows.get(uid, ()))

    def holds(self, uid: str, row: int) -> bool:
        """Whether filter let this row pass for the pod."""
        return uid in self._rows and bool((self._rows[uid] == row).any())
