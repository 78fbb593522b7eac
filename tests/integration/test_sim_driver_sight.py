"""Which cards a process sees, and by which names it reaches the driver's functions."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from simcluster import gpu

from .sim_driver_client import BUILD, ROOT, DriverProcess, out, require_driver

FOUR = ["T4", "V100-SXM2-16GB", "T4", "T4"]


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return gpu.create(tmp_path / "state", FOUR, seed="sight")


def uuids(state: Path) -> list[str]:
    with gpu.Machine(state) as machine:
        return [card.uuid for card in machine.cards()]


def cuda_cards(state: Path, visible: str | None = None, **env: str) -> list[int]:
    """The machine's indices of the cards that CUDA numbers from 0."""
    order = uuids(state)
    with DriverProcess(state, visible, **env) as process:
        if process.call("cuInit", 0).result == 100:
            return []
        count = process.cu("cuDeviceGetCount", out(4)).number(size=4)
        found = [process.cu("cuDeviceGetUuid_v2", out(16), device).bytes[0].hex() for device in range(count)]
    return [next(i for i, each in enumerate(order) if each[4:].replace("-", "") == one) for one in found]


def nvml_cards(state: Path, visible: str | None = None, **env: str) -> list[int]:
    order = uuids(state)
    with DriverProcess(state, visible, **env) as process:
        process.cu("nvmlInit_v2")
        count = process.cu("nvmlDeviceGetCount_v2", out(4)).number(size=4)
        handles = [process.cu("nvmlDeviceGetHandleByIndex_v2", i, out()).number() for i in range(count)]
        assert [process.cu("nvmlDeviceGetIndex", each, out(4)).number(size=4) for each in handles] == list(
            range(count)
        )
        return [order.index(process.cu("nvmlDeviceGetUUID", each, out(96), 96).text()) for each in handles]


def test_the_host_sees_all_cards_and_cuda_counts_the_fastest_first(state: Path) -> None:
    assert nvml_cards(state) == [0, 1, 2, 3]
    assert cuda_cards(state) == [1, 0, 2, 3]
    assert cuda_cards(state, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("all", [0, 1, 2, 3]),
        ("2,0", [0, 2]),  # a container numbers its cards in the machine's order
        ("{3}", [3]),
        ("{3},{2}", [2, 3]),
        ("void", []),
        ("", []),
        ("9", []),
    ],
)
def test_a_container_sees_only_its_cards(visible: str, expected: list[int], state: Path) -> None:
    named = visible.format(*uuids(state))
    assert nvml_cards(state, named) == expected
    assert cuda_cards(state, named, CUDA_DEVICE_ORDER="PCI_BUS_ID") == expected


