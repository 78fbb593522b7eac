"""Programs without CUDA behave as if the library were not there, and plug-ins that use CUDA are held."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .isolation_rig import SANITIZER, SIM, container

pytestmark = pytest.mark.skipif(bool(SANITIZER), reason="programs without the sanitizer")

LINKED = ("-Wl,--no-as-needed", f"-L{SIM}", "-l:libcuda.so.1")
WEAK = r"""
#include <stdio.h>
#pragma weak cuInit
#pragma weak cuMemAlloc_v2
#pragma weak nvmlDeviceGetMemoryInfo
#pragma weak cuLaunchKernel
#pragma weak cuDevicePrimaryCtxRetain
#pragma weak cuCtxSetCurrent
int cuInit(), cuMemAlloc_v2(unsigned long long *, unsigned long), nvmlDeviceGetMemoryInfo(), cuLaunchKernel();
int cuDevicePrimaryCtxRetain(), cuCtxSetCurrent();
static int (*const listed)(unsigned long long *, unsigned long) = cuMemAlloc_v2;
int weak(void)
{
    void *context;
    unsigned long long at;
    printf("%d%d%d%d%d ", !!cuInit, !!cuMemAlloc_v2, !!cuLaunchKernel, !!nvmlDeviceGetMemoryInfo, !!listed);
    if (!cuMemAlloc_v2 || cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context))
        return 0;
    return printf("%d %d", listed(&at, 64 << 20), cuMemAlloc_v2(&at, 1900ul << 20));
}
"""
RUNS = "__attribute__((constructor)) static void run(void) { weak(); }"
CALLS = "int weak(void); int main(void) { return weak() && 0; }"
OPENS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int version(void) { return 1; }
int main(int count, char **paths)
{
    for (int i = 2; i < count; i++) {
        void *plug = dlopen(paths[i], (paths[1][0] == 'n' ? RTLD_NOW : RTLD_LAZY) | RTLD_DEEPBIND);
        int (*function)(void) = plug ? (int (*)(void))dlsym(plug, "plug") : NULL;
        printf("%d ", function ? function() : -1);
    }
    return 0;
}
"""
OWN_VERSION = "int version(void) { return 2; } int plug(void) { return version(); }"
NEEDS_VERSION = "int version(void); int plug(void) { return version(); }"
VERSION = "int version(void) { return 2; }"
ALLOCATES = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#ifndef LOOKS_UP
int cuInit(), cuDevicePrimaryCtxRetain(), cuCtxSetCurrent(), cuMemAlloc_v2();
#define F(name) name
#else
static void *driver;
static int (*find(const char *name))() { return (int (*)())dlsym(driver, name); }
#define F(name) find(#name)
#endif
static int held(void)
{
    void *context;
    unsigned long long at;
#ifdef LOOKS_UP
    driver = dlopen("libcuda.so.1", RTLD_NOW | LOOKS_UP);
#endif
    if (F(cuInit)(0) || F(cuDevicePrimaryCtxRetain)(&context, 0) || F(cuCtxSetCurrent)(context))
        return -2;
    return F(cuMemAlloc_v2)(&at, 64ul << 20) * 10 + F(cuMemAlloc_v2)(&at, 1900ul << 20);
}
#ifdef EARLY
static int answer;
__attribute__((constructor)) static void first(void) { answer = held(); }
int plug(void) { return answer; }
#else
int plug(void) { return held(); }
#endif
"""


def compiled(path: Path, source: str, *flags: str) -> Path:
    command = ["gcc", "-w", "-std=gnu11", "-xc", "-", "-xnone", "-o", str(path), *flags, "-ldl"]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def library(path: Path, source: str, *flags: str) -> Path:
    return compiled(path, source, "-shared", "-fPIC", *flags)


@pytest.mark.parametrize("build", [("-pie", "-fPIE"), ("-fPIC", "-pie", "-fno-plt", "-Wl,-z,now")])
@pytest.mark.parametrize("where", ["program", "library", "library that exports nothing"])
def test_weak_references_are_null_where_no_driver_is_linked(
    tmp_path: Path, where: str, build: tuple[str, ...]
) -> None:
    if where == "program":
        program = compiled(tmp_path / "program", WEAK + CALLS, *build)
    elif where == "library":
        needed = library(tmp_path / "libweak.so", WEAK)
        program = compiled(tmp_path / "program", CALLS, *build, str(needed))
    else:
        needed = library(tmp_path / "libweak.so", WEAK + RUNS, "-fvisibility=hidden")
        program = compiled(
            tmp_path / "program", "int main(void) { return 0; }", *build, "-Wl,--no-as-needed", str(needed)
        )
    with container(tmp_path / "box") as box:
        assert box.run(str(program)).stdout == box.run(str(program), LD_PRELOAD="").stdout == "00000 "


def test_weak_references_are_held_where_the_driver_is_linked(tmp_path: Path) -> None:
    program = compiled(tmp_path / "program", WEAK + CALLS, *LINKED)
    with container(tmp_path / "box") as box:
        assert box.run(str(program)).stdout == "11101 0 2"
        assert box.run(str(program), LD_PRELOAD="").stdout == "11101 0 0"


@pytest.mark.parametrize("binding", ["now", "lazy"])
def test_a_plugin_that_is_bound_deeply_uses_its_own_libraries(tmp_path: Path, binding: str) -> None:
    library(tmp_path / "libversion2.so", VERSION)
    plugins = [
        library(tmp_path / "libown.so", OWN_VERSION),
        library(tmp_path / "libneeds.so", NEEDS_VERSION, f"-L{tmp_path}", "-lversion2", "-Wl,-rpath,$ORIGIN"),
    ]
    program = compiled(tmp_path / "program", OPENS, "-rdynamic")
    with container(tmp_path / "box") as box:
        assert box.run(str(program), binding, *map(str, plugins)).stdout == "2 2 "


@pytest.mark.parametrize("binding", ["now", "lazy"])
@pytest.mark.parametrize(
    "build",
    [
        LINKED,
        ("-DEARLY", *LINKED),
        ("-fno-plt", *LINKED),
        ("-DLOOKS_UP=RTLD_LOCAL",),
        ("-DLOOKS_UP=RTLD_DEEPBIND",),
        ("-DEARLY", "-DLOOKS_UP=RTLD_LOCAL", "-fno-plt"),
        ("-nostartfiles", *LINKED),
        ("-nostartfiles", "-fno-plt", *LINKED),
        ("-nostartfiles", "-DEARLY", *LINKED),
        ("-nostartfiles", "-DLOOKS_UP=RTLD_LOCAL"),
        ("-nostartfiles", "-DLOOKS_UP=RTLD_DEEPBIND"),
    ],
)
def test_a_plugin_that_is_bound_deeply_is_held(tmp_path: Path, build: tuple[str, ...], binding: str) -> None:
    plugin = library(tmp_path / "libplugin.so", ALLOCATES, *build)
    program = compiled(tmp_path / "program", OPENS, "-rdynamic")
    with container(tmp_path / "box") as box:
        assert box.run(str(program), binding, str(plugin)).stdout == "2 "  # 64 MiB given, 1900 refused
        assert box.run(str(program), binding, str(plugin), LD_PRELOAD="").stdout == "0 "


@pytest.mark.parametrize("name", ["libplugin.so", "$ORIGIN/libplugin.so"])
@pytest.mark.parametrize(
    "build", [LINKED, ("-nostartfiles", *LINKED), ("-nostartfiles", "-DLOOKS_UP=RTLD_LOCAL")]
)
def test_a_plugin_is_searched_for_as_without_us_and_held(
    tmp_path: Path, name: str, build: tuple[str, ...]
) -> None:
    """libc takes the folders from who calls dlopen."""
    library(tmp_path / "libplugin.so", ALLOCATES, *build)
    program = compiled(tmp_path / "program", OPENS, "-rdynamic", f"-Wl,-rpath,{tmp_path}")
    with container(tmp_path / "box") as box:
        assert box.run(str(program), "now", name).stdout == "2 "
        assert box.run(str(program), "now", name, LD_PRELOAD="").stdout == "0 "


def test_an_error_of_the_programs_own_stays_after_a_plugin_was_bound(tmp_path: Path) -> None:
    plugin = library(tmp_path / "libplugin.so", "int plug(void) { return 0; }", "-nostartfiles")
    source = """
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <stdio.h>
    int main(int count, char **paths)
    {
        void *plug = dlopen(paths[1], RTLD_NOW | RTLD_DEEPBIND);
        const char *none = dlerror();
        void *other = dlopen("/nowhere/libother.so", RTLD_NOW | RTLD_DEEPBIND);
        const char *error = dlerror();
        printf("%d %d %d %s", !!plug, !!none, !!other, error ? error : "-");
        return 0;
    }
    """
    program = compiled(tmp_path / "program", source)
    with container(tmp_path / "box") as box:
        said = box.run(str(program), str(plugin)).stdout
        assert said == box.run(str(program), str(plugin), LD_PRELOAD="").stdout
        assert said.startswith("1 0 0 /nowhere/libother.so: cannot open")


def test_a_library_below_a_plugin_that_is_bound_deeply_is_held(tmp_path: Path) -> None:
    library(tmp_path / "liballocates.so", ALLOCATES.replace("plug", "below"), *LINKED)
    source = "int below(void); int plug(void) { return below(); }"
    flags = (f"-L{tmp_path}", "-lallocates", "-Wl,-rpath,$ORIGIN")
    plugin = library(tmp_path / "libplugin.so", source, *flags)
    program = compiled(tmp_path / "program", OPENS)
    with container(tmp_path / "box") as box:
        assert box.run(str(program), "now", str(plugin)).stdout == "2 "
