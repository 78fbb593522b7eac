"""Programs that try several files of the driver's name: the first one that can be initialised is held."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from .isolation_rig import MIB, SANITIZER, SIM, Container, container

pytestmark = pytest.mark.skipif(bool(SANITIZER), reason="programs without the sanitizer")

PROBE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
enum { INIT, COUNT, TOTAL, HANDLE, CURRENT, ALLOC, FUNCTIONS };
static const char *const names[2][FUNCTIONS] = {
    {"cuInit", "cuDeviceGetCount", "cuDeviceTotalMem",
     "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuMemAlloc"},
    {"nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetMemoryInfo",
     "nvmlDeviceGetHandleByIndex_v2"}};
static const char *const symbols[FUNCTIONS] = {
    "cuInit", "cuDeviceGetCount", "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuMemAlloc_v2"};
static struct candidate {
    void *handle;
    const char *path;
    int nvml, (*call[FUNCTIONS])();
} all[10];
static void find(struct candidate *of, int by_name)
{
    int (*ask)() = by_name ? (int (*)())dlsym(of->handle, "cuGetProcAddress_v2") : NULL;
    for (int i = 0; i < FUNCTIONS; i++) {
        void *found = NULL;
        int status, result = ask ? ask(names[0][i], &found, 12020, 0ul, &status) : 0;
        if (!ask && (of->nvml ? names[1][i] : symbols[i]))
            found = dlsym(of->handle, of->nvml ? names[1][i] : symbols[i]);
        of->call[i] = result ? NULL : (int (*)())found;
    }
}
static int has(struct candidate *of, int function) { return of->call[function] != NULL; }
static void act(char step, struct candidate *of, const char *path)
{
    size_t total[3] = {0};
    void *handle = NULL, *left;
    int count = 0, result = -1, blocks = 0;
    unsigned long long at;
    switch (step) {
    case 'o':
    case 'm':
        handle = step == 'o' ? dlopen(path, RTLD_LAZY) : dlmopen(LM_ID_NEWLM, path, RTLD_LAZY);
        *of = (struct candidate){handle, path, strstr(path, "nvidia-ml") != NULL};
        result = !handle;
        break;
    case 'q': dlclose(of->handle); return;
    case 'l': find(of, 0); return;
    case 'g': find(of, 1); return;
    case 'i': if (has(of, INIT)) result = of->call[INIT](0); break;
    case 'c': if (has(of, COUNT)) result = of->call[COUNT](&count); break;
    case 't':
        if (has(of, TOTAL) && of->nvml)
            result = of->call[HANDLE](0, &handle) || of->call[TOTAL](handle, total);
        else if (has(of, TOTAL))
            result = of->call[TOTAL](total, 0);
        printf("t%d:%zu ", result, total[0] >> 20);
        return;
    case 'a':
        if (has(of, ALLOC) && !(result = of->call[HANDLE](&handle, 0)) &&
            !(result = of->call[CURRENT](handle)))
            while (blocks < 400 && !of->call[ALLOC](&at, (size_t)64 << 20))
                blocks++;
        printf("a%d:%d ", result, blocks);
        return;
    case 'x':
        dlclose(of->handle);
        left = dlopen(of->path, RTLD_LAZY | RTLD_NOLOAD);
        result = left != NULL;
    }
    printf("%c%d ", step, result);
}
static volatile int stop;
static void *keep_asking(void *of)
{
    size_t total;
    while (!stop)
        ((struct candidate *)of)->call[TOTAL](&total, 0);
    return NULL;
}
int main(int count, char **steps)
{
    pthread_t thread;
    for (int i = 1; i < count; i++)
        if (steps[i][0] == 'p')
            pthread_create(&thread, NULL, keep_asking, &all[steps[i][1] - '0']);
        else
            act(steps[i][0], &all[steps[i][1] - '0'], steps[i] + 3);
    if (stop++, strchr(steps[count - 1], 'p'))
        pthread_join(thread, NULL);
    return 0;
}
"""


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("probe") / "probe"
    command = ["gcc", "-w", "-std=gnu11", "-xc", "-o", str(program), "-", "-ldl", "-lpthread"]
    subprocess.run(command, input=PROBE, text=True, check=True)
    return program


def answers(box: Container, probe: Path, steps: str, **environment: str) -> list[str]:
    """`{stubs}` in the steps is the folder of the toolkit's stubs, and so on."""
    folders = {name: str(SIM / name) for name in ("stubs", "compat", "older", "second")}
    done = box.run(str(probe), *steps.format(sim=SIM, **folders).split(), **environment)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout.split()


STUB, COMPAT, OLDER = "{stubs}/libcuda.so.1", "{compat}/libcuda.so.1", "{older}/libcuda.so.1"
RIGHT, BY_PATH, SECOND = "libcuda.so.1", "{sim}/libcuda.so.1", "{second}/libcuda.so.1"
NVML_STUB, NVML_OLDER, NVML = (
    "{stubs}/libnvidia-ml.so.1",
    "{older}/libnvidia-ml.so.1",
    "libnvidia-ml.so.1",
)
NVML_SECOND = "{second}/libnvidia-ml.so.1"


