"""The shared file's layout in C and in Python, and what creating a machine writes into it."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from simcluster import gpu, gpu_layout
from simcluster.gpu_profiles import PROFILES

from .sim_driver_client import MIB, DriverProcess, out, require_driver

STRUCTURES = {
    "sim_state": gpu_layout.State,
    "sim_card": gpu_layout.Card,
    "sim_process": gpu_layout.Process,
    "sim_record": gpu_layout.Record,
    "sim_event": gpu_layout.Event,
    "sim_ghost": gpu_layout.Ghost,
    "sim_limit": gpu_layout.Limit,
    "sim_sample": gpu_layout.Sample,
    "sim_queue": gpu_layout.Queue,
    "sim_item": gpu_layout.Item,
}


def test_python_and_c_lay_the_file_out_alike() -> None:
    printed = subprocess.run([require_driver() / "layout"], capture_output=True, text=True, check=True).stdout
    in_c = {tuple(line.split()[:2]): int(line.split()[2]) for line in printed.splitlines()}
    in_python = {
        (name, field): ctypes.sizeof(STRUCTURES[name])
        if field == "sizeof"
        else getattr(STRUCTURES[name], field).offset
        for name, field in in_c
    }
    assert in_python == in_c


@pytest.mark.parametrize("profile", sorted(PROFILES))
def test_every_profile_is_a_card_that_cuda_sees(profile: str, tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "state", [profile])
    expected = PROFILES[profile]
    with DriverProcess(state) as process:
        process.start()
        assert process.cu("cuDeviceGetName", out(100), 100, 0).text() == expected.name
        total = process.cu("cuDeviceTotalMem_v2", out(), 0).number()
        assert total == (expected.total_mib - expected.reserved_mib) * MIB
        free, of = process.memory()
        assert of == total
        assert free == total - (expected.idle_mib + expected.context_mib) * MIB
        major = process.cu("cuDeviceGetAttribute", out(4), 75, 0).number(size=4)
        minor = process.cu("cuDeviceGetAttribute", out(4), 76, 0).number(size=4)
        assert (major, minor) == expected.capability


def test_the_same_seed_gives_the_same_uuids(tmp_path: Path) -> None:
    def uuids(name: str, seed: str) -> list[str]:
        with gpu.Machine(gpu.create(tmp_path / name, ["T4", "T4"], seed=seed)) as machine:
            return [card.uuid for card in machine.cards()]

    assert uuids("a", "node-1") == uuids("b", "node-1")
    assert len({*uuids("a", "node-1"), *uuids("b", "node-2")}) == 4


@pytest.mark.parametrize(
    ("card", "complaint"),
    [
        (gpu.CardSpec("T4", mig=("1g.5gb",)), "no MIG device"),
        (gpu.CardSpec("T4", gauges={"colour": 1}), "no gauge"),
    ],
)
def test_a_card_that_cannot_be_is_refused(card: gpu.CardSpec, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=complaint):
        gpu.create(tmp_path / "state", [card])


def test_a_file_of_another_layout_is_no_driver(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.write_bytes(bytes(ctypes.sizeof(gpu_layout.State)))
    with pytest.raises(ValueError, match="no simulated machine"):
        gpu.Machine(state)
    with DriverProcess(state) as process:
        assert process.call("cuInit", 0).result == 100
        assert process.call("nvmlInit_v2").result == 9
