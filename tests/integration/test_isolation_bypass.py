"""What a tenant who means harm can try: it does not help, or the driver's own figures give it away.

docs/user/security.md tells the same in words.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.region.reader import prepare_region
from simcluster import gpu
from tests.integration.exporter_rig import Page, gpu_node
from tests.integration.isolation_rig import (
    BUILD,
    MIB,
    OUT_OF_MEMORY,
    SANITIZER,
    SIM,
    Container,
    Mounts,
    container,
    make_container,
    make_machine,
)
from tests.integration.sim_node import make_pod, state_of

IMAGE = "registry.cn-shanghai.aliyuncs.com/tensorflow-samples/cuda-malloc:3G"
USED = "gpuslice_container_memory_used_bytes"
LIMIT = "gpuslice_container_memory_limit_bytes"
ALLOCATED = "gpuslice_container_memory_allocated_bytes"
UTILIZATION = "gpuslice_container_sm_utilization_ratio"
SHARE = "gpuslice_container_compute_share_ratio"


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


HOSTILE = BUILD / "tests/hostile"
STATIC = Path(f"{HOSTILE}_static")
PAST = {
    "preload taken out": f"LD_PRELOAD= exec {HOSTILE} plain",
    **({"static": f"exec {STATIC} plain"} if STATIC.exists() else {}),  # not every machine has a static libc
    "refused to the loader": f"LD_AUDIT={BUILD}/tests/refusing.so exec {HOSTILE} plain",
    "own lookup": f"exec {HOSTILE} lookup",
    "own namespace": f"exec {HOSTILE} namespace",
    "code written over": f"exec {HOSTILE} patch",
    "private table": f"exec {HOSTILE} table",
}
"""By shell command, before the bytes. native/tests/hostile.c tells how each of them goes past the library."""


@contextmanager
def hostile(box: Container, command: str, amount: int) -> Iterator[tuple[int, str]]:
    """Its pid and what it says. It holds what it took meanwhile."""
    process = subprocess.Popen(
        ["/bin/sh", "-c", f"{command} {amount}"],
        env=box.environ(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().strip()
    finally:
        process.communicate()


def driver_bytes(box: Container, pid: int) -> int:
    """What the driver says the process holds, as the exporter reads it from outside."""
    with gpu.Machine(box.machine.state) as cards:
        return cards.used_bytes(pid=pid)


@pytest.mark.parametrize("way", PAST)
def test_what_is_taken_past_the_library_stands_in_the_drivers_figures(tmp_path: Path, way: str) -> None:
    """Not held; and a neighbour in the same container is told apart."""
    if SANITIZER and way in ("own namespace", "refused to the loader"):
        pytest.skip("a sanitizer's runtime is not for two namespaces, and wants to be loaded")
    with container(tmp_path) as box, box.worker() as honest:
        honest.ok("start 0")
        with hostile(box, PAST[way], 3000 * MIB) as (pid, said):
            assert said == "taken"
            assert driver_bytes(box, pid) > 3000 * MIB > 1024 * MIB
            counted = {process.pid: process.used_bytes for process in box.card().processes}
            assert driver_bytes(box, honest.pid) == counted[honest.pid] < 1024 * MIB


def test_what_a_measurement_shows_counts_from_then_on(tmp_path: Path) -> None:
    """Memory that came by a way the library does not know leaves none for those it knows."""
    with container(tmp_path) as box, box.worker() as honest:
        honest.ok("start 0")
        with hostile(box, PAST["private table"], 3000 * MIB) as (_, said):
            assert said == "taken"
            assert box.card().used_bytes == box.machine.used() > 3000 * MIB
            assert honest.ask(f"alloc 0 plain {2 * MIB}") == OUT_OF_MEMORY
        honest.ok(f"alloc 0 plain {2 * MIB}")


@pytest.mark.skipif(bool(SANITIZER), reason="a sanitizer's runtime is not for two namespaces")
def test_a_driver_in_a_namespace_of_its_own_is_held_when_it_is_asked_as_usual(tmp_path: Path) -> None:
    with container(tmp_path) as box, hostile(box, f"exec {HOSTILE} asked", 3000 * MIB) as (_, said):
        assert said == OUT_OF_MEMORY


def test_launches_by_a_private_table_stand_in_the_drivers_figures(tmp_path: Path) -> None:
    """They do not wait for the share: the exporter shows the driver's utilisation beside it."""
    with container(tmp_path, share=1, kernel_us=1000) as box:
        with gpu.Machine(box.machine.state) as cards:
            before = cards.cards()[0].busy_ns
        with hostile(box, f"exec {HOSTILE} launch", 1000) as (_, said):
            assert said == "taken"
        with gpu.Machine(box.machine.state) as cards:
            assert cards.cards()[0].busy_ns - before > 2 * 0.01 * 1e9
        assert box.card().throttled_ns == 0


