"""All our processes at once, on a machine in trouble: a full disk, a clock that jumps, pods without end."""

from __future__ import annotations

import os
import re
import resource
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuslice.adapters.kube.resources import PODS
from simcluster.kubelet.devices import AdmissionError
from simcluster.kubelet.plugin_calls import PluginError
from tests.integration.installation import OURS, Installation, Process, installed

NAMES = ("agent", "webhook", "extender", "exporter", "console")
HOUR_S = 3600
LIVES = int(os.environ.get("GPUSLICE_CHURN", "40"))
"""20,000 for hours of life: `GPUSLICE_CHURN=20000 make test ARGS="-k pods_come_and_go"`."""
SLACK_FILES = 4  # connections that are just open
GROWTH_KIB = 8 << 10


async def start_all(there: Installation, names: Sequence[str] = NAMES) -> None:
    for name in names:
        await there.upgrade(name, OURS)


async def all_answer(there: Installation) -> None:
    for each in there.processes():
        path = "/" if each.name == "console" else "/metrics"
        status, _ = await each.ask(path)
        assert status == 200, each.name


async def test_a_disk_without_room_stops_only_what_must_be_written(tmp_path: Path) -> None:
    """No file of any process can grow, as on a full disk or a file system that has become read-only."""
    async with installed(tmp_path) as there:
        await start_all(there)
        await there.run_pod("before")
        for each in there.processes():
            resource.prlimit(each.pid, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        with pytest.raises(AdmissionError, match="files cannot be written on the node: File too large"):
            await there.run_pod("refused")
        await all_answer(there)
        with pytest.raises(PluginError, match="files cannot be written on the node: File too large"):
            await there.bench.kubelet.start_container(there.running["before"][0])
        for each in there.processes():
            resource.prlimit(each.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        await there.bench.client.delete(PODS, "refused", "default", grace_s=0)
        await there.all_holds()
        await there.run_pod("after")
        await there.all_holds()


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    found = tmp_path / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(found), str(source)], check=True)
    return found


async def test_a_clock_that_jumps_by_hours_changes_nothing(tmp_path: Path, shim: Path) -> None:
    offset = tmp_path / "offset"
    offset.write_bytes((0).to_bytes(8, "little", signed=True))
    async with installed(tmp_path, {"LD_PRELOAD": str(shim), "CLOCK_OFFSET": str(offset)}) as there:
        await start_all(there)
        await there.run_pod("before")
        for hours in (7, -7, 0):
            with offset.open("r+b") as file:
                file.write((hours * HOUR_S).to_bytes(8, "little", signed=True))
            await there.run_pod(f"after-{hours % 24}")
            await there.all_holds()
            await all_answer(there)


@pytest.mark.timeout(120 + 2 * LIVES)
async def test_nothing_grows_while_pods_come_and_go(tmp_path: Path) -> None:
    async with installed(tmp_path) as there:
        await start_all(there, ("agent", "webhook", "extender", "exporter"))

        async def lives(first: int, count: int) -> None:
            for number in range(first, first + count):
                await there.run_pod(f"p{number}")
                await there.end_pod(f"p{number}")
                if number % 10 == 0:
                    await all_answer(there)

        await lives(0, LIVES // 2)
        before = {each.name: held(each) for each in there.processes()}
        await lives(LIVES // 2, LIVES // 2)
        for each in there.processes():
            (files, threads, kib), (files_then, threads_then, kib_then) = held(each), before[each.name]
            print(f"{each.name}: {files} files, {threads} threads, {kib >> 10} MiB, +{kib - kib_then} KiB")
            assert files <= files_then + SLACK_FILES, each.name
            assert threads <= threads_then + 1, each.name
            assert kib - kib_then < GROWTH_KIB, each.name


def held(process: Process) -> tuple[int, int, int]:
    """Open files, threads and KiB of resident memory."""
    folder = Path(f"/proc/{process.pid}")
    status = folder.joinpath("status").read_text()
    threads, kib = (int(re.findall(rf"^{name}:\s+(\d+)", status, re.M)[0]) for name in ("Threads", "VmRSS"))
    return len(list(folder.joinpath("fd").iterdir())), threads, kib
