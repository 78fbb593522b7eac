"""Real programs under a limit, unchanged: nvcc's, PyTorch's, and the command line."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.driver import Skip, smi
from tests.gpu.stage import (
    BUILD,
    HERE,
    MIB,
    ROOT,
    SIMULATED,
    Program,
    Seen,
    Stage,
    bare_environment,
    torch_python,
)

EXPECTED = ["total 4096 property 4096", "half 0", "whole 2", "async 2", "work 1000"]
BUILDS = {
    "static runtime, legacy streams": ["--default-stream=legacy"],
    "static runtime, per-thread streams": ["--default-stream=per-thread"],
    "shared runtime": ["--cudart=shared"],
}


def nvcc_programs(stage: Stage) -> Seen:
    """Programs as nvcc builds them: told 4096 MiB, given half, refused the whole, and right in their sums."""
    nvcc = _nvcc()
    with ThreadPoolExecutor(len(BUILDS)) as pool:
        programs = list(pool.map(lambda flags: _compiled(nvcc, stage.folder, flags), BUILDS.values()))
    ran = {name: program for name, program in zip(BUILDS, programs, strict=True) if program}
    for number, (name, program) in enumerate(ran.items()):
        told = stage.box(f"app-{number}", 4096).run(program).splitlines()
        assert told == EXPECTED, f"{name}: {told}"
    missing = "; no shared runtime to link here" if len(ran) < len(BUILDS) else ""
    return Seen(f"{'; '.join(ran)}: saw 4096 MiB, got half, was refused all, computed rightly{missing}")


def nvcc_program(folder: Path) -> str:
    """One of them. Skips where there is no nvcc."""
    program = _compiled(_nvcc(), folder, [])
    assert program is not None
    return program


def _nvcc() -> str:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise Skip("no nvcc here")
    if SIMULATED:
        raise Skip("the CUDA runtime wants NVIDIA's own driver, this one is simulated")
    return nvcc


def _compiled(nvcc: str, folder: Path, flags: list[str]) -> str | None:
    """The program; None where the toolkit lacks the shared runtime's link, as NVIDIA's wheels do."""
    program = str(folder / "-".join(["program", *flags]).replace("=", "-"))
    home = Path(nvcc).resolve().parent.parent / "lib64"
    found_at_run = ["-Xlinker", f"-rpath={home}"]
    rest = [*flags, *found_at_run, "-o", program, str(HERE / "program.cu")]
    command = [nvcc, *_architecture(), *rest]
    made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=80)
    if "nsupported gpu architecture" in made.stderr:  # older than the card: the driver compiles what it made
        command = [nvcc, *rest]
        made = subprocess.run(command, capture_output=True, text=True, check=False, timeout=80)
    if "cannot find -lcudart" in made.stderr:
        return None
    assert made.returncode == 0, f"{' '.join(command)}: {made.stdout[-400:]} {made.stderr[-800:]}"
    return program


def _architecture() -> list[str]:
    """This card's; nvcc's own choice where nobody tells."""
    try:
        found = smi(["compute_cap"])[0]["compute_cap"].replace(".", "")
    except (Skip, AssertionError):
        return []
    return [f"-arch=sm_{found}"] if found.isdigit() else []


def torch_memory(stage: Stage) -> Seen:
    """PyTorch is told its share, is refused past it and goes on; with each of its allocators."""
    torch_python()
    rows, found = [], {}
    for allocator, setting in (
        ("caching", ""),
        ("expandable segments", "expandable_segments:True"),
        ("cudaMallocAsync", "backend:cudaMallocAsync"),
    ):
        found[allocator] = each = _ask_torch(stage, allocator, setting, "memory")
        assert each["total_mib"] == each["property_mib"] == 8192, f"{allocator}: {each}"
        assert each["refusal"], f"{allocator}: never refused: {each}"
        assert each["went_on"], f"{allocator}: {each}"
        assert 5120 <= each["got_mib"] <= 8192, f"{allocator}: {each}"
        rows.append(f"| {allocator} | {each['free_mib']} | {each['got_mib']} |")
    table = "\n".join(["| allocator | MiB free at the start | MiB got |", "| --- | --- | --- |", *rows])
    version = found["caching"]["torch"]
    return Seen(f"PyTorch {version}: told 8192 MiB, then OutOfMemoryError, and went on", table, found)


def torch_graph(stage: Stage) -> Seen:
    """A CUDA graph is recorded and replayed under a limit and a share, with a refusal in between."""
    torch_python()
    box = stage.box("app", 8192, 50)
    with Program("torch", box.environment, stage.folder / "torch.log") as torch:
        found = torch.answer("graph")
    assert found == {"refused": True, "grew_by": 20.0}, found
    return Seen("a graph of 20 kernels gave the same before and after a refusal, under a share of 50 %")


def torch_processes(stage: Stage) -> Seen:
    """Forked workers under a parent's context, and a tensor lent to a process that was started anew."""
    torch_python()
    box = stage.box("app", 8192)
    with Program("torch", box.environment, stage.folder / "torch.log") as torch:
        batches = torch.answer("workers")
        assert batches["sum"] == batches["expected"], batches
        lent = torch.answer("shared")
    assert lent["sum_mib"] == 512, lent
    assert lent["exit"] == 0, lent
    more = lent["after_mib"] - lent["before_mib"]
    assert more <= 128, f"opening 512 MiB of another process counted {more} MiB: {lent}"
    return Seen(
        f"forked workers fed {batches['sum']:.0f} numbers; 512 MiB opened elsewhere added {more} MiB",
        figures=lent,
    )