def used_of(page: Page, pod: str) -> float:
    return page.value(USED, pod=pod) or 0


def hostile_pod(number: int, command: str) -> dict[str, Any]:
    pod = make_pod(f"hostile-{number}", 1, command=f"tail -f /dev/null | {command} {1300 * MIB}")
    pod["spec"]["containers"][0]["image"] = IMAGE
    return pod


of_an_interpreter = pytest.mark.skipif(
    bool(SANITIZER), reason="the exporter's own interpreter would need the sanitizer's runtime first"
)


@of_an_interpreter
async def test_who_holds_more_than_the_limit_without_the_library_stands_on_the_exporters_page(
    tmp_path: Path,
) -> None:
    """What the alert GpuContainerPastMemoryLimit looks at, by every way. Their neighbour is told apart."""
    async with gpu_node(tmp_path) as host, host.exporter() as exporter:
        honest = make_pod("honest", 4, command="exec cuda_malloc 1G")
        honest["spec"]["containers"][0]["image"] = IMAGE
        pods = [
            honest,
            *(
                hostile_pod(number, command.replace("exec ", ""))
                for number, command in enumerate(PAST.values())
            ),
        ]
        for pod in pods:
            await host.node.create(pod)
        names = [pod["metadata"]["name"] for pod in pods]
        for name in names:
            await host.node.wait_pod(name, lambda pod: state_of(pod) == "running")
        page = await exporter.page_when(lambda page: all(used_of(page, name) > 1 << 30 for name in names))
        past = {name for name in names if page.one(USED, pod=name) > page.one(LIMIT, pod=name)}
        assert past == set(names) - {"honest"}
        for region in (tmp_path / "gpuslice/containers").glob("*/var/region"):  # as its tenant can
            os.truncate(region, 100)
        page = await exporter.page_when(
            lambda page: page.value("gpuslice_exporter_collector_success", collector="isolation") == 0
        )
        assert past == {name for name in names if page.one(USED, pod=name) > page.one(LIMIT, pod=name)}


@of_an_interpreter
async def test_who_was_given_nothing_and_uses_a_card_stands_on_the_exporters_page(tmp_path: Path) -> None:
    """What the alert GpuMemoryNotRequested looks at. Such a pod never reaches the webhook."""
    async with gpu_node(tmp_path) as host, host.exporter() as exporter:
        pod = hostile_pod(0, f"{HOSTILE} plain")
        main = pod["spec"]["containers"][0]
        del main["resources"]
        main["env"] = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
        await host.node.create(pod)
        page = await exporter.page_when(lambda page: used_of(page, "hostile-0") > 1 << 30)
        assert page.all(ALLOCATED, pod="hostile-0") == []
        assert page.one("gpuslice_exporter_collector_success", collector="pod_resources") == 1


