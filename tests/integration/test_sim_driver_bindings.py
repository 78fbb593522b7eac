"""NVIDIA's own Python bindings of the driver, unchanged, on the simulated one."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from simcluster import gpu

from .sim_driver_client import MIB, python

HEAD = """
import ctypes, json
from cuda.bindings import driver as cu
def must(answer):
    assert int(answer[0]) == 0, answer
    return answer[1] if len(answer) == 2 else answer[1:]
must(cu.cuInit(0))
device = must(cu.cuDeviceGet(0))
must(cu.cuCtxSetCurrent(must(cu.cuDevicePrimaryCtxRetain(device))))
def free():
    return must(cu.cuMemGetInfo())[0]
before = free()
"""


def bindings(body: str, state: Path) -> Any:
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        pytest.skip("NVIDIA's cuda-bindings are not installed: pip install cuda-bindings")
    return json.loads(python(HEAD + body, state=state))


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return gpu.create(tmp_path / "state", ["H200"])


def test_devices_and_linear_memory(state: Path) -> None:
    body = """
p = must(cu.cuMemAlloc(3 << 30))
took = before - free()
text = (ctypes.c_char * 16)(*b"to and fro again")
back = (ctypes.c_char * 16)()
q = must(cu.cuMemAlloc(4096))
must(cu.cuMemcpyHtoD(q, ctypes.addressof(text), 16))
must(cu.cuMemcpyDtoH(ctypes.addressof(back), q, 16))
name = must(cu.cuDeviceGetName(64, device)).rstrip(b"\\0 ").decode()
version, refused = must(cu.cuDriverGetVersion()), int(cu.cuMemAlloc(200 << 30)[0])
print(json.dumps([version, name, took, back.raw.decode(), refused,
                  must(cu.cuGetErrorName(cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY)).decode()]))
"""
    name, text = "NVIDIA H200", "to and fro again"
    assert bindings(body, state) == [13000, name, 3 << 30, text, 2, "CUDA_ERROR_OUT_OF_MEMORY"]


def test_pools_virtual_memory_and_arrays(state: Path) -> None:
    body = """
T = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
properties = cu.CUmemPoolProps()
properties.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
properties.location.type, properties.location.id = T, 0
pool = must(cu.cuMemPoolCreate(properties))
block = must(cu.cuMemAllocFromPoolAsync(100 << 20, pool, 0))
current = cu.CUmemPool_attribute.CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT
reserved = int(must(cu.cuMemPoolGetAttribute(pool, current)))
must(cu.cuMemFreeAsync(block, 0)); must(cu.cuMemPoolTrimTo(pool, 0))
physical = cu.CUmemAllocationProp()
physical.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
physical.location.type, physical.location.id = T, 0
handle = must(cu.cuMemCreate(64 << 20, physical, 0))
address = must(cu.cuMemAddressReserve(64 << 20, 0, 0, 0))
must(cu.cuMemMap(address, 64 << 20, 0, handle, 0)); must(cu.cuMemRelease(handle))
mapped = before - free()
must(cu.cuMemUnmap(address, 64 << 20))
shape = cu.CUDA_ARRAY_DESCRIPTOR()
shape.Width, shape.Height, shape.NumChannels = 1024, 1024, 4
shape.Format = cu.CUarray_format.CU_AD_FORMAT_FLOAT
array = must(cu.cuArrayCreate(shape))
print(json.dumps([reserved, mapped, before - free()]))
"""
    assert bindings(body, state) == [128 * MIB, 64 * MIB, 16 * MIB]


def test_graphs_with_memory_nodes(state: Path) -> None:
    body = """
graph = must(cu.cuGraphCreate(0))
p = cu.CUDA_MEM_ALLOC_NODE_PARAMS()
p.poolProps.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
p.poolProps.location.type, p.poolProps.location.id = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
p.bytesize = 10 << 20
node, params = must(cu.cuGraphAddMemAllocNode(graph, None, 0, p)), p
must(cu.cuGraphAddMemFreeNode(graph, [node], 1, p.dptr))
executable = must(cu.cuGraphInstantiate(graph, 0))
must(cu.cuGraphLaunch(executable, 0)); must(cu.cuCtxSynchronize())
kept = before - free()
must(cu.cuDeviceGraphMemTrim(device))
print(json.dumps([kept, before - free()]))
"""
    assert bindings(body, state) == [10 * MIB, 0]


def test_kernels_streams_and_events(state: Path) -> None:
    body = """
module = must(cu.cuModuleLoadData(b".version 7.0\\n.visible .entry gpusim_busy_ns() { ret; }\\n\\0"))
kernel = must(cu.cuModuleGetFunction(module, b"gpusim_busy_ns"))
stream, start, end = must(cu.cuStreamCreate(0)), must(cu.cuEventCreate(0)), must(cu.cuEventCreate(0))
def launch(ns):
    must(cu.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, ((ns,), (ctypes.c_uint64,)), 0))
launch(1_000_000)
must(cu.cuEventRecord(start, stream)); launch(20_000_000); must(cu.cuEventRecord(end, stream))
early = int(cu.cuEventQuery(end)[0])
must(cu.cuStreamSynchronize(stream))
print(json.dumps([early, round(must(cu.cuEventElapsedTime(start, end)), 3)]))
"""
    assert bindings(body, state) == [600, pytest.approx(20.0, abs=1.0)]


def test_numba_launches_its_kernels(state: Path) -> None:
    """Kernels take time and compute nothing: what was copied in comes back as it was."""
    for module, package in (
        ("numba_cuda", "numba-cuda"),
        ("nvidia.cu13", "nvidia-cuda-nvrtc and nvidia-nvvm"),
    ):
        if importlib.util.find_spec(module.split(".", maxsplit=1)[0]) is None:
            pytest.skip(f"{package} is not installed")
    body = """
import numpy, warnings
warnings.simplefilter("ignore")
from numba import cuda
@cuda.jit
def add_one(values):
    values[cuda.grid(1)] += 1
values = cuda.to_device(numpy.arange(1024, dtype=numpy.float32))
add_one[4, 256](values)
cuda.synchronize()
print(json.dumps([cuda.get_current_device().name, float(values.copy_to_host()[1023])]))
"""
    assert bindings(body, state) == ["NVIDIA H200", 1023.0]
