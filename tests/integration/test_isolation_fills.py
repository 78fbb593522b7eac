"""Memsets and copies within a card do with the library, under a share, what they do without."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.isolation_rig import container

EVERY_FORM = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context, one, other, stream = (ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_void_p())
def must(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    assert code == 0, (name, code)
must("cuInit", 0)
must("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
must("cuCtxSetCurrent", context)
must("cuStreamCreate", ctypes.byref(stream), 1)
for pointer in (one, other):
    must("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(64))
def contents(pointer):
    found = (ctypes.c_ubyte * 64)()
    must("cuMemcpyDtoH_v2", found, pointer, ctypes.c_size_t(64))
    return bytes(found).hex()
size = ctypes.c_size_t
for number, bits in enumerate((8, 16, 32)):
    value = 0x01020304 + number
    for suffix in ("_v2", "_v2_ptds", "Async", "Async_ptsz"):
        last = (stream,) if "Async" in suffix else ()
        value += 0x11
        must(f"cuMemsetD{bits}{suffix}", one, value, size(4), *last)
        must(f"cuMemsetD2D{bits}{suffix}", other, size(16), value + 1, size(2), size(3), *last)
        print(bits, suffix, contents(one), contents(other))
for name in ("cuMemcpyDtoD_v2", "cuMemcpyDtoD_v2_ptds", "cuMemcpyDtoDAsync_v2", "cuMemcpyDtoDAsync_v2_ptsz",
             "cuMemcpy", "cuMemcpy_ptds", "cuMemcpyAsync", "cuMemcpyAsync_ptsz"):
    must("cuMemsetD8_v2", other, len(name), size(64))
    must(name, one, other, size(9), *((stream,) if "Async" in name else ()))
    print(name, contents(one))
host = (ctypes.c_ubyte * 64)(*range(64))
for name in ("cuMemcpy", "cuMemcpyAsync"):
    must(name, one, host, size(64), *((stream,) if "Async" in name else ()))
    print(name, contents(one))
print(cuda.cuMemsetD8_v2(ctypes.c_uint64(), 1, size(4)))
"""


@pytest.mark.parametrize("share", [None, 50])
def test_every_form_does_the_same_with_and_without_the_library(tmp_path: Path, share: int | None) -> None:
    with container(tmp_path, share=share) as box:
        limited = box.run(sys.executable, "-c", EVERY_FORM)
        bare = box.run(sys.executable, "-c", EVERY_FORM, LD_PRELOAD="")
        assert limited.returncode == bare.returncode == 0, limited.stderr + bare.stderr
        assert limited.stdout == bare.stdout
        assert len(set(bare.stdout.splitlines())) == 23


FROM_HOST = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
context, there = ctypes.c_void_p(), ctypes.c_uint64()
host = (ctypes.c_ubyte * 64)(*range(64))
codes = [
    cuda.cuInit(0),
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0),
    cuda.cuCtxSetCurrent(context),
    cuda.cuMemAlloc_v2(ctypes.byref(there), ctypes.c_size_t(64)),
    cuda.cuMemcpy(there, host, ctypes.c_size_t(64)),
    cuda.cuMemcpyAsync(there, host, ctypes.c_size_t(64), None),
    cuda.cuMemcpy(host, there, ctypes.c_size_t(64)),
]
print(codes)
"""


def test_no_call_of_ours_fails_that_a_tool_would_show_as_the_programs_error(tmp_path: Path) -> None:
    """compute-sanitizer and the driver's log show each: a copy from memory that the driver does not know."""
    gates = tmp_path / "gates"
    gates.mkdir()
    (gates / "unknown-address").touch()  # who asks about one in a way that fails stays there
    with container(tmp_path, share=50) as box:
        done = box.run(sys.executable, "-c", FROM_HOST, GPUSLICE_SIM_GATES=str(gates))
    assert done.stdout == f"{[0] * 7}\n", done.stderr
    assert not (gates / "unknown-address.reached").exists()
