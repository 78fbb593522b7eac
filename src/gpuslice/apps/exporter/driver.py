"""Keeps the driver open: its faults are followed, and it is reopened when necessary.

NVML enumerates the cards only when it is opened. A card that was added or reset, or a reloaded driver, is
seen only after everybody in the process has closed it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from gpuslice.adapters.gpu.source import GpuSource, GpuUnavailableError
from gpuslice.adapters.gpu.telemetry import Telemetry
from gpuslice.apps.exporter.node_state import NodeState

_log = logging.getLogger(__name__)
CHECK_EVERY_S = 10.0
LOST_EVERY_S = 60.0
"""How often to look for a card that does not answer by reopening the driver."""
FAULTS_RETRY_S = 10.0


async def keep_driver_open(source: GpuSource, telemetry: Telemetry, state: NodeState, cards: Path) -> None:
    """Runs until cancelled. `cards`: the folder in which the driver lists its cards."""
    renewal = Renewal(cards)
    while True:
        faults = asyncio.create_task(_follow_faults(source, state), name="faults")
        try:
            reason = ""
            while not reason:
                await asyncio.wait({faults}, timeout=CHECK_EVERY_S)
                if faults.done():
                    faults.result()  # it does not end by itself
                driver = state.collectors.readings.get("driver")
                failing = driver is not None and not driver.success
                reason = renewal.reason(failing=failing, lost=bool(state.snapshot.lost))
        finally:
            faults.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await faults
        await source.close()
        await telemetry.renew()
        renewal.done()
        _log.info("driver is reopened", extra={"reason": reason})


async def _follow_faults(source: GpuSource, state: NodeState) -> None:
    while True:
        try:
            async with contextlib.aclosing(source.events()) as events:
                state.collectors.good("xid", 0.0)
                async for event in events:
                    _log.warning("xid", extra={"xid": event.xid, "uuid": event.uuid})
                    state.history.xids.add(event.uuid, event.xid, time.time())
        except GpuUnavailableError as error:
            state.collectors.bad("xid", str(error))
        await asyncio.sleep(FAULTS_RETRY_S)


class Renewal:
    """Decides by the folder in which the driver lists its cards, and by the result of the last sample."""

    def __init__(self, cards: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = cards
        self._clock = clock
        self.done()

    def reason(self, *, failing: bool, lost: bool) -> str:
        """Why to reopen now, or "". `failing`: the driver does not answer; `lost`: a card does not."""
        if self._list() != self._listed:
            return "cards came or went"
        if failing:
            return "the driver does not answer"
        if lost and self._clock() - self._opened_s >= LOST_EVERY_S:
            return "a card does not answer"
        return ""

    def done(self) -> None:
        self._opened_s, self._listed = self._clock(), self._list()

    def _list(self) -> frozenset[str]:
        try:
            return frozenset(os.listdir(self._folder))
        except OSError:  # no such driver yet, or hidden from this container
            return frozenset()
