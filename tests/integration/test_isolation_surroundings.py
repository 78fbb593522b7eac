"""A program's surroundings, made by itself or by its sandbox: namespaces, a root without the usual files, no
descriptor left, tools with functions of the driver's names.

Limits hold there, and what ran without the library runs with it.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice.adapters.region.living import living

from .isolation_rig import (
    BUILD,
    MIB,
    OUT_OF_MEMORY,
    SANITIZER,
    SIM,
    Container,
    Worker,
    container,
    make_container,
    make_machine,
)
from .sequence_players import first_child

TIME = ("unshare", "--time", "--boottime", "5000", "--monotonic", "5000", "--fork", "--kill-child")
NUMBERS = ("unshare", "--pid", "--fork", "--kill-child")
"""With the machine's own /proc, where our number is somebody else's."""


def worker_in(box: Container, *start: str) -> Worker:
    if subprocess.run([*start, "true"], capture_output=True, check=False).returncode:
        pytest.skip(f"not possible here: {' '.join(start)}")
    return Worker([*start, str(BUILD / "tests/worker"), "dlsym", "12020"], box.environ())


def test_a_process_with_a_clock_of_its_own_keeps_what_it_holds(tmp_path: Path) -> None:
    """Start times in /proc are told by the clock of who reads them, so it seemed to be another process."""
    with container(tmp_path) as box, worker_in(box, *TIME) as inside, box.worker() as outside:
        inside.ok("start 0")
        inside.ok(f"alloc 0 plain {600 * MIB}")
        outside.ok("start 0")
        assert outside.ask(f"alloc 0 plain {400 * MIB}") == OUT_OF_MEMORY
        inside.ok("free 0")
        outside.ok(f"alloc 0 plain {400 * MIB}")
        assert box.card().used_bytes == box.machine.used()


def test_readers_outside_know_a_process_with_a_clock_of_its_own(tmp_path: Path) -> None:
    """It tells its start, and all times, by the machine's clocks."""
    with container(tmp_path) as box, worker_in(box, *TIME) as inside:
        inside.ok("start 0")
        assert [process.pid for process in living(box.card().processes)] == [first_child(inside.pid)]


def test_exec_where_each_program_gets_the_same_addresses_returns_what_the_old_one_held(
    tmp_path: Path,
) -> None:
    """As under a debugger: the new program's stack is where the old one's was, so nothing told them apart."""
    with (
        container(tmp_path) as box,
        worker_in(box, "setarch", "--addr-no-randomize") as one,
        box.worker() as two,
    ):
        one.ok("start 0")
        one.ok(f"alloc 0 plain {600 * MIB}")
        two.ok("start 0")
        assert two.ask(f"alloc 0 plain {600 * MIB}") == OUT_OF_MEMORY
        one.ask("exec")
        two.ok(f"alloc 0 plain {600 * MIB}")
        assert box.card().used_bytes == box.machine.used()


def test_processes_that_see_another_namespaces_proc_keep_what_they_hold(tmp_path: Path) -> None:
    with container(tmp_path) as box, worker_in(box, *NUMBERS) as first:
        first.ok("start 0")
        first.ok(f"alloc 0 plain {600 * MIB}")
        beside = ("nsenter", "--target", str(first_child(first.pid)), "--pid")
        with worker_in(box, *beside) as second:
            second.ok("start 0")
            assert second.ask(f"alloc 0 plain {400 * MIB}") == OUT_OF_MEMORY
            first.ok("free 0")
            second.ok(f"alloc 0 plain {400 * MIB}")
            assert box.card().used_bytes == box.machine.used()


def child(pid: int) -> int:
    found = first_child(pid)
    assert found, f"{pid} has started nothing"
    return found


def number_inside(pid: int) -> str:
    (line,) = (text for text in Path(f"/proc/{pid}/status").read_text().splitlines() if "NSpid" in text)
    return line.split()[-1]


AGAIN = 'echo $(($1 - 1)) > /proc/sys/kernel/ns_last_pid; shift; "$@"; exit $?'


@pytest.mark.parametrize("starts", [False, True], ids=["not using the card", "using the card"])
def test_a_process_with_the_number_of_one_that_was_killed_is_not_taken_for_it(
    tmp_path: Path, starts: bool
) -> None:
    """Numbers come again; the time of the start tells the two apart."""
    with container(tmp_path) as box, worker_in(box, *NUMBERS, "--mount-proc") as first:
        beside = ("nsenter", "--target", str(first_child(first.pid)), "--pid", "--mount")
        with worker_in(box, *beside) as killed:
            killed.ok("start 0")
            killed.ok(f"alloc 0 plain {600 * MIB}")
            program = child(killed.pid)
            number = number_inside(program)
            os.kill(program, signal.SIGKILL)
            killed.leave()  # who started it lets its number go
        again = Worker(
            [*beside, "sh", "-c", AGAIN, "sh", number, str(BUILD / "tests/worker"), "dlsym", "12020"],
            box.environ(),
        )
        with again as heir:
            assert number_inside(child(child(heir.pid))) == number
            if starts:
                heir.ok("start 0")
            first.ok("start 0")
            first.ok(f"alloc 0 plain {600 * MIB}")
            assert box.card().used_bytes == box.machine.used()


