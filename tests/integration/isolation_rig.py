"""A container as libgpuslice sees one: a folder with limits, region, library, and workers that obey."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import pytest

from gpuslice.adapters.region.limits import LimitsEntry, write_limits
from gpuslice.adapters.region.reader import CardUsage, prepare_region, read_region
from simcluster import gpu
from tests import HANG_S

MIB: Final = 1 << 20
BUILD: Final = Path(
    os.environ.get("GPUSLICE_NATIVE_BUILD", Path(__file__).resolve().parents[2] / "native" / "build")
)
SIM: Final = BUILD / "sim"
SANITIZER: Final = os.environ.get("GPUSLICE_TEST_SANITIZER", "")
"""Path of a sanitizer's runtime and a colon: it wants to be loaded first."""
OUT_OF_MEMORY: Final = "error 2"
V100: Final = "V100-SXM2-16GB"


def list_of_hooks() -> str:
    """`HOOK(library, symbol, "name", since, stream, (parameters))` of each, one a line."""
    text = "#define BORROW(...)\n#define HOOK(...) HOOK(__VA_ARGS__)\n" + '#include "driver/hooks.def"\n'
    sources = Path(__file__).resolve().parents[2] / "native" / "src"
    command = ["gcc", "-E", "-P", f"-I{sources}", "-xc", "-"]
    listed = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
    return listed.replace("HOOK(", "\nHOOK(")


class Worker:
    """One process of the container."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        try:
            self.greeting = self._line()
        except BaseException:
            self._close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def say(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the worker ended with {self._process.wait()}")
        return line.strip()

    def ask(self, command: str) -> str:
        self.say(command)
        return self._line()

    def heard(self) -> str:
        """The answer to an earlier `say`."""
        return self._line()

    def said_nothing(self) -> bool:
        """Waits for the answer to an earlier `say`: whether the process ended instead."""
        assert self._process.stdout is not None
        return not self._process.stdout.readline()

    def ok(self, command: str) -> list[int]:
        answer = self.ask(command).split()
        assert answer[0] == "ok", f"{command}: {' '.join(answer)}"
        return [int(word) for word in answer[1:]]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._close()

    def leave(self) -> int:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        status = self._process.wait(30)
        self._close()
        return status

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                with suppress(BrokenPipeError):
                    stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self.kill()
        self._close()


def descriptor_of(pid: int, number: int) -> int:
    """A worker's exported descriptor, as it hands them to other workers."""
    with socket.socket(socket.AF_UNIX) as counter:
        counter.connect(f"\0gpuslice-worker-{pid}")
        counter.sendall(number.to_bytes(4, sys.byteorder))
        _, (descriptor,), _, _ = socket.recv_fds(counter, 4, 1)
    return descriptor


@dataclass
class Machine:
    """The simulated cards, and what the driver says of them."""

    state: Path
    seed: str

    def uuid(self, card: int = 0) -> str:
        return gpu.make_uuid("GPU", self.seed, card)

    def used(self, card: int = 0) -> int:
        """Bytes that live processes hold of the card, by the driver's accounts."""
        with gpu.Machine(self.state) as cards:
            return cards.cards()[card].used_bytes


@dataclass
class Container:
    """One container's files. Workers started here share its limits."""

    root: Path
    machine: Machine
    limits: list[LimitsEntry]
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for folder in ("usr/lib", "etc/gpuslice", "var/lib/gpuslice"):
            (self.root / folder).mkdir(parents=True)
        (self.root / "usr/lib/gpuslice").symlink_to(BUILD / "lib")
        if self.limits:
            write_limits(self.limits_path, self.limits)
        prepare_region(self.region_path)
        for limit in self.limits:
            self._meet(limit.uuid)

    def _meet(self, uuid: str) -> None:
        """Where the containers of a card tell each other what they want."""
        place, meeting = self.root / "run/gpuslice" / uuid, self.machine.state.parent / "claims" / uuid
        own = meeting / self.root.name
        own.mkdir(parents=True, exist_ok=True)
        place.mkdir(parents=True)
        (place / "own").symlink_to(own)
        (place / "all").symlink_to(meeting)

    @property
    def limits_path(self) -> Path:
        return self.root / "etc/gpuslice/limits"

    @property
    def region_path(self) -> Path:
        return self.root / "var/lib/gpuslice/region"

    def environ(self, **more: str) -> dict[str, str]:
        inherited = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
        return {
            **inherited,
            gpu.STATE_VARIABLE: str(self.machine.state),
            "GPUSLICE_SIM_STALE": "abort",
            "LD_LIBRARY_PATH": str(SIM),
            "LD_PRELOAD": f"{SANITIZER}{self.root / 'usr/lib/gpuslice/libgpuslice.so'}",
            "ASAN_OPTIONS": "detect_leaks=0",
            "GPUSLICE_TEST_PLUG": str(BUILD / "tests/plug.so"),
            **self.environment,
            **more,
        }

    def worker(self, way: str = "dlsym", version: int = 12020, **environment: str) -> Worker:
        linked = way in ("linked", "default")
        program = BUILD / "tests" / ("linked_worker" if linked else "worker")
        return Worker([str(program), way, str(version)], self.environ(**environment))

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            env=self.environ(**environment),
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )

    def card(self, index: int = 0) -> CardUsage:
        reading = read_region(self.region_path)
        assert reading is not None
        return next(card for card in reading.cards if card.uuid == self.limits[index].uuid)


