"""Memory that the driver keeps after the program has let go of it, or that takes more than it seems to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Self

from tests.gpu.driver import Skip
from tests.gpu.stage import MIB, SIMULATED, Box, Seen, Stage, Worker, bare_environment

OUT_OF_MEMORY = "error 2"
SHAPES = ((1, 1, 2048), (64, 8, 2048), (65, 8, 512), (17, 17, 512), (8192, 0, 1024), (200, 0, 300))
"""Width, height and layers of arrays of bytes."""


def descriptors(stage: Stage) -> Seen:
    """Exported memory whose handle is released lives while its descriptor is open, and counts."""
    box = stage.box("app", 4096)
    with Worker(box) as worker:
        worker.ok("start 0")
        before = stage.nvml.used_bytes(stage.card.uuid)
        worker.ok(f"alloc 0 physical {2000 * MIB}")
        _, descriptor = worker.ok("share 0")
        worker.ok("free 0")
        kept = (stage.nvml.used_bytes(stage.card.uuid) - before) // MIB
        counted = box.used_mib()
        assert kept >= 1990, f"the driver let go of it: {kept} MiB are left"
        assert worker.ask(f"alloc 1 physical {2000 * MIB}") == OUT_OF_MEMORY, f"{counted} MiB are counted"
        worker.ok(f"shut {descriptor}")
        worker.ok(f"alloc 1 physical {2000 * MIB}")
        figure = stage.nvml.processes(stage.card.uuid).get(worker.pid)
    told = "no figure" if figure is None else f"{figure // MIB} MiB"
    return Seen(
        f"released with its descriptor open, 2000 MiB stayed on the card ({kept}) and counted; closed, both "
        f"were gone; NVML then gave the process {told}"
    )


@dataclass(frozen=True)
class Left:
    """What a killed process left behind whose descriptor another one has, beside one that starts then."""

    on_card_mib: int
    counted_mib: int
    told: str

    @classmethod
    def measured(cls, stage: Stage, box: Box, newcomer: Worker, empty_mib: int) -> Self:
        """`empty_mib`: what the card had before anybody came. A context is what the newcomer added."""
        time.sleep(1.5)  # the driver is still clearing up, and locks count a second longer in a namespace
        left = stage.nvml.used_bytes(stage.card.uuid) // MIB - empty_mib
        newcomer.ok("start 0")
        context = stage.nvml.used_bytes(stage.card.uuid) // MIB - empty_mib - left
        counted = box.used_mib() - context
        return cls(left, round(counted), f"{left} MiB stayed on the card, {counted:.0f} were counted")


def orphans(stage: Stage) -> Seen:
    """Memory whose maker was killed lives while another process has its descriptor, and counts."""
    box, empty = stage.box("app", 4096), stage.nvml.used_bytes(stage.card.uuid) // MIB
    with Worker(box) as keeper, Worker(box) as newcomer:
        with Worker(box) as maker:
            maker.ok("start 0")
            maker.ok(f"alloc 0 physical {2000 * MIB}")
            pid, file = maker.ok("share 0")
            _, kept = keeper.ok(f"take {pid} {file}")
        left = Left.measured(stage, box, newcomer, empty)
        assert left.counted_mib >= left.on_card_mib - 10, left.told
        if left.on_card_mib > 1990:
            assert newcomer.ask(f"alloc 0 physical {2000 * MIB}") == OUT_OF_MEMORY, left.told
        keeper.ok(f"shut {kept}")
        newcomer.ok(f"alloc 0 physical {2000 * MIB}")
    return Seen(
        f"killed with 2000 MiB exported, a process left its descriptor: {left.told}; closed, there was room"
    )


def exported_again(stage: Stage) -> Seen:
    """Whether a process may export what it imported, and what then keeps the memory."""
    box, empty = stage.box("app", 6144), stage.nvml.used_bytes(stage.card.uuid) // MIB
    with Worker(box) as keeper, Worker(box) as newcomer:
        with Worker(box) as maker, Worker(box) as importer:
            maker.ok("start 0")
            importer.ok("start 0")
            maker.ok(f"alloc 0 physical {1500 * MIB}")
            pid, file = maker.ok("share 0")
            importer.ok(f"receive 0 {pid} {file}")
            answer = importer.ask("share 0").split()
            if answer[0] != "ok":
                raise Skip(f"the driver answers {' '.join(answer)} to an export of imported memory")
            _, kept = keeper.ok(f"take {answer[1]} {answer[2]}")
        left = Left.measured(stage, box, newcomer, empty)
        assert left.counted_mib >= left.on_card_mib - 10, left.told
        keeper.ok(f"shut {kept}")
        newcomer.ok(f"alloc 0 physical {4000 * MIB}")
    return Seen(
        f"exported again by an importer, both killed, with that descriptor open {left.told}; closed, "
        "there was room"
    )


def pool_descriptor(stage: Stage) -> Seen:
    """Whether the descriptor of a killed process's pool keeps the pool's memory."""
    box, empty = stage.box("app", 4096), stage.nvml.used_bytes(stage.card.uuid) // MIB
    with Worker(box) as keeper, Worker(box) as newcomer:
        with Worker(box) as maker:
            maker.ok("start 0")
            answer = maker.ask(f"alloc 0 pool {1500 * MIB}")
            shared = maker.ask("share-pool").split()
            if answer != "ok" or shared[0] != "ok":
                raise Skip(f"a pool of 1500 MiB answers {answer}, its export {' '.join(shared)}")
            _, kept = keeper.ok(f"take {shared[1]} {shared[2]}")
        left = Left.measured(stage, box, newcomer, empty)
        assert left.counted_mib >= left.on_card_mib - 10, left.told
        keeper.ok(f"shut {kept}")
        newcomer.ok(f"alloc 0 plain {3000 * MIB}")
    return Seen(
        f"killed with 1500 MiB in an exported pool, a process left the pool's descriptor: {left.told}"
    )


def green(stage: Stage) -> Seen:
    """What was allocated in a green context outlives it, and counts."""
    known = stage.nvml.cuda_version()
    if known < 12040:
        raise Skip("green contexts came with CUDA 12.4")
    box = stage.box("app", 4096)
    with Worker(box, "proc2", min(known, 13000)) as worker:
        worker.ok("start 0")
        answer = worker.ask("alloc 0 green 0")
        if answer != "ok":
            raise Skip(f"a green context of the whole device answers {answer}")
        worker.ok("enter 0")
        worker.ok(f"alloc 1 plain {2000 * MIB}")
        worker.ok("current 0")
        worker.ok("free 0")
        driver = stage.nvml.processes(stage.card.uuid).get(worker.pid)
        counted = box.used_mib()
        assert worker.ask(f"alloc 2 plain {2000 * MIB}") == OUT_OF_MEMORY, f"{counted} MiB are counted"
        worker.ok("free 1")
        worker.ok(f"alloc 2 plain {2000 * MIB}")
    told = "no figure" if driver is None else f"{driver // MIB} MiB"
    return Seen(f"destroyed, it left {counted} MiB counted, {told} by NVML; freed, there was room again")


def arrays(stage: Stage) -> Seen:
    """Layered arrays of bytes count as the card lays them out."""
    box, rows, apart = stage.box("app", 16384), [], []
    with Worker(box) as worker:
        worker.ok("start 0")
        for number, shape in enumerate(SHAPES):
            counted, before = box.used_mib(), stage.nvml.used_bytes(stage.card.uuid)
            many = range(number * 100, number * 100 + 16)
            for each in many:
                worker.ok(f"array {each} {shape[0]} {shape[1]} {shape[2]}")
            more = (box.used_mib() - counted) / 16
            lost = (stage.nvml.used_bytes(stage.card.uuid) - before) / MIB / 16
            rows.append(f"| {shape[0]} x {shape[1]} x {shape[2]} | {more:.2f} | {lost:.2f} |")
            apart += [shape] if more < lost - 0.1 else []
            for each in many:
                worker.ok(f"free {each}")
    head = ["| bytes, rows, layers | MiB counted | MiB lost by the card |", "| --- | --- | --- |"]
    table = "\n".join([*head, *rows])
    assert not apart or SIMULATED, f"less is counted than the card lost: {apart}\n{table}"
    return Seen("16 of each: never less counted than the card lost", table)


def first_thread(stage: Stage) -> Seen:
    """A process whose first thread has ended looks like a zombie and holds what it held."""
    box = stage.box("app", 4096)
    with Worker(box) as one, Worker(box) as two:
        one.ok("start 0")
        two.ok("start 0")
        one.ok(f"alloc 0 plain {1500 * MIB}")
        assert one.ask("leave-first-thread") == "ok"
        assert two.ask(f"alloc 0 plain {2500 * MIB}") == OUT_OF_MEMORY
        with open(f"/proc/{one.pid}/stat", encoding="utf-8") as file:
            state = file.read().rpartition(")")[2].split()[0]
        one.ok("free 0")
        two.ok(f"alloc 0 plain {2500 * MIB}")
    return Seen(f"the kernel shows it as {state}; its 1500 MiB counted until it freed them")


REOPENED = """
import ctypes, _ctypes
for name, asks in (("libnvidia-ml.so.1", "nvmlInit_v2"), ("libcuda.so.1", "cuInit")):
    for _ in range(3):
        library = ctypes.CDLL(name)
        getattr(library, "nvmlDeviceGetMemoryInfo" if "ml" in name else "cuMemAlloc_v2")
        print(name, getattr(library, asks)(*(() if "ml" in name else (0,))))
        _ctypes.dlclose(library._handle)
