"""The helper program that calls the driver's checkpoint functions: the agent itself never loads libcuda."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

from gpuslice.adapters.gpu import checkpoint_program
from gpuslice.core.errors import GpusliceError

NO_SUCH_PROCESS = 1
"""CUDA_ERROR_INVALID_VALUE: it has ended, or never used CUDA."""
CALL_S = 180.0
"""140 GiB at the slowest rate that was reported, 5 GB/s unpinned, five times over."""
_WORDS = {
    2: "the card has no room",
    401: "the process is in another state",
    500: "the driver is older than 570",
    600: "its work did not end in time",
    800: "not permitted: the agent needs CAP_SYS_PTRACE and the host's PID namespace",
    801: "it has memory of a kind that this driver cannot take off a card: managed memory, or, before 610, "
    "memory shared between processes",
}


class ProcessState(IntEnum):
    """CUprocessState of cuda.h."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


class CheckpointRefusedError(GpusliceError):
    """The driver does not do it; `code` is its CUresult."""

    def __init__(self, call: str, pid: int, code: int) -> None:
        super().__init__(f"process {pid}: {_WORDS.get(code, f'{call}: CUDA error {code}')}")
        self.code = code


class HelperEndedError(GpusliceError):
    """The program ended before it answered: what it did is told by the process's state alone."""


class Checkpointer:
    """One program, started when it is needed and again when it has ended; one call at a time.

    `lock`: a file, the same for all that may move the same processes.
    """

    def __init__(self, lock: Path, environ: Mapping[str, str]) -> None:
        self._lock = lock
        self._environ = dict(environ)
        self._program: Process | None = None
        self._turn = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return self._program.pid if self._program is not None else None

    async def lock(self, pid: int, timeout_ms: int) -> None:
        """Let the process finish what it submitted; its later calls wait."""
        await self._done("lock", pid, timeout_ms)

    async def checkpoint(self, pid: int) -> None:
        await self._done("checkpoint", pid)

    async def restore(self, pid: int) -> None:
        """Only where there is room: a process whose restore met a full card is lost."""
        await self._done("restore", pid)

    async def unlock(self, pid: int) -> None:
        await self._done("unlock", pid)

    async def state(self, pid: int) -> ProcessState | None:
        """None for a process that uses no card. Raises as all of these do."""
        try:
            return ProcessState(await self._done("state", pid))
        except CheckpointRefusedError as error:
            if error.code == NO_SUCH_PROCESS:
                return None
            raise

    async def _done(self, call: str, pid: int, *more: int) -> int:
        """What the driver answered. Raises `CheckpointRefusedError`, `HelperEndedError`."""
        async with self._turn:
            line = " ".join(map(str, (call, pid, *more)))
            answer = b""
            try:
                program = await self._started()
                assert program.stdin is not None
                assert program.stdout is not None
                program.stdin.write(f"{line}\n".encode())
                async with asyncio.timeout(CALL_S):
                    answer = await program.stdout.readline()
            except (TimeoutError, OSError):
                pass
            finally:
                if not answer.endswith(b"\n"):  # also when we are cancelled: the next answer is another's
                    self._drop()
        if not answer.endswith(b"\n"):
            raise HelperEndedError(f"{line}: the program that calls the driver has ended")
        result, value = map(int, answer.split())
        if result:
            raise CheckpointRefusedError(call, pid, result)
        return value

    async def _started(self) -> Process:
        if self._program is None or self._program.returncode is not None:
            self._program = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                checkpoint_program.__name__,
                str(self._lock),
                env=self._environ,
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,  # what is typed at a terminal is for the agent, which ends it
            )
        return self._program

    def _drop(self) -> None:
        """It finishes the call that it is at, and ends."""
        if self._program is not None and self._program.stdin is not None:
            self._program.stdin.close()
        self._program = None

    async def close(self) -> None:
        """It ends by itself, after what it is doing."""
        if self._program is not None and self._program.stdin is not None:
            self._program.stdin.close()
            program, self._program = self._program, None
            await program.wait()
