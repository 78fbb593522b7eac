"""Takes processes off their cards and puts them back: a program that has called cuInit and obeys lines.

``python -m gpuslice.adapters.gpu.checkpoint_program LOCK`` reads ``CALL PID [ARGUMENT]`` and answers each
line by ``RESULT VALUE``, the driver's own numbers. It stays, since a program that is started for each call
takes seconds to attach (cuda-checkpoint's users report 0.4 to 2.7 s). At the end of its input it unlocks what
it had locked: nobody's calls wait for an agent that has ended. It begins once no other one has the file LOCK
locked: that of an agent before may still be at a call.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
from collections.abc import Callable

from gpuslice.adapters.gpu.cuda import CudaMissingError

NOT_FOUND = 500
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p)
FIRST_CUDA = 12080
"""Of driver 570."""


class LockArguments(ctypes.Structure):
    """CUcheckpointLockArgs of cuda.h."""

    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class Checkpoints:
    """The driver's functions. Each returns a result and a value, which is 0 except for `state`."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaMissingError(f"no CUDA driver: {error}") from error
        self.started = int(self._library.cuInit(0))
        self.locked: set[int] = set()

    def lock(self, pid: int, timeout_ms: int = 0) -> tuple[int, int]:
        return self._change("Lock", pid, ctypes.byref(LockArguments(timeout_ms)), self.locked.add)

    def checkpoint(self, pid: int, _: int = 0) -> tuple[int, int]:
        return self._change("Checkpoint", pid, None, self.locked.discard)

    def restore(self, pid: int, _: int = 0) -> tuple[int, int]:
        return self._change("Restore", pid, None, self.locked.add)

    def unlock(self, pid: int, _: int = 0) -> tuple[int, int]:
        return self._change("Unlock", pid, None, self.locked.discard)

    def state(self, pid: int, _: int = 0) -> tuple[int, int]:
        found = ctypes.c_int()
        return self._call("GetState", pid, ctypes.byref(found)), found.value

    def _change(self, name: str, pid: int, arguments: object, then: Callable[[int], None]) -> tuple[int, int]:
        result = self._call(name, pid, arguments)
        if result == 0:
            then(pid)
        return result, 0

    def _call(self, name: str, pid: int, arguments: object) -> int:
        if self.started:
            return self.started
        function, found = ctypes.c_void_p(), ctypes.c_int()
        asked = f"cuCheckpointProcess{name}".encode(), ctypes.byref(function), FIRST_CUDA, ctypes.c_uint64()
        try:
            self._library.cuGetProcAddress_v2(*asked, ctypes.byref(found))
        except AttributeError:  # of a driver before 525
            return NOT_FOUND
        if not function.value:
            return NOT_FOUND
        return int(FUNCTION(function.value)(pid, arguments))


def main(lock: str) -> None:
    turn = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(turn, fcntl.LOCK_EX)
    checkpoints = Checkpoints()
    calls: dict[str, Callable[..., tuple[int, int]]] = {
        "lock": checkpoints.lock,
        "checkpoint": checkpoints.checkpoint,
        "restore": checkpoints.restore,
        "unlock": checkpoints.unlock,
        "state": checkpoints.state,
    }
    for line in sys.stdin:
        call, pid, *more = line.split()
        result, value = calls[call](int(pid), *map(int, more))
        sys.stdout.write(f"{result} {value}\n")
        sys.stdout.flush()
    for pid in tuple(checkpoints.locked):
        checkpoints.unlock(pid)


if __name__ == "__main__":
    main(sys.argv[1])