@pytest.mark.parametrize(
    "steps",
    [
        f"o0={STUB} l0 i0 t0 x0 o1={RIGHT} l1 i1 c1 t1 a1",
        f"o0={COMPAT} l0 i0 t0 x0 o1={BY_PATH} l1 i1 c1 t1 a1",
        f"o0={OLDER} l0 i0 c0 x0 o1={STUB} l1 i1 t1 x1 o2={BY_PATH} l2 i2 t2 a2",
        f"o0={COMPAT} o1={BY_PATH} l0 l1 i0 t0 i1 t1 a1 x0",
        f"o0={COMPAT} o1={BY_PATH} l1 l0 i1 t1 i0 t0 c0 a1 x0",
        f"o0={COMPAT} g0 i0 t0 x0 o1={BY_PATH} g1 i1 c1 t1 a1",
        f"o0={COMPAT} o1={BY_PATH} g0 g1 i0 i1 t0 t1 a1 x0",
        f"o1={BY_PATH} l1 i1 t1 o0={STUB} l0 i0 t0 x0 a1",
        f"o1={BY_PATH} g1 i1 t1 o0={COMPAT} g0 i0 x0 t1 a1",
        f"o0={BY_PATH} l0 i0 t0 q0 o1={SECOND} l1 i1 c1 t1 a1",
        f"o0={BY_PATH} l0 i0 t0 o1={SECOND} g1 i1 c1 t1 a1 i0 t0",
        f"m0={COMPAT} l0 i0 t0 m1={BY_PATH} l1 i1 c1 t1 a1",
        f"m0={BY_PATH} l0 i0 c0 t0 a0",
        f"o0={COMPAT} l0 p0 i0 o1={BY_PATH} l1 i1 t1 a1 c1",
        f"o0={NVML_OLDER} l0 i0 t0 x0 o1={NVML} l1 i1 c1 t1",
        f"o0={NVML_STUB} l0 i0 t0 x0 o1={NVML_OLDER} l1 i1 x1 o2={NVML} l2 i2 t2",
        f"o0={NVML_STUB} o1={NVML_OLDER} l0 l1 i0 i1 t0 t1 x0 x1",
        f"o0={NVML} l0 i0 t0 o1={NVML_SECOND} l1 i1 c1 t1 t0",
        f"o0={NVML_OLDER} l0 i0 o1={BY_PATH} l1 i1 a1 x0 o2={NVML} l2 i2 t2",
    ],
)
def test_candidates_answer_as_without_the_library_and_the_driver_is_held(
    tmp_path: Path, probe: Path, steps: str
) -> None:
    with container(tmp_path) as box:
        bare = answers(box, probe, steps, LD_PRELOAD="")
        limited = answers(box, probe, steps)
        assert [re.sub(":.*", "", answer) for answer in limited] == [
            re.sub(":.*", "", answer) for answer in bare
        ]
        for answer, without in zip(limited, bare, strict=True):
            if answer.startswith("t0:"):
                assert answer == ("t0:1024" if not without.endswith(":0") else without)
            elif answer.startswith("a0:"):
                assert 8 < int(answer.removeprefix("a0:")) <= 14  # as many as fit beside the context


def test_a_driver_that_finds_its_card_later_is_held(tmp_path: Path, probe: Path) -> None:
    """The first cuInit says 100, as where the device's files come after the program has started."""
    source = r"""
    int tries; static int r(void) { return tries > 1 ? 0 : 3; }
    int cuInit(unsigned f) { return ++tries > 1 ? 0 : 100; }
    int cuCtxGetCurrent(void **c) { *c = (void *)1; return r(); }
    int cuDeviceGetCount(int *n) { *n = 1; return r(); }
    int cuCtxGetDevice(int *d) { *d = 0; return r(); }
    int cuCtxSetCurrent(void *c) { return r(); }
    int cuDeviceTotalMem_v2(unsigned long *b, int d) { *b = r() ? 0 : 80ul << 30; return r(); }
    int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)1; return r(); }
    int cuMemAlloc_v2(unsigned long long *p, unsigned long n) { *p = n; return r(); }
    int cuDeviceGetUuid_v2(void *u, int d) { return UUID, 0; }
    """
    library = tmp_path / "late/libcuda.so.1"
    library.parent.mkdir()
    with container(tmp_path) as box:
        digits = box.machine.uuid().removeprefix("GPU-").replace("-", "")
        spelled = "".join(rf"\x{digits[i : i + 2]}" for i in range(0, 32, 2))
        code = "#include <string.h>\n" + source.replace("UUID", f'memcpy(u, "{spelled}", 16)')
        command = ["gcc", "-w", "-shared", "-fPIC", "-xc", "-", "-o", str(library)]
        subprocess.run(command, input=code, text=True, check=True)
        steps = f"o0={library} l0 i0 t0 i0 t0 a0"
        assert answers(box, probe, steps, LD_PRELOAD="")[1:5] == ["i100", "t3:0", "i0", f"t0:{80 << 10}"]
        limited = answers(box, probe, steps)
        assert limited[1:5] == ["i100", "t3:0", "i0", "t0:1024"]
        blocks = int(limited[5].partition(":")[2])
        assert 0 < blocks <= 1024 // 64
        assert box.card().used_bytes <= 1024 * MIB
