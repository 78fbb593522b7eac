"""A program's surroundings: tools with functions of the driver's names.

Limits hold there, and what ran without the library runs with it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .isolation_rig import SIM, container

TRACER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
static void *driver;
static void *find(const char *name) {
    return dlsym(driver ? driver : (driver = dlopen("libcuda.so.1", RTLD_NOW)), name);
}
int calls;
int cuInit(unsigned flags) { return ((int (*)(unsigned))find("cuInit"))(flags); }
int cuMemAlloc_v2(unsigned long long *at, unsigned long bytes) {
    calls++;
    return ((int (*)(unsigned long long *, unsigned long))find("cuMemAlloc_v2"))(at, bytes);
}
"""
ASKS = """
import ctypes
tracer = ctypes.CDLL("{tracer}")
context, address, given = ctypes.c_void_p(), ctypes.c_ulonglong(), 0
print(tracer.cuInit(0), tracer.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
tracer.cuCtxSetCurrent(context)
while given < 40 and not tracer.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(64 << 20)):
    given += 1
print(given, ctypes.c_int.in_dll(tracer, "calls").value)
"""


def test_a_library_with_functions_of_the_drivers_names_is_asked_and_held(tmp_path: Path) -> None:
    """Who asked it for them got ours; a tracer that had found the driver itself called itself without end."""
    tracer = tmp_path / "libtracer.so"
    command = ["gcc", "-shared", "-fPIC", "-xc", "-", "-o", str(tracer), "-Wl,--no-as-needed"]
    command += [f"-L{SIM}", "-l:libcuda.so.1", "-ldl"]
    subprocess.run(command, input=TRACER, text=True, check=True)
    with container(tmp_path) as box:
        done = box.run(sys.executable, "-c", ASKS.format(tracer=tracer))
    assert done.stdout.split() == ["0", "0", "14", "15"], (done.returncode, done.stderr)
