"""The JSON that the page requests, reduced to what a viewer may see.

``api/v1/cluster``, the whole cluster or the changes since a version::

    version     what to pass as ``since`` next time
    full        whether it is the whole: discard what you had
    cluster     name, viewer, mayListNodes, problems {what: why}, usage {readAt, problem, source}, now
    TABLE       rows that are new or changed; TABLE is one of rows.TABLES
    gone        {TABLE: [key]}

With ``figures=later`` the whole is sent without usage, and the next answer follows at once with it: this way
a page shows earlier what each pod holds.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from gpuslice.apps.console.access import Viewer
from gpuslice.apps.console.rows import TABLES, Rows

UNSEEN = "a pod that you may not see"
_KEY = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
EXPLAINED = ("waiting",)
"""Tables whose sentences may name pods of other namespaces."""
FIGURES = ("cardUsage", "podUsage")


class Known(NamedTuple):
    """What a page already has: the numbers of the newest rows, of usage and of everything else."""

    rows: int = 0
    figures: int = 0


NOTHING = Known()


class ClusterDocuments:
    """Creates the documents. A new epoch tells a page that this process has restarted."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._epoch = secrets.token_hex(4)

    def known(self, since: str, viewer: Viewer) -> Known:
        """What a page that sends `since` already has; nothing if it must read everything."""
        epoch, _, rest = since.partition(".")
        *numbers, fingerprint = rest.split(".")
        if epoch != self._epoch or fingerprint != viewer.fingerprint or len(numbers) != 2:
            return NOTHING
        if not all(each.isdecimal() for each in numbers) or not self._rows.knows(int(numbers[0])):
            return NOTHING
        return Known(*map(int, numbers))

    def changes(
        self, known: Known, viewer: Viewer, cluster: Mapping[str, Any], *, figures: bool = True
    ) -> bytes:
        """What is newer than `known`, with or without usage."""
        rows, parts = self._rows, []
        now = Known(rows.number, rows.number if figures else 0)
        head = {
            "version": f"{self._epoch}.{now.rows}.{now.figures}.{viewer.fingerprint}",
            "full": known == NOTHING,
            "cluster": cluster,
        }
        parts.append(msgspec.json.encode(head)[:-1])
        for table in TABLES:
            if table in EXPLAINED and not viewer.nodes:
                continue  # reasons for waiting name nodes
            if table in FIGURES and not figures:
                continue
            newer = rows.changed(table, known.figures if table in FIGURES else known.rows)
            found = [each.json for each in newer if viewer.sees(each.namespace)]
            if table in EXPLAINED and not viewer.everything:
                names = rows.namespaces()
                found = [
                    msgspec.json.encode(without_strangers(msgspec.json.decode(each), viewer, names))
                    for each in found
                ]
            if found:
                parts.append(b',"%s":[' % table.encode() + b",".join(found) + b"]")
        gone: dict[str, list[str]] = {}
        for each in rows.gone(known.rows) if known.rows else ():
            if viewer.sees(each.namespace):
                gone.setdefault(each.table, []).append(each.key)
        if gone:
            parts.append(b',"gone":' + msgspec.json.encode(gone))
        parts.append(b"}")
        return b"".join(parts)


def without_strangers(value: Any, viewer: Viewer, namespaces: set[str]) -> Any:
    """The same value, without the names of pods that `viewer` may not list, wherever a sentence contains
    them.
    """
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
