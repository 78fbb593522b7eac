"""A framework in a container: works, takes what it gets until it is refused, works again. One line of JSON.

    told_mib     the card's size by the framework's own question
    got_mib      what it got before the refusal
    refusal      the error that the framework raised, shortened
    right        whether what it computed, before and after the refusal, is right

It then waits for a line, so that its memory can be looked at, and ends.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Beside this file are modules of ours with common names; frameworks must not find them.
sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).resolve().parent]

MIB = 1 << 20
STEP_MIB = 512
MOST_MIB = 65536


def filled(take: Callable[[], object], works: Callable[[], bool]) -> dict[str, Any]:
    """Until `take` raises; what it took is released before the work is done again."""
    before, refusal = works(), ""
    held: list[object] = []
    while not refusal and len(held) * STEP_MIB < MOST_MIB:
        try:
            held.append(take())
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
    got_mib = len(held) * STEP_MIB
    held.clear()
    return {"got_mib": got_mib, "refusal": " ".join(refusal.split())[:160], "right": before and works()}


def with_jax() -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    limit = jax.devices()[0].memory_stats()["bytes_limit"]
    ones = jnp.ones((2048, 2048), jnp.bfloat16)
    step = jax.jit(jax.grad(lambda x: jnp.sum(x @ x).astype(jnp.float32)))

    def works() -> bool:
        return bool((step(ones) == 4096).all())

    def take() -> object:
        return jnp.zeros(STEP_MIB * MIB, jnp.uint8).block_until_ready()

    # Three quarters of what was free are its own from the start.
    return {"told_mib": limit * 4 // 3 // MIB, **filled(take, works)}


def with_cupy() -> dict[str, Any]:
    import cupy

    def works() -> bool:
        ones = cupy.ones((1024, 1024), cupy.float32)
        return bool((ones @ ones == 1024).all()) and int(cupy.arange(1000).sum()) == 499500

    def take() -> object:
        return cupy.empty(STEP_MIB * MIB, cupy.uint8)

    return {"told_mib": cupy.cuda.runtime.memGetInfo()[1] // MIB, **filled(take, works)}


def with_numba() -> dict[str, Any]:
    import numpy
    from numba import cuda

    @cuda.jit  # type: ignore[untyped-decorator]
    def double(numbers: Any) -> None:
        place = cuda.grid(1)
        if place < numbers.size:
            numbers[place] *= 2

    def works() -> bool:
        numbers = cuda.to_device(numpy.arange(4096, dtype=numpy.float32))
        double[16, 256](numbers)
        return bool((numbers.copy_to_host() == 2 * numpy.arange(4096)).all())

    def take() -> object:
        return cuda.device_array(STEP_MIB * MIB, dtype=numpy.uint8)

    return {"told_mib": cuda.current_context().get_memory_info()[1] // MIB, **filled(take, works)}


def with_driver_bindings() -> dict[str, Any]:
    from cuda.bindings import driver

    def called(name: str, *arguments: Any) -> Any:
        error, *values = getattr(driver, name)(*arguments)
        if error:
            raise RuntimeError(f"{name}: {error!r}")
        return values[0] if len(values) == 1 else values

    called("cuInit", 0)
    card = called("cuDeviceGet", 0)
    called("cuCtxSetCurrent", called("cuDevicePrimaryCtxRetain", card))
    taken: list[Any] = []

    def works() -> bool:
        for each in taken:
            called("cuMemFree", each)
        taken.clear()
        word = called("cuMemAlloc", 4)
        called("cuMemsetD32", word, 7, 1)
        out = bytearray(4)
        called("cuMemcpyDtoH", out, word, 4)
        called("cuMemFree", word)
        return int.from_bytes(out, sys.byteorder) == 7

    def take() -> object:
        taken.append(called("cuMemAlloc", STEP_MIB * MIB))
        return taken[-1]

    return {"told_mib": called("cuMemGetInfo")[1] // MIB, **filled(take, works)}


def with_torch_compile() -> dict[str, Any]:
    import torch

    @torch.compile  # type: ignore[untyped-decorator]
    def fused(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).relu().sum(dim=1)

    def works() -> bool:
        return bool((fused(torch.ones(512, 1000, device="cuda")) == 3000).all())

    return {"told_mib": torch.cuda.mem_get_info()[1] // MIB, **filled(_torch_take, works)}


def with_transformers() -> dict[str, Any]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=768, n_head=12)).cuda().eval()
    start = torch.tensor([[464, 3290]], device="cuda")

    def written() -> list[int]:
        whole: list[int] = model.generate(start, max_new_tokens=24, do_sample=False, pad_token_id=0)[
            0
        ].tolist()
        return whole

    first = written()
    return {
        "told_mib": torch.cuda.mem_get_info()[1] // MIB,
        **filled(_torch_take, lambda: written() == first and len(first) > 2),
    }


def with_torch_profiler() -> dict[str, Any]:
    """What CUPTI records of a program: it subscribes to the driver's calls that the library answers."""
    import torch

    def works() -> bool:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            ones = torch.ones(512, 512, device="cuda")
            product = ones @ ones
            torch.cuda.synchronize()
        kernels = [event for event in profile.events() if str(event.device_type).endswith("CUDA")]
        return bool((product == 512).all()) and bool(kernels)

    return {"told_mib": torch.cuda.mem_get_info()[1] // MIB, **filled(_torch_take, works)}


def with_nccl() -> dict[str, Any]:
    import torch
    from torch import distributed

    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    store = distributed.FileStore(tempfile.mkstemp()[1], 1)
    distributed.init_process_group("nccl", store=store, rank=0, world_size=1)

    def works() -> bool:
        numbers = torch.full((1 << 20,), 3.0, device="cuda")
        distributed.all_reduce(numbers)
        return bool((numbers == 3).all())

    return {"told_mib": torch.cuda.mem_get_info()[1] // MIB, **filled(_torch_take, works)}


def _torch_take() -> object:
    import torch

    return torch.empty(STEP_MIB * MIB, dtype=torch.uint8, device="cuda")


FRAMEWORKS: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "JAX": ("jax", with_jax),
    "CuPy": ("cupy", with_cupy),
    "Numba": ("numba.cuda.cudaimpl", with_numba),
    "CUDA Python": ("cuda.bindings.driver", with_driver_bindings),
    "torch.compile, Triton": ("torch", with_torch_compile),
    "Transformers, generating": ("transformers", with_transformers),
    "PyTorch's profiler": ("torch", with_torch_profiler),
    "NCCL, one rank": ("torch", with_nccl),
}
"""By name: the module that must be there, and the play."""

if __name__ == "__main__":
    module, play = FRAMEWORKS[" ".join(sys.argv[1:])]
    try:
        __import__(module)
    except Exception as error:  # one that does not go with this machine's NumPy says so by any error
        print(json.dumps({"missing": f"{type(error).__name__}: {error}"}), flush=True)
    else:
        print(json.dumps(play()), flush=True)
        sys.stdin.readline()
