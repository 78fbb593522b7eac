"""Rows of JSON that a page follows. Each has the number of its last change: a page at N lacks newer ones."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

TABLES = ("nodes", "pods", "waiting", "cardUsage", "podUsage", "quotas")
LONGEST_MEMORY = 20_000
"""How many deleted rows are remembered; a page that was away longer reads everything again."""


class Row(NamedTuple):
    number: int
    namespace: str
    json: bytes


class Gone(NamedTuple):
    number: int
    table: str
    key: str
    namespace: str


class Rows:
    """All tables. Rows without a namespace belong to the cluster: viewers who may list nodes see them."""

    def __init__(self) -> None:
        self.number = 1  # 0 is the number of a page that has nothing
        self._tables: dict[str, dict[str, Row]] = {name: {} for name in TABLES}
        self._namespaces: Counter[str] = Counter()  # number of rows of each
        self._gone: deque[Gone] = deque(maxlen=LONGEST_MEMORY)
        self._forgotten = 0  # the number of the newest deleted row that is no longer remembered
        self._changed = asyncio.Event()

    def put(self, table: str, key: str, document: Mapping[str, Any], namespace: str = "") -> None:
        """Add or replace a row. Does nothing if the row is the same already."""
        rows, json = self._tables[table], msgspec.json.encode(document)
        known = rows.get(key)
        if known is not None and known.json == json:
            return
        if known is not None:
            del rows[key]  # the newest are last
            self._namespaces[known.namespace] -= 1
        self._namespaces[namespace] += 1
        rows[key] = Row(self._next(), namespace, json)

    def drop(self, table: str, key: str) -> None:
        row = self._tables[table].pop(key, None)
        if row is None:
            return
        self._namespaces[row.namespace] -= 1
        if len(self._gone) == LONGEST_MEMORY:
            self._forgotten = self._gone[0].number
        self._gone.append(Gone(self._next(), table, key, row.namespace))

    def keys(self, table: str) -> list[str]:
        return list(self._tables[table])

    def knows(self, number: int) -> bool:
        """Whether all changes since `number` are still remembered."""
        return self._forgotten <= number <= self.number

    def changed(self, table: str, number: int) -> Iterator[Row]:
        """Rows newer than `number`, the newest first."""
        for row in reversed(self._tables[table].values()):
            if row.number <= number:
                return
            yield row

    def gone(self, number: int) -> Iterator[Gone]:
        """Rows deleted since `number`, the last first."""
        for each in reversed(self._gone):
            if each.number <= number:
                return
            yield each

    def namespaces(self) -> set[str]:
        self._namespaces = +self._namespaces  # without those that have no rows any more
        return self._namespaces.keys() - {""}

    async def newer_than(self, number: int) -> None:
        """Returns as soon as something has changed since `number`."""
        while self.number <= number:
            await self._changed.wait()

    def _next(self) -> int:
        self.number += 1
        self._changed.set()
        self._changed = asyncio.Event()
        return self.number
