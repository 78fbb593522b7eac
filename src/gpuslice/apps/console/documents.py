"""The JSON that the page asks for, cut to what a viewer may see.

``api/v1/cluster``, the whole or what changed since::

    version     what to give as ``since`` next time
    full        whether it is the whole: forget what you knew
    cluster     name, viewer, mayListNodes, problems {what: why}, usage {readAt, problem, source}, now
    TABLE       rows that are new or changed; TABLE is one of rows.TABLES
    gone        {TABLE: [key]}
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from gpuslice.apps.console.access import Viewer
from gpuslice.apps.console.rows import TABLES, Rows

UNSEEN = "a pod that you may not see"
_KEY = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
EXPLAINED = ("waiting",)
"""Tables whose sentences may name pods of other namespaces."""


class ClusterDocuments:
    """Makes the documents. An epoch of its own tells a page that this process began anew."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._epoch = secrets.token_hex(4)

    def known(self, since: str, viewer: Viewer) -> int:
        """Which number a page knows that gives `since`; 0 where it must read everything."""
        epoch, _, rest = since.partition(".")
        number, _, fingerprint = rest.partition(".")
        if epoch != self._epoch or fingerprint != viewer.fingerprint or not number.isdecimal():
            return 0
        return int(number) if self._rows.knows(int(number)) else 0

    def changes(self, number: int, viewer: Viewer, cluster: Mapping[str, Any]) -> bytes:
        """What is newer than `number`."""
        rows, parts = self._rows, []
        head = {
            "version": f"{self._epoch}.{rows.number}.{viewer.fingerprint}",
            "full": number == 0,
            "cluster": cluster,
        }
        parts.append(msgspec.json.encode(head)[:-1])
        for table in TABLES:
            if table in EXPLAINED and not viewer.nodes:
                continue  # why a pod waits is told of nodes
            found = [each.json for each in rows.changed(table, number) if viewer.sees(each.namespace)]
            if table in EXPLAINED and not viewer.everything:
                found = [self._without_strangers(each, viewer) for each in found]
            if found:
                parts.append(b',"%s":[' % table.encode() + b",".join(found) + b"]")
        gone: dict[str, list[str]] = {}
        for each in rows.gone(number) if number else ():
            if viewer.sees(each.namespace):
                gone.setdefault(each.table, []).append(each.key)
        if gone:
            parts.append(b',"gone":' + msgspec.json.encode(gone))
        parts.append(b"}")
        return b"".join(parts)

    def _without_strangers(self, row: bytes, viewer: Viewer) -> bytes:
        document = msgspec.json.decode(row)
        return msgspec.json.encode(without_strangers(document, viewer, self._rows.namespaces()))


def without_strangers(value: Any, viewer: Viewer, namespaces: set[str]) -> Any:
    """The same with the names of pods left out that `viewer` may not list, wherever a sentence has them."""
    if isinstance(value, str):

        def seen(match: re.Match[str]) -> str:
            namespace = match[0].partition("/")[0]
            return UNSEEN if namespace in namespaces and not viewer.sees(namespace) else match[0]

        return _KEY.sub(seen, value)
    if isinstance(value, dict):
        return {name: without_strangers(each, viewer, namespaces) for name, each in value.items()}
    if isinstance(value, list):
        return [without_strangers(each, viewer, namespaces) for each in value]
    return value
