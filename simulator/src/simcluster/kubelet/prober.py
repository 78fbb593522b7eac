"""Acts on the results of a container's probes: readiness is shown in the status, liveness restarts it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from simcluster.cluster.amounts import Object
from simcluster.kubelet.probes import Probe, probe_of, verdicts
from simcluster.kubelet.records import ContainerRecord
from simcluster.kubelet.runtime import Container


@dataclass(frozen=True, slots=True)
class Prober:
    """Probes one attempt of a container. `tell` writes an event: reason, message, whether it is a warning.

    Readiness is probed `speed_up` times as often, the others at the specified interval.
    """

    container: Container
    spec: Object
    record: ContainerRecord
    grace_s: float
    speed_up: float
    stop: Callable[[Container, float], Awaitable[None]]
    changed: Callable[[], None]
    tell: Callable[[str, str, bool], Awaitable[None]]

    def __post_init__(self) -> None:
        """Until its probes say otherwise a container is neither started nor ready."""
        self.record.probed_ready = not self.spec.get("readinessProbe")
        self.record.probed_started = not self.spec.get("startupProbe")

    async def run(self) -> None:
        """The startup probe first, the others only afterwards; until cancelled or the container ends."""
        startup = probe_of(self.spec, "startupProbe")
        if startup is not None and not await self._started(startup):
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow_readiness(), name="readiness")
            group.create_task(self._follow_liveness(), name="liveness")

    async def _started(self, probe: Probe) -> bool:
        async for verdict in verdicts(probe, self.container):
            if not verdict.well:
                await self._kill("Startup", verdict.reason)
                return False
            self.record.probed_started = True
            self.changed()
            return True
        return False

    async def _follow_readiness(self) -> None:
        probe = probe_of(self.spec, "readinessProbe", self.speed_up)
        if probe is None:
            return
        async for verdict in verdicts(probe, self.container):
            if verdict.well == self.record.probed_ready:
                continue
            self.record.probed_ready = verdict.well
            self.changed()
            if not verdict.well:
                await self.tell("Unhealthy", f"Readiness probe failed: {verdict.reason}", True)

    async def _follow_liveness(self) -> None:
        probe = probe_of(self.spec, "livenessProbe")
        if probe is None:
            return
        async for verdict in verdicts(probe, self.container):
            if not verdict.well:
                await self._kill("Liveness", verdict.reason)
                return

    async def _kill(self, kind: str, reason: str) -> None:
        """Only kills it: the restart is the ordinary one."""
        await self.tell("Unhealthy", f"{kind} probe failed: {reason}", True)
        words = f"Container {self.record.name} failed {kind.lower()} probe, will be restarted"
        await self.tell("Killing", words, False)
        await self.stop(self.container, self.grace_s)