@pytest.fixture
def stacked(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system over others, as the root of most containers is."""
    lower, upper, work, merged = (tmp_path / name for name in ("lower", "upper", "work", "merged"))
    for folder in (lower, upper, work, merged):
        folder.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    mount = ["mount", "-t", "overlay", "-o", options, "overlay", str(merged)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no overlay file systems of our own on this machine")
    yield merged
    subprocess.run(["umount", "--lazy", str(merged)], check=True)


def test_where_mappings_keep_no_lock_another_namespaces_processes_keep_what_they_hold(
    tmp_path: Path, stacked: Path
) -> None:
    """There the kernel maps the file below, and closing ours lets go of its lock: it tells nothing."""
    box = make_container(stacked / "box", make_machine(tmp_path))
    with worker_in(box, *NUMBERS) as first, worker_in(box, *NUMBERS) as second:
        first.ok("start 0")
        first.ok(f"alloc 0 plain {500 * MIB}")
        second.ok("start 0")
        assert second.ask(f"alloc 0 plain {400 * MIB}") == OUT_OF_MEMORY
        assert box.card().used_bytes == box.machine.used()


def allow_descriptors(worker: Worker, most: int | None) -> None:
    _, hard = resource.prlimit(worker.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(worker.pid, resource.RLIMIT_NOFILE, (hard if most is None else most, hard))


def share_with_the_last_descriptor(worker: Worker) -> int:
    for most in range(3, 64):
        allow_descriptors(worker, most)
        answer = worker.ask("share 0").split()
        if answer[0] == "ok":
            return int(answer[2])
    raise AssertionError(f"never shared: {answer}")


@pytest.mark.parametrize("when", ["exporting", "releasing"])
def test_who_has_no_descriptor_left_counts_what_exported_ones_keep(tmp_path: Path, when: str) -> None:
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 physical {500 * MIB}")
        if when == "exporting":
            descriptor = share_with_the_last_descriptor(worker)
            allow_descriptors(worker, None)
        else:
            descriptor = worker.ok("share 0")[1]
            allow_descriptors(worker, 0)
        worker.ok("free 0")
        assert box.card().used_bytes >= box.machine.used() > 500 * MIB
        assert worker.ask(f"alloc 1 plain {500 * MIB}") == OUT_OF_MEMORY
        allow_descriptors(worker, None)
        worker.ok(f"shut {descriptor}")
        worker.ok(f"alloc 1 plain {500 * MIB}")
        assert box.card().used_bytes == box.machine.used()


def test_who_hides_the_drivers_files_counts_what_exported_descriptors_keep(tmp_path: Path) -> None:
    with container(tmp_path) as box, box.worker() as worker:
        worker.ok("start 0")
        worker.ok(f"alloc 0 physical {500 * MIB}")
        worker.ok("share 0")
        (tmp_path / "cards.exports").rename(tmp_path / "elsewhere")
        worker.ok("free 0")
        assert worker.ask(f"alloc 1 plain {500 * MIB}") == OUT_OF_MEMORY


@pytest.mark.skipif(bool(SANITIZER), reason="a sanitizer's runtime wants to be first itself")
def test_a_library_that_stands_before_the_list_of_libraries_changes_nothing(tmp_path: Path) -> None:
    """Tools in front of dl_iterate_phdr find the real one by dlsym, which led back to them without end; and
    what they show is of some earlier moment."""
    lister = built(tmp_path, "lister", LISTER, "-ldl")
    with container(tmp_path) as box:
        done = box.run(
            str(BUILD / "tests/conditions"), "plain", LD_PRELOAD=f"{lister}:{box.environ()['LD_PRELOAD']}"
        )
    assert (done.returncode, done.stdout) == (0, "14 14 odd 0\n"), done.stderr


def built(folder: Path, name: str, source: str, *libraries: str) -> Path:
    library = folder / f"lib{name}.so"
    command = ["gcc", "-std=gnu11", "-shared", "-fPIC", "-xc", "-", "-o", str(library), *libraries]
    subprocess.run(command, input=source, text=True, check=True)
    return library


LISTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <string.h>
typedef int (*look)(struct dl_phdr_info *, size_t, void *);
struct asked { look look; void *context; };
static int show(struct dl_phdr_info *object, size_t size, void *context) {
    struct asked *asked = context;
    return strstr(object->dlpi_name, "libcuda") ? 0 : asked->look(object, size, asked->context);
}
int dl_iterate_phdr(look look, void *context) {
    int (*next)() = dlsym(RTLD_NEXT, "dl_iterate_phdr");
    return next(show, &(struct asked){look, context});
}
"""
OVERLAY = r"""
#define _GNU_SOURCE
#include <elf.h>
#include <link.h>
#include <string.h>
static void *of_libc(const char *wanted) {
    for (struct link_map *object = _r_debug.r_map; object; object = object->l_next) {
        const Elf64_Sym *symbol = 0;
        const char *names = 0;
        for (const Elf64_Dyn *entry = object->l_ld; entry->d_tag; entry++)
            if (entry->d_tag == DT_SYMTAB) symbol = (const void *)entry->d_un.d_ptr;
            else if (entry->d_tag == DT_STRTAB) names = (const void *)entry->d_un.d_ptr;
        for (; strstr(object->l_name, "/libc.so") && (const char *)symbol < names; symbol++)
            if (symbol->st_value && !strcmp(names + symbol->st_name, wanted))
                return (void *)(object->l_addr + symbol->st_value);
    }
    return 0;
}
void *dlsym(void *handle, const char *name) {
    return ((void *(*)(void *, const char *))of_libc("dlsym"))(handle, name);
}
"""
TRACER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
static void *driver;
static void *find(const char *name) {
    return dlsym(driver ? driver : (driver = dlopen("libcuda.so.1", RTLD_NOW)), name);
}
int calls;
int cuInit(unsigned flags) { return ((int (*)(unsigned))find("cuInit"))(flags); }
int cuMemAlloc_v2(unsigned long long *at, unsigned long bytes) {
    calls++;
    return ((int (*)(unsigned long long *, unsigned long))find("cuMemAlloc_v2"))(at, bytes);
}
"""
ASKS = """
import ctypes
tracer = ctypes.CDLL("{tracer}")
context, address, given = ctypes.c_void_p(), ctypes.c_ulonglong(), 0
print(tracer.cuInit(0), tracer.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
tracer.cuCtxSetCurrent(context)
while given < 40 and not tracer.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(64 << 20)):
    given += 1
print(given, ctypes.c_int.in_dll(tracer, "calls").value)
"""


def test_a_library_with_functions_of_the_drivers_names_is_asked_and_held(tmp_path: Path) -> None:
    """Who asked it for them got ours; a tracer that had found the driver itself called itself without end."""
    tracer = built(tmp_path, "tracer", TRACER, "-Wl,--no-as-needed", f"-L{SIM}", "-l:libcuda.so.1", "-ldl")
    with container(tmp_path) as box:
        done = box.run(sys.executable, "-c", ASKS.format(tracer=tracer))
    assert done.stdout.split() == ["0", "0", "14", "15"], (done.returncode, done.stderr)


@pytest.mark.skipif(bool(SANITIZER), reason="a sanitizer's runtime wants to be first itself")
@pytest.mark.parametrize(("way", "answer"), [("linked", OUT_OF_MEMORY), ("dlsym", "ok")])
def test_a_tool_with_a_dlsym_past_ours_lets_lookups_through_and_the_driver_tells(
    tmp_path: Path, way: str, answer: str
) -> None:
    """As MangoHud's, which finds libc's in libc's file: docs/user/security.md says so."""
    overlay = built(tmp_path, "overlay", OVERLAY)
    with container(tmp_path) as box:
        preload = f"{overlay}:{box.environ()['LD_PRELOAD']}"
        with box.worker(way, LD_PRELOAD=preload) as worker:
            worker.ok("start 0")
            assert worker.ask(f"alloc 0 plain {2048 * MIB}") == answer
            assert (box.machine.used() > 2048 * MIB) == (answer == "ok")


RENAMED = """
import ctypes, shutil, sys
shutil.copy("{driver}", "renamed.so")
driver = ctypes.CDLL("./renamed.so", ctypes.RTLD_GLOBAL)
everything, context, address, given = ctypes.CDLL(None), ctypes.c_void_p(), ctypes.c_ulonglong(), 0
print(driver.cuInit(0), driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
driver.cuCtxSetCurrent(context)
while given < 40 and not everything.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(64 << 20)):
    given += 1
print(given)
"""


def test_a_driver_under_another_name_is_held_where_everything_is_searched(tmp_path: Path) -> None:
    """By the name of its file alone no driver was loaded, and the function was missing."""
    with container(tmp_path) as box:
        script = RENAMED.format(driver=(SIM / "libcuda.so.1").resolve())
        done = box.run("env", "-C", str(tmp_path), sys.executable, "-c", script)
    assert done.stdout.split() == ["0", "0", "14"], (done.returncode, done.stderr)
