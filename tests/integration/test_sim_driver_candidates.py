"""What a program may find under the names of the driver: stubs, copies that do not fit, a second path."""

from __future__ import annotations

from pathlib import Path

import pytest

from simcluster import gpu

from .sim_driver_client import BUILD, DriverProcess, out

STUB_LIBRARY, MISFIT, NOT_INITIALIZED = 34, 803, 3
NVML_UNINITIALIZED, NVML_MISFIT = 1, 18


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return gpu.create(tmp_path / "state", ["H200"], driver="570")


def first_found(state: Path, folder: str) -> DriverProcess:
    """A process whose search path has that folder of the build first."""
    return DriverProcess(state, LD_LIBRARY_PATH=f"{BUILD / folder}:{BUILD}")


@pytest.mark.parametrize(
    ("folder", "from_start", "afterwards"),
    [
        ("stubs", STUB_LIBRARY, STUB_LIBRARY),
        ("compat", MISFIT, NOT_INITIALIZED),
        ("older", MISFIT, NOT_INITIALIZED),
        ("second", 0, 0),
    ],
)
def test_libcuda_of_another_kind_answers_as_documented(
    state: Path, folder: str, from_start: int, afterwards: int
) -> None:
    with first_found(state, folder) as process:
        assert process.call("cuInit", 0).result == from_start
        assert process.call("cuInit", 0).result == from_start
        assert process.call("cuDeviceGetCount", out(4)).result == afterwards


def test_copies_that_do_not_fit_tell_their_own_version(state: Path) -> None:
    def version(folder: str) -> int:
        with first_found(state, folder) as process:
            return process.cu("cuDriverGetVersion", out(4)).number(0, 4)

    assert version("older") < version("second") < version("compat")


@pytest.mark.parametrize(
    ("folder", "from_start", "afterwards"),
    [
        ("stubs", NVML_UNINITIALIZED, NVML_UNINITIALIZED),
        ("older", NVML_MISFIT, NVML_UNINITIALIZED),
        ("second", 0, 0),
    ],
)
def test_nvml_of_another_kind_answers_as_documented(
    state: Path, folder: str, from_start: int, afterwards: int
) -> None:
    with first_found(state, folder) as process:
        assert process.call("nvmlInit_v2").result == from_start
        assert process.call("nvmlDeviceGetCount_v2", out(4)).result == afterwards