@of_an_interpreter
async def test_who_computes_past_a_share_stands_on_the_exporters_page(tmp_path: Path) -> None:
    async with gpu_node(tmp_path) as host, host.exporter() as exporter:
        pod = make_pod(
            "hostile", 1, command=f"tail -f /dev/null | GPUSLICE_SIM_KERNEL_US=1000 {HOSTILE} launch 60000"
        )
        pod["spec"]["containers"][0]["image"] = IMAGE
        await host.node.create(pod)
        await host.node.wait_pod("hostile", lambda pod: state_of(pod) == "running")
        (limits,) = (tmp_path / "gpuslice/containers").glob("*/etc/limits")
        limits.write_text(limits.read_text().replace("share=-", "share=1"))  # as a pod with a share has it
        page = await exporter.page_when(
            lambda page: (
                (page.value(UTILIZATION, pod="hostile") or 0) > 0.02 and page.value(SHARE, pod="hostile")
            )
        )
        assert page.one(UTILIZATION, pod="hostile") > page.one(SHARE, pod="hostile") == 0.01


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


STORY = f"start 0\nalloc 0 plain {64 * MIB}\nalloc 1 plain {2048 * MIB}\ntotal 0\n"
HELD = ["ok", "ok", "ok", OUT_OF_MEMORY, f"ok {1024 * MIB}"]


def test_an_empty_environment_changes_nothing(tmp_path: Path) -> None:
    """As in a container: the library comes by /etc/ld.so.preload, which no variable and no shell can undo."""
    with container(tmp_path / "box") as box:
        worker = (str(BUILD / "tests/worker"), "dlsym")
        assert Mounts(tmp_path, box).run('exec env -i "$@"', *worker, say=STORY) == HELD


WRITE_THE_PRELOAD_FILE = """
file=/etc/ld.so.preload
for try in "echo > $file" "rm -f $file" "mv $file $file.old" "ln -sf /dev/null $file" "umount $file" \
    "mount -o remount,bind,rw $file" "mount --bind /dev/null $file" "truncate -s 0 $file"; do
    env -i PATH="$PATH" setpriv --bounding-set -sys_admin /bin/sh -c "$try" 2>/dev/null && echo "done: $try"
done
exec env -i "$@"
"""


def test_root_in_a_container_cannot_write_the_preload_file(tmp_path: Path) -> None:
    """Root without CAP_SYS_ADMIN, as in any container that is not privileged."""
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv on this machine")
    with container(tmp_path / "box") as box:
        worker = (str(BUILD / "tests/worker"), "dlsym")
        assert Mounts(tmp_path, box).run(WRITE_THE_PRELOAD_FILE, *worker, say=STORY) == HELD


WITHOUT_THE_FILE = {
    "mounted over": 'mount --bind /dev/null /etc/ld.so.preload && exec env -i "$@"',
    "another root": "mkdir $folder/root && mount --bind / $folder/root && "
    'exec env -i /usr/sbin/chroot $folder/root /usr/bin/env "$@"',
    # of a volume: the kernel takes a mount away whose file is deleted where nothing is mounted on it
    "deleted by a container with the same folder": "nsenter --mount=/proc/$PPID/ns/mnt "
    'rm $folder/etc/ld.so.preload && exec env -i "$@"',
    "asked in vain": 'exec env -i "$@"',
}


@pytest.mark.parametrize("how", WITHOUT_THE_FILE)
def test_who_starts_programs_that_do_not_find_the_preload_file_is_seen(tmp_path: Path, how: str) -> None:
    """Mounts of its own need a user namespace, where the node lets containers make one."""
    with container(tmp_path / "box") as box:
        mounts = Mounts(tmp_path, box)
        if mounts.run('exec env -i "$@"', "echo", "yes", say="") != ["yes"]:
            pytest.skip("no mounts of our own on this machine")
        way = "unasked" if how == "asked in vain" else "plain"
        command = shlex.join(mounts.command(WITHOUT_THE_FILE[how], str(HOSTILE), way))
        with hostile(box, f"LD_PRELOAD= exec {command}", 3000 * MIB) as (pid, said):
            assert said == "taken"
            assert driver_bytes(box, pid) > 3000 * MIB


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
