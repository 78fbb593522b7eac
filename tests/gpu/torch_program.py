"""PyTorch under a limit, or without one: started by the cases, asked line by line, answers in JSON.

    (start)          the names of its works
    warm WORK        makes it ready, answers how many calls a block has
    time WORK        seconds for one call, over one block
    busy WORK S      calls a second for so long
    hold MIB         takes so much and keeps it
    memory           what PyTorch is told, what it gets, and that it goes on after a refusal
    graph            a recorded graph under the limit, and a refusal between two replays
    workers          batches from forked workers, made while this process has a context
    shared           a tensor lent to a process started anew; what the container is told to be used
    libraries        products, convolutions, attention, transforms: what else comes to the card with them

GPUSLICE_TORCH_DEVICE=cpu tries this file out where there is no card, as far as that goes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Beside this file are modules of ours with common names; PyTorch must not find them.
sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).resolve().parent]

import torch  # noqa: E402

MIB = 1 << 20
BLOCK_S = 0.05
DEVICE = os.environ.get("GPUSLICE_TORCH_DEVICE", "cuda")
SIZE = 4096 if DEVICE == "cuda" else 256
Call = Callable[[], object]


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def product() -> Call:
    left = torch.randn(SIZE, SIZE, device=DEVICE, dtype=torch.bfloat16)
    out = torch.empty_like(left)
    return lambda: torch.mm(left, left, out=out)


def transformer() -> Call:
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, device=DEVICE)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    batch = torch.randn(16, 128, 512, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        layer(batch).square().mean().backward()
        optimizer.step()

    return step


def small_launches() -> Call:
    cell = torch.zeros(1, device=DEVICE)
    return lambda: cell.add_(1)


def recorded() -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    cell = torch.zeros(1, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # once before recording, as PyTorch's manual asks
        cell.add_(1)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            cell.add_(1)
    return graph, cell


def graph() -> Call:
    captured, _cell = recorded()
    replay: Call = captured.replay
    keep.append(_cell)
    return replay


def allocations() -> Call:
    """Past the caching allocator, so that each is a call of the driver."""

    def once() -> None:
        block = torch.empty(32 * MIB, dtype=torch.uint8, device=DEVICE)
        del block
        torch.cuda.empty_cache()

    return once


WORKS: dict[str, Callable[[], Call]] = {
    "matrix product": product,
    "transformer step": transformer,
    "launch-bound loop": small_launches,
    "CUDA graph of 20 kernels": graph,
    "allocate and free": allocations,
}
keep: list[object] = []
ready: dict[str, tuple[Call, int]] = {}


def block_s(call: Call, count: int) -> float:
    synchronize()
    began = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return time.perf_counter() - began


def warm(name: str) -> int:
    call = WORKS[name]()
    block_s(call, 3)
    count = max(1, round(BLOCK_S / max(block_s(call, 10) / 10, 1e-7)))
    block_s(call, count)
    ready[name] = call, count
    return count


def timed(name: str) -> float:
    call, count = ready[name]
    return block_s(call, count) / count


def busy(name: str, for_s: float) -> float:
    """A block has a hundredth of a second of work: waiting for it keeps queues short."""
    call, count = ready[name]
    few, done, began = max(1, count // 8), 0, time.perf_counter()
    while time.perf_counter() - began < for_s:
        block_s(call, few)
        done += few
    return done / (time.perf_counter() - began)


def memory() -> dict[str, Any]:
    free, total = torch.cuda.mem_get_info()
    properties = torch.cuda.get_device_properties(0)
    held: list[torch.Tensor] = []
    refusal = ""
    try:
        while len(held) < 4096:
            held.append(torch.empty(256 * MIB, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError as error:
        refusal = str(error)[:200]
    got = len(held) * 256
    held.clear()
    torch.cuda.empty_cache()
    again = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda").sum().item()
    return {
        "free_mib": free // MIB,
        "total_mib": total // MIB,
        "property_mib": properties.total_memory // MIB,
        "got_mib": got,
        "refusal": refusal,
        "went_on": again == 64 * MIB,
        "allocator": torch.cuda.get_allocator_backend(),
        "torch": torch.__version__,
    }


def hold(size_mib: int) -> int:
    keep.append(torch.ones(size_mib * MIB, dtype=torch.uint8, device=DEVICE))
    synchronize()
    return size_mib


def graph_under_limit() -> dict[str, Any]:
    """Memory taken while recording counts, a refusal between replays leaves the graph as it was."""
    captured, cell = recorded()
    captured.replay()
    torch.cuda.synchronize()
    before = cell.item()
    refused = False
    try:
        torch.empty(torch.cuda.mem_get_info()[1] * 2, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        refused = True
    captured.replay()
    torch.cuda.synchronize()
    return {"refused": refused, "grew_by": cell.item() - before}


class Numbers:
    """64 rows of 1000 ones; who makes them has forgotten the parent's context."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(1000)


