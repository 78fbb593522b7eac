"""Takes a sample of the cards and puts the resulting snapshot into the node's state.

A scrape never waits for it: the page is made from the last snapshot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gpuslice.adapters.gpu.source import GpuUnavailableError
from gpuslice.adapters.gpu.telemetry import CardSample, Telemetry
from gpuslice.apps.exporter.card_snapshot import (
    LostCard,
    NodeFacts,
    NodeSnapshot,
    SnapshotBuilder,
    with_device_time,
)
from gpuslice.apps.exporter.counters import HEALTH_STATUS
from gpuslice.apps.exporter.isolation import IsolationReader
from gpuslice.apps.exporter.node_state import NodeState
from gpuslice.apps.exporter.settings import ExporterSettings, parse_devices
from gpuslice.core.device_time import TimeAccount

LONGEST_STEP_S = 10.0
"""Longer gaps between two samples do not count as busy time: nothing was measured."""
CLOCK_EVENTS_FIELD = 112
PODS_UNKNOWN = "pods of this node are not known"


class Sampler:
    """Samples into `state`. `hidden`: why the host's processes cannot be seen, "" if they can."""

    def __init__(
        self,
        telemetry: Telemetry,
        state: NodeState,
        settings: ExporterSettings,
        *,
        hidden: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._telemetry = telemetry
        self._state = state
        self._settings = settings
        self._hidden = hidden
        self._clock = clock
        self._chosen = parse_devices(settings.devices).cards  # None for all
        self._isolation = IsolationReader(Path(settings.root))
        self._builder = SnapshotBuilder()
        self._accounts: dict[str, TimeAccount] = {}  # by card uuid
        self._places: dict[int, tuple[int, str]] = {}  # position → last known index and uuid

    async def sample(self) -> None:
        """Take one sample; the last good one stays if the driver cannot be queried."""
        state, began_s = self._state, self._clock()
        try:
            sample = await self._telemetry.sample(state.counters.wanted_fields)
        except GpuUnavailableError as error:
            state.collectors.bad("driver", str(error), self._clock() - began_s)
            return
        state.collectors.good("driver", sample.took_s)

        samples = [card for card in sample.cards if self._is_chosen(card.index)]
        facts = await self._facts(samples)
        cards = []
        taken_at_s = state.snapshot.taken_at_s
        step_s = max(0.0, sample.taken_at_s - taken_at_s) if taken_at_s else 0.0
        for card in samples:
            account = self._accounts.setdefault(card.uuid, TimeAccount())
            cards.append(with_device_time(self._builder.build(card, facts), account, facts.isolation, step_s))
            await asyncio.sleep(0)  # a scrape may be waiting

        self._places |= {card.position: (card.index, card.uuid) for card in sample.cards}
        silent = [
            LostCard(position, reason, *self._places.get(position, (position, "")))
            for position, reason in sample.lost
        ]
        lost = tuple(card for card in silent if self._is_chosen(card.index))
        state.expected_cards = max(state.expected_cards, len(cards) + len(lost))

        for card in samples:
            if (bits := card.fields.get(CLOCK_EVENTS_FIELD)) is not None:
                state.history.clocks.add(card.uuid, int(bits), sample.taken_at_s)
            if state.counters.asks(HEALTH_STATUS):
                state.history.rises.add(card.uuid, card.fields, began_s)

        counted_s = step_s if step_s <= LONGEST_STEP_S else 0.0
        before = state.snapshot.sm_seconds
        state.snapshot = NodeSnapshot(
            cards=tuple(cards),
            lost=lost,
            driver_version=sample.driver_version,
            taken_at_s=sample.taken_at_s,
            sm_seconds={  # a container that is gone is forgotten: its series ends
                (card.sample.uuid, key): before.get((card.sample.uuid, key), 0.0) + each.sm_ratio * counted_s
                for card in cards
                for key, each in card.containers.items()
                if each.sm_ratio is not None
            },
            active=state.activity.after(cards, state.pods),
            owners=facts.owners,
            peers=sample.peers,
        )

    async def _facts(self, cards: Sequence[CardSample]) -> NodeFacts:
        """The owners of the cards' processes, the holders of the cards, and the interposer's counts."""
        state, obstacle = self._state, ""
        if self._settings.kubernetes:
            obstacle = self._hidden or ("" if state.pods.known else PODS_UNKNOWN)
        pids = {process.pid for card in cards for process in card.processes or ()}
        owners = state.owners.of(pids, state.grants.containers)

        # if the driver reports no processes, or not their memory, the interposer's regions are used
        silent = {
            card.uuid
            for card in cards
            if not card.processes or any(process.memory_bytes is None for process in card.processes)
        }
        busy = None
        if not obstacle:  # those with a process, and those for which that is unknown
            unsure = {key for card in cards if card.uuid in silent for key in state.grants.of(card)}
            busy = {*owners.values(), *unsure}
        began_s = self._clock()
        isolation = await self._isolation.read(busy)
        problem = isolation.problems[0] if isolation.problems else ""
        state.collectors.report("isolation", self._clock() - began_s, problem)
        if not self._hidden:
            isolation = isolation.without_dead_processes(silent, Path(self._settings.proc))
        return NodeFacts(owners, state.grants, isolation, self._settings.memory_unit, obstacle)

    def _is_chosen(self, index: int) -> bool:
        return self._chosen is None or index in self._chosen
