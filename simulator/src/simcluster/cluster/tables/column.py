"""What a printed table is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simcluster.cluster.request import Object

Row = Callable[[Object, float], list[Any]]
"""Cells of one object at a time given in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Column:
    """``wide`` columns show with ``-o wide`` only."""

    name: str
    type: str = "string"
    wide: bool = False

    def definition(self) -> Object:
        return {
            "name": self.name,
            "type": self.type,
            "format": "name" if self.name == "Name" and not self.wide else "",
            "description": "",
            "priority": int(self.wide),
        }


@dataclass(frozen=True, slots=True)
class Printer:
    columns: tuple[Column, ...]
    row: Row


def printer(names: str, row: Row) -> Printer:
    """Columns from a text: ``Name, Desired#, Images+`` where ``#`` is an integer and ``+`` is wide."""
    columns = [
        Column(text.rstrip("#+"), "integer" if "#" in text else "string", "+" in text)
        for text in map(str.strip, names.split(","))
    ]
    return Printer(tuple(columns), row)


def containers(spec: Object) -> tuple[str, str]:
    """Names and images of a pod spec's containers, as the wide columns show them."""
    items = spec.get("containers") or []
    return ",".join(item["name"] for item in items), ",".join(item.get("image", "") for item in items)


def name(obj: Object) -> str:
    text: str = obj["metadata"]["name"]
    return text


def created(obj: Object) -> str | None:
    timestamp: str | None = obj["metadata"].get("creationTimestamp")
    return timestamp


def plain_selector(selector: Object | None) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted((selector or {}).items())) or "<none>"


def shortened(items: list[str], limit: int = 3) -> str:
    """The first few, and how many more there are."""
    if not items:
        return "<none>"
    more = f" + {len(items) - limit} more..." if len(items) > limit else ""
    return ",".join(items[:limit]) + more
