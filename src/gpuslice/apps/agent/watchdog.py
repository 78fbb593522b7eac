"""Acts where a container holds more of a card than its limit, or its request, by the driver's own figures.

The library limits every program into which it is loaded. It does not limit a program that is linked
statically, talks to the devices directly or finds undocumented functions of the driver, and its neighbours
then lack the memory. The driver counts it nevertheless. On a node without isolation nothing limits anybody:
whoever holds more than it asked for is told so, and that is all.

The libraries in the containers get these figures too: many drivers report nothing for a process that asks
from inside a container, so that the size of a context is measured by difference, which a neighbour's growth
falsifies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gpuslice.adapters.cgroup.container import parse_cgroup
from gpuslice.adapters.gpu.source import GpuSource, GpuUnavailableError
from gpuslice.adapters.region.figures import Figure
from gpuslice.adapters.region.living import identity_of
from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.container_tiers import ContainerName, ContainerTiers, publish
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.lender import Lender
from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.settings import AgentSettings
from gpuslice.apps.agent.status import Counters
from gpuslice.apps.agent.writer import Writer
from gpuslice.core.attribution import ProcessReading
from gpuslice.core.units import MIB

_log = logging.getLogger(__name__)

EVERY_S = 0.5
"""So long a container may be past its limit, and so long it is asked to give back what it borrowed."""
HURRIED_S = 0.02
"""While somebody waits for what was lent."""
UNSEEN = 1.03
"""Drivers load a little that no library sees; the alert uses the same factor."""
URGENT_S = 0.3
"""Both, while a program waits for what is its own: for no longer than a second."""
CALLED_BACK = "GPUMemoryCalledBack"
GRACE_S = 5.0
"""Between SIGTERM and SIGKILL."""
TELL_S = 2.0
"""Time for the API server in each check: one that hangs must not keep figures from the containers."""


class Holder(NamedTuple):
    """A container on a card."""

    uid: str
    container: str
    card: str


@dataclass(slots=True)
class Excess:
    """A container that was past its limit, or what it asked for without one, at the last check; `ending` are
    pidfds that got SIGTERM.
    """

    limited: bool = True
    reported: bool = False
    kill_at_s: float = 0.0
    ending: dict[int, int] = field(default_factory=dict)

    def close(self) -> None:
        for handle in self.ending.values():
            os.close(handle)
        self.ending.clear()


class Watchdog:
    """Warns about containers past their limit, and with `stop` ends the processes that hold the excess."""

    def __init__(
        self,
        source: GpuSource,
        state: AllocationState,
        folders: Folders,
        writer: Writer,
        *,
        lender: Lender,
        counters: Counters,
        settings: AgentSettings,
        proc: Path = Path("/proc"),
    ) -> None:
        self.grace_s = GRACE_S
        self.tell_s = TELL_S
        self._source = source
        self._state = state
        self._folders = folders
        self._writer = writer
        self._lender = lender
        self._counters = counters
        self._stop = settings.watchdog == "stop"
        self._allow_cgpu_disable = settings.allow_cgpu_disable
        self._proc = proc
        self.tiers = ContainerTiers(state, folders, writer, allow_cgpu_disable=settings.allow_cgpu_disable)
        self._excesses: dict[Holder, Excess] = {}
        self._seen: dict[Holder, float] = {}  # since when they are past their limit, by the last check
        self._problem = ""
        self.held: Mapping[Holder, Sequence[ProcessReading]] = {}  # at the last check

    @property
    def containers_past_limit(self) -> int:
        return len(
            {
                (each.uid, each.container)
                for each, found in self._excesses.items()
                if found.reported and found.limited
            }
        )

    async def run(self) -> None:
        """Check for ever."""
        try:
            while True:
                problem = ""
                try:
                    await self.check()
                except GpuUnavailableError as error:
                    problem = f"the driver does not report processes: {error}"
                except OSError as error:
                    problem = f"the driver's figures cannot be published to containers: {error}"
                if problem and problem != self._problem:
                    _log.warning("watchdog is without figures", extra={"error": problem})
                elif self._problem and not problem:
                    _log.info("watchdog has figures again")
                self._problem = problem
                await asyncio.sleep(HURRIED_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S - HURRIED_S):
                        await self._lender.is_waiting.wait()
        finally:
            for excess in self._excesses.values():
                excess.close()

    async def check(self) -> None:
        """One check. A container past its limit for as long as it may be is dealt with.

        Raises `GpuUnavailableError`, and OSError if the figures cannot be published.
        """
        at_ns = time.monotonic_ns()
        held: dict[Holder, list[ProcessReading]] = defaultdict(list)
        for reading in await self._source.processes():
            if (found := self._container_of(reading.pid)) is not None:
                held[Holder(found[0].view.uid, found[1], reading.uuid)].append(reading)
        used_bytes = {each: sum(one.memory_bytes or 0 for one in readings) for each, readings in held.items()}
        self._lender.live.reported = {(*each,): used for each, used in used_bytes.items()}
        self.held = held
        excesses, seen = {}, dict[Holder, float]()
        by_claims = self._folders.claim_limits() if held else {}
        for holder, readings in held.items():
            limit_bytes, limited = self._promised_bytes(holder)
            if (claimed := by_claims.get((holder.uid, holder.container))) is not None:
                limit_bytes = claimed.get(holder.card, 0)
            unseen = 1.0 if self._lender.calls_back(*holder) else UNSEEN
            if limit_bytes is not None and used_bytes[holder] > limit_bytes * unseen:
                excess = self._excesses.pop(holder) if holder in self._excesses else Excess(limited)
                excesses[holder] = excess
                seen[holder] = self._seen.get(holder, at_ns / 1e9)
                asked_s = URGENT_S if self._lender.is_urgent(holder.card) else EVERY_S
                if at_ns / 1e9 - seen[holder] >= asked_s - HURRIED_S:
                    self._act(holder, excess, readings, limit_bytes)
        for over in self._excesses.values():
            over.close()
        self._excesses, self._seen = excesses, seen
        figures: dict[ContainerName, list[Figure]] = defaultdict(list)
        for holder, readings in held.items():
            for reading in readings:  # each process by its pid inside its container
                identity = identity_of(reading.pid, self._proc)
                if identity is not None and reading.memory_bytes:
                    figure = Figure(holder.card, *identity, reading.memory_bytes)
                    figures[holder.uid, holder.container].append(figure)
        try:
            publish(self._folders, figures, at_ns)
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.tell_s):
                    await self.tiers.judge(figures)

    def _container_of(self, pid: int) -> tuple[NodePod, str] | None:
        """The pod and the container's name; None for a process of no container with a grant.

        By the runtime's id alone: the path names a static pod by another uid than the API server, and no pod
        at all where kubelet makes no cgroups of pods (``cgroupsPerQOS: false``).
        """
        try:
            found = parse_cgroup((self._proc / str(pid) / "cgroup").read_text(errors="replace"))
        except OSError:  # it has ended
            return None
        if found is None:
            return None
        named = ((pod, pod.container_ids.get(found.container_id, "")) for pod in self._state.pods())
        return next(((pod, name) for pod, name in named if name), None)

    def _promised_bytes(self, holder: Holder) -> tuple[int | None, bool]:
        """What it asked for, and whether that limits it. None if kubelet does not list what it was given."""
        pod, limits = self._state.pod(holder.uid), self._state.limits(holder.uid, holder.container)
        if limits is None:
            return None, False
        exempt = pod is not None and self._allow_cgpu_disable and holder.container in pod.unlimited
        promised = limits[holder.card].memory_mib * MIB if holder.card in limits else 0
        promised += max(0, self._lender.lease_bytes(*holder)) - self._lender.parked_bytes(*holder)
        return promised, self._state.rules.isolation and not exempt

    def _act(self, holder: Holder, excess: Excess, readings: list[ProcessReading], limit_bytes: int) -> None:
        """Deal with a container past its limit; its pod is told once."""
        pod = self._state.pod(holder.uid)
        if pod is None:
            return
        if self._stop and excess.limited:
            self._end(holder, excess, readings, limit_bytes)
        if excess.reported:
            return
        excess.reported = True
        used_mib, limit_mib = sum(each.memory_bytes or 0 for each in readings) // MIB, limit_bytes // MIB
        if not excess.limited:
            what = (
                f"container {holder.container} holds {used_mib} MiB of card {holder.card} and asked for "
                f"{limit_mib} MiB: nothing limits it here, and its neighbours lack the rest"
            )
            _log.warning("past its request", extra={"pod": pod.view.key, "used_mib": used_mib})
            self._writer.pod_event(pod.view, "GPUMemoryPastRequest", what)
            return
        what = (
            f"container {holder.container} holds {used_mib} MiB of card {holder.card}, its limit is "
            f"{limit_mib} MiB"
        )
        done = "the processes that hold the excess are ended" if self._stop else "delete the pod to stop it"
        _log.warning("past its limit", extra={"pod": pod.view.key, "used_mib": used_mib})
        if not self._lender.calls_back(*holder):
            self._counters.past_limit += 1
            why = "a program in it is not held by libgpuslice"
            self._writer.pod_event(pod.view, "GPUMemoryPastLimit", f"{what}: {why}; {done}")
            return
        self._counters.borrowers_ended += 1
        winner = self._lender.wanted_by(holder.card)
        whom = winner.key if winner else "others"
        why = f"what it borrowed beyond its request is called back for {whom}, who requested it"
        order = "the lowest priority loses first, then who has the most beyond its request, then the youngest"
        self._writer.pod_event(
            pod.view, CALLED_BACK, f"{what}: {why}, and was not given back; {done} ({order})"
        )
        if winner is not None:
            text = f"waits for memory of card {holder.card} that {pod.view.key} borrowed: {done}"
            self._writer.pod_event(winner, CALLED_BACK, text)

    def _end(self, holder: Holder, excess: Excess, readings: list[ProcessReading], limit_bytes: int) -> None:
        """SIGTERM to the largest processes until the rest is within the limit; later SIGKILL."""
        now_s = time.monotonic()
        if not excess.ending:
            left_bytes = sum(each.memory_bytes or 0 for each in readings)
            for each in sorted(readings, key=lambda one: one.memory_bytes or 0, reverse=True):
                if left_bytes <= limit_bytes:
                    break
                left_bytes -= each.memory_bytes or 0
                with contextlib.suppress(ProcessLookupError):
                    excess.ending[each.pid] = os.pidfd_open(each.pid)
            excess.kill_at_s = now_s + (URGENT_S if self._lender.is_urgent(holder.card) else self.grace_s)
            self._signal(holder, excess, signal.SIGTERM)
        elif now_s >= excess.kill_at_s:
            self._signal(holder, excess, signal.SIGKILL)
            excess.close()

    def _signal(self, holder: Holder, excess: Excess, number: signal.Signals) -> None:
        """A pidfd refers to one process for good, and is checked after opening to be in this container."""
        for pid, handle in excess.ending.items():
            found = self._container_of(pid)
            if found is None or (found[0].view.uid, found[1]) != (holder.uid, holder.container):
                continue
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, number)
                _log.warning("process past the limit ended", extra={"pid": pid, "signal": number.name})
                self._counters.ended[number.name] += 1
