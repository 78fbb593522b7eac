"""Whether the driver itself enforces memory limits here, card by card: tried once a run of the machine.

A small limit is set for a cgroup of our own and read back; a program in it must be refused, and must not be
once the limit is cleared. A version number proves neither: the driver may count nothing (`RmMemacctMode`),
and a card in MIG mode is not counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from gpuslice.adapters.cgroup.tree import CgroupTree
from gpuslice.adapters.gpu import limit_trial
from gpuslice.adapters.gpu.memory_limits import (
    FIRST_BRANCH,
    LimitRefusedError,
    MemoryLimiter,
    MemoryLimits,
)
from gpuslice.adapters.gpu.source import GpuUnavailableError
from gpuslice.apps.agent.library import replace_file
from gpuslice.core.errors import GpusliceError
from gpuslice.core.model import Card
from gpuslice.core.units import MIB

_log = logging.getLogger(__name__)

FILE = "driver-limits.json"
LIMIT_BYTES = 64 * MIB
"""Less than a context takes on any card of these drivers."""
TRIAL_S = 60.0
AGAIN_S = 600.0
"""After this time a card is tried again that did not hold, e.g. since it was full."""
UNLIMITED = MemoryLimits(0, None)


class _NotHeldError(GpusliceError):
    """The card's limits cannot be left to the driver."""


class Record(msgspec.Struct, frozen=True):
    """What was proved: cards by uuid, in one run of the machine, with one driver."""

    boot: str = ""
    driver: str = ""
    cards: list[str] = []


class DriverProbe:
    """Proves cards and remembers that below `root`. `library`: where NVML was found, with CUDA beside it."""

    def __init__(
        self,
        limiter: MemoryLimiter | None,
        tree: CgroupTree,
        root: Path,
        *,
        boot: str,
        library: str = "",
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.problems: dict[str, str] = {}  # by uuid, why the driver is not relied on
        self._limiter = limiter
        self._tree = tree
        self._file = root / FILE
        self._boot = boot
        self._environ = cuda_environment(environ, library)
        self._tried_s: dict[str, float] = {}

    async def proved(self, cards: Iterable[Card], driver: str) -> frozenset[str]:
        """The uuids of those cards whose limits this driver enforces. Cards are tried one after the other."""
        cards = tuple(cards)
        if reason := self._impossible(driver):
            self.problems = {card.uuid: reason for card in cards}
            return frozenset()
        known, now_s = self._read(driver), time.monotonic()
        for card in cards:
            if card.uuid in known or now_s - self._tried_s.get(card.uuid, -AGAIN_S) < AGAIN_S:
                continue
            self._tried_s[card.uuid] = now_s
            try:
                await self._try(card)
            except (_NotHeldError, LimitRefusedError, GpuUnavailableError, OSError) as error:
                self.problems[card.uuid] = str(error)
                _log.info(
                    "limits are not left to the driver", extra={"card": card.uuid, "reason": str(error)}
                )
                continue
            _log.info("the driver enforces limits", extra={"card": card.uuid, "driver": driver})
            self.problems.pop(card.uuid, None)
            known |= {card.uuid}
            record = Record(self._boot, driver, sorted(known))
            replace_file(self._file, msgspec.json.encode(record), 0o600)
        return known & {card.uuid for card in cards}

    def _impossible(self, driver: str) -> str:
        branch = driver.partition(".")[0]
        if self._limiter is None:
            return "switched off"
        if not branch.isdecimal() or int(branch) < FIRST_BRANCH:
            return f"driver {driver or 'unknown'}: {FIRST_BRANCH} is the first that enforces limits"
        if not self._tree.available:
            return f"{self._tree.root} is not the machine's cgroups of version 2"
        return ""

    def _read(self, driver: str) -> frozenset[str]:
        with contextlib.suppress(OSError, ValueError):
            record = msgspec.json.decode(self._file.read_bytes(), type=Record)
            if (record.boot, record.driver) == (self._boot, driver):
                return frozenset(record.cards)
        return frozenset()

    async def _try(self, card: Card) -> None:
        assert self._limiter is not None
        cgroup = self._tree.make(f"gpuslice-probe-{os.getpid()}")
        small = MemoryLimits(0, LIMIT_BYTES)
        try:
            self._tree.count_device_memory(cgroup)
            await self._limiter.set_memory_limits(card.uuid, cgroup, small)
            found = await self._limiter.memory_limits(card.uuid, cgroup)
            if (found.soft, found.hard) != (small.soft, small.hard):
                raise _NotHeldError(f"{small} was set, and the driver reads {found}")
            limited = await self._trial(cgroup, card.uuid)
            if limited != limit_trial.REFUSED:
                raise _NotHeldError(f"a program past its cgroup's limit was not refused: {limited}")
            await self._limiter.set_memory_limits(card.uuid, cgroup, UNLIMITED)
            free = await self._trial(cgroup, card.uuid)
            if free != limit_trial.ALLOWED:  # then the refusal says nothing
                raise _NotHeldError(f"a program without a limit did not get memory: {free}")
        finally:
            with contextlib.suppress(LimitRefusedError, GpuUnavailableError):
                await self._limiter.set_memory_limits(card.uuid, cgroup, UNLIMITED)
            with contextlib.suppress(OSError):
                cgroup.rmdir()

    async def _trial(self, cgroup: Path, uuid: str) -> str:
        """What the program says."""
        command = [sys.executable, "-m", limit_trial.__name__, str(cgroup), str(LIMIT_BYTES)]
        program = await asyncio.create_subprocess_exec(
            *command,
            env={**self._environ, "CUDA_VISIBLE_DEVICES": uuid},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(TRIAL_S):
                said, errors = await program.communicate()
        except TimeoutError:
            return f"no answer within {TRIAL_S:g} s"
        finally:
            if program.returncode is None:
                program.kill()
                await program.wait()
        return (said.decode().strip() or errors.decode(errors="replace").strip() or "it ended").splitlines()[
            -1
        ]


def cuda_environment(ours: Mapping[str, str], library: str) -> dict[str, str]:
    """Of a program that finds CUDA beside NVML, and has no library of ours in between."""
    made = {name: value for name, value in ours.items() if name != "LD_PRELOAD"}
    if folder := os.path.dirname(library):
        made["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (folder, made.get("LD_LIBRARY_PATH", ""))))
    return made
