"""How much of a card a claim was given, from the agent's records: kubelet names the card alone."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import msgspec

from gpuslice.adapters.kubelet.podresources import Claimed

PreparedUnits = Mapping[tuple[str, str, str, str], int]
"""(namespace, claim, device, share) → units."""


class _Slice(msgspec.Struct, frozen=True):
    card: int
    units: int
    share_id: str = ""


class _Record(msgspec.Struct, frozen=True):
    namespace: str
    name: str
    slices: list[_Slice]


_RECORD = msgspec.json.Decoder(_Record)


def part_of(claim: Claimed) -> tuple[str, str, str, str]:
    return claim.claim_namespace, claim.claim, claim.device, claim.share_id


def prepared_units(root: Path) -> PreparedUnits:
    """Every part of a card that is prepared below the agent's `root`; unreadable records are left out."""
    found = {}
    for path in (root / "claims").glob("*.json"):
        with contextlib.suppress(OSError, ValueError):  # it is being replaced, or its disk fails
            record = _RECORD.decode(path.read_bytes())
            for each in record.slices:
                key = (record.namespace, record.name, f"gpu-{each.card}", each.share_id)
                found[key] = each.units
    return found
