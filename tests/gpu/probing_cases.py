"""Programs that try several files of the driver's name, that have no CUDA, or that start all at once."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from tests.gpu.stage import MIB, SIMULATED, Seen, Stage, bare_environment

STUB = r"""
int cuInit(unsigned flags) { return 34; }
int cuCtxGetCurrent(void *context) { return 34; }
int cuDeviceTotalMem_v2(void *bytes, int device) { return 34; }
int nvmlInit_v2(void) { return 18; }
int nvmlDeviceGetCount_v2(void *count) { return 1; }
int nvmlDeviceGetMemoryInfo(void *device, void *memory) { return 1; }
"""
PROBES = """
import ctypes, json, _ctypes
answer = ctypes.create_string_buffer(64)
def asked(library, *names):
    return [getattr(library, name)(answer) for name in names]
def probe(path, start, *names):
    library = ctypes.CDLL(path)
    told = [getattr(library, start)(0), *asked(library, *names)]
    _ctypes.dlclose(library._handle)
    return told
cuda_names, nvml_names = ("cuCtxGetCurrent", "cuDeviceGetCount"), ("nvmlDeviceGetCount_v2",)
right = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
before = asked(right[0], *cuda_names), asked(right[1], *nvml_names)
for library in right:
    _ctypes.dlclose(library._handle)
stubs = [probe("{folder}/libcuda.so.1", "cuInit", cuda_names[0])]
stubs.append(probe("{folder}/libnvidia-ml.so.1", "nvmlInit_v2"))
cuda, nvml = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnvidia-ml.so.1")
cuda.cuDeviceTotalMem_v2
started = cuda.cuInit(0), nvml.nvmlInit_v2()
total, handle = ctypes.c_size_t(), ctypes.c_void_p()
cuda.cuDeviceTotalMem_v2(ctypes.byref(total), 0)
memory = (ctypes.c_ulonglong * 3)()
shown = [nvml.nvmlDeviceGetHandleByUUID(b"{uuid}", ctypes.byref(handle))]
shown.append(nvml.nvmlDeviceGetMemoryInfo(handle, memory))
print(json.dumps([before, stubs, started, total.value, shown, memory[0]]))
"""
WEAK = r"""
#include <stdio.h>
#pragma weak cuInit
#pragma weak cuMemGetInfo_v2
#pragma weak nvmlDeviceGetMemoryInfo
int cuInit(), cuMemGetInfo_v2(), nvmlDeviceGetMemoryInfo();
int main(void) { return printf("%d%d%d", !!cuInit, !!cuMemGetInfo_v2, !!nvmlDeviceGetMemoryInfo) != 3; }
"""
STARTS = """
import ctypes, json, os, time
readers = []
go_reader, go = os.pipe()
for _ in range({processes}):
    reader, writer = os.pipe()
    if os.fork() == 0:
        cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        os.close(go)
        os.read(go_reader, 1)
        began = time.monotonic()
        failed = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        os.write(writer, json.dumps([failed, time.monotonic() - began]).encode())
        os.read(go_reader, 1)
        os._exit(0)
    os.close(writer)
    readers.append(reader)
time.sleep(1)
os.close(go)
print(json.dumps([json.loads(os.read(reader, 100)) for reader in readers]))
"""


def _compiled(stage: Stage, name: str, source: str, *flags: str) -> Path:
    path = stage.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-w", "-xc", "-", "-o", str(path), *flags], input=source, text=True, check=True)
    return path


def candidates(stage: Stage) -> Seen:
    """A libcuda and an NVML that do not work are tried and closed, then the right ones."""
    box = stage.box("app", 4096)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        _compiled(stage, f"stubs/{name}", STUB, "-shared", "-fPIC", f"-Wl,-soname,{name}")
    script = PROBES.format(folder=stage.folder / "stubs", uuid=stage.card.uuid)
    before, stubs, started, total, shown, memory = json.loads(box.run(sys.executable, "-c", script))
    assert 0 not in [*before[0], *before[1]], f"before cuInit and nvmlInit the driver answers {before}"
    assert stubs == [[34, 34], [18]], stubs
    assert started == [0, 0], started
    assert total == 4096 * MIB, f"cuDeviceTotalMem says {total}"
    assert shown == [0, 0], shown
    assert memory == 4096 * MIB, f"NVML shows {memory}"
    return Seen(
        f"stubs answered {stubs} and were closed; the driver, which had answered {before}, is limited"
    )


def without_cuda(stage: Stage) -> Seen:
    """Weak references to the driver's functions are null in a program that is not linked with it."""
    box = stage.box("app", 4096)
    program = _compiled(stage, "weak", WEAK)
    told = box.run(str(program))
    assert told == "000", f"cuInit, cuMemGetInfo_v2 and NVML's function: {told}"
    return Seen("cuInit, cuMemGetInfo_v2 and nvmlDeviceGetMemoryInfo were null")


def starting_at_once(stage: Stage) -> Seen:
    """Many processes make a context at once, in turns with the raw driver."""
    processes = 8 if SIMULATED else 50
    script = STARTS.format(processes=processes)
    times: dict[str, list[float]] = {"raw": [], "limited": []}
    for turn in range(3):
        box = stage.box(f"app{turn}", processes * 1024)
        bare = bare_environment(stage.card)
        raw = subprocess.run(
            [sys.executable, "-c", script], env=bare, capture_output=True, text=True, check=True
        )
        for kind, told in (("raw", raw.stdout), ("limited", box.run(sys.executable, "-c", script))):
            answers = json.loads(told)
            assert not any(failed for failed, _ in answers), f"{kind}: {answers}"
            times[kind].append(statistics.fmean(seconds for _, seconds in answers))
    raw_s, limited_s = (statistics.median(times[kind]) for kind in ("raw", "limited"))
    if not SIMULATED:
        assert limited_s <= 2 * raw_s, f"{limited_s:.2f} s, raw {raw_s:.2f} s"
    text = f"{processes} processes at once: a context took {limited_s * 1000:.0f} ms, without the library"
    return Seen(f"{text} {raw_s * 1000:.0f} ms", figures={"limited_s": limited_s, "raw_s": raw_s})
