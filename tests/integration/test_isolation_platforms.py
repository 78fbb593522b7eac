"""The same library on aarch64 and with musl: built where a compiler is, run where an emulator is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpuslice.sim import gpu
from tests.integration.isolation_rig import MIB, Container, make_container, make_machine

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


def test_it_builds_for_musl_and_needs_nothing_else(tmp_path: Path) -> None:
    built(tmp_path, "musl-gcc", PARTS[0])
    told = subprocess.run(
        ["readelf", "-d", str(tmp_path / PARTS[0])], capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"NEEDED.*\[(.*)\]", told) == ["libc.so"]


def test_it_holds_the_limit_on_aarch64(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None or not ARM_LIBRARIES.exists():
        pytest.skip("no emulator of aarch64 on this machine: qemu-user-static and libc6-dev-arm64-cross")
    build = tmp_path / "build"
    built(build, "aarch64-linux-gnu-gcc", *PARTS)
    box = make_container(tmp_path / "box", make_machine(tmp_path))
    for way in ("dlsym", "dlvsym", "proc2"):
        assert emulated(box, emulator, build, way) == ["ok", "ok", "ok", "error 2", "ok", "ok 800 0 0"]


def emulated(box: Container, emulator: str, build: Path, way: str) -> list[str]:
    link = box.root / "usr/lib/gpuslice"
    link.unlink()
    link.symlink_to(build / "lib")
    program = [str(build / "tests/worker"), way]
    variables = (f"LD_PRELOAD={link / 'libgpuslice.so'}", f"LD_LIBRARY_PATH={build / 'sim'}")
    within = [word for variable in variables for word in ("-E", variable)]
    done = subprocess.run(
        [emulator, "-L", str(ARM_LIBRARIES), *within, *program],
        env={**os.environ, gpu.STATE_VARIABLE: str(box.machine.state)},
        input=f"start 0\nalloc 0 plain {90 * MIB}\nalloc 1 plain {2000 * MIB}\nalloc 2 mapped {4 * MIB}\n"
        f"threads 4 200 {20 * MIB}\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.splitlines()
