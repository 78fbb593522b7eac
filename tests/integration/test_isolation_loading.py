"""Programs that the dynamic linker treats in its own way: privileged ones, and several namespaces in one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.integration.isolation_rig import MIB, SANITIZER, SIM, Mounts, container

pytestmark = pytest.mark.skipif(bool(SANITIZER), reason="programs without the sanitizer")

NAMESPACES = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
static void *driver;
static int (*find(const char *name))() { return (int (*)())dlsym(driver, name); }
static int blocks(void)
{
    static const char image[] =
        ".version 6.0\n.target sm_50\n.address_size 64\n.visible .entry work() { ret; }\n";
    void *context, *module, *work;
    unsigned long long addresses[64];
    int count = 0;
    if (find("cuInit")(0) || find("cuDevicePrimaryCtxRetain")(&context, 0) ||
        find("cuCtxSetCurrent")(context) || find("cuModuleLoadData")(&module, image) ||
        find("cuModuleGetFunction")(&work, module, "work") ||
        find("cuLaunchKernel")(work, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) || find("cuCtxSynchronize")())
        return -1;
    while (count < 64 && find("cuMemAlloc_v2")(&addresses[count], 64ul << 20) == 0)
        count++;
    for (int i = 0; i < count; i++)
        find("cuMemFree_v2")(addresses[i]);
    return find("cuModuleUnload")(module) ? -1 : count;
}
static int total_mib(void)
{
    unsigned count;
    void *device;
    unsigned long long memory[3] = {0};
    if (find("nvmlInit_v2")() || find("nvmlDeviceGetCount_v2")(&count) ||
        find("nvmlDeviceGetHandleByIndex_v2")(0, &device) ||
        find("nvmlDeviceGetMemoryInfo")(device, memory) || find("nvmlShutdown")())
        return -1;
    return (int)(memory[0] >> 20);
}
int main(int count, char **arguments)
{
    const char *library = arguments[1];
    int (*answer)(void) = strstr(library, "cuda") ? blocks : total_mib;
    if (strcmp(arguments[2], "first") == 0) {
        driver = dlopen(library, RTLD_NOW);
        printf("%d ", answer());
    }
    for (int i = 0; i < 20; i++) {
        driver = dlmopen(LM_ID_NEWLM, library, RTLD_NOW);
        if (!driver)
            return fputs(dlerror(), stderr), 1;
        printf("%d ", answer());
        if (strcmp(arguments[3], "closed") == 0) {
            dlclose(driver);
            for (int k = 0; k < 64; k++) /* where it was, something else is now */
                mmap(NULL, 64 << 10, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        } else if (i == 9)
            return 0;
    }
    return 0;
}
"""


@pytest.mark.parametrize("kept", ["closed", "kept"])
@pytest.mark.parametrize("own", ["first", "never"])
@pytest.mark.parametrize(("library", "answer"), [("libcuda.so.1", "14"), ("libnvidia-ml.so.1", "1024")])
def test_a_driver_opened_in_namespace_after_namespace(
    tmp_path: Path, library: str, answer: str, own: str, kept: str
) -> None:
    """Some functions of each copy led to another one: not started, or gone with its namespace."""
    program = tmp_path / "program"
    command = ["gcc", "-w", "-std=gnu11", "-xc", "-o", str(program), "-", "-ldl"]
    subprocess.run(command, input=NAMESPACES, text=True, check=True)
    with container(tmp_path / "box") as box:
        room = "glibc.rtld.optional_static_tls=20000"  # for that many copies of libc
        done = box.run(str(program), library, own, kept, GLIBC_TUNABLES=room)
        assert (done.returncode, done.stderr) == (0, "")
        assert set(done.stdout.split()) == {answer}
        assert box.machine.used() == 0


@pytest.mark.parametrize("privilege", ["none", "setuid", "capabilities"])
def test_the_preload_file_reaches_privileged_programs_and_the_variable_does_not(
    tmp_path: Path, privilege: str
) -> None:
    """In secure mode (AT_SECURE) glibc's loader drops LD_PRELOAD and reads /etc/ld.so.preload."""
    if os.geteuid() or not all(map(shutil.which, ("setpriv", "setcap"))):
        pytest.skip("needs root, setpriv and setcap")
    program = tmp_path / "conditions"
    source = Path(__file__).resolve().parents[2] / "native/tests/conditions.c"
    old_form = f"-Wl,--disable-new-dtags,-rpath,{SIM}"  # LD_LIBRARY_PATH is dropped, too
    subprocess.run(["gcc", "-w", "-o", str(program), str(source), old_form, "-ldl", "-lpthread"], check=True)
    if privilege == "setuid":
        program.chmod(0o4755)
    elif (
        privilege == "capabilities"
        and subprocess.run(["setcap", "cap_sys_nice=ep", str(program)], check=False).returncode
    ):
        pytest.skip("no file capabilities on this file system")
    with container(tmp_path / "box") as box:
        for folder in (tmp_path, *tmp_path.parents):
            if folder.owner() == "root" and folder.stat().st_mode & 0o777 == 0o700:
                folder.chmod(0o755)
        for file in box.machine.state.parent.iterdir():
            if file.is_file():
                file.chmod(0o666)
        user = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
        by_file = Mounts(tmp_path, box).run('exec env "$@"', *user, str(program), "plain", say="")
        by_variable = box.run(*user, str(program), "plain").stdout.splitlines()
        assert by_file == ["14 14 odd 0"]
        assert by_variable == (["14 14 odd 0"] if privilege == "none" else ["64 64 odd 0"])
        assert box.card().limit_bytes == 1024 * MIB
