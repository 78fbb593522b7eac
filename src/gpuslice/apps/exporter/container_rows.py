"""The containers' part of the page, which is most of it: only what changed is written again.

A row is a container on a card: its lines, one per metric. Rows are kept from page to page, and so are the
pieces of the page that several rows form together, with their compressed form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from gpuslice.adapters.web.exposition import Piece, labels_once, sample_line
from gpuslice.apps.exporter import catalogue as c
from gpuslice.apps.exporter.card_snapshot import Active, CardSnapshot, ContainerSnapshot, NodeSnapshot
from gpuslice.apps.exporter.node_pods import NodePods
from gpuslice.core.attribution import ContainerKey

COLUMNS = (
    c.CONTAINER_INFO,
    c.MEMORY_USED,
    c.MEMORY_LIMIT,
    c.MEMORY_ALLOCATED,
    c.MEMORY_BORROWED,
    c.MEMORY_PEAK,
    c.MEMORY_REFUSED,
    c.SM_UTILIZATION,
    c.SM_SECONDS,
    c.LAST_ACTIVE,
    c.COMPUTE_SHARE,
    c.THROTTLED,
    c.PROCESSES,
)
ROWS_A_PIECE = 64
"""With more, one changed container affects many others; with fewer, a page has too many pieces."""

_Lines = tuple[str, ...]  # one per item of COLUMNS, "" if the value is unknown


@dataclass(frozen=True, slots=True)
class _Row:
    """What a container's lines say, and from what they were made."""

    snapshot: ContainerSnapshot
    busy_s: float | None
    active: Active | None
    version: int  # of the pods
    at: str
    about: Mapping[str, str]
    values: tuple[float | None, ...]
    lines: _Lines


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some rows' lines, by column."""

    rows: list[_Lines]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class _Card:
    rows: Mapping[ContainerKey, _Row]
    chunks: list[_Chunk]


_NOTHING = _Card({}, [])
_Place = tuple[str, int]  # a card: uuid and index


class Rows:
    """The rows of all cards as on the last page."""

    def __init__(self, node: str, pods: NodePods) -> None:
        self._node = node
        self._pods = pods
        self._cards: dict[_Place, _Card] = {}

    def keep(self, cards: Set[_Place]) -> None:
        """Forget all other cards."""
        self._cards = {place: card for place, card in self._cards.items() if place in cards}

    def pieces(
        self,
        card: CardSnapshot,
        keys: Iterable[ContainerKey],
        snapshot: NodeSnapshot,
    ) -> list[tuple[Piece, ...]]:
        """The card's containers `keys`: chunks of rows, each a piece for every one of `COLUMNS`."""
        uuid, place = card.sample.uuid, (card.sample.uuid, card.sample.index)
        before = self._cards.get(place, _NOTHING)
        version, old_rows, rows = self._pods.version, before.rows, {}
        for key in keys:
            row, each = old_rows.get(key), card.containers[key]
            busy_s, active = snapshot.sm_seconds.get((uuid, key)), snapshot.active.get((uuid, key))
            same = row is not None and row.snapshot == each and row.version == version
            if row is None or not same or row.busy_s != busy_s or row.active is not active:
                row = self._row(row, card, key, busy_s, active)
            rows[key] = row
        lines = [row.lines for row in rows.values()]
        chunks = []
        for number, start in enumerate(range(0, len(lines), ROWS_A_PIECE)):
            old = before.chunks[number] if number < len(before.chunks) else None
            chunks.append(_chunk(lines[start : start + ROWS_A_PIECE], old))
        self._cards[place] = _Card(rows, chunks)
        return [chunk.pieces for chunk in chunks]

    def _row(
        self,
        before: _Row | None,
        card: CardSnapshot,
        key: ContainerKey,
        busy_s: float | None,
        active: Active | None,
    ) -> _Row:
        """Written again, except for lines whose content is unchanged."""
        each, pod = card.containers[key], self._pods.pod(key.namespace, key.pod)
        who = {
            "node": self._node,
            "gpu": str(card.sample.index),
            "gpu_uuid": card.sample.uuid,
            "namespace": key.namespace,
            "pod": key.pod,
            "container": key.container,
        }
        about = {
            "pod_uid": pod.uid if pod is not None else "",
            "container_id": self._pods.container_id(key),
            "resource": each.grant.resource if each.grant is not None else "",
            "share_mode": each.grant.mode if each.grant is not None else "none",
            "workload_kind": pod.workload[0] if pod is not None else "",
            "workload": pod.workload[1] if pod is not None else "",
        }
        at = before.at if before is not None else labels_once(who)
        if before is not None and before.about == about:
            lines = [before.lines[0]]
        else:
            lines = [sample_line(COLUMNS[0].name, labels_once({**who, **about}), 1)]
        values = (
            each.used_bytes,
            each.limit_bytes,
            each.allocated_bytes,
            each.borrowed_bytes,
            active.peak_bytes if each.peak_bytes is None and active is not None else each.peak_bytes,
            each.refused,
            each.sm_ratio,
            busy_s,
            active.last_s if active is not None and each.sm_ratio is not None else None,
            each.share_ratio,
            each.throttled_s,
            each.processes,
        )
        for number, (metric, value) in enumerate(zip(COLUMNS[1:], values, strict=True)):
            if before is not None and before.values[number] == value:
                lines.append(before.lines[number + 1])
            else:
                lines.append("" if value is None else sample_line(metric.name, at, value))
        return _Row(each, busy_s, active, self._pods.version, at, about, values, tuple(lines))


def _chunk(rows: list[_Lines], before: _Chunk | None) -> _Chunk:
    """The same object as before, or with the same pieces, if the lines are the same."""
    if before is not None and before.rows == rows:
        return before
    pieces = []
    for column in range(len(COLUMNS)):
        lines = [row[column] for row in rows]
        text = "".join(lines).encode()
        old = before.pieces[column] if before is not None else None
        same = old is not None and old.text == text
        pieces.append(old if old is not None and same else Piece(text, len(lines) - lines.count("")))
    return _Chunk(rows, tuple(pieces))
