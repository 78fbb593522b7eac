"""Other people's programs in containers of one card: frameworks side by side, NVIDIA's tools, and MPS."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.gpu.driver import Skip
from tests.gpu.framework_program import FRAMEWORKS, STEP_MIB
from tests.gpu.program_cases import EXPECTED, nvcc_program
from tests.gpu.stage import HERE, MIB, SIMULATED, Box, Process, Seen, Stage, Worker, torch_python

LIMIT_MIB = 8192
OUT_OF_MEMORY = ("out of memory", "out_of_memory", "resource_exhausted", "outofmemory")
APART_MIB = 64
"""How far what is counted for a framework may be from what the driver says of its process."""


def side_by_side(stage: Stage) -> Seen:
    """Frameworks in containers of 8 GiB on one card at the same time: each is told its part, is refused past
    it in its own words, and goes on.
    """
    python, room = torch_python(), stage.card.memory_mib // LIMIT_MIB
    names = list(FRAMEWORKS)[:room]
    with ExitStack() as stack, ThreadPoolExecutor(len(names)) as pool:
        boxes = [stage.box(f"framework-{number}", LIMIT_MIB, 10, lent=True) for number in range(len(names))]
        programs = [
            stack.enter_context(_started([python, str(HERE / "framework_program.py"), *name.split()], box))
            for name, box in zip(names, boxes, strict=True)
        ]
        answers = list(pool.map(_answer, programs))
        rows, odd, figures = [], [], {}
        seen = stage.nvml.processes(stage.card.uuid)
        for name, box, program, answer in zip(names, boxes, programs, answers, strict=True):
            if "missing" not in answer and "died" not in answer:
                answer["driver_mib"] = (seen.get(program.pid) or 0) // MIB
                answer["counted_mib"] = box.used_mib()
            figures[name] = answer
            odd += [f"{name}: {what}" for what in _odd(answer)]
            rows.append(_row(name, answer))
    head = "| framework | told, MiB | got, MiB | its words | counted, MiB | the driver's, MiB |\n"
    table = "\n".join([head + "| --- " * 6 + "|", *rows])
    assert not odd, f"{'; '.join(odd)}\n{table}"
    there = [name for name, answer in figures.items() if "missing" not in answer]
    if not there:
        raise Skip(f"none of {', '.join(names)} is here")
    return Seen(
        f"{len(there)} at once: told {LIMIT_MIB} MiB each, refused past it, and right afterwards",
        table,
        figures,
    )


def _started(command: list[str], box: Box, **more: str) -> Process:
    return Process(command, box.environment | more, box.folder / "program.log")


def _answer(program: Process) -> dict[str, Any]:
    """A framework that dies is a row, and the others' figures are kept."""
    try:
        while not (line := program.hear()).startswith("{"):
            pass  # some greet on standard output
        answer: dict[str, Any] = json.loads(line)
    except AssertionError as error:
        return {"died": str(error)[-600:]}
    return answer


def _odd(answer: dict[str, Any]) -> list[str]:
    if "missing" in answer:
        return []
    if "died" in answer:
        return [answer["died"]]
    odd = []
    if abs(answer["told_mib"] - LIMIT_MIB) > LIMIT_MIB // 8 or answer["told_mib"] > LIMIT_MIB:
        odd.append(f"told {answer['told_mib']} MiB")
    if not any(word in answer["refusal"].lower() for word in OUT_OF_MEMORY):
        odd.append(f"its refusal is {answer['refusal']!r}")
    if not LIMIT_MIB // 2 <= answer["got_mib"] + STEP_MIB <= LIMIT_MIB:
        odd.append(f"got {answer['got_mib']} MiB")
    if not answer["right"]:
        odd.append("what it computed is wrong")
    if answer["driver_mib"] and abs(answer["counted_mib"] - answer["driver_mib"]) > APART_MIB:
        odd.append(f"{answer['counted_mib']} MiB are counted, {answer['driver_mib']} the driver's")
    return odd


