"""A little of the CUDA driver API through ctypes: enough to hold memory and keep a card busy.

Needs ``libcuda.so.1`` and nothing of the toolkit; kernels come as PTX text and are compiled by the driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from gpuslice.core.errors import GpusliceError

OUT_OF_MEMORY = 2
PEER_ACCESS_ENABLED = 704
# CUdevice_attribute
MAX_THREADS = 39  # per multiprocessor
MULTIPROCESSORS = 16
MAX_SHARED = 81
MAJOR = 75
MINOR = 76
BUS_WIDTH = 37
MEMORY_CLOCK = 36


class CudaError(GpusliceError):
    """A call failed; `code` is its CUresult."""

    def __init__(self, call: str, code: int, name: str) -> None:
        super().__init__(f"{call}: {name or f'CUDA error {code}'}")
        self.code = code


class CudaMissingError(GpusliceError):
    """There is no driver library."""


class Cuda:
    """One card with its primary context current. Every method raises `CudaError`."""

    def __init__(self, ordinal: int = 0) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CudaMissingError(f"no CUDA driver: {error}") from error
        self.ordinal = ordinal
        self._device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self.make_current()

    def make_current(self) -> None:
        """Use this card for the calling thread's next calls; the thread that made the object need not ask."""
        self._call("cuCtxSetCurrent", self._context)

    def count(self) -> int:
        """The number of cards that this process sees."""
        found = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def reaches(self, other: Cuda) -> bool:
        """Whether copies between the two cards go directly, not through the host."""
        can = ctypes.c_int()
        self._call("cuDeviceCanAccessPeer", ctypes.byref(can), self._device, other._device)
        return bool(can.value)

    def open_to(self, other: Cuda) -> None:
        """Let copies between this card, which must be current, and `other` go directly."""
        try:
            self._call("cuCtxEnablePeerAccess", other._context, 0)
        except CudaError as error:
            if error.code != PEER_ACCESS_ENABLED:
                raise

    def copy_to_peer(self, other: Cuda, target: int, source: int, size_bytes: int) -> None:
        """From this card's `source` to the other's `target`; returns at once, `synchronize` waits for it."""
        self._call(
            "cuMemcpyPeerAsync",
            ctypes.c_uint64(target),
            other._context,
            ctypes.c_uint64(source),
            self._context,
            ctypes.c_size_t(size_bytes),
            None,
        )

    @property
    def name(self) -> str:
        text = ctypes.create_string_buffer(128)
        self._call("cuDeviceGetName", text, len(text), self._device)
        return text.value.decode(errors="replace")

    @property
    def uuid(self) -> str:
        """As NVML spells it."""
        raw = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid", raw, self._device)
        digits = bytes(raw).hex()
        parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        return "GPU-" + "-".join(parts)

    def attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
        return value.value

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def allocate(self, size_bytes: int) -> int:
        """Device memory; the address."""
        pointer = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
        return pointer.value

    def fill(self, pointer: int, size_bytes: int) -> None:
        """Write zeros, so that the memory is really backed."""
        self._call("cuMemsetD8_v2", ctypes.c_uint64(pointer), ctypes.c_ubyte(0), ctypes.c_size_t(size_bytes))

    def read_u64(self, pointer: int) -> int:
        value = ctypes.c_uint64()
        self._call("cuMemcpyDtoH_v2", ctypes.byref(value), ctypes.c_uint64(pointer), ctypes.c_size_t(8))
        return value.value

    def allocate_host(self, size_bytes: int) -> int:
        """Pinned host memory; the address."""
        pointer = ctypes.c_void_p()
        self._call("cuMemHostAlloc", ctypes.byref(pointer), ctypes.c_size_t(size_bytes), 0)
        return pointer.value or 0

    def copy_to_device(self, device: int, host: int, size_bytes: int) -> None:
        self._call(
            "cuMemcpyHtoD_v2", ctypes.c_uint64(device), ctypes.c_void_p(host), ctypes.c_size_t(size_bytes)
        )

    def copy_to_host(self, host: int, device: int, size_bytes: int) -> None:
        self._call(
            "cuMemcpyDtoH_v2", ctypes.c_void_p(host), ctypes.c_uint64(device), ctypes.c_size_t(size_bytes)
        )

    def kernel(self, ptx: str, name: str) -> ctypes.c_void_p:
        """Compile `ptx` and find the kernel `name` in it."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(ptx.encode()))
        self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        return function

    def launch(self, kernel: ctypes.c_void_p, blocks: int, threads: int, parameters: Sequence[int]) -> None:
        """Start a kernel whose parameters are all 64 bits wide; returns before it ends."""
        values = [ctypes.c_uint64(value) for value in parameters]
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        self._call("cuLaunchKernel", kernel, blocks, 1, 1, threads, 1, 1, 0, None, pointers, None)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            unknown = self._library.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(name, code, "" if unknown else (text.value or b"").decode())
