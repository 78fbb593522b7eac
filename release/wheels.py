"""Wheels that hold libgpuslice and man pages, and folders with a wheel and what it needs."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path

from release.man import pages

ROOT = Path(__file__).resolve().parent.parent
INSIDE = "gpuslice/lib/libgpuslice.so"
TAGS = "manylinux_2_17_{0}.manylinux2014_{0}.musllinux_1_1_{0}"
"""One file loads with any glibc and with musl: it needs nothing younger than glibc 2.2.5, on Arm 2.17."""
PYTHONS = ("3.11", "3.12", "3.13")


def pure_wheel(out: Path, epoch: int) -> Path:
    """The wheel of the package alone, with the man pages."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (found,) = out.glob("gpuslice-*-py3-none-any.whl")
    files, info = _content(found)
    data = info.replace(".dist-info", ".data")
    files |= {f"{data}/data/share/man/man1/{name}": page.encode() for name, page in pages(epoch).items()}
    return _written(found, files, info, epoch)


def compiler(architecture: str) -> str | None:
    """A C compiler for it on this machine: the usual one or GNU's cross compiler; None without."""
    if architecture == os.uname().machine:
        return "cc"
    return shutil.which(f"{architecture}-linux-gnu-gcc")


def built(architecture: str, name: str = "libgpuslice.so") -> Path:
    """The library, or the hook beside it, for an architecture, built in a folder of its own."""
    found = compiler(architecture)
    assert found is not None
    build = ROOT / "native" / "build" / f"release-{architecture}"
    target = str(build / "lib" / name)
    command = [
        "make",
        "-C",
        str(ROOT / "native"),
        f"BUILD={build}",
        f"CC={found}",
        "CFLAGS=-O2",
        "LDFLAGS=-s",
        target,
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return Path(target)


def platform_wheel(pure: Path, built: Path, architecture: str, epoch: int) -> Path:
    """The same wheel with the library inside, for one architecture. It runs with every Python 3."""
    tags = TAGS.format(architecture)
    made = pure.with_name(pure.name.replace("-any.whl", f"-{tags}.whl"))
    files, info = _content(pure)
    told = files[f"{info}/WHEEL"].decode().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    each = "".join(f"Tag: py3-none-{tag}\n" for tag in tags.split("."))
    files[f"{info}/WHEEL"] = re.sub(r"Tag: .*\n", each, told).encode()
    files[INSIDE] = built.read_bytes()
    return _written(made, files, info, epoch)


def _content(wheel: Path) -> tuple[dict[str, bytes], str]:
    """The files of a wheel without their record, and the folder of its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (info,) = {name.partition("/")[0] for name in files if ".dist-info/" in name}
    del files[f"{info}/RECORD"]
    return files, info


def _written(wheel: Path, files: dict[str, bytes], info: str, epoch: int) -> Path:
    record = "".join(f"{name},sha256={_digest(content)},{len(content)}\n" for name, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name, time.gmtime(max(epoch, 315532800))[:6])  # zip begins in 1980
            entry.external_attr = (0o755 if name == INSIDE else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return wheel


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def constraints(out: Path) -> Path:
    """Every package of the lock at its version, as pip's constraints."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pinned = [
        line.rstrip(" \\") for line in lines if "==" in line and not line.lstrip().startswith(("#", "--"))
    ]
    file = out / "constraints.txt"
    file.write_text("\n".join(pinned) + "\n")
    return file


def merged(folder: Path, sites: Iterable[Path]) -> Path:
    """`folder` with the files of all `sites`: compiled modules say in their names where they run.

    pip cannot do this in one folder: it replaces what it finds there. FileExistsError where two sites have
    different machine code by one name, of which only one would be kept.
    """
    for site in sites:
        for path in sorted(site.rglob("*.so")):
            there = folder / path.relative_to(site)
            if there.exists() and there.read_bytes() != path.read_bytes():
                raise FileExistsError(
                    f"{path.relative_to(site)} is another one for another Python or machine"
                )
        shutil.copytree(site, folder, dirs_exist_ok=True)
    return folder


def installed(folder: Path, wheel: Path, extras: str, python: str, architecture: str) -> Path:
    """`folder` with the wheel and what it needs, for a Python and an architecture that need not be these."""
    held = constraints(folder.parent)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
    pip += ["--target", str(folder), "--upgrade", "--only-binary=:all:", "-c", str(held)]
    pip += ["--python-version", python, "--implementation", "cp"]
    for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014"):
        pip += ["--platform", f"{tag}_{architecture}"]
    subprocess.run([*pip, f"gpuslice{extras} @ {wheel.resolve().as_uri()}"], check=True)
    for what in (
        "bin",
        "share",
        "*.dist-info/direct_url.json",
        "*.dist-info/REQUESTED",
        "*.dist-info/INSTALLER",
    ):
        for path in folder.glob(what):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder
