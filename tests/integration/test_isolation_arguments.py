"""Arguments that few programs give: null pointers in place of outputs, graphs in graphs in graphs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from .isolation_rig import MIB, SANITIZER, container, list_of_hooks

pytestmark = pytest.mark.skipif(bool(SANITIZER), reason="programs without the sanitizer")

ROOT = Path(__file__).resolve().parents[2]
START = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
#include "driver/driver_abi.h"
static void *driver, *nvml;
static int (*find(const char *name))() { return (int (*)())dlsym(name[0] == 'n' ? nvml : driver, name); }
static void *device;
static void start(void)
{
    void *context;
    driver = dlopen("libcuda.so.1", RTLD_NOW), nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    find("cuInit")(0), find("cuDevicePrimaryCtxRetain")(&context, 0), find("cuCtxSetCurrent")(context);
    find("nvmlInit_v2")(), find("nvmlDeviceGetHandleByIndex_v2")(0, &device);
}
"""
ONE_OF_TWO = r"""
int main(void)
{
    size_t free_bytes = 0, total = 0;
    start();
    printf("%d ", find("cuMemGetInfo_v2")(NULL, &total));
    printf("%d ", find("cuMemGetInfo_v2")(&free_bytes, NULL));
    printf("%zu %zu", free_bytes >> 20, total >> 20);
    return 0;
}
"""
NOTHING = r"""
static const char *const names[] = {
#define HOOK(library, symbol, name, since, stream, parameters) #symbol,
#define BORROW(library, symbol, parameters)
#include "driver/hooks.def"
};
int main(void)
{
    for (int i = 0; i < sizeof names / sizeof *names; i++) {
        int status;
        fflush(stdout);
        if (fork() == 0) {
            start();
            int (*call)() = find(names[i]);
            long first = names[i][0] == 'n' ? (long)device : 0;
            int result = call ? call(first, 0l, 0l, 0l, 0l, 0l, 0l, 0l, 0l, 0l, 0l, 0l) : -1;
            printf("%s %d\n", names[i], result);
            fflush(stdout);
            _exit(0);
        }
        wait(&status);
        if (!WIFEXITED(status))
            printf("%s ends\n", names[i]);
    }
    return 0;
}
"""
NESTED = r"""
static CUgraph around(CUgraph inner, int depth, size_t bytes)
{
    CUgraph graph;
    CUgraphNode node;
    find("cuGraphCreate")(&graph, 0);
    if (depth) {
        find("cuGraphAddChildGraphNode")(&node, graph, NULL, 0l, around(NULL, depth - 1, bytes));
        return graph;
    }
    CUDA_MEM_ALLOC_NODE_PARAMS page = {.bytesize = bytes};
    page.poolProps.allocType = 1, page.poolProps.location.type = 1;
    find("cuGraphAddMemAllocNode")(&node, graph, NULL, 0l, &page);
    return graph;
}
int main(int count, char **depths)
{
    start();
    for (int i = 1; i < count; i++) {
        CUgraphExec made;
        CUgraph graph = around(NULL, atoi(depths[i]), 600ul << 20);
        int result = find("cuGraphInstantiateWithFlags")(&made, graph, 0l);
        printf("%d ", result ? result : find("cuGraphLaunch")(made, NULL));
    }
    return 0;
}
"""


ON_A_NODE = r"""
int main(void)
{
    CUmemAllocationProp where = {.type = 1, .location = {3, 1}};
    CUmemGenericAllocationHandle made;
    start();
    for (int i = 0; i < 2; i++)
        printf("%d ", find("cuMemCreate")(&made, 600ul << 20, &where, 0ull));
    return 0;
}
"""


def program(folder: Path, source: str) -> str:
    path = folder / "program"
    command = ["gcc", "-w", "-std=gnu11", f"-I{ROOT}/native/src", "-xc", "-", "-o", str(path), "-ldl"]
    subprocess.run(command, input=START + source, text=True, check=True)
    return str(path)


def test_each_of_two_outputs_may_be_left_out(tmp_path: Path) -> None:
    """As OptiX asks for the total alone: it was told the card's."""
    with container(tmp_path / "box") as box:
        said = box.run(program(tmp_path, ONE_OF_TWO)).stdout.split()
    assert said[:2] == ["0", "0"]
    assert int(said[3]) == 1024
    assert 800 < int(said[2]) < 1024


def test_who_gives_no_arguments_gets_the_drivers_answer(tmp_path: Path) -> None:
    called = program(tmp_path, NOTHING)
    with container(tmp_path / "box", cuda="13.0") as box:
        limited, bare = (box.run(called, **more).stdout.splitlines() for more in ({}, {"LD_PRELOAD": ""}))
    assert len(bare) == list_of_hooks().count("\nHOOK(")
    assert [line for line, other in zip(limited, bare, strict=True) if line != other] == []


@pytest.mark.parametrize("depth", [0, 1, 8, 9, 40, 300])
def test_memory_of_graphs_inside_each_other_is_held_at_any_depth(tmp_path: Path, depth: int) -> None:
    with container(tmp_path / "box") as box:
        called = program(tmp_path, NESTED)
        assert box.run(called, str(depth), LD_PRELOAD="").stdout.split() == ["0"]
        assert box.run(called, str(depth), str(depth)).stdout.split() == ["0", "2"]
        assert box.card().used_bytes <= 1024 * MIB


def test_memory_on_a_cards_own_numa_node_is_held(tmp_path: Path) -> None:
    """On GH200 and GB200 the card's memory is a node of the machine."""
    with container(tmp_path / "box", GPUSLICE_SIM_COHERENT="1") as box:
        assert box.run(program(tmp_path, ON_A_NODE)).stdout.split() == ["0", "2"]
