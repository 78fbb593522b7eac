"""How much of its cards a claim was given, from the agent's records.

kubelet cannot tell: it lists all of a claim to each container that uses a part of it, and tells shares apart
only since 1.35 (`GetDynamicResources` of its container manager).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import msgspec


class PreparedPart(msgspec.Struct, frozen=True):
    """What one request of a claim was given of one card; `units` is 0 where it takes nothing."""

    request: str
    card: int
    units: int


PreparedParts = Mapping[tuple[str, str], list[PreparedPart]]
"""(namespace, claim) → its parts."""


class _Record(msgspec.Struct, frozen=True):
    namespace: str
    name: str
    slices: list[PreparedPart]


_RECORD = msgspec.json.Decoder(_Record)


def prepared_parts(root: Path) -> PreparedParts:
    """Every claim that is prepared below the agent's `root`; unreadable records are left out."""
    found = {}
    for path in (root / "claims").glob("*.json"):
        with contextlib.suppress(OSError, ValueError):  # it is being replaced, or its disk fails
            record = _RECORD.decode(path.read_bytes())
            found[record.namespace, record.name] = record.slices
    return found
