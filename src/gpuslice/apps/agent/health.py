"""Which cards must not be given out, and why. Pure: time and events in, a verdict out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from gpuslice.adapters.gpu.source import XidEvent
from gpuslice.core.errors import ContractError
from gpuslice.core.model import Card

IGNORED_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Faults of an application, not of a card: 31, 43, 45 by the vendor's plugin, 13, 68, 109 by NVIDIA's."""

LOST = "does not answer"
DIVIDED = "is in MIG mode, so it can only be given out by its MIG devices"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a card is out of use after a reported error, and until when (monotonic seconds; None: for good)."""

    reason: str
    until_s: float | None
    times: int = 1


@dataclass(frozen=True, slots=True)
class Health:
    """What is wrong with the cards, by uuid. Each of the four recovers in its own way.

    `faults` heal after `recovery_s` without a new one, twice as long each time; 0 means never. `lost` cards
    heal when they answer, `divided` ones when MIG mode is off, `excluded` ones when the operator's file no
    longer names them.
    """

    recovery_s: float
    faults: Mapping[str, Fault] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    divided: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()

    def event(self, event: XidEvent, uuids: Iterable[str], now_s: float) -> Health:
        """A report of the driver. One without a uuid may mean any card, so it counts for all of them."""
        if event.xid in IGNORED_XIDS:
            return self
        faults = {**self.faults}
        for uuid in [event.uuid] if event.uuid else uuids:
            known = self.faults.get(uuid)
            times = known.times + 1 if known else 1
            until_s = now_s + self.recovery_s * 2.0 ** min(times - 1, 16) if self.recovery_s else None
            faults[uuid] = Fault(f"Xid {event.xid}", until_s, times)
        return replace(self, faults=faults)

    def seen(self, answering: Iterable[str], known: Iterable[str]) -> Health:
        """Of the `known` cards, those that are not `answering` are lost."""
        return replace(self, lost=frozenset(known) - frozenset(answering))

    def aged(self, now_s: float) -> Health:
        """Faults whose time is over are forgiven, but still counted."""
        over = {
            uuid: replace(fault, reason="", until_s=None)
            for uuid, fault in self.faults.items()
            if fault.until_s is not None and now_s >= fault.until_s
        }
        faults = {**self.faults, **over}
        return self if faults == self.faults else replace(self, faults=faults)

    def faulty(self) -> frozenset[str]:
        """The cards with a fault that is not forgiven yet and that only time heals."""
        return frozenset(uuid for uuid, fault in self.faults.items() if fault.reason)

    def reasons(self) -> dict[str, str]:
        """Every card that must not be given out, with the reason."""
        faults = {uuid: self.faults[uuid].reason for uuid in self.faulty()}
        excluded = dict.fromkeys(self.excluded, "excluded by the operator")
        divided = dict.fromkeys(self.divided, DIVIDED)
        return {**faults, **excluded, **divided, **dict.fromkeys(self.lost, LOST)}


# -- the operator's file ---------------------------------------------------------------------------------
class _Excluded(msgspec.Struct):
    index: list[int | str] = []
    uuid: list[str] = []


def excluded_cards(text: bytes, cards: Iterable[Card]) -> frozenset[str]:
    """The uuids that ``unhealthyDevices.json`` takes out of use. Raises `ContractError`."""
    try:
        entries = msgspec.json.decode(text, type=_Excluded)
    except (ValueError, RecursionError) as error:  # not JSON of this shape, or not text
        shown = text[:80].decode(errors="replace")
        raise ContractError("unhealthyDevices.json", shown, f'{{"index":[],"uuid":[]}} ({error})') from error
    indices = {str(index) for index in entries.index}
    named = {card.uuid for card in cards if str(card.index) in indices}
    return frozenset(named | set(entries.uuid))


# -- the ConfigMap ---------------------------------------------------------------------------------------
OWN_KEY = "agent"  # the cards that the agent itself listed; the others are the operator's
FAULTS_KEY = "faults"  # the uuids of those that only time heals; the others are checked again by each agent


def unhealthy_data(
    present: Mapping[str, str] | None, unhealthy: Mapping[int, str], faulty: Iterable[str]
) -> dict[str, str]:
    """The ConfigMap's data for these cards and reasons, preserving what an operator wrote.

    The `faulty` ones are recorded by uuid: a machine that comes back without a card renumbers the others.
    """
    present = present or {}
    operators = _indices(present.get("gpus", "")) - _indices(present.get(OWN_KEY, ""))
    return {
        "gpus": _joined(operators | set(unhealthy)),
        OWN_KEY: _joined(unhealthy),
        FAULTS_KEY: ",".join(sorted(faulty)),
        "reasons": "; ".join(f"{index}: {reason}" for index, reason in sorted(unhealthy.items())),
    }


def recorded_faults(data: Mapping[str, str] | None) -> frozenset[str]:
    """The uuids of cards for which an earlier agent knew faults: a restart must not heal them."""
    return frozenset(filter(None, (data or {}).get(FAULTS_KEY, "").split(",")))


def _indices(text: str) -> set[int]:
    parts = (part.strip() for part in text.split(","))
    return {int(part) for part in parts if part.isascii() and part.isdecimal() and len(part) <= 4}


def _joined(indices: Iterable[int]) -> str:
    return ",".join(str(index) for index in sorted(indices))
