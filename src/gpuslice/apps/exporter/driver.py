"""Keeps the driver open: its faults are followed, and it is reopened when necessary."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path

from gpuslice.adapters.gpu.renewal import LOST_EVERY_S, Renewal
from gpuslice.adapters.gpu.source import GpuSource, GpuUnavailableError
from gpuslice.adapters.gpu.telemetry import Telemetry
from gpuslice.apps.exporter.node_state import NodeState

_log = logging.getLogger(__name__)
CHECK_EVERY_S = 10.0
CHECK_SAMPLES = 10  # where those take less
FAULTS_RETRY_S = 10.0
FOLLOWED_S = 2.0


async def keep_driver_open(
    source: GpuSource, telemetry: Telemetry, state: NodeState, cards: Path, every_s: float
) -> None:
    """Runs until cancelled. `cards`: where the driver lists its cards; `every_s`: between two samples."""
    check_s = min(CHECK_EVERY_S, CHECK_SAMPLES * every_s)
    renewal, logged = Renewal(cards, lost_every_s=min(LOST_EVERY_S, 3 * check_s)), ""
    while True:
        faults = asyncio.create_task(_follow_faults(source, state), name="faults")
        try:
            reason = ""
            while not reason:
                await asyncio.wait({faults}, timeout=check_s)
                if faults.done():
                    faults.result()  # it does not end by itself
                driver = state.collectors.readings.get("driver")
                failing = driver is not None and not driver.success
                reason = renewal.reason(failing=failing, lost=bool(state.snapshot.lost))
                logged = logged if failing or state.snapshot.lost else ""
        finally:
            faults.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await faults
        await source.close()
        await telemetry.renew()
        renewal.done()
        if reason != logged:  # it may be so for days
            _log.info("driver is reopened", extra={"reason": reason})
        logged = reason


async def _follow_faults(source: GpuSource, state: NodeState) -> None:
    while True:
        # a driver that does not report fails at once; one that does says nothing until there is a fault
        works = asyncio.get_running_loop().call_later(FOLLOWED_S, state.collectors.good, "xid", 0.0)
        try:
            async with contextlib.aclosing(source.events()) as events:
                async for event in events:
                    _log.warning("xid", extra={"xid": event.xid, "uuid": event.uuid})
                    state.history.xids.add(event.uuid, event.xid, time.time())
        except GpuUnavailableError as error:
            state.collectors.bad("xid", str(error))
        finally:
            works.cancel()
        await asyncio.sleep(FAULTS_RETRY_S)
