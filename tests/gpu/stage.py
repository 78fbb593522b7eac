"""What a case is played with: containers in folders, processes in them, and a full account when it fails."""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from gpuslice.adapters.region.layout import RegionCard, RegionHead
from gpuslice.adapters.region.limits import LimitsEntry, write_limits
from gpuslice.adapters.region.reader import CardUsage, RegionError, prepare_region, read_region
from gpuslice.core.units import card_units, limit_mib
from tests.gpu.driver import Card, NoDriverError, Nvml, Skip

MIB = 1 << 20
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = Path(os.environ.get("GPUSLICE_NATIVE_BUILD", ROOT / "native" / "build"))
SIMULATED = "GPUSLICE_SIM_STATE" in os.environ
ANSWER_WITHIN_S = 120.0


@dataclass(frozen=True)
class Seen:
    """What a case saw: a sentence, perhaps a table for the page, and the figures behind both."""

    sentence: str
    table: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class Stage:
    """One case's folder on one card."""

    folder: Path
    card: Card
    nvml: Nvml

    def box(
        self,
        name: str,
        memory_mib: int,
        share: int | None = None,
        *,
        lent: bool = False,
        build: Path = BUILD,
        interactive: bool = False,
    ) -> Box:
        return Box(
            self.folder / name,
            self.card,
            memory_mib,
            share,
            lent=lent,
            build=build,
            interactive=interactive,
        )

    def units_mib(self, units: int) -> int:
        return limit_mib(self.card.memory_mib, units, card_units(self.card.memory_mib))

    def driver_mib(self, pid: int, before_bytes: int) -> tuple[int, str]:
        """What the driver says a process holds, and how it was read.

        By its pid where NVML shows it; else by how much the card's use grew, as we are alone on it.
        """
        used = self.nvml.processes(self.card.uuid).get(pid)
        if used is not None:
            return used // MIB, "by pid"
        return (self.nvml.used_bytes(self.card.uuid) - before_bytes) // MIB, "by the card's growth"


class Box:
    """A container's files in a folder, and how a process gets into it."""

    def __init__(
        self,
        folder: Path,
        card: Card,
        memory_mib: int,
        share: int | None = None,
        *,
        lent: bool = False,
        build: Path = BUILD,
        interactive: bool = False,
    ) -> None:
        self.folder = folder
        self.card = card
        for part in ("usr/lib", "etc/gpuslice", "var/lib/gpuslice"):
            (folder / part).mkdir(parents=True)
        (folder / "usr/lib/gpuslice").symlink_to(build / "lib")
        entry = LimitsEntry(card.uuid, memory_mib * MIB, share, 100 if lent else None, interactive)
        write_limits(folder / "etc/gpuslice/limits", [entry])
        if share:
            self._meet()
        prepare_region(folder / "var/lib/gpuslice/region")
        preload = str(folder / "usr/lib/gpuslice/libgpuslice.so")
        self.environment = bare_environment(card) | {"LD_PRELOAD": preload}

    def _meet(self) -> None:
        """Where the agent has the containers of a card tell each other what they use."""
        place = self.folder / "run/gpuslice" / self.card.uuid
        meeting = self.folder.parent / "claims" / self.card.uuid
        own = meeting / self.folder.name
        own.mkdir(parents=True)
        place.mkdir(parents=True)
        (place / "own").symlink_to(own)
        (place / "all").symlink_to(meeting)

    def usage(self) -> CardUsage:
        reading = read_region(self.folder / "var/lib/gpuslice/region")
        if reading is None:
            raise AssertionError("nobody has opened the region: the library was not in the program")
        return reading.cards[0]

    def compute_account(self) -> RegionCard:
        """How its share of the first card stands: what was charged, and of which busy time."""
        region = (self.folder / "var/lib/gpuslice/region").read_bytes()
        card: RegionCard = RegionHead.from_buffer_copy(region).cards[0]
        return card

    def used_mib(self) -> int:
        return self.usage().used_bytes // MIB

    def run(self, *command: str, timeout_s: float = 90) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        if done.returncode:
            told = f"{done.stdout[-800:]} {done.stderr[-800:]}"
            raise AssertionError(f"{command[0]} ended with {done.returncode}: {told}")
        return done.stdout


