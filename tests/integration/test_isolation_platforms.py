"""Other machines and other C libraries.

The file that containers are given serves glibc and musl, on x86-64 and, built for it, on aarch64; where it
cannot serve, it keeps no program from starting.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from simcluster import gpu
from tests import HANG_S
from tests.integration.isolation_rig import (
    BUILD,
    MIB,
    OUT_OF_MEMORY,
    SANITIZER,
    Container,
    Mounts,
    container,
    make_container,
    make_machine,
)

NATIVE = Path(__file__).resolve().parents[2] / "native"
PARTS = ("lib/libgpuslice.so", "tests/worker", "sim/libcuda.so.1", "sim/libnvidia-ml.so.1")
ARM_LIBRARIES = Path("/usr/aarch64-linux-gnu")


def built(build: Path, compiler: str, *parts: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler} on this machine")
    done = subprocess.run(
        ["make", f"BUILD={build}", f"CC={compiler}", "CFLAGS=-O0", *(str(build / part) for part in parts)],
        cwd=NATIVE,
        env={**os.environ, "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


IN_BOTH = {
    *(
        "__cxa_finalize",
        "__errno_location",
        "clock_gettime",
        "dl_iterate_phdr",
        "memcmp",
        "memcpy",
        "memmove",
    ),
    *(
        "memset",
        "mmap",
        "munmap",
        "sched_yield",
        "strchr",
        "strcmp",
        "strlen",
        "strncmp",
        "strncpy",
        "strrchr",
        "strstr",
        "syscall",
    ),
}
"""Functions that glibc 2.17 and every musl have under this name, on both architectures."""


def needed(library: Path) -> set[str]:
    """What it wants of others: all of it glibc 2.17 or older has, and musl too."""
    nm = ["nm", "-D", "--undefined-only", str(library)]
    lines = subprocess.run(nm, capture_output=True, text=True, check=True).stdout.splitlines()
    symbols = [line.split()[-1].partition("@")[::2] for line in lines if line.split()[0] == "U"]
    assert all(tuple(map(int, it.removeprefix("GLIBC_").split("."))) <= (2, 17) for _, it in symbols if it)
    return {name for name, _ in symbols}


@pytest.mark.skipif(bool(SANITIZER), reason="a sanitizer's runtime is needed too")
def test_what_it_needs_of_libc_every_libc_has() -> None:
    assert needed(BUILD / PARTS[0]) <= IN_BOTH


def test_what_a_newer_compiler_warns_of_does_not_stop_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GCC 15 warned of an initializer that GCC 14 took, and with it ``make demo`` ended."""
    monkeypatch.delenv("WARNINGS", raising=False)  # .ci/run makes errors of them
    newer = tmp_path / "cc"
    newer.write_text('#!/bin/sh\nexec cc "$@" -Wtraditional\n')
    newer.chmod(0o755)
    built(tmp_path / "build", str(newer), "tests/worker")


def test_it_builds_for_musl_and_needs_nothing_else(tmp_path: Path) -> None:
    built(tmp_path, "musl-gcc", PARTS[0])
    told = subprocess.run(
        ["readelf", "-d", str(tmp_path / PARTS[0])], capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"NEEDED.*\[(.*)\]", told) == ["libc.so"]


@pytest.fixture(scope="module")
def musl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The worker and the simulated driver for musl's loader; the library stays the one that glibc loads."""
    build = tmp_path_factory.mktemp("musl")
    built(build, "musl-gcc", *PARTS[1:])
    return build


STORY = f"start 0\nalloc 0 plain {90 * MIB}\nalloc 1 plain {2000 * MIB}\nalloc 2 mapped {4 * MIB}\n"


@pytest.mark.skipif(bool(SANITIZER), reason="a sanitizer's runtime is glibc's")
def test_the_same_file_holds_programs_of_musl(tmp_path: Path, musl: Path) -> None:
    with container(tmp_path / "box") as box:
        for way in ("dlsym", "proc", "proc2"):
            done = subprocess.run(
                [str(musl / "tests/worker"), way],
                env=box.environ(LD_LIBRARY_PATH=str(musl / "sim")),
                input=STORY + f"total 0\nfork\nthreads 4 200 {20 * MIB}\n",
                capture_output=True,
                text=True,
                check=True,
                timeout=HANG_S,
            )
            answers = done.stdout.splitlines()
            assert answers[:6] == ["ok", "ok", "ok", OUT_OF_MEMORY, "ok", f"ok {1024 * MIB}"], way
            assert answers[7] == "ok 800 0 0"
            assert done.stderr == ""
        assert box.card().refused == 3


@pytest.mark.skipif(bool(SANITIZER), reason="a sanitizer's runtime is glibc's")
def test_musl_does_not_read_the_preload_file(tmp_path: Path, musl: Path) -> None:
    """So programs of musl run there undisturbed, and are not held unless LD_PRELOAD names the library."""
    with container(tmp_path / "box") as box:
        mounts = Mounts(tmp_path, box, LD_LIBRARY_PATH=str(musl / "sim"))
        told = mounts.run('exec env -i "$@"', str(musl / "tests/worker"), "dlsym", say=STORY)
    assert told[:4] == ["ok", "ok", "ok", "ok"]


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("arm")
    built(build, "aarch64-linux-gnu-gcc", *PARTS)
    return build


def test_a_library_of_another_machine_keeps_no_program_from_starting(arm: Path) -> None:
    """As 32-bit programs in a container find it: the loader says so, and goes on without."""
    done = subprocess.run(
        ["/bin/sh", "-c", "exit 7"],
        env={**os.environ, "LD_PRELOAD": str(arm / PARTS[0])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "ignored" in done.stderr) == (7, True)


def test_it_holds_the_limit_on_aarch64(tmp_path: Path, arm: Path) -> None:
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None or not ARM_LIBRARIES.exists():
        pytest.skip("no emulator of aarch64 on this machine: qemu-user-static and libc6-dev-arm64-cross")
    assert needed(arm / PARTS[0]) <= IN_BOTH
    box = make_container(tmp_path / "box", make_machine(tmp_path))
    for way in ("dlsym", "dlvsym", "proc2"):
        assert emulated(box, emulator, arm, way) == ["ok", "ok", "ok", "error 2", "ok", "ok 800 0 0"]


ROOM = ("-R", "0x800000000")
"""32 GiB of addresses: of more, the emulator takes half a minute to write down what the driver reserves."""


def emulated(box: Container, emulator: str, build: Path, way: str) -> list[str]:
    link = box.root / "usr/lib/gpuslice"
    link.unlink()
    link.symlink_to(build / "lib")
    program = [str(build / "tests/worker"), way]
    variables = (f"LD_PRELOAD={link / 'libgpuslice.so'}", f"LD_LIBRARY_PATH={build / 'sim'}")
    within = [word for variable in variables for word in ("-E", variable)]
    done = subprocess.run(
        [emulator, *ROOM, "-L", str(ARM_LIBRARIES), *within, *program],
        env={**os.environ, gpu.STATE_VARIABLE: str(box.machine.state)},
        input=f"start 0\nalloc 0 plain {90 * MIB}\nalloc 1 plain {2000 * MIB}\nalloc 2 mapped {4 * MIB}\n"
        f"threads 4 200 {20 * MIB}\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG_S,
    )
    return done.stdout.splitlines()