@contextmanager
def container(
    folder: Path,
    *,
    memory_mib: int | None = 1024,
    share: int | None = None,
    cap: int | None = None,
    interactive: bool = False,
    cards: int = 1,
    profile: str = V100,
    cuda: str = "12.2",
    kernel_us: float = 0,
    pool_chunk_mib: int = 32,
    **environment: str,
) -> Iterator[Container]:
    """A container limited on every card of a fresh machine."""
    machine = make_machine(
        folder, cards=cards, profile=profile, cuda=cuda, kernel_us=kernel_us, pool_chunk_mib=pool_chunk_mib
    )
    yield make_container(
        folder / "container",
        machine,
        memory_mib=memory_mib,
        share=share,
        cap=cap,
        interactive=interactive,
        cards=cards,
        **environment,
    )


def make_machine(
    folder: Path,
    *,
    cards: int = 1,
    profile: str = V100,
    cuda: str = "12.2",
    kernel_us: float = 0,
    pool_chunk_mib: int = 32,
) -> Machine:
    gpu.create(
        folder / "cards",
        [profile] * cards,
        cuda_version=cuda,
        seed=str(folder),
        kernel_us=kernel_us,
        pool_chunk_mib=pool_chunk_mib,
    )
    return Machine(folder / "cards", str(folder))


def make_container(
    root: Path,
    machine: Machine,
    *,
    memory_mib: int | None = 1024,
    share: int | None = None,
    cap: int | None = None,
    interactive: bool = False,
    cards: int = 1,
    **environment: str,
) -> Container:
    memory = None if memory_mib is None else memory_mib * MIB
    limits = [LimitsEntry(machine.uuid(card), memory, share, cap, interactive) for card in range(cards)]
    return Container(root, machine, limits, dict(environment))


MOUNTED = """
cp -a /etc "$1/etc" && echo "$2" > "$1/etc/ld.so.preload" && mount --bind "$1/etc" /etc || exit 77
mount --bind /etc/ld.so.preload /etc/ld.so.preload && mount -o remount,bind,ro /etc/ld.so.preload || exit 77
folder=$1 && shift 2
"""
"""The shell's part of what a container runtime does: the preload file as a read-only mount of its own."""


class Mounts:
    """A container with the mounts that a runtime makes, where this machine lets us have them."""

    def __init__(self, folder: Path, box: Container, **environment: str) -> None:
        self._folder = folder
        self._library = str(box.root / "usr/lib/gpuslice/libgpuslice.so")
        needed = ("GPUSLICE_SIM_STATE", "LD_LIBRARY_PATH")  # to find the simulated driver at all
        self.variables = [f"{name}={box.environ(**environment)[name]}" for name in needed]

    def command(self, script: str, *arguments: str) -> list[str]:
        start = [
            "unshare",
            "--mount",
            "/bin/sh",
            "-c",
            MOUNTED + script,
            "sh",
            str(self._folder),
            self._library,
        ]
        return [*start, *self.variables, *arguments]

    def run(self, script: str, *arguments: str, say: str) -> list[str]:
        """The lines it prints."""
        done = subprocess.run(
            self.command(script, *arguments), input=say, capture_output=True, text=True, check=False
        )
        shutil.rmtree(self._folder / "etc", ignore_errors=True)
        if done.returncode in (1, 77, 126, 127) and not done.stdout:
            pytest.skip(f"no mounts of our own on this machine: {done.stderr.strip()}")
        return done.stdout.splitlines()
