"""What the library exports and needs, and that every function of the driver has been decided about."""

from __future__ import annotations

import platform
import re
import subprocess
import sysconfig
from pathlib import Path

import pynvml
import pytest

from tests.integration.isolation_rig import BUILD, list_of_hooks

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = BUILD / "lib/libgpuslice.so"
OLDEST_GLIBC = {"x86_64": (2, 2, 5), "aarch64": (2, 17)}
"""The first of each architecture: a loader that lacks a version starts no program with one that wants it."""
OWN_ENTRIES = {"dlsym", "dlvsym", "dlopen", "__gmon_start__", "gpuslice_locks_held"}
VARIANT = re.compile(r"(_v\d+)?(_ptsz|_ptds)?$")
HOOK = re.compile(r"^HOOK\((CUDA|NVML), (\w+),", re.MULTILINE)
DECLARED = re.compile(r"\bCUDAAPI\s+(cu[A-Z]\w*)\s*\(")
BESIDE = ("cudaGL.h", "cudaEGL.h", "cudaVDPAU.h")


def hooks() -> dict[str, str]:
    return {symbol: library for library, symbol in HOOK.findall(list_of_hooks())}


def symbols(*options: str) -> list[str]:
    done = subprocess.run(["nm", "-D", *options, str(LIBRARY)], capture_output=True, text=True, check=True)
    return [line.split()[-1] for line in done.stdout.splitlines()]


def decisions(name: str = "driver_api.txt") -> dict[str, str]:
    lines = (ROOT / "native/tests" / name).read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines if not line.startswith("#"))


def headers() -> list[Path]:
    packages = Path(sysconfig.get_path("purelib"))
    found = [*packages.glob("nvidia/*/include/cuda.h"), Path("/usr/local/cuda/include/cuda.h")]
    return [path for path in found if path.exists()]


def test_exactly_the_hooks_are_exported() -> None:
    assert set(symbols("--defined-only")) == set(hooks()) | OWN_ENTRIES


def test_nothing_newer_than_the_first_glibc_is_needed() -> None:
    versions = {name.split("@")[1] for name in symbols("--undefined-only") if "@" in name}
    numbers = {tuple(map(int, name.removeprefix("GLIBC_").split("."))) for name in versions}
    assert max(numbers) <= OLDEST_GLIBC[platform.machine()]


def test_only_libc_is_needed() -> None:
    done = subprocess.run(["readelf", "-d", str(LIBRARY)], capture_output=True, text=True, check=True)
    needed = re.findall(r"NEEDED.*\[(.*)\]", done.stdout)
    assert [name for name in needed if not re.match(r"(libc|ld-linux.*|libc\.musl.*)\.so", name)] == []
    assert "TEXTREL" not in done.stdout
    assert "EXECSTACK" not in done.stdout


@pytest.mark.parametrize("header", headers() or [None])
def test_every_function_of_the_newest_header_has_a_decision(header: Path | None) -> None:
    if header is None:
        pytest.skip("no cuda.h on this machine: `pip install nvidia-cuda-runtime` brings one")
    read = [path.read_text() for path in (header, *map(header.with_name, BESIDE)) if path.exists()]
    text = re.sub(r"/\*.*?\*/", "", "".join(read), flags=re.DOTALL)
    declared = {VARIANT.sub("", name) for name in DECLARED.findall(text)}
    assert len(declared) > 300
    assert sorted(declared - set(decisions())) == [], "decide what it is and add it to driver_api.txt"


def test_every_function_of_the_newest_nvml_has_a_decision() -> None:
    asked = re.findall(r'_nvmlGetFunctionPointer\("(nvml\w+)"\)', Path(pynvml.__file__).read_text())
    known = {VARIANT.sub("", name) for name in asked}
    assert len(known) > 300
    assert sorted(known - set(decisions("nvml_api.txt"))) == [], (
        "decide what it is and add it to nvml_api.txt"
    )


@pytest.mark.parametrize(("library", "name"), [("CUDA", "driver_api.txt"), ("NVML", "nvml_api.txt")])
def test_decisions_and_hooks_agree(library: str, name: str) -> None:
    hooked = {VARIANT.sub("", symbol) for symbol, of in hooks().items() if of == library}
    assert {function for function, decision in decisions(name).items() if decision == "hooked"} == hooked


TYPE = re.compile(r"PFN_(cu\w+?)_v(\d+)(_ptsz|_ptds)?\b")
LINE = re.compile(r'^HOOK\(CUDA, (\w+), "(\w+)", (\d+), (EITHER|LEGACY|OWN),', re.MULTILINE)


def variants(header: Path | None) -> set[tuple[str, str, str]]:
    """Name, version and stream's mark of each, as cudaTypedefs.h has them: what cuGetProcAddress goes by."""
    typedefs = header and header.with_name("cudaTypedefs.h")
    if typedefs is None or not typedefs.exists():
        pytest.skip("no cudaTypedefs.h on this machine: `pip install nvidia-cuda-runtime` brings one")
    return {
        found for path in typedefs.parent.glob("cuda*Typedefs.h") for found in TYPE.findall(path.read_text())
    }


def marks(stream: str) -> tuple[str, ...]:
    return ("_ptsz", "_ptds") if stream == "OWN" else ("",)


@pytest.mark.parametrize("header", headers() or [None])
def test_hooks_have_the_versions_that_the_header_gives_them(header: Path | None) -> None:
    known = variants(header)
    newest = max(int(version) for _, version, _ in known)
    wrong = [
        symbol
        for symbol, name, since, stream in LINE.findall(list_of_hooks())
        if int(since) <= newest and not any((name, since, mark) in known for mark in marks(stream))
    ]
    assert wrong == []


@pytest.mark.parametrize("header", headers() or [None])
def test_every_variant_of_a_hooked_function_is_hooked(header: Path | None) -> None:
    """A later form of the same name takes memory too."""
    hooks = LINE.findall(list_of_hooks())
    names = {name for _, name, _, _ in hooks}
    ours = {(name, since, mark) for _, name, since, stream in hooks for mark in marks(stream)}
    assert sorted(known for known in variants(header) if known[0] in names and known not in ours) == []
