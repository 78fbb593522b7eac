"""Monitors the cards: which exist, which must not be given out; and makes that known."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from gpuslice.adapters.gpu.renewal import Renewal
from gpuslice.adapters.gpu.source import GpuSource, GpuUnavailableError, Inventory
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.objects import ConfigMap
from gpuslice.adapters.kube.resources import CONFIG_MAPS
from gpuslice.adapters.kube.watch import Reflector
from gpuslice.apps.agent.active_lock import ActiveLock
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.device_list import DeviceList
from gpuslice.apps.agent.health import Fault, Health, excluded_cards, recorded_faults, unhealthy_data
from gpuslice.apps.agent.node_reconciler import NodeReconciler
from gpuslice.apps.agent.settings import AgentSettings
from gpuslice.apps.agent.units_in_force import UnitsInForce
from gpuslice.apps.agent.upkeep import Owned, Upkeep
from gpuslice.apps.agent.writer import Writer, unhealthy_configmap
from gpuslice.core.card_links import Link, card_links
from gpuslice.core.contract import SYSTEM_NAMESPACE
from gpuslice.core.errors import ContractError
from gpuslice.core.model import Card

_log = logging.getLogger(__name__)

FAILURES_TO_LOST = 3
"""One query that the driver does not answer in time does not make a card lost."""
REOPEN_EVERY = 12  # queries, while a card is lost
MOST_UNTOLD = 100
"""Changes that are remembered while the API server cannot be reached."""


class _NodeEvent(NamedTuple):
    reason: str
    message: str
    warning: bool = True


class CardMonitor:
    """Follows the driver, the operator's file and the clock.

    A card that was seen once stays in the list with its units, even if it is lost: an id that a container
    holds must not disappear for kubelet. It goes only if another card has its index now.
    """

    def __init__(
        self,
        source: GpuSource,
        state: AllocationState,
        devices: DeviceList,
        node: NodeReconciler,
        writer: Writer,
        *,
        client: KubeClient,
        lock: ActiveLock,
        units: UnitsInForce,
        settings: AgentSettings,
        proc: Path = Path("/proc"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cards: tuple[Card, ...] = ()
        self.health = Health(settings.recovery_s)
        self.problem = "the cards have not been read yet"  # "" while the driver reports cards
        self.driver_version = ""
        self.bus_ids: dict[int, str] = {}  # PCI addresses by index
        self._source = source
        self._state = state
        self._devices = devices
        self._node = node
        self._writer = writer
        self._lock = lock
        self._units = units
        self._told = ""  # what waits, as reported
        self._file = Path(settings.unhealthy_file)
        self._every_s = settings.inventory_s
        listed = proc / "driver" / "nvidia" / "gpus"
        self._renewal = Renewal(listed, lost_every_s=REOPEN_EVERY * self._every_s)
        self._follow_events = settings.health_check
        self._failures = 0
        self.links: dict[frozenset[str], Link] = {}  # by a pair of uuids
        self._untold: deque[_NodeEvent] = deque(maxlen=MOST_UNTOLD)  # in order
        self._file_problem = ""
        self._unusable: list[str] = []  # in words, of the driver's list
        name = unhealthy_configmap(settings.node_name)
        self._configmap = f"{SYSTEM_NAMESPACE}/{name}"
        self.upkeep = Upkeep(self._owned, writer.not_repaired)
        self._configmaps: Reflector[ConfigMap] = Reflector(
            client, CONFIG_MAPS, lambda _: self.upkeep.wake(), namespace=SYSTEM_NAMESPACE,
            fields=f"metadata.name={name}", clock=clock,
        )  # fmt: skip

    def reasons(self) -> dict[int, str]:
        """Why cards are out of use, by index."""
        reasons = self.health.reasons()
        return {card.index: reasons[card.uuid] for card in self.cards if card.uuid in reasons}

    # -- tasks ----------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Query the cards, the file and the time, for ever."""
        if not self._units.known:
            await self._node.read.wait()
            if (seen := self._node.seen) is not None:
                self._units.learn(seen.metadata.annotations or {}, seen.status.capacity or {})
        while True:
            await self.refresh()
            await asyncio.sleep(self._every_s)

    async def record(self) -> None:
        """Write down what is found, for ever. Nobody who looks at the cards waits for the API server."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._configmaps.run())
            await self._configmaps.synced.wait()
            while not self.cards:  # noqa: ASYNC110
                await asyncio.sleep(self._every_s)
            await self._adopt()
            await self.upkeep.run()

    async def follow_events(self) -> None:
        """Handle the driver's reports, for ever. A driver that cannot report is asked again now and then."""
        if not self._follow_events:
            return
        problem = ""
        while True:
            try:
                async with contextlib.aclosing(self._source.events()) as events:
                    async for event in events:
                        problem = ""
                        _log.warning("driver reports", extra={"xid": event.xid, "uuid": event.uuid})
                        known = [card.uuid for card in self.cards]
                        await self._set(self.health.event(event, known, time.monotonic()))
                # the driver was reopened: subscribe again at once, so that no report is missed
            except GpuUnavailableError as error:
                if str(error) != problem:
                    problem = str(error)
                    _log.warning("no fault reports from the driver", extra={"error": problem})
                await asyncio.sleep(self._every_s)

    # -- the verdict ----------------------------------------------------------------------------------

    async def refresh(self) -> None:
        """Query everything once. Never raises for a driver or file that cannot be read.

        Raises `TooManyUnitsError` if the cards are too many devices for kubelet in this unit.
        """
        inventory: Inventory | GpuUnavailableError
        if self._renewal.reason(lost=bool(self.health.lost)):
            await self._source.close()
            self._renewal.done()
        try:
            inventory = await self._source.inventory()
        except GpuUnavailableError as error:
            inventory = error
        health = self.health.aged(time.monotonic())  # not earlier: a report may have arrived meanwhile
        if isinstance(inventory, Inventory):
            self._failures = 0
            self.driver_version = inventory.driver_version
            self.bus_ids |= {card.index: card.pci_bus_id for card in inventory.cards}
            self.links |= {frozenset((each.uuid, each.other)): each.link for each in inventory.links}
            answering: dict[str, Card] = {}
            unusable = [
                f"card {each.position} of the driver's list: {each.reason}" for each in inventory.lost
            ]
            for card in self._units.cut(inventory.cards):
                twin = answering.setdefault(card.uuid, card)
                if twin is not card:
                    place = f"card {card.index} of the driver's list"
                    unusable.append(f"{place}: has the uuid of card {twin.index}, {card.uuid}")
            self.cards = tuple(card for card in _listed(self.cards, answering) if card.units > 0)
            problem = (
                f"no card can be read ({'; '.join(unusable)})" if unusable else "the driver reports no card"
            )
            self._set_problem("" if self.cards else problem)
            health = health.seen(answering, (card.uuid for card in self.cards))
            health = replace(health, divided=frozenset(card.uuid for card in inventory.cards if card.divided))
            new = [each for each in unusable if each not in self._unusable]
            self._unusable = unusable
            # as many as lost cards: they were known, and are reported as such
            if new and len(unusable) > len(health.lost):
                for each in new:
                    _log.warning("card cannot be given out", extra={"reason": each})
                self._untold.extend(_NodeEvent("GPUOutOfUse", each) for each in new)
        else:
            self._failures += 1
            self._set_problem(str(inventory))
            if self._failures >= FAILURES_TO_LOST:
                health = health.seen((), (card.uuid for card in self.cards))
        await self._set(replace(health, excluded=self._excluded()))

    def _set_problem(self, problem: str) -> None:
        if problem and problem != self.problem:
            _log.warning("cards cannot be given out", extra={"reason": problem})
        elif self.problem and not problem:
            _log.info("the driver answers", extra={"cards": len(self.cards)})
        self.problem = problem

    def _excluded(self) -> frozenset[str]:
        """What the operator's file takes out of use; if it cannot be read, what it did before."""
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

    async def _set(self, health: Health) -> None:
        known, before = self.health.reasons(), self.reasons()
        self.health = health
        for uuid, reason in health.reasons().items():
            if uuid not in known:
                _log.warning("card out of use", extra={"uuid": uuid, "reason": reason})
        for uuid in sorted(known.keys() - health.reasons().keys()):
            _log.info("card back in use", extra={"uuid": uuid})
        self.upkeep.wake()
        after = self.reasons()
        if self._lock.held.is_set():  # otherwise another agent reports
            self._untold.extend(
                _out_of_use(each, after[each]) for each in sorted(after.keys() - before.keys())
            )
            for each in sorted(before.keys() - after.keys()):
                self._untold.append(
                    _NodeEvent("GPUBackInUse", f"card {each} is given out again", warning=False)
                )
        self._state.set_cards(self.cards, frozenset(self.reasons()))
        unhealthy = health.reasons().keys() & {card.uuid for card in self.cards}
        await self._devices.update(self.cards, unhealthy)
        uuids = [card.uuid for card in self.cards]  # including lost ones
        pairs = [
            [self.links.get(frozenset((uuid, other))) for other in uuids[at + 1 :]]
            for at, uuid in enumerate(uuids[:-1])
        ]
        known_pairs = [[link for link in row if link is not None] for row in pairs]
        self._node.links = ()  # if the driver does not report each pair
        if known_pairs and known_pairs == pairs:
            self._node.links = card_links(known_pairs)
        self._node.wake()

    def _owned(self) -> Iterator[Owned]:
        if not self.cards:
            return
        present = self._present()
        reasons, here = self.reasons(), {card.uuid for card in self.cards}
        wanted = None
        if reasons or present is not None:
            wanted = unhealthy_data(present, reasons, self.health.faulty() & here)
        yield Owned(f"ConfigMap {self._configmap}", present, wanted, partial(self._record, wanted or {}))
        yield Owned("event on units", self._told, self._units.waits, self._tell_waits)
        yield Owned("events on cards", len(self._untold), 0, self._tell)

    def _present(self) -> dict[str, str] | None:
        """What the ConfigMap of unhealthy cards says; None if there is none."""
        found = next(iter(self._configmaps.objects.values()), None)
        return None if found is None else found.data or {}

    async def _record(self, data: dict[str, str]) -> None:
        await self._writer.set_unhealthy(data, present=self._present() is not None)

    async def _tell(self) -> None:
        """Report each change, even if it is over, once the API server can be reached."""
        await self._writer.reach()
        while self._untold:
            event = self._untold.popleft()
            self._writer.node_event(event.reason, event.message, warning=event.warning)

    async def _tell_waits(self) -> None:
        self._told = self._units.waits
        if self._told:
            self._writer.node_event("GPUUnitsWait", self._told, warning=True)

    async def _adopt(self) -> None:
        """An earlier agent's faults still count: a restart of the agent repairs nothing."""
        recorded, now_s = recorded_faults(self._present()), time.monotonic()
        until_s = now_s + self.health.recovery_s if self.health.recovery_s else None
        fault = Fault("recorded before the agent's start", until_s)
        found = {card.uuid: fault for card in self.cards if card.uuid in recorded}
        await self._set(replace(self.health, faults={**found, **self.health.faults}))
        known = [_out_of_use(index, reason) for index, reason in self.reasons().items()]
        self._untold.extend(each for each in known if each not in self._untold)


def _listed(known: Iterable[Card], answering: Mapping[str, Card]) -> list[Card]:
    """The cards to list, in index order, also those that do not answer.

    Each has the index that it has now: after a reload of the driver without one card, the next may have its
    index, and then the lost one is not listed any more.
    """
    cards, taken = dict(answering), {card.index for card in answering.values()}
    for card in known:
        if card.uuid not in answering and card.index not in taken:
            cards[card.uuid] = card
    return sorted(cards.values(), key=lambda card: card.index)


def _out_of_use(index: int | None, reason: str) -> _NodeEvent:
    return _NodeEvent("GPUOutOfUse", f"card {index}: {reason}")
