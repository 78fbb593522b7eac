"""PyTorch under a limit: run as a program by run.py, with or without the library. Prints one JSON object."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

MIB = 1 << 20
WARM_UP, REPEATS = 10, 5


def memory() -> dict[str, Any]:
    """What PyTorch is told, what it gets, and that it goes on after a refusal."""
    free, total = torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties(0)
    held = []
    try:
        while True:
            held.append(torch.empty(256 * MIB, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        refused = True
    got = len(held) * 256
    held.clear()
    torch.cuda.empty_cache()
    again = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda").sum().item()
    return {
        "free_mib": free // MIB,
        "total_mib": total // MIB,
        "property_mib": properties.total_memory // MIB,
        "got_mib": got,
        "refused": refused,
        "went_on": again == (64 * MIB),
    }


def seconds(work: Callable[[], object], count: int) -> float:
    """The best of some rounds, for one call."""
    for _ in range(WARM_UP):
        work()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(count):
            work()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / count)
    return best


def product() -> Callable[[], object]:
    left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    return lambda: left @ left


def transformer() -> Callable[[], object]:
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, device="cuda")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    batch = torch.randn(16, 128, 512, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        layer(batch).square().mean().backward()
        optimizer.step()

    return step


def small_launches() -> Callable[[], object]:
    cell = torch.zeros(1, device="cuda")
    return lambda: cell.add_(1)


def graph() -> Callable[[], object]:
    cell = torch.zeros(1, device="cuda")
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(20):
            cell.add_(1)
    replay: Callable[[], object] = captured.replay
    return replay


def allocations() -> Callable[[], object]:
    """Past the caching allocator, so that each is a call of the driver."""

    def once() -> None:
        block = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        del block
        torch.cuda.empty_cache()

    return once


SPEEDS: dict[str, tuple[Callable[[], Callable[[], object]], int]] = {
    "matrix product": (product, 200),
    "transformer step": (transformer, 50),
    "launch-bound loop": (small_launches, 20000),
    "CUDA graph of 20 kernels": (graph, 2000),
    "allocate and free": (allocations, 200),
}


def speed() -> dict[str, float]:
    return {name: seconds(make(), count) for name, (make, count) in SPEEDS.items()}


def busy(for_s: float) -> dict[str, float]:
    """How many matrix products a second."""
    work = product()
    for _ in range(WARM_UP):
        work()
    torch.cuda.synchronize()
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < for_s:
        for _ in range(10):
            work()
        torch.cuda.synchronize()
        done += 10
    return {"products_per_second": done / (time.perf_counter() - began)}


if __name__ == "__main__":
    CASES: dict[str, Callable[[], dict[str, Any]]] = {
        "memory": memory,
        "speed": speed,
        "busy": lambda: busy(6.0),
    }
    print(json.dumps(CASES[sys.argv[1]]()))