def _row(name: str, answer: dict[str, Any]) -> str:
    if reason := answer.get("missing") or answer.get("died"):
        words = " ".join(reason.replace("|", "/").split())[-80:]
        return f"| {name} | – | – | {'does not start here: ' if 'missing' in answer else ''}{words} | – | – |"
    words = answer["refusal"].replace("|", "/")[:70]
    cells = (answer["told_mib"], answer["got_mib"], words, answer["counted_mib"], answer["driver_mib"])
    return f"| {name} | {' | '.join(str(cell) for cell in cells)} |"


TOOLS = {
    "compute-sanitizer": ["--tool", "memcheck", "--report-api-errors", "no"],
    "ncu": ["--clock-control", "none", "--launch-count", "1"],
    "cuda-gdb": ["-batch", "-ex", "run", "--args"],
}


def tools(stage: Stage) -> Seen:
    """NVIDIA's tools for developers, in a container, around a program: it behaves as it does without them."""
    program = nvcc_program(stage.folder)
    told, odd = [], []
    for name, options in TOOLS.items():
        if shutil.which(name) is None:
            continue
        box = stage.box(name, 4096)
        done = subprocess.run(
            [name, *options, program],
            env=box.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        missing = [line for line in EXPECTED if line not in done.stdout]
        told.append(name)
        if missing or (
            name == "compute-sanitizer" and "ERROR SUMMARY: 0 errors" not in done.stdout + done.stderr
        ):
            odd.append(f"{name} ended with {done.returncode}: {done.stdout[-700:]} {done.stderr[-500:]}")
    assert not odd, "\n".join(odd)
    if not told:
        raise Skip(f"none of {', '.join(TOOLS)} is here")
    return Seen(f"{', '.join(told)}: the program saw 4096 MiB, was refused, and computed rightly")


def under_mps(stage: Stage) -> Seen:
    """Two containers whose programs are clients of one MPS server: each is held to its own limit."""
    control = shutil.which("nvidia-cuda-mps-control") or "/usr/local/nvidia/bin/nvidia-cuda-mps-control"
    if SIMULATED or not Path(control).exists():
        raise Skip("no nvidia-cuda-mps-control here")
    pipe, log = stage.folder / "mps", stage.folder / "mps.out"
    pipe.mkdir()
    mps = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(stage.folder)}
    with log.open("wb") as out:
        server = subprocess.Popen([control, "-f"], env=os.environ | mps, stdout=out, stderr=out)
    try:
        until = time.monotonic() + 10
        while not (pipe / "control").exists() and time.monotonic() < until:
            time.sleep(0.05)
        boxes = [stage.box(name, 4096) for name in ("one", "two")]
        for box in boxes:
            box.environment.update(mps)
        with Worker(boxes[0]) as one, Worker(boxes[1]) as two:
            rows = []
            for worker, box in ((one, boxes[0]), (two, boxes[1])):
                worker.ok("start 0")
                context = box.used_mib()
                worker.ok(f"alloc 0 plain {3000 * MIB}")
                refused = worker.ask(f"alloc 1 plain {1200 * MIB}")
                rows.append((context, refused, box.used_mib(), worker.ok("info")[1] // MIB))
            seen = stage.nvml.processes(stage.card.uuid)
            by_nvml = [(seen.get(worker.pid) or 0) // MIB for worker in (one, two)]
        told = "".join(each.read_text(errors="replace") for each in (log, *stage.folder.glob("*.log")))
        if "NEW CLIENT" not in told:
            raise Skip(f"MPS saw no client here: {' '.join(told.split())[-300:]}")
    finally:
        subprocess.run(
            [control],
            input="quit -t 1\n",
            env=os.environ | mps,
            text=True,
            capture_output=True,
            timeout=15,
            check=False,
        )
        server.kill()
        server.wait()
    assert all(refused == "error 2" and total == 4096 for _, refused, _, total in rows), rows
    shown = ", ".join(f"{used} MiB" for _, _, used, _ in rows)
    text = f"a context counts {rows[0][0]} MiB; {shown} counted, {by_nvml} by NVML"
    return Seen(f"{text}; 1200 MiB more were refused to each", figures={"rows": rows, "by_nvml": by_nvml})
