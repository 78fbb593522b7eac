"""NVIDIA's own CUDA runtime on the simulated driver, and under libgpuslice's limit.

GPUSLICE_CUDA_RUNTIMES names shared runtimes of CUDA 9 to 11.1, with colons between; PyTorch 1.4 and 1.5 bring
one each (torch/lib/libcudart-*.so.10.*). Later ones verify that the driver is NVIDIA's and refuse.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import HANG_S
from tests.integration.isolation_rig import MIB, Container, container

RUNTIMES = [path for path in os.environ.get("GPUSLICE_CUDA_RUNTIMES", "").split(os.pathsep) if path]
NOT_ESTABLISHED = 103  # cudaErrorSoftwareValidityNotEstablished

PROGRAM = r"""
import ctypes, json, sys
cuda = ctypes.CDLL(sys.argv[1])
out, size = ctypes.byref, ctypes.c_size_t
version, count, free, total = ctypes.c_int(), ctypes.c_int(), size(), size()
said = {}
def call(name, *arguments):
    said[name] = getattr(cuda, name)(*arguments)
call("cudaRuntimeGetVersion", out(version))
call("cudaGetDeviceCount", out(count))
if count.value > 0:
    linear, pitched, managed, large = (ctypes.c_void_p() for _ in range(4))
    stream, event, host, step = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p(), size()
    call("cudaMalloc", out(linear), size(48 << 20))
    call("cudaMemGetInfo", out(free), out(total))
    call("cudaMallocPitch", out(pitched), out(step), size(1000), size(1024))
    call("cudaMallocManaged", out(managed), size(16 << 20), 1)
    call("cudaStreamCreate", out(stream))
    call("cudaEventCreate", out(event))
    call("cudaHostAlloc", out(host), size(4096), 0)
    text, back = ctypes.create_string_buffer(b"to and fro"), ctypes.create_string_buffer(16)
    call("cudaMemcpy", linear, text, size(11), 1)
    call("cudaMemset", ctypes.c_void_p(linear.value + 32), 7, size(8))
    call("cudaMemcpyAsync", back, linear, size(11), 2, stream)
    call("cudaEventRecord", event, stream)
    call("cudaEventSynchronize", event)
    call("cudaDeviceSynchronize")
    said["copied"] = back.value.decode()
    said["refused"] = cuda.cudaMalloc(out(large), size(3 << 30))
    said["last error"] = cuda.cudaGetLastError()
    for name in ("linear", "pitched", "managed"):
        call("cudaFree", globals()[name])
    said["info"] = [free.value, total.value]
    call("cudaDeviceReset")
said["version"] = version.value
print(json.dumps(said))
"""


def talk(inside: Container, runtime: str, **environment: str) -> dict[str, Any]:
    done = inside.run(sys.executable, "-c", PROGRAM, runtime, **environment)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.skipif(not RUNTIMES, reason="GPUSLICE_CUDA_RUNTIMES names no libcudart.so of CUDA 9 to 11.1")
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_runtime_from_before_the_check_runs_and_keeps_to_the_limit(tmp_path: Path, runtime: str) -> None:
    with container(tmp_path, memory_mib=2048) as inside:
        held = talk(inside, runtime)
        free = talk(inside, runtime, LD_PRELOAD="")
    for said in (held, free):
        calls = {name: code for name, code in said.items() if name.startswith("cuda")}
        assert set(calls.values()) == {0}, calls
        assert said["copied"] == "to and fro"
    assert (held["refused"], held["last error"], held["info"][1]) == (2, 2, 2048 * MIB)
    assert (free["refused"], free["last error"], free["info"][1]) == (0, 0, 16130 * MIB)


def test_a_runtime_that_verifies_the_driver_refuses_the_simulated_one(tmp_path: Path) -> None:
    """And says so: the simulation does not counterfeit NVIDIA's proof."""
    found = importlib.util.find_spec("nvidia")
    places = [Path(place) for place in found.submodule_search_locations or ()] if found else []
    libraries = [str(path) for place in places for path in sorted(place.glob("*/lib/libcudart.so.1[23]"))]
    if not libraries:
        pytest.skip("nvidia-cuda-runtime is not installed")
    with container(tmp_path, cuda="13.5") as inside:
        assert talk(inside, libraries[0])["cudaGetDeviceCount"] == NOT_ESTABLISHED


def test_without_a_driver_a_runtime_finds_no_card(tmp_path: Path) -> None:
    if not RUNTIMES:
        pytest.skip("GPUSLICE_CUDA_RUNTIMES names no libcudart.so of CUDA 9 to 11.1")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, RUNTIMES[0]],
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_S,
    )
    assert json.loads(done.stdout)["cudaGetDeviceCount"] == 35
