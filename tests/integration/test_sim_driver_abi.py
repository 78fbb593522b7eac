"""The simulation's own declarations, held against NVIDIA's headers and binding."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pynvml
import pytest

from .sim_driver_client import ROOT

SIM = ROOT / "native" / "sim"

# Ours and the header's name of the last field, whose offset must agree along with the whole size.
CUDA_STRUCTURES = {
    "CUuuid": ("bytes", "bytes"),
    "CUdevprop": ("texture_alignment", "textureAlign"),
    "CUmemAllocationProp": ("flags", "allocFlags"),
    "CUmemAccessDesc": ("flags", "flags"),
    "CUmemPoolProps": ("max_bytes", "maxSize"),
    "CUDA_ARRAY_DESCRIPTOR": ("channels", "NumChannels"),
    "CUDA_ARRAY3D_DESCRIPTOR": ("flags", "Flags"),
    "CUDA_ARRAY_MEMORY_REQUIREMENTS": ("alignment", "alignment"),
    "CUDA_MEMCPY2D": ("height", "Height"),
    "CUDA_MEMCPY3D": ("depth", "Depth"),
    "CUlaunchConfig": ("attribute_count", "numAttrs"),
    "CUDA_KERNEL_NODE_PARAMS": ("context", "ctx"),
    "CUDA_MEMSET_NODE_PARAMS": ("height", "height"),
    "CUDA_HOST_NODE_PARAMS": ("user_data", "userData"),
    "CUDA_MEM_ALLOC_NODE_PARAMS": ("address", "dptr"),
    "CUgraphNodeParams": ("reserved2", "reserved2"),
    "CUDA_GRAPH_INSTANTIATE_PARAMS": ("result", "result_out"),
    "CUDA_EXTERNAL_MEMORY_HANDLE_DESC": ("flags", "flags"),
    "CUDA_EXTERNAL_MEMORY_BUFFER_DESC": ("flags", "flags"),
    "CUipcMemHandle": ("reserved", "reserved"),
}
NVML_STRUCTURES = {
    "nvmlMemory_t": pynvml.c_nvmlMemory_t,
    "nvmlMemory_v2_t": pynvml.c_nvmlMemory_v2_t,
    "nvmlBAR1Memory_t": pynvml.c_nvmlBAR1Memory_t,
    "nvmlProcessInfo_v2_t": pynvml.c_nvmlProcessInfo_v3_t,
    "nvmlPciInfo_t": pynvml.nvmlPciInfo_t,
    "nvmlUtilization_t": pynvml.c_nvmlUtilization_t,
    "nvmlProcessUtilizationSample_t": pynvml.c_nvmlProcessUtilizationSample_t,
    "nvmlProcessUtilizationInfo_t": pynvml.c_nvmlProcessUtilizationInfo_v1_t,
    "nvmlEventData_t": pynvml.c_nvmlEventData_t,
    "nvmlFieldValue_t": pynvml.c_nvmlFieldValue_t,
    "nvmlDeviceAttributes_t": pynvml.c_nvmlDeviceAttributes,
}


def cuda_include() -> Path:
    """NVIDIA's headers beside nvcc; skips without them."""
    nvcc = shutil.which("nvcc")
    for folder in (
        Path(nvcc).resolve().parent.parent / "include" if nvcc else Path(),
        Path("/usr/local/cuda/include"),
    ):
        if (folder / "cuda.h").exists():
            return folder
    pytest.skip("no cuda.h on this machine")


def sizes(folder: Path, header: str, expressions: list[str], *flags: str) -> list[int]:
    """What a C compiler makes of the expressions after including the header."""
    source = folder / "sizes.c"
    lines = "".join(f'printf("%zu\\n", (size_t)({each}));' for each in expressions)
    head = f"#include <stddef.h>\n#include <stdio.h>\n#include {header}\n"
    source.write_text(head + f"int main(void) {{ {lines} return 0; }}\n")
    subprocess.run(["cc", *flags, "-o", folder / "sizes", source], check=True)
    printed = subprocess.run([folder / "sizes"], capture_output=True, text=True, check=True).stdout
    return [int(line) for line in printed.split()]


def test_structures_of_the_driver_lie_as_in_nvidias_header(tmp_path: Path) -> None:
    include = cuda_include()
    ours, theirs = [], []
    for name, (our_last, their_last) in CUDA_STRUCTURES.items():
        ours += [f"sizeof({name})", f"offsetof({name}, {our_last})"]
        theirs += [f"sizeof({name})", f"offsetof({name}, {their_last})"]
    assert sizes(tmp_path, f'"{SIM}/libcuda/cuda_abi.h"', ours) == sizes(
        tmp_path, "<cuda.h>", theirs, f"-I{include}"
    )


def test_structures_of_nvml_are_as_large_as_in_nvidias_binding(tmp_path: Path) -> None:
    found = sizes(tmp_path, f'"{SIM}/libnvml/nvml_abi.h"', [f"sizeof({name})" for name in NVML_STRUCTURES])
    assert dict(zip(NVML_STRUCTURES, found, strict=True)) == {
        name: ctypes.sizeof(structure) for name, structure in NVML_STRUCTURES.items()
    }


def test_the_symbol_list_has_all_that_nvidias_header_declares(tmp_path: Path) -> None:
    """When it has not: run native/sim/libcuda/list_symbols.py over the newer header's folder."""
    tool = tmp_path / "list_symbols.py"
    shutil.copy(SIM / "libcuda" / "list_symbols.py", tool)
    subprocess.run([sys.executable, tool, cuda_include()], check=True)
    theirs = set((tmp_path / "symbols.def").read_text().splitlines()[1:])
    assert theirs - set((SIM / "libcuda" / "symbols.def").read_text().splitlines()) == set()


def test_cugetprocaddress_knows_every_function_of_the_header() -> None:
    """By name, version and stream mode: a name that the list lacks is one that programs cannot find."""
    typedefs = cuda_include() / "cudaTypedefs.h"
    declared = set(re.findall(r"\bPFN_(cu\w+?)_v(\d+)(_ptsz|_ptds)?\)", typedefs.read_text()))
    rows = re.findall(r"SYMBOL\((\w+), (\d+), (\d)", (SIM / "libcuda" / "symbols.def").read_text())
    known = {(name, version, own == "1") for name, version, own in rows}
    assert len(declared) > 500
    assert {(name, version, bool(suffix)) for name, version, suffix in declared} - known == set()