def bare_environment(card: Card) -> dict[str, str]:
    """Without the library, on the same card."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | {
        "CUDA_VISIBLE_DEVICES": card.uuid
    }


class Process:
    """A program that answers each line with a line; what it says otherwise is kept for the account."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self._errors: IO[bytes] = log.open("ab")
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            bufsize=0,
        )
        self._heard = b""
        self.pid = self.process.pid

    def say(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")

    def hear(self, within_s: float = ANSWER_WITHIN_S) -> str:
        """The next line. Not readline: a program that hangs must not take us with it."""
        assert self.process.stdout is not None
        until = time.monotonic() + within_s
        while b"\n" not in self._heard:
            left = until - time.monotonic()
            ready, _, _ = select.select([self.process.stdout], [], [], max(left, 0))
            part = os.read(self.process.stdout.fileno(), 65536) if ready else b""
            if not part:
                why = f"it ended with {self.process.wait()}" if ready else f"no answer in {within_s:.0f} s"
                told = self._log.read_text(errors="replace")[-1500:]
                raise AssertionError(f"process {self.pid}: {why}: {told}")
            self._heard += part
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode().strip()

    def ask(self, command: str) -> str:
        self.say(command)
        return self.hear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            with suppress(OSError):
                maps = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
                names = ("libcuda", "libgpuslice", "libnvidia", "libc.so", "libc-")
                found = sorted({line.split()[-1] for line in maps if any(name in line for name in names)})
                self._errors.write(f"loaded: {found}\n".encode())
        self.process.kill()
        self.process.communicate()
        self._errors.close()


class Worker(Process):
    """The tests' C program, on this machine's driver; in the box, or beside it without the library."""

    def __init__(self, box: Box, way: str = "dlsym", version: int = 12020, *, bare: bool = False) -> None:
        log = box.folder / f"worker-{time.monotonic_ns()}.log"
        environment = bare_environment(box.card) if bare else box.environment
        super().__init__([str(BUILD / "tests/worker"), way, str(version)], environment, log)
        greeting = self.hear(30)
        assert greeting == "ok", f'the worker says "{greeting}": it cannot load libcuda.so.1'

    def ok(self, command: str) -> list[int]:
        answer = self.ask(command).split()
        if answer[:1] != ["ok"]:
            raise AssertionError(f"{command}: {' '.join(answer)}")
        return [int(word) for word in answer[1:]]


class Program(Process):
    """`torch_program.py` or `driver_program.py`: answers JSON."""

    def __init__(self, kind: str, environment: dict[str, str], log: Path) -> None:
        python = torch_python() if kind == "torch" else sys.executable
        super().__init__([python, str(HERE / f"{kind}_program.py")], environment, log)
        self.works: list[str] = json.loads(self.hear())

    def answer(self, command: str) -> Any:
        return json.loads(self.ask(command))


def torch_python() -> str:
    """A Python that has PyTorch. Skips where there is none."""
    if SIMULATED:
        raise Skip("PyTorch's CUDA runtime wants NVIDIA's own driver, this one is simulated")
    named = os.environ.get("GPUSLICE_TORCH_PYTHON", "")
    for python in filter(None, (named, sys.executable, *_pythons())):
        look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
        with suppress(OSError):
            if subprocess.run([python, "-c", look], capture_output=True, check=False).returncode == 0:
                return python
    raise Skip("no Python with PyTorch here; GPUSLICE_TORCH_PYTHON names one")


def _pythons() -> Iterator[str]:
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        yield from (str(path) for name in ("python3", "python") if (path := Path(folder) / name).exists())


def account(folder: Path) -> str:
    """All that helps to understand a failure afterwards: limits, regions, logs, and the driver's view."""
    parts = [*_boxes(folder), *_logs(folder)]
    with suppress(NoDriverError):
        nvml = Nvml()
        for card in nvml.cards():
            parts.append(f"card {card.uuid}: {nvml.used_bytes(card.uuid) // MIB} MiB used")
            parts.append(f"  processes by NVML: {nvml.processes(card.uuid)}")
    with suppress(OSError, subprocess.TimeoutExpired):
        kernel = subprocess.run(["dmesg"], capture_output=True, text=True, check=False, timeout=5).stdout
        parts += [line for line in kernel.splitlines() if "NVRM" in line or "Xid" in line][-5:]
    return "\n".join(parts)


def _boxes(folder: Path) -> Iterator[str]:
    for limits in sorted(folder.rglob("etc/gpuslice/limits")):
        box = limits.parents[2]
        yield f"box {box.name}: {limits.read_text()!r}"
        try:
            yield f"  region: {read_region(box / 'var/lib/gpuslice/region')}"
        except (RegionError, OSError) as error:
            yield f"  region: {error}"


def _logs(folder: Path) -> Iterator[str]:
    for log in sorted(folder.rglob("*.log")):
        text = log.read_text(errors="replace")[-1500:]
        if text:
            yield f"{log.name}: {text}"


def machine_facts() -> list[tuple[str, str]]:
    """What the page says of the machine, and what one wants to know when nothing works."""
    return [
        ("machine", f"{platform.platform()}, {os.cpu_count()} cores, glibc {platform.libc_ver()[1]}"),
        ("Python", f"{platform.python_version()} at {sys.executable}"),
        ("compiler", shutil.which("cc") or shutil.which("gcc") or "none"),
        ("nvcc", shutil.which("nvcc") or "none"),
        ("nvidia-smi", shutil.which("nvidia-smi") or "none"),
        ("PID namespace", _link("/proc/self/ns/pid")),
    ]


def in_host_namespace() -> bool:
    """The kernel's first PID namespace has this number everywhere."""
    return _link("/proc/self/ns/pid") == "pid:[4026531836]"


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError as error:
        return str(error)
