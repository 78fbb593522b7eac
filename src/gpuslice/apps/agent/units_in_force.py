"""The units in which parts of this node's cards are promised, recorded below the agent's root.

A pod asks for a number of units, and kubelet counts them. If their size, the number that a card has, or their
name changed while pods hold some, the same memory would be promised twice. What was promised stays in force
until nobody holds a part any more. Only then do the settings, or another size of a card, take its place.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from gpuslice.adapters.gpu.source import DriverCard
from gpuslice.adapters.region.plain import read_plain
from gpuslice.apps.agent.device_list import cut
from gpuslice.apps.agent.library import replace_file
from gpuslice.apps.agent.owner import MOST_BYTES
from gpuslice.apps.agent.upkeep import Owned
from gpuslice.core.annotations import decode_cards
from gpuslice.core.claim_views import unit_of
from gpuslice.core.contract import NAME_SETS, NODE_GPUS, ResourceNames
from gpuslice.core.errors import ContractError
from gpuslice.core.model import Card
from gpuslice.core.units import UNIT_MIB, card_units
from gpuslice.core.views import names_offered

_log = logging.getLogger(__name__)


class CardUnits(msgspec.Struct, frozen=True):
    """`cards`: the units of each, by uuid."""

    memory_unit: str
    resource_names: str
    cards: dict[str, int] = {}


class UnitsInForce:
    """What is in force of the settings' unit and names. `holders`: who holds a part; None: not known yet."""

    def __init__(
        self, root: Path, unit: str, resource_names: str, holders: Callable[[], Sequence[str] | None]
    ) -> None:
        self.waits = ""  # what is not in force yet, in a sentence
        self._file = root / "units.json"
        self._wanted = CardUnits(unit, resource_names)
        self._holders = holders
        self._recorded: CardUnits | None = None
        with contextlib.suppress(OSError, ValueError):
            found = msgspec.json.decode(read_plain(self._file, MOST_BYTES), type=CardUnits)
            if found.memory_unit in UNIT_MIB and found.resource_names in NAME_SETS:
                self._recorded = found

    @property
    def known(self) -> bool:
        """Whether there is a record."""
        return self._recorded is not None

    @property
    def unit(self) -> str:
        return (self._recorded or self._wanted).memory_unit

    @property
    def names(self) -> ResourceNames:
        return NAME_SETS[(self._recorded or self._wanted).resource_names]

    def learn(self, annotations: Mapping[str, str], capacity: Mapping[str, object]) -> None:
        """Without a record: what the node said last, if it said anything."""
        with contextlib.suppress(ContractError):
            cards = decode_cards(annotations.get(NODE_GPUS, ""))
            offered = names_offered(capacity)
            names = next(key for key, each in NAME_SETS.items() if each == offered)
            self._recorded = CardUnits(unit_of(cards), names, {card.uuid: card.units for card in cards})

    def cut(self, cards: Iterable[DriverCard]) -> tuple[Card, ...]:
        """The cards in the units in force. Raises `TooManyUnitsError`."""
        cards, holders = tuple(cards), self._holders()
        before = self._recorded
        if before is None or (holders is not None and not holders):
            found = cut(cards, self._wanted.memory_unit)
            self._set(msgspec.structs.replace(self._wanted, cards={card.uuid: card.units for card in found}))
            self.waits = ""
            return found
        found = tuple(
            replace(card, units=before.cards.get(card.uuid, card.units))
            for card in cut(cards, before.memory_unit)
        )
        self._set(
            msgspec.structs.replace(before, cards=before.cards | {card.uuid: card.units for card in found})
        )
        self._set_waits(cards, found, before, holders or ())
        return found

    def _set_waits(
        self, cards: Sequence[DriverCard], found: Iterable[Card], before: CardUnits, holders: Sequence[str]
    ) -> None:
        changes = []
        if before.memory_unit != self._wanted.memory_unit:
            changes.append(f"the memory unit stays {before.memory_unit}, not {self._wanted.memory_unit}")
        if before.resource_names != self._wanted.resource_names:
            changes.append(f"resources stay {before.resource_names}, not {self._wanted.resource_names}")
        sizes = {each.uuid: card_units(each.memory_mib, before.memory_unit) for each in cards}
        changes += [
            f"card {card.index} stays {card.units} units, not {sizes[card.uuid]}"
            for card in found
            if card.units != sizes[card.uuid]
        ]
        waits = ""
        if changes and holders:
            waits = (
                f"{', '.join(changes)}: {len(holders)} hold parts of cards as they were promised "
                f"({', '.join(holders[:5])}); it changes once they have ended"
            )
        if waits and waits != self.waits:
            _log.warning("units not changed", extra={"reason": waits})
        self.waits = waits

    def _set(self, record: CardUnits) -> None:
        if record != self._recorded:
            self._recorded = record
            with contextlib.suppress(OSError):  # the upkeep tries again, and reports it
                self._write()

    def owned(self) -> Iterator[Owned]:
        if self._recorded is not None:
            found, wanted = None, msgspec.json.encode(self._recorded)
            with contextlib.suppress(OSError):
                found = read_plain(self._file, MOST_BYTES)
            yield Owned(f"record {self._file}", found, wanted, partial(self._write))

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._file, msgspec.json.encode(self._recorded), 0o600)