def workers() -> dict[str, Any]:
    """PyTorch's usual way: workers are forked while the parent's context lives, batches are pinned."""
    torch.zeros(1, device=DEVICE)
    total = 0.0
    for _ in range(2):
        loader = torch.utils.data.DataLoader(
            Numbers(),
            batch_size=8,
            num_workers=2,
            pin_memory=DEVICE == "cuda",
            multiprocessing_context=multiprocessing.get_context("fork"),
        )
        total += sum(float(batch.to(DEVICE, non_blocking=True).sum()) for batch in loader)
    return {"sum": total, "expected": 2 * 64 * 1000.0}


def used_mib() -> int:
    if DEVICE != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free) // MIB


def borrow(lent: Any, told: Any) -> None:
    """In the process started anew: before and after it opened the tensor."""
    torch.zeros(1, device=DEVICE)
    synchronize()
    before = used_mib()
    tensor = lent.get(timeout=60)
    told.put((before, used_mib(), int(tensor.sum().item())))
    del tensor
    lent.get(timeout=60)


def lend() -> dict[str, Any]:
    context = torch.multiprocessing.get_context("spawn")
    lent, told = context.Queue(), context.Queue()
    child = context.Process(target=borrow, args=(lent, told))
    child.start()
    tensor = torch.ones(512 * MIB, dtype=torch.uint8, device=DEVICE)
    lent.put(tensor)
    before, after, total = told.get(timeout=90)
    lent.put(None)
    child.join(30)
    return {"before_mib": before, "after_mib": after, "sum_mib": total // MIB, "exit": child.exitcode}


def libraries() -> dict[str, Any]:
    images = torch.randn(8, 64, 56, 56, device=DEVICE, requires_grad=True)
    layer = torch.nn.Conv2d(64, 64, 3, padding=1, device=DEVICE)
    layer(images).square().mean().backward()
    left = torch.randn(1024, 1024, device=DEVICE)
    for kind in (torch.float32, torch.float16, torch.bfloat16):
        torch.mm(left.to(kind), left.to(kind))
    query = torch.randn(4, 8, 256, 64, device=DEVICE, dtype=torch.float16 if DEVICE == "cuda" else None)
    torch.nn.functional.scaled_dot_product_attention(query, query, query)
    torch.fft.rfft2(left)
    torch.linalg.svd(left[:128, :128])
    torch.sort(left.flatten())
    synchronize()
    reserved = torch.cuda.memory_reserved() // MIB if DEVICE == "cuda" else 0
    again = torch.empty(2 * MIB, dtype=torch.uint8, device=DEVICE)
    time.sleep(2.5)
    del again
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.empty(64 * MIB, dtype=torch.uint8, device=DEVICE)  # a call of the driver, after a pause
    return {"reserved_mib": reserved}


def obey(words: list[str]) -> Any:
    order, rest = words[0], words[1:]
    if order in ("warm", "time"):
        return (warm if order == "warm" else timed)(" ".join(rest))
    if order == "busy":
        return busy(" ".join(rest[:-1]), float(rest[-1]))
    if order == "hold":
        return hold(int(rest[0]))
    orders: dict[str, Callable[[], Any]] = {
        "memory": memory,
        "graph": graph_under_limit,
        "workers": workers,
        "shared": lend,
        "libraries": libraries,
    }
    return orders[order]()


if __name__ == "__main__":
    print(json.dumps(list(WORKS)), flush=True)
    for line in sys.stdin:
        print(json.dumps(obey(line.split())), flush=True)
