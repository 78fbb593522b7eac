"""A known load, and what the exporter makes of it: the two agree, and it is noticed when they part."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from simcluster import gpu
from tests.integration.exporter_rig import PROGRAM, have_native, running_exporter
from tests.integration.sim_node import NATIVE

pytestmark = pytest.mark.skipif(not have_native(), reason="native libraries are not built: run `make native`")

MIB = 1 << 20


async def load(state: Path, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        PROGRAM, "load", *arguments, env=gpu.environment(state, NATIVE), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_what_was_generated_is_what_the_exporter_shows(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", ["H100-80GB-HBM3"])
    async with running_exporter(state, kubernetes="false") as exporter:
        order = ["-t", "1002", "--level", "40", "-d", "1", "--hold", "1GiB", "-o", "json"]
        wide = [
            "--tolerance",
            "30",
        ]  # a busy machine keeps a level badly, and a sample is one second of three
        code, text = await load(state, *order, *wide, "--validate", exporter.url)
        report: dict[str, Any] = json.loads(text)
        assert code == 0, report["verdicts"]
        shown = {verdict["series"]: verdict for verdict in report["verdicts"]}
        assert set(shown) == {
            "DCGM_FI_PROF_SM_ACTIVE"
            if "DCGM_FI_PROF_SM_ACTIVE" in shown
            else "gpuslice_gpu_utilization_ratio",
            "gpuslice_gpu_utilization_ratio",
            "gpuslice_gpu_memory_used_bytes",
        }
        assert shown["gpuslice_gpu_memory_used_bytes"]["measured"] > 1024 * MIB
        assert report["agrees"] is True


async def test_it_fails_when_the_exporter_says_something_else(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", ["H100-80GB-HBM3"])
    with gpu.Machine(state) as machine:
        machine.set_gauge(0, gpu_percent=5)
    async with running_exporter(state, kubernetes="false") as exporter:
        code, text = await load(state, "-t", "1001", "--level", "80", "-d", "1", "--validate", exporter.url)
        assert code == 1
        assert "PARTS" in text


async def test_the_seeds_command_line_prints_the_seeds_lines(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", ["T4"])
    code, text = await load(state, "--no-dcgm-validation", "-t 1004", "-d 1")
    assert code == 0
    lines = text.splitlines()
    assert lines[:8] == [
        "Skipping CreateDcgmGroups() since DCGM validation is disabled",
        "CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: 1024",
        "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 40",
        "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: 65536",
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 7",
        "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 5",
        "CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: 256",
        "CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: 5001000",
    ]
    assert lines[8].startswith("Max Memory bandwidth: 320064000000 bytes (320.06 GiB)")
    assert lines[-1].startswith("TensorEngineActive: generated ???, dcgm 0.000")


async def test_growing_ends_where_memory_ends(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", ["T4"])
    code, text = await load(state, "--grow", "4GiB", "-d", "0", "-o", "json")
    report = json.loads(text)
    assert code == 0
    assert report["held_bytes"] == 3 * 4096 * MIB
    assert report["refused_at_bytes"] == 4 * 4096 * MIB
    assert "CUDA_ERROR_OUT_OF_MEMORY" in report["refusal"]


@pytest.mark.parametrize("field", ["1010", "1011"])
async def test_bytes_that_were_moved_are_the_bytes_that_are_shown(tmp_path: Path, field: str) -> None:
    state = gpu.create(tmp_path / "machine", ["H100-80GB-HBM3", "H100-80GB-HBM3"])
    async with running_exporter(state, kubernetes="false") as exporter:
        await exporter.page_when(
            lambda page: "gpuslice_gpu_pcie_bytes_total" in page.names()
        )  # of two samples
        order = ["-t", field, "-d", "0.5", "--level", "20", "-o", "json"]
        code, text = await load(state, *order, "--validate", exporter.url)
        report = json.loads(text)
        assert code == 0, report["verdicts"]
        (counted,) = [each for each in report["verdicts"] if "_bytes_total" in each["series"]]
        assert counted["measured"] == pytest.approx(counted["generated"], rel=0.01)
        assert report["intervals"][0]["bytes_per_s"] > 0


async def test_copies_between_cards_need_two_that_reach_each_other(tmp_path: Path) -> None:
    alone = gpu.create(tmp_path / "alone", ["H100-80GB-HBM3"])
    code, _ = await load(alone, "-t", "1011", "-d", "0.1")
    assert code == 1
    both = gpu.create(tmp_path / "both", ["H100-80GB-HBM3", "H100-80GB-HBM3"])
    code, text = await load(both, "-t", "1012", "-d", "0.1", "-i", "1,0")
    assert code == 0
    assert "NvLinkRxBytes: generated" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_load_that_is_stopped_says_what_it_did_and_lets_go(tmp_path: Path, number: int) -> None:
    state = gpu.create(tmp_path / "machine", ["T4"])
    process = await asyncio.create_subprocess_exec(
        PROGRAM, "load", "-t", "1001", "-d", "60", "--hold", "1GiB", "-o", "json",
        env=gpu.environment(state, NATIVE), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    with gpu.Machine(state) as machine:
        while machine.used_bytes(0) < 1024 * MIB:  # noqa: ASYNC110 — in another process
            await asyncio.sleep(0.05)
        process.send_signal(number)
        output, errors = await process.communicate()
        assert (process.returncode, errors) == (130, b"")
        report = json.loads(output)
        assert (report["stopped"], report["held_bytes"]) == (True, 1024 * MIB)
        assert machine.used_bytes(0) == 0