@pytest.mark.parametrize(
    ("visible", "chosen", "expected"),
    [
        (None, "2,1", [2, 1]),
        (None, "{3},{0}", [3, 0]),
        (None, "GPU-{3:.8}", [3]),
        (None, "1,7,2", [1]),  # the list ends at the first that is none
        (None, "-1,0", []),
        (None, "", []),
        (None, "1,1", []),
        ("1,3", "1", [3]),  # counted among the container's cards
        ("1,3", "{0}", []),
        ("1,3", "{3},0", [3, 1]),
    ],
)
def test_cuda_visible_devices_chooses_among_them(
    visible: str | None, chosen: str, expected: list[int], state: Path
) -> None:
    names = [each[4:] if "GPU-{" in chosen else each for each in uuids(state)]
    env = {"CUDA_VISIBLE_DEVICES": chosen.format(*names), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert cuda_cards(state, visible, **env) == expected


def test_mig_devices_are_seen_one_at_a_time(tmp_path: Path) -> None:
    card = gpu.CardSpec("A100-SXM4-40GB", mig=("3g.20gb", "2g.10gb"))
    state = gpu.create(tmp_path / "state", [card, "A100-SXM4-40GB"], seed="mig")
    names = uuids(state)
    assert cuda_cards(state, CUDA_VISIBLE_DEVICES=names[2]) == [2]
    assert cuda_cards(state, names[2]) == [2]
    assert cuda_cards(state, "0:1") == [2]
    assert cuda_cards(state, CUDA_VISIBLE_DEVICES=names[0]) == []  # a card in MIG mode is no device
    assert nvml_cards(state, names[1]) == [0]
    with DriverProcess(state, names[1]) as process:
        process.start()
        assert process.cu("cuDeviceGetName", out(99), 99, 0).text() == "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
        assert process.memory()[1] == 19968 << 20
        process.alloc(1 << 30)
        with gpu.Machine(state) as machine:
            assert machine.used_bytes(card=0) == 0
            assert machine.used_bytes(card=1) > 1 << 30


# ------------------------------------------------------------------------------------------- entry points


def address(process: DriverProcess, name: str, version: int, flags: int = 0) -> int:
    return process.cu("cuGetProcAddress_v2", name, out(), version, flags, None).number()


def symbol(process: DriverProcess, name: str) -> int:
    return int(process.ask({"address": name})["address"])


@pytest.mark.parametrize(
    ("name", "version", "flags", "expected"),
    [
        ("cuMemAlloc", 2000, 0, "cuMemAlloc"),
        ("cuMemAlloc", 3020, 0, "cuMemAlloc_v2"),
        ("cuMemAlloc", 13000, 2, "cuMemAlloc_v2"),
        ("cuCtxCreate", 3020, 0, "cuCtxCreate_v2"),
        ("cuCtxCreate", 11040, 0, "cuCtxCreate_v3"),
        ("cuCtxCreate", 12050, 0, "cuCtxCreate_v4"),
        ("cuLaunchKernel", 12000, 0, "cuLaunchKernel"),
        ("cuLaunchKernel", 12000, 1, "cuLaunchKernel"),
        ("cuLaunchKernel", 12000, 2, "cuLaunchKernel_ptsz"),
        ("cuMemAllocAsync", 11020, 2, "cuMemAllocAsync_ptsz"),
        ("cuMemcpyHtoD", 12000, 2, "cuMemcpyHtoD_v2_ptds"),
        ("cuGetProcAddress", 11030, 0, "cuGetProcAddress"),
        ("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
        ("cuGraphInstantiate", 12000, 0, "cuGraphInstantiateWithFlags"),
    ],
)
def test_a_name_leads_to_the_form_of_its_version_and_stream(
    name: str, version: int, flags: int, expected: str, tmp_path: Path
) -> None:
    with DriverProcess(gpu.create(tmp_path / "state", ["H200"])) as process:
        assert address(process, name, version, flags) == symbol(process, expected)


def test_what_is_not_there_is_told_with_a_status(tmp_path: Path) -> None:
    with DriverProcess(gpu.create(tmp_path / "state", ["H200"])) as process:
        for name, version, status in (("cuNoSuchThing", 12000, 1), ("cuMemAllocAsync", 11010, 2)):
            reply = process.cu("cuGetProcAddress_v2", name, out(), version, 0, out(4))
            assert (reply.number(0), reply.number(1, 4)) == (0, status)
        assert process.call("cuGetProcAddress", "cuNoSuchThing", out(), 12000, 0).result == 500
        assert process.call("cuGetProcAddress_v2", "cuInit", out(), 14000, 0, None).result == 1
        assert process.ask({"has": "cuNoSuchThing"}) == {"has": False}
        assert process.ask({"has": "nvmlDeviceSetMemoryLimits_v2"}) == {"has": False}


def test_both_libraries_export_nothing_but_their_interface() -> None:
    for library, prefix in (("libcuda.so.1", "cu"), ("libnvidia-ml.so.1", "nvml")):
        listed = subprocess.run(
            ["nm", "-D", "--defined-only", require_driver() / library],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert [line for line in listed.splitlines() if not line.split()[2].startswith(prefix)] == []


def test_the_driver_never_calls_out_to_a_preloaded_library() -> None:
    """A preloaded hook would otherwise see calls that the program did not make."""
    relocations = subprocess.run(
        ["readelf", "-rW", BUILD / "libcuda.so.1"], capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"\bcu[A-Z]\w+", relocations) == []


def nvcc(folder: Path, source: str, *options: str | Path) -> Path:
    """Compiles the source; skips without a compiler."""
    compiler = shutil.which("nvcc")
    if compiler is None:
        pytest.skip("nvcc is not on this machine")
    (folder / "program.cu").write_text(source)
    command = [compiler, "-o", folder / "program", folder / "program.cu", *options]
    subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return folder / "program"


def test_a_program_of_nvidias_static_runtime_gets_as_far_as_the_runtime_lets_it(tmp_path: Path) -> None:
    """It finds all entry points and tables; then it verifies that the driver is NVIDIA's own, and ends."""
    program = nvcc(
        tmp_path,
        "#include <cstdio>\n#include <cuda_runtime.h>\n"
        'int main() { int n = 0; printf("%d\\n", (int)cudaGetDeviceCount(&n)); return 0; }\n',
    )
    env = gpu.environment(gpu.create(tmp_path / "state", ["H200"]), require_driver())
    printed = subprocess.run([program], env=env, capture_output=True, text=True, check=True).stdout
    assert (
        printed == "103\n"
    )  # cudaErrorSoftwareValidityNotEstablished: what only NVIDIA's driver can establish


VECTOR_ADD = """\
#include <cstdio>
#include <cuda_runtime.h>
#include <unistd.h>
__global__ void add(float *a, const float *b) { a[threadIdx.x] += b[threadIdx.x]; }
int main() {
    float *a, *b, host[4] = {1, 2, 3, 4};
    void *large;
    cudaMalloc(&a, 1 << 20);
    cudaMalloc(&b, 1 << 20);
    cudaMemcpy(a, host, sizeof host, cudaMemcpyHostToDevice);
    cudaMemcpy(b, a, sizeof host, cudaMemcpyDeviceToDevice);
    add<<<4, 256>>>(a, b);
    add<<<4, 256>>>(a, b);
    int synchronised = cudaDeviceSynchronize(), launched = cudaGetLastError();
    cudaMemcpy(host, b, sizeof host, cudaMemcpyDeviceToHost);
    printf("%d %d %g %d\\n", synchronised, launched, host[3], (int)cudaMalloc(&large, (size_t)1 << 45));
    fflush(stdout);
    return read(0, host, 1) < 0;
}
"""


@pytest.mark.parametrize(
    ("runtime", "launches"), [("cudart.o", (2, 0, 0)), ("cudart_per_thread.o", (0, 2, 0))]
)
def test_a_program_that_nvcc_compiled_runs_on_the_small_runtime(
    runtime: str, launches: tuple[int, int, int], tmp_path: Path
) -> None:
    program = nvcc(tmp_path, VECTOR_ADD, "-cudart", "none", require_driver() / runtime, "-lpthread", "-ldl")
    state = gpu.create(tmp_path / "state", ["H200"])
    env = gpu.environment(state, BUILD)
    with (
        gpu.Machine(state) as machine,
        subprocess.Popen(
            [program], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as running,
    ):
        assert running.stdout
        assert running.stdout.readline() == "0 0 4 2\n"
        held = {each.kind: each.bytes >> 20 for each in machine.holdings(running.pid)}
        assert held == {"context": 527, "plain": 4, "module": 2}
        assert machine.launches(running.pid) == launches
        running.communicate("")


def test_the_symbol_list_is_sorted_as_its_search_needs() -> None:
    names = re.findall(r"SYMBOL\((\w+), (\d+)", (ROOT / "native/sim/libcuda/symbols.def").read_text())
    assert len(names) > 600
    assert [name for name, _ in names] == sorted(name for name, _ in names)
