"""The cards of a whole cluster as arrays, one row per node, so that all nodes can be evaluated at once.

The fleet records what is free and which rows have changed since a reader last looked; it makes no decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from gpuslice.core.card_links import CardLinks
from gpuslice.core.placement import SPREAD
from gpuslice.core.shape import UNLIMITED, FleetNode, Shape

__all__ = ["UNLIMITED", "AnyInts", "Flags", "Fleet", "FleetNode", "Floats", "Ints", "Rows", "Shape"]

Rows: TypeAlias = npt.NDArray[np.intp]
Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
AnyInts: TypeAlias = npt.NDArray[np.signedinteger]
Flags: TypeAlias = npt.NDArray[np.bool_]

TERMS = np.dtype(
    [("compute_percent", "i4"), ("tier", "i1"), ("names", "i1")]
    + [(name, "?") for name in ("spreads", "packs", "compute_required", "avoided", "kubelet_away")]
)
RECENT = 32  # changes that can be found without scanning every row


def _empty_ints() -> Ints:
    return np.zeros(0, dtype=np.int64)


def _empty_floats() -> Floats:
    return np.zeros(0, dtype=np.float64)


def _no_cards() -> npt.NDArray[np.int32]:
    return np.zeros((0, 1), dtype=np.int32)  # at least one slot, even if no node has a card


@dataclass(slots=True)
class Fleet:
    """Nodes × cards. Rows never move; a dropped row is reused for the next new node.

    `left`, `size`, `compute_left`: [row, slot]; a slot without a usable card has size 0 and nothing left.
    `slots`: how many slots belong to the node, 0 if the row is unused: a node that shares no cards has none;
    `cards`: how many have a usable card. The columns of `TERMS` are what else decides whom a node takes
    (`fit`), with `names` as codes of `name_sets`. If `host_limits` is False, somebody else refuses pods for
    lack of CPU and memory: here they only affect what a node is worth. `stamp[row]` is the value of `clock`
    at the row's last change. `cards_version` counts changes of which cards exist, as opposed to what is free
    on them.
    """

    left: npt.NDArray[np.int32] = field(default_factory=_no_cards)
    size: npt.NDArray[np.int32] = field(default_factory=_no_cards)
    compute_left: npt.NDArray[np.int32] = field(default_factory=_no_cards)
    cpu_left: Floats = field(default_factory=_empty_floats)
    memory_left: Floats = field(default_factory=_empty_floats)
    cpu_milli: Floats = field(default_factory=_empty_floats)
    memory_mib: Floats = field(default_factory=_empty_floats)
    cards: Ints = field(default_factory=_empty_ints)
    slots: Ints = field(default_factory=_empty_ints)
    model: Ints = field(default_factory=_empty_ints)
    terms: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, dtype=TERMS))
    stamp: Ints = field(default_factory=_empty_ints)
    host_limits: bool = True
    clock: int = 0
    cards_version: int = 0
    models: list[str] = field(default_factory=list)
    name_sets: dict[str, int] = field(default_factory=dict)
    row_of: dict[str, int] = field(default_factory=dict)
    links: dict[int, CardLinks] = field(default_factory=dict)  # of rows whose cards differ
    _free_rows: list[int] = field(default_factory=list)
    demanding: set[int] = field(default_factory=set)  # rows that require compute or have lost their kubelet
    _recent: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))  # rows as they changed

    @property
    def rows(self) -> int:
        """The number of rows in the arrays, used or not."""
        return len(self.stamp)

    @property
    def nodes_version(self) -> tuple[int, int]:
        """Changes whenever nodes come or go: rows may then mean other nodes."""
        return self.cards_version, len(self.row_of)

    def put(self, node: FleetNode) -> int:
        """Add a node or update its row, and return the row. Does nothing if nothing differs."""
        missing = len(node.size) - self.left.shape[1]
        if missing > 0:
            for cards in ("left", "size", "compute_left"):
                setattr(self, cards, np.pad(getattr(self, cards), ((0, 0), (0, missing))))
            self.cards_version += 1
        row = self.row_of.get(node.name)
        if row is None:
            if not self._free_rows:
                self._lengthen(max(16, self.rows))
            row = self.row_of[node.name] = self._free_rows.pop()
        self._put_cards(row, node)
        self._put_free(row, node)
        self._put_terms(row, node)
        if node.links != self.links.get(row, ()):
            self.links.pop(row, None)
            if node.links:
                self.links[row] = node.links
            self.touch(row)
        self._set_slots(row, len(node.size))
        return row

    def drop(self, name: str) -> None:
        """Forget a node; an unknown name is ignored."""
        row = self.row_of.pop(name, None)
        if row is None:
            return
        self.left[row] = self.size[row] = self.compute_left[row] = 0
        self.cpu_left[row] = self.memory_left[row] = -1.0  # then not even a pod without GPU fits
        self.cards[row] = 0
        self.cards_version += 1
        self._free_rows.append(row)
        self.links.pop(row, None)
        self.touch(row)
        self._set_slots(row, 0)

    def take(self, row: int, slots: Sequence[int], shape: Shape) -> None:
        """Give a pod what `shape` requests, on these cards of this node."""
        self._add(row, slots, shape, -1)

    def give_back(self, row: int, slots: Sequence[int], shape: Shape) -> None:
        """Undo `take`: the pod is gone."""
        self._add(row, slots, shape, 1)

    def touch(self, row: int) -> None:
        """Mark a row as changed for readers."""
        self.clock += 1
        self.stamp[row] = self.clock
        self._recent.append(row)

    def changed_since(self, clock: int) -> Rows:
        """The rows that changed after `clock`, in order."""
        changes = self.clock - clock
        if changes > len(self._recent):
            return np.flatnonzero(self.stamp > clock)
        return np.array(sorted({self._recent[-number] for number in range(1, changes + 1)}), dtype=np.intp)

    def allowed(self, models: frozenset[str]) -> Flags | None:
        """For each model code, whether a pod with these models may use it; None if it may use all."""
        if not models:
            return None
        return np.array([model in models for model in self.models], dtype=np.bool_)

    def _add(self, row: int, slots: Sequence[int], shape: Shape, sign: int) -> None:
        for slot in slots:
            self.left[row, slot] += sign * shape.units
            self.compute_left[row, slot] += sign * shape.compute_percent
        self.cpu_left[row] += sign * shape.cpu_milli
        self.memory_left[row] += sign * shape.memory_mib
        self.touch(row)

    def _put_cards(self, row: int, node: FleetNode) -> None:
        if node.model not in self.models:
            self.models.append(node.model)
        size = self._padded(node.size)
        facts = (self.models.index(node.model), node.cpu_milli, node.memory_mib)
        same = facts == (self.model[row], self.cpu_milli[row], self.memory_mib[row])
        if same and size == self.size[row].tolist():
            return
        self.size[row] = size
        self.model[row], self.cpu_milli[row], self.memory_mib[row] = facts
        self.cards[row] = np.count_nonzero(self.size[row])
        self.cards_version += 1
        self.touch(row)

    def _put_free(self, row: int, node: FleetNode) -> None:
        usable = [left if size > 0 else 0 for left, size in zip(node.left, node.size, strict=True)]
        left, core = self._padded(usable), self._padded(node.compute_left)
        if (
            left == self.left[row].tolist()
            and core == self.compute_left[row].tolist()
            and node.cpu_left == self.cpu_left[row]
            and node.memory_left == self.memory_left[row]
        ):
            return
        self.left[row], self.compute_left[row] = left, core
        self.cpu_left[row], self.memory_left[row] = node.cpu_left, node.memory_left
        self.touch(row)

    def _put_terms(self, row: int, node: FleetNode) -> None:
        terms = (
            node.compute_percent,
            node.tier,
            self.name_sets.setdefault(node.names, len(self.name_sets)),
            node.packing == SPREAD,
            bool(node.packing) and node.packing != SPREAD,
            node.compute_required,
            node.avoided,
            node.kubelet_away,
        )
        if self.terms[row].item() == terms:
            return
        self.terms[row] = terms
        (self.demanding.add if node.compute_required or node.kubelet_away else self.demanding.discard)(row)
        self.touch(row)

    def _padded(self, amounts: Sequence[int]) -> list[int]:
        """One amount for each slot of a row, as a list: an array would cost more for so few numbers."""
        return [*amounts, *(0,) * (self.left.shape[1] - len(amounts))]

    def _lengthen(self, more: int) -> None:
        start = self.rows
        for cards in ("left", "size", "compute_left"):
            array = getattr(self, cards)
            setattr(self, cards, np.vstack([array, np.zeros((more, array.shape[1]), dtype=np.int32)]))
        for name in ("cpu_left", "memory_left", "cpu_milli", "memory_mib"):
            setattr(self, name, np.concatenate([getattr(self, name), np.full(more, -1.0)]))
        for name in ("cards", "slots", "model", "stamp", "terms"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros(more, dtype=column.dtype)]))
        self._free_rows = list(range(start + more - 1, start - 1, -1))

    def _set_slots(self, row: int, slots: int) -> None:
        """Also shrinks a fleet twice as wide as any of its nodes: each slot costs time and memory in every
        row.
        """
        before, self.slots[row] = self.slots[row], slots
        width = self.left.shape[1]
        if slots < before == width and (widest := max(1, int(self.slots.max()))) <= width // 2:
            for cards in ("left", "size", "compute_left"):
                setattr(self, cards, getattr(self, cards)[:, :widest].copy())
            self.cards_version += 1