STARTS = 2


def torch_start(stage: Stage) -> Seen:
    """How long PyTorch takes to its first kernel, and what its libraries bring that nobody asked for."""
    torch_python()
    bare, held = [], []
    for number in range(STARTS):
        bare.append(_start_s(bare_environment(stage.card), stage.folder / f"bare-{number}.log"))
        held.append(
            _start_s(stage.box(f"start-{number}", 8192).environment, stage.folder / f"held-{number}.log")
        )
    box = stage.box("libraries", 16384)
    before = stage.nvml.used_bytes(stage.card.uuid)
    with Program("torch", box.environment, stage.folder / "torch.log") as torch:
        found = torch.answer("libraries")
        driver, how = stage.driver_mib(torch.pid, before)
        counted, own = box.used_mib(), box.usage().processes[0].own_bytes // MIB
    started = f"to the first kernel {min(bare):.1f} s without the library, {min(held):.1f} s with it"
    text = (
        f"{started}; after work with all libraries {counted} MiB are counted, {driver} the driver's ({how})"
    )
    figures = found | {
        "bare_s": bare,
        "held_s": held,
        "counted_mib": counted,
        "driver_mib": driver,
        "own_mib": own,
    }
    assert min(held) <= min(bare) * 1.25 + 1, text
    assert counted - driver <= 256, f"too much is counted: {text}"
    # Where the driver has no figure for a process, code that comes with its first launch is seen by nobody.
    assert how != "by pid" or driver - counted <= 64, f"too little is counted: {text}"
    return Seen(text, figures=figures)


def _start_s(environment: dict[str, str], log: Path) -> float:
    began = time.monotonic()
    with Program("torch", environment, log) as torch:
        torch.answer("warm launch-bound loop")
        return time.monotonic() - began


def _ask_torch(stage: Stage, name: str, allocator: str, order: str) -> Any:
    box = stage.box(name.replace(" ", "-"), 8192)
    # Both names: the older is read by every version, the newer by those that warn of it.
    variables = {"PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTORCH_ALLOC_CONF": allocator} if allocator else {}
    with Program("torch", box.environment | variables, box.folder / "torch.log") as torch:
        return torch.answer(order)


def command_line(stage: Stage) -> Seen:
    """`gpuslice run` starts a program with a part of the card, `gpuslice ps` shows it."""
    missing = [name for name in ("click", "msgspec", "pynvml") if importlib.util.find_spec(name) is None]
    if missing:
        raise Skip(f"this Python lacks {' and '.join(missing)}")
    base, library = stage.folder / "budgets", str(BUILD / "lib/libgpuslice.so")
    limit = stage.units_mib(4)
    start = (
        f"import sys; sys.path[:0] = [{str(ROOT / 'src')!r}]; from gpuslice.apps.cli.main import main; main()"
    )
    worker = [str(BUILD / "tests/worker"), "dlsym"]
    run = [sys.executable, "-c", start, "run", "--base", str(base), "--mem", "4", "--library", library, "--"]
    told = subprocess.run(
        [*run, *worker],
        input=f"start 0\ntotal 0\nalloc 0 plain {(limit + 1) * MIB}\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert told.stdout.splitlines() == ["ok", "ok", f"ok {limit * MIB}", "error 2"], f"{told}"
    shown = subprocess.run(
        [*run, sys.executable, "-c", start, "ps", "--base", str(base), "-o", "json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert shown.returncode == 0, shown.stderr
    (budget,) = json.loads(shown.stdout)
    assert budget["cards"][0]["limitBytes"] == limit * MIB, budget
    return Seen(f"--mem 4 gave {limit} MiB, {limit + 1} MiB were refused; ps shows the budget while it lives")


def load_program(stage: Stage) -> Seen:
    """`gpuslice load` beside the exporter, in a program of its own."""
    done = subprocess.run(
        [sys.executable, str(HERE / "load_cases.py")], capture_output=True, text=True, check=False, timeout=70
    )
    last = (done.stdout.strip().splitlines() or ["no word"])[-1][:900]
    if done.returncode == 77:
        raise Skip(last)
    assert done.returncode == 0, f"{last}\n{done.stdout[-1500:]} {done.stderr[-1500:]}"
    return Seen(last)
