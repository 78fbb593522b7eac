"""What waits for a stream and what does not, by the driver's own interface: one JSON object of figures."""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from tests.gpu.driver_program import PTX  # noqa: E402

LONG_ROUNDS = 200_000_000
"""A fifth of a second of the simulated card, and one or two of a real one."""
PAGE = 2 << 20
NOT_READY = 600


class Order:
    """A context with three streams that do not wait for the legacy one."""

    def __init__(self) -> None:
        self.cu = ctypes.CDLL("libcuda.so.1")
        self.context = ctypes.c_void_p()
        self.do("cuInit", 0)
        self.do("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self.do("cuCtxSetCurrent", self.context)
        self.kernel = self.load()
        self.streams = [self.made("cuStreamCreate", 1) for _ in range(3)]
        sink = ctypes.c_uint64()
        self.do("cuMemAlloc_v2", ctypes.byref(sink), ctypes.c_size_t(4096))
        self.sink = sink

    def do(self, name: str, *arguments: Any) -> None:
        result = getattr(self.cu, name)(*arguments)
        if result:
            raise RuntimeError(f"{name}: {result}")

    def made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self.do(name, ctypes.byref(handle), *arguments)
        return handle

    def load(self) -> ctypes.c_void_p:
        module = self.made("cuModuleLoadData", PTX.encode())
        return self.made("cuModuleGetFunction", module, b"fixed_gpusim_busy_ns")

    def launch(self, kernel: ctypes.c_void_p, stream: ctypes.c_void_p, rounds: int) -> None:
        values = ctypes.c_uint64(rounds), self.sink
        parameters = (ctypes.c_void_p * 2)(*(ctypes.addressof(each) for each in values))
        self.do("cuLaunchKernel", kernel, 1, 1, 1, 32, 1, 1, 0, stream, parameters, None)

    def event(self, stream: ctypes.c_void_p) -> ctypes.c_void_p:
        event = self.made("cuEventCreate", 2)
        self.do("cuEventRecord", event, stream)
        return event

    def is_pending(self, event: ctypes.c_void_p) -> bool:
        return bool(self.cu.cuEventQuery(event) == NOT_READY)

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.do("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def turns(self) -> dict[str, Any]:
        """Twelve blocks of two fifths of what is free, on the streams in turn, each freed behind work."""
        size = self.free_bytes() * 2 // 5 // PAGE * PAGE
        granted, address = 0, ctypes.c_uint64()
        began, first = time.monotonic(), None
        for turn in range(12):
            stream = self.streams[turn % 3]
            if self.cu.cuMemAllocAsync(ctypes.byref(address), ctypes.c_size_t(size), stream):
                continue
            granted += 1
            self.launch(self.kernel, stream, LONG_ROUNDS)
            first = first or self.event(stream)
            self.do("cuMemFreeAsync", address, stream)
        waited = not (first and self.is_pending(first))
        took = time.monotonic() - began
        self.do("cuCtxSynchronize")
        return {"granted": granted, "waited": waited, "took_s": took}

    def refusal(self) -> dict[str, Any]:
        """More than is free, on a stream with work."""
        self.launch(self.kernel, self.streams[0], LONG_ROUNDS)
        event, address = self.event(self.streams[0]), ctypes.c_uint64()
        size = ctypes.c_size_t(self.free_bytes() + 64 * PAGE)
        result = self.cu.cuMemAllocAsync(ctypes.byref(address), size, self.streams[0])
        waited = not self.is_pending(event)
        self.do("cuCtxSynchronize")
        return {"result": result, "waited": waited}

    def context_end(self) -> dict[str, Any]:
        """A thread destroys a context with long work; the longest launch in the other one meanwhile."""
        context = ctypes.c_void_p()
        self.do("cuCtxCreate_v2", ctypes.byref(context), 0, 0)
        self.launch(self.load(), self.made("cuStreamCreate", 1), LONG_ROUNDS)
        self.do("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        began, longest = time.monotonic(), 0.0
        thread = threading.Thread(target=self.cu.cuCtxDestroy_v2, args=(context,))
        thread.start()
        while thread.is_alive():
            launched = time.monotonic()
            self.launch(self.kernel, self.streams[1], 1000)
            longest = max(longest, time.monotonic() - launched)
            time.sleep(0.002)
        return {"took_s": time.monotonic() - began, "longest_launch_s": longest}

    def waiting_free(self) -> dict[str, Any]:
        """A thread frees memory behind long work; how many modules are loaded meanwhile."""
        address, loaded = ctypes.c_uint64(), 0
        self.do("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(PAGE))
        self.launch(self.kernel, self.streams[0], LONG_ROUNDS)

        def free() -> None:
            self.do("cuCtxSetCurrent", self.context)
            self.do("cuMemFree_v2", address)

        thread, began = threading.Thread(target=free), time.monotonic()
        thread.start()
        while thread.is_alive() and time.monotonic() - began < 10:
            self.do("cuModuleUnload", self.made("cuModuleLoadData", PTX.encode()))
            loaded += 1
        took = time.monotonic() - began
        thread.join()
        return {"took_s": took, "loaded": loaded}


def main() -> None:
    order = Order()
    print(json.dumps(getattr(order, sys.argv[1])()))


if __name__ == "__main__":
    main()
