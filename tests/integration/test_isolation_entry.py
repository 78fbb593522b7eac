"""How programs come to the driver, and that the right variant of a function is what they get."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.isolation_rig import (
    BUILD,
    MIB,
    OUT_OF_MEMORY,
    SANITIZER,
    SIM,
    Worker,
    container,
    list_of_hooks,
)

PER_THREAD = 2


def proc(worker: Worker, name: str, version: int, flags: int = 0) -> tuple[str, str]:
    """Which library and symbol cuGetProcAddress answers with."""
    _, result, status, library, symbol = worker.ask(f"proc {name} {version} {flags}").split()
    if result != "0" or status != "0":
        return f"result {result} status {status}", "-"
    return Path(library).name, symbol


@pytest.mark.parametrize(
    ("name", "version", "flags", "symbol"),
    [
        ("cuMemAlloc", 2000, 0, "cuMemAlloc"),
        ("cuMemAlloc", 12020, 0, "cuMemAlloc_v2"),
        ("cuLaunchKernel", 12020, 0, "cuLaunchKernel"),
        ("cuLaunchKernel", 12020, PER_THREAD, "cuLaunchKernel_ptsz"),
        ("cuLaunchKernel", 4000, PER_THREAD, "cuLaunchKernel"),
        ("cuMemAllocAsync", 12020, 0, "cuMemAllocAsync"),
        ("cuMemAllocAsync", 12020, PER_THREAD, "cuMemAllocAsync_ptsz"),
        ("cuGraphLaunch", 13000, PER_THREAD, "cuGraphLaunch_ptsz"),
        ("cuCtxCreate", 3020, 0, "cuCtxCreate_v2"),
        ("cuCtxCreate", 11040, 0, "cuCtxCreate_v3"),
        ("cuCtxCreate", 12050, 0, "cuCtxCreate_v4"),
        ("cuGetProcAddress", 11030, 0, "cuGetProcAddress"),
        ("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
        ("cuMemGetInfo", 13000, 0, "cuMemGetInfo_v2"),
        ("cuStreamSynchronize", 12020, PER_THREAD, "cuStreamSynchronize_ptsz"),
    ],
)
def test_a_version_and_its_flags_get_the_variant_they_ask_for(
    tmp_path: Path, name: str, version: int, flags: int, symbol: str
) -> None:
    with container(tmp_path, cuda="13.0") as box, box.worker() as worker:
        worker.ok("start 0")
        assert proc(worker, name, version, flags) == ("libgpuslice.so", symbol)


def test_what_we_do_not_know_passes_through(tmp_path: Path) -> None:
    with container(tmp_path, cuda="13.0") as box, box.worker() as worker:
        worker.ok("start 0")
        assert proc(worker, "cuMemcpyHtoD", 12020)[0] == "libcuda.so.1"
        assert proc(worker, "cuMemoryOfTomorrow", 12020)[0] != "libgpuslice.so"


def test_without_limits_the_driver_itself_is_found(tmp_path: Path) -> None:
    with container(tmp_path) as box:
        box.limits_path.unlink()
        with box.worker() as worker:
            assert "libcuda.so.1" in worker.ask("name cuMemAlloc_v2")
            assert proc(worker, "cuMemAlloc", 12020)[0] == "libcuda.so.1"


def test_a_constructor_that_runs_before_everything_is_held(tmp_path: Path) -> None:
    with container(tmp_path) as box:
        early = str(BUILD / "tests/early.so")
        preload = f"{box.environ()['LD_PRELOAD']}:{early}"
        for size, answer in ((2048 * MIB, "early 2"), (64 * MIB, "early 0")):
            done = box.run("/bin/true", LD_PRELOAD=preload, GPUSLICE_TEST_EARLY_BYTES=str(size))
            assert done.stdout.strip() == answer


@pytest.mark.skipif(bool(SANITIZER), reason="a sanitizer's runtime wants to be first itself")
def test_a_tool_preloaded_before_us_stands_in_front(tmp_path: Path) -> None:
    with container(tmp_path) as box:
        early = str(BUILD / "tests/early.so")
        preload = f"{early}:{box.environ()['LD_PRELOAD']}"
        done = box.run("/bin/true", LD_PRELOAD=preload, GPUSLICE_TEST_EARLY_BYTES=str(2048 * MIB))
        assert done.stdout.strip() == "early 2"


WRAPPER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
int cuMemAlloc_v2(unsigned long long *address, unsigned long bytes)
{
    int (*next)(unsigned long long *, unsigned long) = dlsym(RTLD_NEXT, "cuMemAlloc_v2");
    return next(address, bytes);
}
int wrapped(unsigned long long *address, unsigned long bytes) { return cuMemAlloc_v2(address, bytes); }
"""
WRAPPED = r"""
#include <stdio.h>
int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *);
int wrapped(unsigned long long *, unsigned long);
int main(void)
{
    void *context;
    unsigned long long address;
    cuInit(0), cuDevicePrimaryCtxRetain(&context, 0), cuCtxSetCurrent(context);
    printf("%d %d\n", wrapped(&address, 64 << 20), wrapped(&address, 1900ul << 20));
}
"""


