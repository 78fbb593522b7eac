"""What of a node is left to the driver at this moment; `driver_limits` keeps it up to date."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpuslice.core.contract import card_of_device_id
from gpuslice.core.mode import Rules
from gpuslice.core.model import Card, Tier


@dataclass(slots=True)
class ByDriver:
    """`cards` whose limits it enforces, by uuid; `containers` whose limits it has, by pod uid and name.

    `applied`: by these, the limits file that it last got. `limits_changed`: it is to get others.
    """

    cards: frozenset[str] = frozenset()
    containers: frozenset[tuple[str, str]] = frozenset()
    applied: dict[tuple[str, str], str] = field(default_factory=dict)
    limits_changed: asyncio.Event = field(default_factory=asyncio.Event)

    def holds(self, ids: Iterable[str]) -> bool:
        """Whether it enforces the limits of a container with these device ids."""
        return {card_of_device_id(each) for each in ids} <= self.cards

    def tier(self, rules: Rules, cards: Iterable[Card]) -> Tier:
        """What enforces the limits of containers that start on a node of these cards."""
        uuids = {card.uuid for card in cards}
        by_driver = bool(uuids) and uuids <= self.cards
        return Tier.NONE if not rules.isolation else Tier.DRIVER if by_driver else Tier.LIBRARY
