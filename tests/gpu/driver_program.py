"""The driver's own interface through ctypes, without a toolkit: answers as `torch_program.py` does.

Also runs on the simulated driver, so that what plays with it cannot rot where there is no card.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "src")]

from gpuslice.adapters.gpu.cuda import MULTIPROCESSORS, Cuda, CudaError  # noqa: E402

MIB = 1 << 20
BLOCK_S = 0.05
ROUNDS = 200_000
PTX = """
.version 7.0
.target sm_70
.address_size 64
.visible .entry fixed_gpusim_busy_ns(.param .u64 rounds, .param .u64 sink)
{
    .reg .u64 %left, %sink;
    .reg .f32 %a, %b;
    .reg .pred %again, %never;
    ld.param.u64 %left, [rounds];
    ld.param.u64 %sink, [sink];
    mov.f32 %a, 0f3F800001;
    mov.f32 %b, 0f3F7FFFFE;
AGAIN:
    fma.rn.f32 %a, %a, %b, %b;
    sub.u64 %left, %left, 1;
    setp.ne.u64 %again, %left, 0;
    @%again bra AGAIN;
    setp.eq.f32 %never, %a, 0f7F7FFFFF;
    @%never st.global.f32 [%sink], %a;
    ret;
}
.visible .entry small(.param .u64 sink)
{
    ret;
}
"""
Call = Callable[[], object]


class Works:
    """One context and what is called in it."""

    def __init__(self) -> None:
        self.card = Cuda()
        self.blocks = self.card.attribute(MULTIPROCESSORS)
        self.sink = self.card.allocate(4096)
        self.fixed = self.card.kernel(PTX, "fixed_gpusim_busy_ns")
        self.small = self.card.kernel(PTX, "small")
        self.ready: dict[str, tuple[Call, int]] = {}
        self.names: dict[str, Call] = {
            "arithmetic kernel": lambda: self.card.launch(self.fixed, self.blocks, 128, (ROUNDS, self.sink)),
            "kernels with pauses": self._paused,
            "empty kernels": lambda: self.card.launch(self.small, 1, 1, (self.sink,)),
            "cuMemGetInfo": self.card.memory,
            "one word to the card and back": self._word,
            "cuMemAlloc and cuMemFree": self._plain,
            "cuMemAllocAsync and cuMemFreeAsync": self._stream_ordered,
        }
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.place = ctypes.c_ulonglong()

    def _paused(self) -> None:
        """As a program that computes itself between two kernels: for 0.3 ms."""
        self.card.launch(self.fixed, self.blocks, 128, (ROUNDS, self.sink))
        self.card.synchronize()
        until = time.perf_counter() + 0.0003
        while time.perf_counter() < until:
            pass

    def _word(self) -> None:
        self.card.fill(self.sink, 8)
        self.card.read_u64(self.sink)

    def _plain(self) -> None:
        self.driver.cuMemAlloc_v2(ctypes.byref(self.place), ctypes.c_size_t(8 * MIB))
        self.driver.cuMemFree_v2(self.place)

    def _stream_ordered(self) -> None:
        self.driver.cuMemAllocAsync(ctypes.byref(self.place), ctypes.c_size_t(8 * MIB), None)
        self.driver.cuMemFreeAsync(self.place, None)

    def block_s(self, call: Call, count: int) -> float:
        self.card.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            call()
        self.card.synchronize()
        return time.perf_counter() - began

    def warm(self, name: str) -> int:
        call = self.names[name]
        self.block_s(call, 3)
        count = max(1, min(20_000, round(BLOCK_S / max(self.block_s(call, 10) / 10, 1e-7))))
        self.ready[name] = call, count
        return count

    def timed(self, name: str) -> float:
        call, count = self.ready[name]
        return self.block_s(call, count) / count

    def memory(self) -> dict[str, Any]:
        """What a program is told, what it gets, and that it goes on after a refusal."""
        free, total = self.card.memory()
        held: list[int] = []
        refusal = ""
        while not refusal:
            try:
                held.append(self.card.allocate(256 * MIB))
            except CudaError as error:
                refusal = str(error)
        for each in held:
            self.driver.cuMemFree_v2(ctypes.c_uint64(each))
        self.card.fill(self.sink, 8)
        return {
            "free_mib": free // MIB,
            "total_mib": total // MIB,
            "got_mib": 256 * len(held),
            "refusal": refusal,
            "went_on": self.card.read_u64(self.sink) == 0,
        }

    def hold(self, size_mib: int) -> int:
        """Takes so much and keeps it."""
        self.card.allocate(size_mib * MIB)
        return size_mib

    def busy(self, name: str, for_s: float) -> float:
        call, count = self.ready[name]
        few, done, began = max(1, count // 5), 0, time.perf_counter()
        while time.perf_counter() - began < for_s:
            self.block_s(call, few)
            done += few
        return done / (time.perf_counter() - began)


def obey(works: Works, words: list[str]) -> Any:
    order, rest = words[0], words[1:]
    if order == "busy":
        return works.busy(" ".join(rest[:-1]), float(rest[-1]))
    if order == "memory":
        return works.memory()
    if order == "hold":
        return works.hold(int(rest[0]))
    return {"warm": works.warm, "time": works.timed}[order](" ".join(rest))


if __name__ == "__main__":
    made = Works()
    print(json.dumps(list(made.names)), flush=True)
    for line in sys.stdin:
        print(json.dumps(obey(made, line.split())), flush=True)
