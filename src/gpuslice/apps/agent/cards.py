"""Keeps an eye on the cards: which there are, which must not be given out, and tells everybody."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from gpuslice.adapters.gpu.source import GpuSource, GpuUnavailableError, Inventory
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.apps.agent.health import Fault, Health, excluded_cards, recorded_by_agent, unhealthy_data
from gpuslice.apps.agent.node import cut
from gpuslice.apps.agent.writer import Writer
from gpuslice.core.errors import ContractError
from gpuslice.core.model import Card

_log = logging.getLogger(__name__)

FAILURES_TO_LOST = 3
"""One question that the driver does not answer in time is no lost card."""


class CardKeeper:
    """Follows the driver, the operator's file and the clock. `changed` is called after each new verdict.

    A card that was seen once stays in the list with its units, lost or not: kubelet may not see an id vanish
    that a container holds.
    """

    def __init__(
        self,
        source: GpuSource,
        writer: Writer,
        changed: Callable[[], Awaitable[None]],
        *,
        unit: str,
        health: Health,
        unhealthy_file: Path,
        every_s: float,
        follow_events: bool = True,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self.cards: tuple[Card, ...] = ()
        self.health = health
        self.problem = "the cards have not been read yet"  # "" while the driver answers with cards
        self.driver_version = ""
        self._source = source
        self._writer = writer
        self._changed = changed
        self._unit = unit
        self._file = unhealthy_file
        self._every_s = every_s
        self._follow_events = follow_events
        self._may_write = may_write
        self._failures = 0
        self._written: dict[int, str] | None = None
        self._file_problem = ""

    # -- the verdict ----------------------------------------------------------------------------------

    def reasons(self) -> dict[int, str]:
        """Why cards are out of use, by index."""
        reasons = self.health.reasons()
        return {card.index: reasons[card.uuid] for card in self.cards if card.uuid in reasons}

    def unhealthy_uuids(self) -> frozenset[str]:
        reasons = self.health.reasons()
        return frozenset(card.uuid for card in self.cards if card.uuid in reasons)

    # -- tasks ----------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Ask for the cards, the file and the time, for ever."""
        while True:
            await self.look()
            await self._record()
            await asyncio.sleep(self._every_s)

    async def follow_events(self) -> None:
        """Take the driver's reports, for ever. A driver that cannot report is asked again now and then."""
        if not self._follow_events:
            return
        told = ""
        while True:
            try:
                async with contextlib.aclosing(self._source.events()) as events:
                    async for event in events:
                        told = ""
                        _log.warning("driver reports", extra={"xid": event.xid, "uuid": event.uuid})
                        known = [card.uuid for card in self.cards]
                        await self._set(self.health.event(event, known, time.monotonic()))
                        await self._record()
            except GpuUnavailableError as error:
                if str(error) != told:
                    told = str(error)
                    _log.warning("no fault reports from the driver", extra={"error": told})
            await asyncio.sleep(self._every_s)

    async def look(self) -> None:
        """One look at everything. Never raises for a driver or file that cannot be read.

        Raises `TooManyUnitsError` for cards that cannot be told to kubelet in this unit.
        """
        inventory: Inventory | GpuUnavailableError
        try:
            inventory = await self._source.inventory()
        except GpuUnavailableError as error:
            inventory = error
        health = self.health.aged(time.monotonic())  # only now: a report may have come meanwhile
        if isinstance(inventory, Inventory):
            health = self._answered(health, inventory)
        else:
            health = self._unanswered(health, str(inventory))
        await self._set(replace(health, excluded=self._excluded()))

    def _answered(self, health: Health, inventory: Inventory) -> Health:
        self._failures = 0
        self.driver_version = inventory.driver_version
        known = {card.uuid: card for card in self.cards}
        found = {card.uuid: card for card in cut(inventory.cards, self._unit)}
        cards = tuple(sorted({**found, **known}.values(), key=lambda card: card.index))
        self.cards = tuple(card for card in cards if card.units > 0)
        self._say("" if self.cards else _why_none(inventory))
        return health.seen(found, (card.uuid for card in self.cards))

    def _unanswered(self, health: Health, reason: str) -> Health:
        self._failures += 1
        self._say(reason)
        lost = self._failures >= FAILURES_TO_LOST
        return health.seen((), (card.uuid for card in self.cards)) if lost else health

    def _say(self, problem: str) -> None:
        if problem and problem != self.problem:
            _log.warning("cards cannot be given out", extra={"reason": problem})
        self.problem = problem

    async def _set(self, health: Health) -> None:
        before, self.health = self.health.reasons(), health
        for uuid, reason in health.reasons().items():
            if uuid not in before:
                _log.warning("card out of use", extra={"uuid": uuid, "reason": reason})
        await self._changed()

    def _excluded(self) -> frozenset[str]:
        try:
            excluded = excluded_cards(self._file.read_bytes(), self.cards)
        except FileNotFoundError:
            return frozenset()
        except (OSError, ContractError) as error:
            if str(error) != self._file_problem:
                self._file_problem = str(error)
                _log.warning("operator's file not read, its last content stays", extra={"error": str(error)})
            return self.health.excluded
        self._file_problem = ""
        return excluded

    # -- the ConfigMap --------------------------------------------------------------------------------

    async def _record(self) -> None:
        """Write the ConfigMap when it does not say what we found; try again at the next look."""
        wanted = self.reasons()
        if not self.cards or wanted == self._written or not self._may_write():
            return
        try:
            present = await self._writer.unhealthy()
            if self._written is None:
                await self._take_over(present)
                wanted = self.reasons()
            if wanted or present is not None:
                data = unhealthy_data(present, wanted)
                if data != present:
                    await self._writer.set_unhealthy(data)
        except KubeError as error:
            _log.warning("ConfigMap of unhealthy cards not written", extra={"error": str(error)})
            return
        await self._tell(self._written or {}, wanted)
        self._written = wanted

    async def _tell(self, before: dict[int, str], now: dict[int, str]) -> None:
        """Say in `kubectl describe node` which cards left and came back."""
        for index in sorted(now.keys() - before.keys()):
            await self._writer.tell_node("GPUOutOfUse", f"card {index}: {now[index]}", warning=True)
        for index in sorted(before.keys() - now.keys()):
            await self._writer.tell_node("GPUBackInUse", f"card {index} is given out again", warning=False)

    async def _take_over(self, present: dict[str, str] | None) -> None:
        """What an earlier agent found is still so: its restart has mended nothing."""
        recorded = recorded_by_agent(present)
        known = self.health.reasons()
        now_s = time.monotonic()
        until_s = now_s + self.health.recovery_s if self.health.recovery_s else None
        found = {
            card.uuid: Fault("recorded before the agent's start", until_s)
            for card in self.cards
            if card.index in recorded and card.uuid not in known
        }
        await self._set(replace(self.health, faults={**found, **self.health.faults}))


def _why_none(inventory: Inventory) -> str:
    lost = "; ".join(f"card {each.position}: {each.reason}" for each in inventory.lost)
    return f"no card can be read ({lost})" if lost else "the driver reports no card"
