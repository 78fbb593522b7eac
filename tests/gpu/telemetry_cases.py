"""What our telemetry makes of NVML's answers, beside what nvidia-smi prints at the same moment."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.gpu.driver import Skip, smi
from tests.gpu.stage import (
    ROOT,
    SIMULATED,
    Process,
    Program,
    Seen,
    Stage,
    bare_environment,
    in_host_namespace,
    torch_python,
)

PAUSE_S = 0.3 if SIMULATED else 1.0
LEAST_BUSY = 0.3 if SIMULATED else 0.85  # a test machine may be busy with other things
# DCGM field: nvidia-smi's name, and by how much the two may part (absolute, and as a part of the value).
COMPARED: dict[int, tuple[str, float, float]] = {
    150: ("temperature.gpu", 4, 0),
    155: ("power.draw", 30, 0.25),
    160: ("power.limit", 0.1, 0),
    161: ("power.min_limit", 0.1, 0),
    162: ("power.max_limit", 0.1, 0),
    164: ("enforced.power.limit", 0.1, 0),
    100: ("clocks.sm", 60, 0.1),
    101: ("clocks.mem", 5, 0),
    102: ("clocks.video", 60, 0.1),
    203: ("utilization.gpu", 50 if SIMULATED else 20, 0),
    204: ("utilization.memory", 50 if SIMULATED else 20, 0),
    250: ("memory.total", 1, 0),
    252: ("memory.used", 64, 0),
    253: ("memory.reserved", 1, 0),
    235: ("pcie.link.gen.max", 0, 0),
    236: ("pcie.link.width.max", 0, 0),
    237: ("pcie.link.gen.current", 1, 0),
    238: ("pcie.link.width.current", 0, 0),
    310: ("ecc.errors.corrected.volatile.total", 0, 0),
    311: ("ecc.errors.uncorrected.volatile.total", 0, 0),
    393: ("remapped_rows.correctable", 0, 0),
    140: ("temperature.memory", 4, 0),
}
WORDS = {54: "uuid", 50: "name", 1: "driver_version", 85: "vbios_version"}
ENGINE, SM, OCCUPANCY, TENSOR, DRAM = 1001, 1002, 1003, 1004, 1005


def conversions(stage: Stage) -> Seen:
    """Each figure, under load, against nvidia-smi's of the same moment."""
    _require_binding(stage)
    numbers = _fields()
    with _busy(stage, "driver"):
        ours = _samples(stage, numbers, 2)[-1]
        theirs = _one_by_one([name for name, _, _ in COMPARED.values()] + list(WORDS.values()))
    rows, apart, unknown = [], [], []
    for number, (name, absolute, relative) in COMPARED.items():
        value, text = ours.fields.get(number), theirs.get(name, "")
        figure = _number(text)
        if value is None or figure is None:
            unknown.append(f"{name} (ours {value}, nvidia-smi's {text or 'unknown'})")
            # "[N/A]" beside a figure of ours is a figure made up; a name that it does not know says nothing.
            if text and value is not None:
                apart.append(f"{name}: ours {value}, nvidia-smi's {text}")
            continue
        rows.append(f"| {number} | {name} | {value:g} | {text} |")
        if abs(float(value) - figure) > absolute + relative * abs(figure):
            apart.append(f"{name}: ours {value:g}, nvidia-smi's {text}")
    for number, name in WORDS.items():
        if number in ours.fields and theirs.get(name) and str(ours.fields[number]) != theirs[name]:
            apart.append(f"{name}: ours {ours.fields[number]}, nvidia-smi's {theirs[name]}")
    table = "\n".join(["| DCGM field | nvidia-smi | ours | its | ", "| --- | --- | --- | --- |", *rows])
    assert rows, f"nothing to compare: {unknown}"
    assert not apart, f"{'; '.join(apart)}\n{table}"
    told = f"; not comparable here: {', '.join(unknown)}" if unknown else ""
    return Seen(f"{len(rows)} figures agree under load{told}", table, _figures(ours))


def counters(stage: Stage) -> Seen:
    """Hardware counters (GPM): near nothing when idle; busy with matrix products, the tensor pipe is."""
    _require_binding(stage)
    totals = range(1084, 1097)  # cycles and bytes since the start, with drivers that count them
    numbers = dict.fromkeys((*range(1001, 1013), *totals), "")
    idle = _samples(stage, numbers, 3)[-1]
    if ENGINE not in idle.fields:
        raise Skip(f"no counters here: {idle.unsupported.get(ENGINE, 'the driver gave none')}")
    with _busy(stage, "torch") as kind:
        load = _samples(stage, numbers, 4)[-1]
    rows = [
        f"| {number} | {float(idle.fields.get(number, 0)):.4g} | {float(load.fields[number]):.4g} |"
        for number in numbers
        if number in load.fields
    ]
    head = f"| DCGM field | idle | {'matrix products' if kind == 'torch' else 'arithmetic kernel'} |"
    table = "\n".join([head, "| --- | --- | --- |", *rows])
    ratios = [value for number, value in load.fields.items() if ENGINE <= number <= 1008]
    assert all(0 <= float(value) <= 1.01 for value in ratios), f"no ratio:\n{table}"
    counted = [n for n in totals if n in idle.fields and n in load.fields]
    assert all(float(idle.fields[n]) <= float(load.fields[n]) for n in counted), f"went back:\n{table}"
    assert float(load.fields[ENGINE]) >= LEAST_BUSY, f"the engine is busy all the time:\n{table}"
    assert SIMULATED or float(idle.fields[ENGINE]) <= 0.15, f"the card is idle:\n{table}"
    if kind == "torch":
        assert float(load.fields[SM]) >= 0.8, table
        assert float(load.fields.get(TENSOR, 0)) >= 0.3, f"bf16 products run on the tensor pipe:\n{table}"
    return Seen(
        f"engine {load.fields[ENGINE]:.3f} busy, {idle.fields[ENGINE]:.3f} idle", table, _figures(load)
    )


