"""Programs with *variables* of the driver's names, as function loaders export them: they run, and are held.

Our functions of these names come first wherever the dynamic linker looks: such a library wrote into our code.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.isolation_rig import SANITIZER, SIM, Container, container

pytestmark = pytest.mark.skipif(bool(SANITIZER), reason="programs without the sanitizer")

HELD = "64 of 1024 MiB, 14 blocks"
"""What the program below prints: 14 blocks of 64 MiB fit beside a context."""

LOADER = r"""
#include <dlfcn.h>
#define NAMES(X) X(cuInit) X(cuDevicePrimaryCtxRetain) X(cuCtxSetCurrent) X(cuMemAlloc_v2) X(cuMemFree_v2) \
    X(cuMemGetInfo_v2)
static int missing() { return 500; }
#define VARIABLE(name) int (*name)() = missing;
NAMES(VARIABLE)
int (**by_pointer)() = &cuMemAlloc_v2;
int load(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (cuInit != missing || *by_pointer != missing)
        return 2;
#define FIND(name) name = dlsym(driver, #name);
    NAMES(FIND)
    return !driver || *by_pointer != cuMemAlloc_v2;
}
__attribute__((constructor)) static void early(void) { IF_EARLY(cuMemAlloc_v2 = missing; load()); }
"""
USER = r"""
#include <stdio.h>
extern int (*cuInit)(), (*cuDevicePrimaryCtxRetain)(), (*cuCtxSetCurrent)();
extern int (*cuMemAlloc_v2)(), (*cuMemFree_v2)(), (*cuMemGetInfo_v2)();
int load(void);
int use(void)
{
    void *context;
    unsigned long long address;
    size_t free_bytes, total;
    int blocks = 0, unloaded = IF_EARLY(!) load();
    if (unloaded || cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context) ||
        cuMemAlloc_v2(&address, 64ul << 20) || cuMemFree_v2(address) || cuMemGetInfo_v2(&free_bytes, &total))
        return puts("broken"), 1;
    while (blocks < 40 && cuMemAlloc_v2(&address, 64ul << 20) == 0)
        blocks++;
    return printf("64 of %zu MiB, %d blocks\n", total >> 20, blocks), 0;
}
"""
MAIN = "int use(void); int main(void) { return use(); }"
OPENER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
int main(int count, char **arguments)
{
    for (int i = 2; i < count; i++) {
        void *library = dlopen(arguments[i], atoi(arguments[1]) | RTLD_NOW);
        int (*use)(void) = library ? (int (*)(void))dlsym(library, "use") : NULL;
        if (!library || (use && use()))
            return fputs(library ? "use\n" : dlerror(), stderr), 1;
    }
    return 0;
}
"""
LINKED = USER.replace("(*cu", "cu").replace(")()", "()").replace("= IF_EARLY(!) load()", "= 0")


def compiled(target: Path, *sources: str, early: bool = False, flags: tuple[str, ...] = ()) -> Path:
    kind = ("-shared", "-fPIC") if target.suffix == ".so" else ()
    define = "-DIF_EARLY(x)=" + ("x" if early else "")
    text = "\n".join(sources)
    command = ["gcc", "-w", "-std=gnu11", "-xc", *kind, define, "-o", str(target), "-", "-xnone", *flags]
    subprocess.run([*command, f"-Wl,-rpath,{target.parent}", "-ldl"], input=text, text=True, check=True)
    return target


def said(box: Container, *command: Path | str) -> str:
    done = box.run(*map(str, command))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    return done.stdout.strip()


KINDS = {
    "position-independent": ("-fPIE", "-pie"),
    "at fixed addresses": ("-fno-pie", "-no-pie"),
    "by the table of addresses": ("-fPIC", "-pie"),
    "bound at once": ("-fPIC", "-pie", "-Wl,-z,now"),
}
"""The first two copy the library's variables into the program (R_X86_64_COPY)."""


@pytest.mark.parametrize("early", [False, True], ids=["asked", "in a constructor"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_linked_with_such_a_library(tmp_path: Path, kind: str, early: bool) -> None:
    loader = compiled(tmp_path / "libloader.so", LOADER, early=early)
    program = compiled(tmp_path / "program", USER, MAIN, early=early, flags=(*KINDS[kind], str(loader)))
    with container(tmp_path / "box") as box:
        assert said(box, program) == HELD


@pytest.mark.parametrize("binding", [(), ("-Wl,-Bsymbolic",), ("-Wl,-z,now,-z,relro",)])
def test_a_library_that_uses_its_own(tmp_path: Path, binding: tuple[str, ...]) -> None:
    loader = compiled(tmp_path / "libloader.so", LOADER, USER, flags=binding)
    program = compiled(tmp_path / "program", MAIN, flags=(str(loader),))
    with container(tmp_path / "box") as box:
        assert said(box, program) == HELD


def test_a_program_that_exports_its_own(tmp_path: Path) -> None:
    program = compiled(tmp_path / "program", LOADER, USER, MAIN, flags=("-rdynamic",))
    with container(tmp_path / "box") as box:
        assert said(box, program) == HELD


LOCAL, GLOBAL, DEEPBIND = 0, 0x100, 0x8


@pytest.mark.parametrize("flags", [LOCAL, GLOBAL, DEEPBIND])
@pytest.mark.parametrize("split", [False, True], ids=["one library", "two"])
@pytest.mark.parametrize("early", [False, True], ids=["asked", "in a constructor"])
def test_a_library_that_is_opened(tmp_path: Path, flags: int, split: bool, early: bool) -> None:
    loader = compiled(tmp_path / "libloader.so", LOADER, early=early)
    user = compiled(
        tmp_path / "libuser.so",
        *([USER] if split else [LOADER, USER]),
        early=early,
        flags=(str(loader),) if split else (),
    )
    opener = compiled(tmp_path / "opener", OPENER)
    with container(tmp_path / "box") as box:
        assert said(box, opener, str(flags), user) == HELD


def test_a_linked_library_beside_one_with_variables_is_held(tmp_path: Path) -> None:
    """Its calls are of functions, though a variable of that name is loaded, too."""
    driver = (f"-L{SIM}", "-l:libcuda.so.1", "-fno-plt")
    loader = compiled(tmp_path / "libloader.so", LOADER)
    linked = compiled(tmp_path / "liblinked.so", LINKED, flags=driver)
    opener = compiled(tmp_path / "opener", OPENER)
    with container(tmp_path / "box") as box:
        assert said(box, opener, str(LOCAL), loader, linked) == HELD


def test_a_lookup_finds_the_variable_where_no_driver_is_loaded(tmp_path: Path) -> None:
    looks = r"""
    #define _GNU_SOURCE
    #include <dlfcn.h>
    extern int (*cuInit)();
    static int absent(const char *name) { return !dlsym(RTLD_DEFAULT, name); }
    int main(void) { return dlsym(RTLD_DEFAULT, "cuInit") != &cuInit || absent("cuMemAlloc_v2"); }
    """
    loader = compiled(tmp_path / "libloader.so", LOADER)
    program = compiled(tmp_path / "program", looks, flags=("-fPIC", "-pie", str(loader)))
    with container(tmp_path / "box") as box:
        assert said(box, program) == ""
