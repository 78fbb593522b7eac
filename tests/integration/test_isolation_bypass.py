"""What a tenant who means harm can try: it does not help, or the driver's own figures give it away.

docs/user/security.md tells the same in words.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpuslice.adapters.region.reader import prepare_region
from gpuslice.sim import gpu
from tests.integration.exporter_rig import Page, gpu_node
from tests.integration.isolation_rig import (
    BUILD,
    MIB,
    OUT_OF_MEMORY,
    SIM,
    container,
    make_container,
    make_machine,
)
from tests.integration.sim_node import make_pod, state_of

IMAGE = "registry.cn-shanghai.aliyuncs.com/tensorflow-samples/cuda-malloc:3G"
USED = "gpuslice_container_memory_used_bytes"
LIMIT = "gpuslice_container_memory_limit_bytes"


def test_no_variable_of_the_environment_changes_a_limit(tmp_path: Path) -> None:
    with container(tmp_path) as box:
        tried = {
            "CUDA_DISABLE_CONTROL": "true",
            "CUDA_DEVICE_MEMORY_LIMIT": "16g",
            "CUDA_DEVICE_MEMORY_LIMIT_0": "16g",
            "CGPU_DISABLE": "true",
            "GPUSLICE_LIMITS": "/dev/null",
            "GPUSLICE_DISABLE": "1",
            "ALIYUN_COM_GPU_MEM_CONTAINER": "15",
        }
        with box.worker("dlsym", 12020, **tried) as worker:
            worker.ok("start 0")
            assert worker.ok("total 0") == [1024 * MIB]
            assert worker.ask(f"alloc 0 plain {1024 * MIB}") == OUT_OF_MEMORY


def test_a_program_without_the_library_is_seen_in_the_drivers_figures(tmp_path: Path) -> None:
    """Linked statically, or with a libc of its own: not held. What the driver says of it and the region does
    not know is what a watchdog reports."""
    with container(tmp_path) as box, box.worker() as honest, box.worker(LD_PRELOAD="") as static:
        honest.ok("start 0")
        static.ok("start 0")
        static.ok(f"alloc 0 plain {3000 * MIB}")
        counted = {process.pid: process.used_bytes for process in box.card().processes}
        with gpu.Machine(box.machine.state) as cards:
            told = {pid: cards.used_bytes(pid=pid) for pid in (honest.pid, static.pid)}
        assert told[honest.pid] == counted[honest.pid]
        assert static.pid not in counted
        assert told[static.pid] > 3000 * MIB


def used_of(page: Page, pod: str) -> float:
    return page.value(USED, pod=pod) or 0


async def test_who_holds_more_than_the_limit_without_the_library_stands_on_the_exporters_page(
    tmp_path: Path,
) -> None:
    """What the alert GpuContainerPastMemoryLimit looks at. Its neighbour is told apart."""
    async with gpu_node(tmp_path) as host, host.exporter() as exporter:
        for name, command in (
            ("honest", "exec cuda_malloc 1G"),
            ("hostile", "LD_PRELOAD= exec cuda_malloc 6G"),
        ):
            pod = make_pod(name, 4, command=command)
            pod["spec"]["containers"][0]["image"] = IMAGE
            await host.node.create(pod)
            await host.node.wait_pod(name, lambda pod: state_of(pod) == "running")
        page = await exporter.page_when(
            lambda page: used_of(page, "hostile") > 6 << 30 and used_of(page, "honest") > 1 << 30
        )
        assert page.one(USED, pod="hostile") > page.one(LIMIT, pod="hostile")
        assert page.one(USED, pod="honest") < page.one(LIMIT, pod="honest")


def test_a_region_that_a_tenant_empties_raises_no_limit_of_a_running_process(tmp_path: Path) -> None:
    """Zeros over the counters: what is displayed is wrong, and the driver's figures show it."""
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 plain {800 * MIB}")
        with box.region_path.open("r+b") as region:
            region.write(bytes(box.region_path.stat().st_size))
        assert worker.ask(f"alloc 1 plain {1024 * MIB + 1}") == OUT_OF_MEMORY
        assert box.machine.used() > 800 * MIB


def test_a_fresh_region_under_a_running_process_does_not_disturb_it(tmp_path: Path) -> None:
    """As when a container restarts: the old one keeps its own, which is unlinked."""
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        prepare_region(box.region_path)
        worker.ok(f"alloc 0 plain {300 * MIB}")
        assert worker.ask(f"alloc 1 plain {1000 * MIB}") == OUT_OF_MEMORY


def test_a_region_that_cannot_be_mapped_grants_nothing(tmp_path: Path) -> None:
    with container(tmp_path) as box:
        box.region_path.unlink()
        box.region_path.mkdir()
        with box.worker() as worker:
            assert worker.ask("start 0") == OUT_OF_MEMORY
        assert box.machine.used() == 0


IN_A_CONTAINERS_MOUNTS = """
cp -a /etc "$1/etc" && echo "$2" > "$1/etc/ld.so.preload" && mount --bind "$1/etc" /etc || exit 77
shift 2
exec env -i "$@"
"""


def test_an_empty_environment_changes_nothing(tmp_path: Path) -> None:
    """As in a container: the library comes by /etc/ld.so.preload, which no variable and no shell can undo."""
    with container(tmp_path / "box") as box:
        library = str(box.root / "usr/lib/gpuslice/libgpuslice.so")
        needed = ("GPUSLICE_SIM_STATE", "LD_LIBRARY_PATH")  # to find the simulated driver at all
        variables = [f"{name}={box.environ()[name]}" for name in needed]
        script = ["unshare", "--mount", "/bin/sh", "-c", IN_A_CONTAINERS_MOUNTS, "sh", str(tmp_path), library]
        done = subprocess.run(
            [*script, *variables, str(BUILD / "tests/worker"), "dlsym"],
            input=f"start 0\nalloc 0 plain {64 * MIB}\nalloc 1 plain {1024 * MIB}\ntotal 0\n",
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode in (1, 77, 126, 127) and not done.stdout:
            pytest.skip(f"no mounts of our own on this machine: {done.stderr.strip()}")
    assert done.stdout.splitlines() == ["ok", "ok", "ok", OUT_OF_MEMORY, f"ok {1024 * MIB}"]


def test_another_copy_of_the_library_does_not_bring_other_limits(tmp_path: Path) -> None:
    """One from a folder of the tenant's, with generous limits beside it, behind the container's own."""
    machine = make_machine(tmp_path)
    real = make_container(tmp_path / "real", machine, memory_mib=1024)
    own = make_container(tmp_path / "own", machine, memory_mib=8192)
    libraries = os.pathsep.join((real.environ()["LD_PRELOAD"], own.environ()["LD_PRELOAD"]))
    with real.worker(LD_PRELOAD=libraries) as worker:
        worker.ok("start 0")
        assert worker.ok("total 0") == [1024 * MIB]


def test_nvidia_smi_shows_no_neighbour(tmp_path: Path) -> None:
    machine = make_machine(tmp_path)
    one = make_container(tmp_path / "one", machine, memory_mib=1024)
    two = make_container(tmp_path / "two", machine, memory_mib=2048)
    with two.worker() as neighbour:
        neighbour.ok("start 0")
        neighbour.ok(f"alloc 0 plain {1500 * MIB}")
        shown = one.run(str(SIM / "nvidia-smi")).stdout
    assert "0MiB /  1024MiB" in shown
    assert str(neighbour.pid) not in shown