def processes(stage: Stage) -> Seen:
    """The share of the card's time by process, and its memory, where the driver shows processes here."""
    _require_binding(stage)
    with _busy(stage, "driver") as kind:
        found = _samples(stage, {203: ""}, 3)[-1].processes
    if not found:
        raise Skip(f"NVML lists no process here ({found}), as in a PID namespace of its own")
    most = max(found, key=lambda each: each.sm_ratio or 0.0)
    text = f"{len(found)} by NVML; the busiest: {most}"
    if not most.sm_ratio and not in_host_namespace():
        raise Skip(f"in this PID namespace NVML lists processes by other numbers than it samples: {text}")
    assert most.sm_ratio is None or most.sm_ratio >= LEAST_BUSY / 2, f"{kind} keeps the card busy: {found}"
    return Seen(text)


def exporter(stage: Stage) -> Seen:
    """The exporter on this card: its memory figures beside nvidia-smi's."""
    needed = ("msgspec", "httptools", "click", "pynvml", "numpy", "grpclib", "google.protobuf")
    missing = [name for name in needed if _spec(name) is None]
    if missing:
        raise Skip(f"this Python lacks {', '.join(missing)}: bring their wheels and name them in PYTHONPATH")
    start = "from gpuslice.apps.cli.main import main; main()"
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    address = f"127.0.0.1:{_free_port()}"
    command = [sys.executable, "-c", start, "exporter", "--no-kubernetes", "--address", address]
    environment = {**os.environ, "PYTHONPATH": path}
    with Process(command, environment, stage.folder / "exporter.log") as running:
        text = _page(f"http://{address}/metrics", running)
        used = _metric(text, "DCGM_FI_DEV_FB_USED")
        truth = stage.nvml.used_bytes(stage.card.uuid) >> 20
    names = {line.split("{")[0].split()[0] for line in text.splitlines() if line and line[0] != "#"}
    reserved = _metric(text, "DCGM_FI_DEV_FB_RESERVED") or 0
    assert used is not None, f"no DCGM_FI_DEV_FB_USED among {sorted(names)}"
    assert min(abs(used - truth), abs(used + reserved - truth)) <= 64, f"ours {used}, NVML's {truth} MiB"
    return Seen(f"{len(names)} metrics; DCGM_FI_DEV_FB_USED {used:.0f}, NVML's {truth} MiB")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _spec(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None


def _page(url: str, running: Process) -> str:
    until = time.monotonic() + 30
    text = ""
    while "DCGM_FI_DEV_FB_USED" not in text and time.monotonic() < until:
        assert running.process.poll() is None, "the exporter ended"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            pass
        time.sleep(0.3)
    return text


def _metric(text: str, name: str) -> float | None:
    found = re.search(rf"^{name}\{{[^}}]*\}} (\S+)", text, re.MULTILINE)
    return float(found[1]) if found else None


def _require_binding(stage: Stage) -> None:
    if stage.card.divided:
        raise Skip("MIG divides this card: its figures are its card's, which the cases do not have")
    if importlib.util.find_spec("pynvml") is None:
        raise Skip("this Python lacks pynvml (nvidia-ml-py)")


def _fields() -> dict[int, str]:
    """Every field we can read, with the name of its NVML field value."""
    from gpuslice.adapters.gpu.readings import MEMORY_FIELDS, READERS, UTILIZATION_FIELDS

    return dict.fromkeys(sorted({*READERS, *MEMORY_FIELDS, *UTILIZATION_FIELDS, 140, 157}), "")


def _samples(stage: Stage, wanted: Mapping[int, str], count: int) -> list[Any]:
    from gpuslice.adapters.gpu.telemetry import NvmlTelemetry

    async def take() -> list[Any]:
        telemetry, found = NvmlTelemetry(), []
        for _ in range(count):
            sample = await telemetry.sample(wanted)
            found.append(next(card for card in sample.cards if card.uuid == stage.card.uuid))
            await asyncio.sleep(PAUSE_S)
        return found

    return asyncio.run(take())


@contextmanager
def _busy(stage: Stage, kind: str) -> Iterator[str]:
    """The card is busy meanwhile: with PyTorch if that is wished and here, else with a kernel of ours."""
    if kind == "torch":
        try:
            torch_python()
        except Skip:
            kind = "driver"
    work = {"torch": "matrix product", "driver": "arithmetic kernel"}[kind]
    log = stage.folder / f"busy-{time.monotonic_ns()}.log"
    with Program(kind, bare_environment(stage.card), log) as program:
        program.answer(f"warm {work}")
        program.say(f"busy {work} 20")
        time.sleep(2 * PAUSE_S)
        yield kind


def _one_by_one(names: list[str]) -> dict[str, str]:
    """One unknown name spoils a whole question: then each is asked alone."""
    try:
        return smi(names)[0]
    except AssertionError:
        found: dict[str, str] = {}
        for name in names:
            try:
                found |= smi([name])[0]
            except AssertionError:
                continue
        return found


def _number(text: str) -> float | None:
    found = re.match(r"-?\d+(\.\d+)?", text)
    return float(found[0]) if found else None


def _figures(sample: Any) -> dict[str, Any]:
    return {
        "fields": {str(number): value for number, value in sample.fields.items()},
        "unsupported": {str(number): reason for number, reason in sample.unsupported.items()},
    }