@pytest.mark.skipif(bool(SANITIZER), reason="programs without the sanitizer")
def test_a_library_that_wraps_the_driver_behind_us_is_held(tmp_path: Path) -> None:
    """As communication libraries watch allocations: what comes after them by RTLD_NEXT is the driver's."""
    library, program = tmp_path / "libwrap.so", tmp_path / "program"
    (tmp_path / "wrap.c").write_text(WRAPPER)
    (tmp_path / "program.c").write_text(WRAPPED)
    flags = ["-L" + str(BUILD / "sim"), "-l:libcuda.so.1", "-ldl"]
    hidden = ["cc", "-shared", "-fPIC", "-Wl,-Bsymbolic", "-o", str(library), str(tmp_path / "wrap.c")]
    subprocess.run([*hidden, *flags], check=True)
    linked = ["cc", "-o", str(program), str(tmp_path / "program.c"), str(library), *flags]
    subprocess.run(linked, check=True)
    with container(tmp_path / "box") as box:
        assert box.run(str(program)).stdout.split() == ["0", "2"]


def test_a_forked_child_holds_nothing_of_its_parents(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 plain {500 * MIB}")
        used = box.card().used_bytes
        worker.ask("fork")  # the driver refuses a child after cuInit; what counts is what is left
        worker.ok(f"alloc 1 plain {200 * MIB}")
        assert box.card().used_bytes == used + 200 * MIB == box.machine.used()


def test_a_fork_before_the_driver_counts_on_its_own(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as worker:
        assert worker.ask("fork") == "ok 0"
        worker.ok("start 0")
        assert box.card().used_bytes == box.machine.used()


def test_exec_returns_what_the_old_program_held(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as one, box.worker() as two:
        one.ok("start 0")
        one.ok(f"alloc 0 plain {800 * MIB}")
        one.ask("exec")  # the same pid, another program, which does not use the card
        two.ok("start 0")
        two.ok(f"alloc 0 plain {800 * MIB}")
        assert box.card().used_bytes == box.machine.used()


def test_exec_into_a_program_that_allocates_starts_from_nothing(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 plain {800 * MIB}")
        worker.ask("exec")
        worker.ok("start 0")
        worker.ok(f"alloc 0 plain {800 * MIB}")
        assert box.card().used_bytes == box.machine.used()


def test_a_recording_is_not_spoilt_by_what_we_ask_beside_another_threads_calls(tmp_path: Path) -> None:
    """Drivers take questions to a pool for calls that disturb a capture, from whatever thread they come."""
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 async {64 * MIB}")
        worker.ok("free 0")
        assert worker.ok(f"capture-beside {300 * MIB}") == [0, 0, 2, 0]


def test_ipc_memory_is_counted_once(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as maker, box.worker() as opener:
        maker.ok("start 0")
        opener.ok("start 0")
        maker.ok(f"alloc 0 plain {400 * MIB}")
        handle = maker.ask("export 0").split()[1]
        opener.ok(f"import 0 {handle}")
        assert box.card().used_bytes == box.machine.used()
        opener.ok("close 0")
        assert box.card().used_bytes == box.machine.used()


def test_memory_that_an_importer_keeps_alive_stays_counted(tmp_path: Path) -> None:
    """Else a container could give itself memory by making, handing over and dying, again and again."""
    with container(tmp_path) as box, box.worker() as opener:
        opener.ok("start 0")
        with box.worker() as maker:
            maker.ok("start 0")
            maker.ok(f"alloc 0 plain {600 * MIB}")
            opener.ok(f"import 0 {maker.ask('export 0').split()[1]}")
        assert opener.ask(f"alloc 1 plain {500 * MIB}") == OUT_OF_MEMORY
        assert box.card().used_bytes >= box.machine.used()
        opener.ok("close 0")
        opener.ok(f"alloc 1 plain {500 * MIB}")
        assert box.card().used_bytes == box.machine.used()


@pytest.mark.parametrize("version", ["10.1", "12.2", "13.0"])
def test_heaps_and_modules_count_once_they_are_there(tmp_path: Path, version: str) -> None:
    with container(tmp_path, cuda=version) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"heap {64 * MIB}")
        assert box.card().used_bytes == box.machine.used()


CUDART_PROGRAM = r"""
#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>
int main(int count, char **arguments)
{
    size_t free_bytes, total;
    void *memory;
    printf("info %d", cudaMemGetInfo(&free_bytes, &total));
    printf(" %zu\n", total);
    printf("small %d\n", cudaMalloc(&memory, 64 << 20));
    printf("large %d\n", cudaMalloc(&memory, size_t(2) << 30));
    printf("async %d\n", cudaMallocAsync(&memory, size_t(2) << 30, cudaStreamPerThread));
}
"""


def compiled(folder: Path, *options: str) -> Path:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not on this machine: programs of the CUDA runtime cannot be built")
    source, program = folder / "program.cu", folder / "program"
    source.write_text(CUDART_PROGRAM)
    command = [nvcc, "-o", str(program), str(source), *options]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        pytest.skip(f"nvcc does not compile here: {built.stderr.splitlines()[:1]}")
    return program


SEEN = [f"info 0 {2048 * MIB}", "small 0", "large 2", "async 2"]


@pytest.mark.parametrize("runtime", ["cudart.o", "cudart_per_thread.o"])
def test_programs_of_the_cuda_runtime_are_held(tmp_path: Path, runtime: str) -> None:
    """With the simulation's small runtime, which finds the driver as NVIDIA's static one does."""
    options = ("-cudart", "none", str(SIM / runtime), "-lpthread", "-ldl")
    program = compiled(tmp_path, *options)
    with container(tmp_path / "box", cuda="13.0", profile="H200", memory_mib=2048) as box:
        assert box.run(str(program)).stdout.split("\n")[:4] == SEEN


def test_programs_with_nvidias_static_runtime_are_held(tmp_path: Path) -> None:
    program = compiled(tmp_path)
    with container(tmp_path / "box", cuda="13.0", profile="H200", memory_mib=2048) as box:
        bare = box.run(str(program), LD_PRELOAD="")
        if not bare.stdout.startswith("info 0"):
            pytest.skip(
                f"NVIDIA's runtime wants a real driver's private tables: {bare.stdout.splitlines()[:1]}"
            )
        assert box.run(str(program)).stdout.split("\n")[:4] == SEEN


@pytest.mark.skipif(bool(SANITIZER), reason="a sanitizer's runtime has signal handlers of its own")
def test_the_host_process_keeps_its_manners(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        mask = os.umask(0o022)
        os.umask(mask)
        handlers, umask, errno, result = worker.ask("manners").split()[1:]
        assert (handlers, int(umask, 8), errno, result) == ("0", mask, "77", "2")


def test_the_library_prints_nothing_and_leaves_the_exit_status(tmp_path: Path) -> None:
    with container(tmp_path) as box:
        done = box.run("/bin/sh", "-c", "exit 7")
        assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


def test_programs_without_the_driver_open_no_file(tmp_path: Path) -> None:
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not on this machine")
    with container(tmp_path) as box:
        log = tmp_path / "calls"
        box.run(
            strace,
            "-f",
            "-o",
            str(log),
            "-E",
            f"LD_PRELOAD={box.environ()['LD_PRELOAD']}",
            "/bin/true",
            LD_PRELOAD="",
        )
        text = log.read_text()
    assert "libgpuslice.so" in text
    assert "gpuslice/limits" not in text
    assert "gpuslice/region" not in text


def test_a_machine_without_a_driver_notices_nothing(tmp_path: Path) -> None:
    """Our exported symbols must not make a program believe that there is a driver."""
    probe = "import ctypes; it = ctypes.CDLL(None); print(hasattr(it, 'cuMemAlloc_v2'), hasattr(it, 'dlsym'))"
    with container(tmp_path) as box:
        done = box.run(sys.executable, "-c", probe, LD_LIBRARY_PATH="")
    assert done.stdout.strip() == "False True"


WHAT_A_PROCESS_HAS = r"""
import json, os, signal
maps = open("/proc/self/maps").read().split("\n")
print(json.dumps({
    "files": sorted(os.readlink(f"/proc/self/fd/{number}") for number in range(3, 64)
                    if os.path.exists(f"/proc/self/fd/{number}")),
    "threads": len(os.listdir("/proc/self/task")),
    "environment": sorted(name for name in os.environ if name != "LD_PRELOAD"),
    "libraries": sorted({line.split()[-1] for line in maps if ".so" in line}),
    "handlers": [number for number in range(1, 65) if number not in (9, 19, 32, 33)
                 and signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN)],
    "umask": os.umask(0),
}))
"""


@pytest.mark.skipif(bool(SANITIZER), reason="a sanitizer's runtime brings files and mappings of its own")
def test_where_there_is_no_driver_nothing_is_left_behind(tmp_path: Path) -> None:
    """No file, thread, variable or handler; of mappings the library's own, which writes nowhere else."""
    with container(tmp_path) as box:
        asked = [sys.executable, "-c", WHAT_A_PROCESS_HAS]
        have, bare = (
            json.loads(box.run(*asked, LD_LIBRARY_PATH="", LD_PRELOAD=preload).stdout)
            for preload in (box.environ()["LD_PRELOAD"], "")
        )
        library = str((BUILD / "lib/libgpuslice.so").resolve())
        assert library in have["libraries"]
        have["libraries"].remove(library)
        assert have == bare
        assert box.region_path.read_bytes().count(0) == box.region_path.stat().st_size  # nobody came by


@pytest.mark.skipif(bool(SANITIZER), reason="a sanitizer's runtime makes system calls of its own")
def test_on_a_machine_without_limits_or_driver_a_lookup_costs_no_system_call(tmp_path: Path) -> None:
    """Names that are not the driver's go to libc as they came."""
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not on this machine")
    probe = "import ctypes; it = ctypes.CDLL(None); [getattr(it, 'malloc') for _ in range(1000)]"
    with container(tmp_path) as box:
        counts = []
        for number, preload in enumerate((box.environ()["LD_PRELOAD"], "")):
            log = tmp_path / f"calls{number}"
            wanted = [strace, "-f", "-o", str(log), *(("-E", f"LD_PRELOAD={preload}") if preload else ())]
            box.run(*wanted, sys.executable, "-S", "-c", probe, LD_PRELOAD="", LD_LIBRARY_PATH="")
            counts.append(len(log.read_text().splitlines()))
    assert 0 <= counts[0] - counts[1] < 40  # opening and mapping one more library


def test_nvidia_smi_without_limits_shows_the_whole_card(tmp_path: Path) -> None:
    with container(tmp_path) as box:
        box.limits_path.unlink()
        assert "/ 16130MiB" in box.run(str(SIM / "nvidia-smi")).stdout


def test_every_hook_stands_before_the_drivers_function(tmp_path: Path) -> None:
    """By dlsym for the driver's; what this driver lacks must stay lacking."""
    names = re.findall(r"^HOOK\(CUDA, (\w+),", list_of_hooks(), re.MULTILINE)
    with container(tmp_path, cuda="13.0") as box, box.worker() as ours, box.worker(LD_PRELOAD="") as bare:
        wrong = []
        for name in names:
            with_us, without = ours.ask(f"name {name}").split()[1], bare.ask(f"name {name}").split()[1]
            if without == "-" and with_us != "-":
                wrong.append(f"{name} appears from nowhere")
            if without != "-" and not with_us.endswith("libgpuslice.so"):
                wrong.append(f"{name} leads to {with_us}")
    assert len(names) > 90
    assert wrong == []


EVERY_KIND = (
    *("plain", "pitch", "managed", "async", "pool", "physical", "mapped", "array", "array3d", "mipmap"),
    *("group", "group-addr", "tile", "graph", "node", "captured"),
)


@pytest.mark.skipif(bool(SANITIZER), reason="two tools that watch every access do not go together")
def test_valgrind_finds_nothing(tmp_path: Path) -> None:
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        pytest.skip("valgrind is not on this machine")
    story = ["start 0", *(f"alloc {number} {kind} {4 * MIB}" for number, kind in enumerate(EVERY_KIND))]
    story += [*(f"free {number}" for number in range(len(EVERY_KIND))), f"threads 4 50 {MIB}", "burn 100 1 0"]
    story += ["info", "fork", "reset"]
    with container(tmp_path, cuda="13.0", share=50) as box:
        done = subprocess.run(
            [
                valgrind,
                "-q",
                "--leak-check=no",
                "--error-exitcode=9",
                str(BUILD / "tests/worker"),
                "dlsym",
                "13000",
            ],
            env=box.environ(),
            input="\n".join(story) + "\n",
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert "error" not in done.stdout
