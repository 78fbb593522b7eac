"""Taking a process off the card and putting it back, by the calls that the agent's helper makes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from gpuslice.adapters.gpu.blocked_calls import BlockedCalls
from gpuslice.adapters.gpu.checkpoint_program import NOT_FOUND, Checkpoints
from tests.gpu.driver import Skip
from tests.gpu.stage import MIB, SIMULATED, Seen, Stage, bare_environment

SIZES_MIB = (64, 256) if SIMULATED else (1024, 8192, 32768)
HEARD_WITHIN_S = 10.0
CHECKPOINTED, REFUSED_KIND = 2, 801
HOLDER = """
import ctypes as C, json, sys
cuda, size = C.CDLL("libcuda.so.1"), int(sys.argv[1])
ptr, context, device = C.c_uint64(), C.c_void_p(), C.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(C.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxRetain(C.byref(context), device) == 0 and cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(C.byref(ptr), C.c_size_t(size)) == 0
block = (C.c_ubyte * (1 << 20))(*([0xA7] * (1 << 20)))
places = (0, size - len(block))
for at in places:
    assert cuda.cuMemcpyHtoD_v2(C.c_uint64(ptr.value + at), block, C.c_size_t(len(block))) == 0
print("ready", flush=True)
for line in sys.stdin:
    same = True
    for at in places:
        C.memset(block, 0, len(block))
        assert cuda.cuMemcpyDtoH_v2(block, C.c_uint64(ptr.value + at), C.c_size_t(len(block))) == 0
        same = same and bytes(block) == b"\\xa7" * len(block)
    print(json.dumps(same), flush=True)
"""


def moved(stage: Stage) -> Seen:
    """How fast it is, whether every byte is back, and whether a call that waits is heard."""
    calls = Checkpoints()
    if calls.state(1)[0] == NOT_FOUND:
        raise Skip("the driver has no checkpoint functions: they came with 570")
    rows, figures = [], {}
    for mib in SIZES_MIB:
        if mib > stage.card.memory_mib * 3 // 4:
            break
        figures[mib] = found = _one(stage, calls, mib)
        rows.append(f"| {mib} | " + " | ".join(f"{each:.3g}" for each in found.values()) + " |")
    names = next(iter(figures.values()))
    head = [f"| MiB | {' | '.join(names)} |", "| --- " * (len(names) + 1) + "|"]
    return Seen(
        "every byte was back, and a copy that waited was heard", "\n".join([*head, *rows]), {"by": figures}
    )


def _one(stage: Stage, calls: Checkpoints, mib: int) -> dict[str, float]:
    command = [sys.executable, "-c", HOLDER, str(mib * MIB)]
    environment = bare_environment(stage.card)
    with subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == "ready\n"
            pid, bell = holder.pid, BlockedCalls(holder.pid)
            usual, before = bell.in_driver(), stage.nvml.used_bytes(stage.card.uuid)
            lock_s = _timed(calls.lock, pid, 5000)
            checkpoint_s = _timed(calls.checkpoint, pid)
            assert calls.state(pid) == (0, CHECKPOINTED)
            freed = (before - stage.nvml.used_bytes(stage.card.uuid)) // MIB
            assert freed >= mib - 10, f"{freed} MiB of {mib} left the card"
            resident = _resident_mib(pid)
            holder.stdin.write("check\n")
            holder.stdin.flush()
            began = time.monotonic()
            while not bell.in_driver() - usual:
                assert time.monotonic() - began < HEARD_WITHIN_S, "a copy that waits is not heard"
            heard_s = time.monotonic() - began
            restore_s = _timed(calls.restore, pid)
            assert calls.unlock(pid) == (0, 0)
            assert json.loads(holder.stdout.readline()), "other bytes are back"
        finally:
            holder.kill()
    return {
        "lock, s": lock_s,
        "off, GiB/s": mib / 1024 / checkpoint_s,
        "back, GiB/s": mib / 1024 / restore_s,
        "heard, s": heard_s,
        "resident MiB meanwhile": resident,
        "threads that always sleep in the driver": len(usual),
    }


def _timed(call: object, pid: int, *more: int) -> float:
    began = time.monotonic()
    assert callable(call)
    result, _ = call(pid, *more)
    if result == REFUSED_KIND:
        raise Skip("the driver does not take this process off the card")
    assert result == 0, f"CUDA error {result}"
    return time.monotonic() - began


def _resident_mib(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 // MIB
