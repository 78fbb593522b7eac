"""A little of the CUDA driver API through ctypes: what a framework does before it computes anything.

Runs inside a simulated container, with nothing but the standard library.
"""

import ctypes
import sys

MIB = 1 << 20


class Cuda:
    """The first visible card, with its primary context created."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self._check("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check("cuDeviceGet", ctypes.byref(device), 0)
        self._check("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._check("cuCtxSetCurrent", context)

    def memory(self) -> tuple[int, int]:
        """Free and total bytes, as the driver reports them."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._check("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size: int) -> None:
        """Allocate `size` bytes permanently."""
        pointer = ctypes.c_uint64()
        self._check("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))

    def _check(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code == 2:
            sys.exit(f"{name}: CUDA_ERROR_OUT_OF_MEMORY: out of memory")
        if code:
            sys.exit(f"{name}: CUDA error {code}")