"""


def reopened(stage: Stage) -> Seen:
    """Probes open the driver's libraries, ask, close them, and the program opens them again."""
    box = stage.box("app", 4096)
    told = box.run(sys.executable, "-c", REOPENED).split()
    results = [word for word in told if re.fullmatch(r"-?\d+", word)]
    assert results == ["0"] * 6, told
    return Seen("NVML and libcuda opened, asked and closed three times each: all calls answered 0")


FORKED = """
import ctypes, os, sys, time
cuda = ctypes.CDLL("libcuda.so.1")
device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_ulonglong()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t({bytes})) == 0
child = os.fork()
if child == 0:
    time.sleep(3)
    os._exit(0)
print(child, flush=True)
time.sleep(60)
"""


def forked(stage: Stage) -> Seen:
    """Whether a forked child that does nothing keeps its killed parent's memory on the card."""
    before = stage.nvml.used_bytes(stage.card.uuid)
    command = [sys.executable, "-c", FORKED.format(bytes=1000 * MIB)]
    bare = bare_environment(stage.card)
    with subprocess.Popen(command, env=bare, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        held = (stage.nvml.used_bytes(stage.card.uuid) - before) // MIB
        parent.kill()
        parent.wait()
        time.sleep(0.5)
        left = (stage.nvml.used_bytes(stage.card.uuid) - before) // MIB
        alive = os.path.exists(f"/proc/{child}")
    where = "was there" if alive else "had ended"
    return Seen(f"{left} of {held} MiB were left 0.5 s after the parent was killed; its child {where}")
