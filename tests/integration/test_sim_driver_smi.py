"""nvidia-smi and cuda_malloc, held byte for byte against what the published documents print."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from simcluster import gpu
from tests import HANG_S

from .sim_driver_client import BUILD, MIB, require_driver, run

V100_IN_CONTAINER = """\
Mon Apr 13 01:33:10 2020
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 418.87.01    Driver Version: 418.87.01    CUDA Version: 10.1     |
|-------------------------------+----------------------+----------------------+
| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |
|===============================+======================+======================|
|   0  Tesla V100-SXM2...  On   | 00000000:00:07.0 Off |                    0 |
| N/A   37C    P0    57W / 300W |   3193MiB /  4301MiB |      0%      Default |
+-------------------------------+----------------------+----------------------+

+-----------------------------------------------------------------------------+
| Processes:                                                       GPU Memory |
|  GPU       PID   Type   Process name                             Usage      |
|=============================================================================|
+-----------------------------------------------------------------------------+
"""
V100_WITHOUT_ISOLATION = """\
| N/A   37C    P0    56W / 300W |   1929MiB / 16130MiB |      1%      Default |
"""
T4_ON_THE_HOST = """\
Wed May 27 12:19:25 2020
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 418.87.01    Driver Version: 418.87.01    CUDA Version: 10.1     |
|-------------------------------+----------------------+----------------------+
| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |
|===============================+======================+======================|
|   0  Tesla T4            On   | 00000000:00:07.0 Off |                    0 |
| N/A   49C    P0    29W /  70W |   4019MiB / 15079MiB |      0%      Default |
+-------------------------------+----------------------+----------------------+

+-----------------------------------------------------------------------------+
| Processes:                                                       GPU Memory |
|  GPU       PID   Type   Process name                             Usage      |
|=============================================================================|
|    0     11563      C   /usr/bin/python3                            4009MiB |
+-----------------------------------------------------------------------------+
"""
RTX_FOUR_IDLE = """\
+-----------------------------------------------------------------------------+
| NVIDIA-SMI 460.32.03    Driver Version: 460.32.03    CUDA Version: 11.2     |
|-------------------------------+----------------------+----------------------+
| GPU  Name        Persistence-M| Bus-Id        Disp.A | Volatile Uncorr. ECC |
| Fan  Temp  Perf  Pwr:Usage/Cap|         Memory-Usage | GPU-Util  Compute M. |
|                               |                      |               MIG M. |
|===============================+======================+======================|
|   0  GeForce RTX 208...  Off  | 00000000:3D:00.0 Off |                  N/A |
| 23%   25C    P8    19W / 250W |      0MiB / 11019MiB |      0%      Default |
|                               |                      |                  N/A |
+-------------------------------+----------------------+----------------------+
|   1  GeForce RTX 208...  Off  | 00000000:41:00.0 Off |                  N/A |
| 22%   24C    P8    14W / 250W |      0MiB / 11019MiB |      0%      Default |
|                               |                      |                  N/A |
+-------------------------------+----------------------+----------------------+
|   2  GeForce RTX 208...  Off  | 00000000:B1:00.0 Off |                  N/A |
| 22%   24C    P8    13W / 250W |      0MiB / 11019MiB |      0%      Default |
|                               |                      |                  N/A |
+-------------------------------+----------------------+----------------------+
|   3  GeForce RTX 208...  Off  | 00000000:B5:00.0 Off |                  N/A |
| 23%   26C    P8    13W / 250W |      0MiB / 11019MiB |      0%      Default |
|                               |                      |                  N/A |
+-------------------------------+----------------------+----------------------+

+-----------------------------------------------------------------------------+
| Processes:                                                                  |
|  GPU   GI   CI        PID   Type   Process name                  GPU Memory |
|        ID   ID                                                   Usage      |
|=============================================================================|
|  No running processes found                                                 |
+-----------------------------------------------------------------------------+
"""
MALLOC_REFUSED = """\
gpu_cuda_malloc starting...
Detected 1 CUDA Capable device(s)

Device 0: "Tesla V100-SXM2-16GB"
  CUDA Driver Version / Runtime Version          10.1 / 10.1
  Total amount of global memory:                 4301 MBytes (4509925376 bytes)
Try to malloc 1024 MBytes memory on GPU 0
"""
CUDA_ERROR = (
    "CUDA error at cgpu_cuda_malloc.cu:119 code=2(cudaErrorMemoryAllocation) "
    '"cudaMalloc( (void**)&dev_c, malloc_size)"\n'
)
APRIL, MAY = "1586741590", "1590581965"


def slice_of_v100(folder: Path) -> Path:
    """A card as big as a container's 4 of 15 units."""
    card = gpu.CardSpec("V100-SXM2-16GB", gauges={"total_bytes": 4301 * MIB, "idle_bytes": 0})
    return gpu.create(folder / "state", [card])


@contextmanager
def holding(size: str, state: Path, visible: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A cuda_malloc that holds its memory, from the moment it has it."""
    with gpu.Machine(state) as machine:
        program = subprocess.Popen(
            [require_driver() / "cuda_malloc", size], env=gpu.environment(state, BUILD, visible)
        )
        try:
            while not any(each.kind == "plain" for each in machine.holdings(program.pid)):
                assert program.poll() is None
            yield program
        finally:
            program.kill()
            program.wait()


def test_the_table_in_a_container_is_the_published_one(tmp_path: Path) -> None:
    state = slice_of_v100(tmp_path)
    with holding("3G", state, visible="all"):
        printed = run("nvidia-smi", state=state, visible="all", SOURCE_DATE_EPOCH=APRIL)
    assert printed.stdout == V100_IN_CONTAINER


def test_the_line_without_isolation_is_the_published_one(tmp_path: Path) -> None:
    gauges = {"power_mw": 54_000, "gpu_percent": 1}  # at rest; a hundredth of the load adds two watts
    state = gpu.create(tmp_path / "state", [gpu.CardSpec("V100-SXM2-16GB", gauges=gauges)])
    with gpu.Machine(state) as machine:
        machine.add_ghost(0, 4711, 1919, "python")
    assert V100_WITHOUT_ISOLATION in run("nvidia-smi", state=state, visible="0").stdout


def test_the_table_on_the_host_names_processes(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "state", ["T4"])
    with gpu.Machine(state) as machine:
        machine.add_ghost(0, 11563, 4009, "/usr/bin/python3")
        assert run("nvidia-smi", state=state, SOURCE_DATE_EPOCH=MAY).stdout == T4_ON_THE_HOST
        machine.remove_ghost(11563)
    assert "No running processes found" in run("nvidia-smi", state=state).stdout


def test_newer_drivers_print_a_line_for_mig(tmp_path: Path) -> None:
    gauges = [(23, 25, 19), (22, 24, 14), (22, 24, 13), (23, 26, 13)]
    cards = [
        gpu.CardSpec(
            "RTX-2080-Ti", gauges={"fan_percent": fan, "temperature_c": heat, "power_mw": watts * 1000}
        )
        for fan, heat, watts in gauges
    ]
    state = gpu.create(tmp_path / "state", cards)
    table = run("nvidia-smi", state=state).stdout
    assert table.split("\n", 1)[1] == RTX_FOUR_IDLE


def test_mig_devices_have_a_table_and_lines_of_their_own(tmp_path: Path) -> None:
    state = gpu.create(
        tmp_path / "state", [gpu.CardSpec("A100-SXM4-40GB", mig=("3g.20gb", "1g.5gb"))], seed="mig"
    )
    table = run("nvidia-smi", state=state).stdout
    assert "|  0    1   0   0  |      0MiB / 19968MiB | 42      0 |  3   0    1    0    0 |\n" in table
    assert all(len(line) == 79 for line in table.splitlines()[1:] if line)
    listed = run("nvidia-smi", "-L", state=state).stdout.splitlines()
    assert listed[0].startswith("GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-")
    assert listed[1].startswith("  MIG 3g.20gb     Device  0: (UUID: MIG-")
    assert listed[2].startswith("  MIG 1g.5gb      Device  1: (UUID: MIG-")


def test_two_apps_sum_up_on_the_host(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "state", ["V100-SXM2-16GB"])
    query = ("--query-gpu=memory.used,memory.total", "--format=csv,noheader,nounits")
    with holding("3G", state), holding("3G", state):
        assert run("nvidia-smi", *query, state=state).stdout == "6396, 16130\n"
        apps = run("nvidia-smi", "--query-compute-apps=used_memory", "--format=csv", state=state).stdout
    assert apps == "used_memory [MiB]\n3193 MiB\n3193 MiB\n"
    assert run("nvidia-smi", *query, state=state).stdout == "10, 16130\n"


def test_fields_come_as_csv_with_and_without_their_units(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "state", ["T4", "T4"], seed="csv")
    fields = "--query-gpu=index,name,temperature.gpu,power.draw,fan.speed,mig.mode.current,compute_mode"
    assert run("nvidia-smi", fields, "--format=csv", "-i", "1", state=state).stdout == (
        "index, name, temperature.gpu, power.draw [W], fan.speed [%], mig.mode.current, compute_mode\n"
        "1, Tesla T4, 49, 29.00 W, [N/A], [N/A], Default\n"
    )
    displays = "--query-gpu=gpu_serial,display_active,display_mode"  # as GPUtil and nvsmi ask
    assert run("nvidia-smi", displays, "--format=csv,noheader", "-i", "0", state=state).stdout.endswith(
        ", Disabled, Disabled\n"
    )
    unknown = run("nvidia-smi", "--query-gpu=colour", "--format=csv", state=state)
    assert (unknown.returncode, unknown.stdout) == (2, 'Field "colour" is not a valid field to query.\n\n')


def test_without_driver_cards_or_with_a_lost_one_nvidia_smi_says_so(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "state", ["T4"])
    assert run("nvidia-smi", state=tmp_path / "none").returncode == 9
    assert run("nvidia-smi", state=state, visible="void").stdout == "No devices were found\n"
    with gpu.Machine(state) as machine:
        machine.lose(0)
        lost = run("nvidia-smi", state=state)
        assert (lost.returncode, "GPU is lost" in lost.stdout) == (15, True)
        machine.restore(0)
    assert run("nvidia-smi", state=state).returncode == 0


def test_a_refused_cuda_malloc_prints_the_published_lines(tmp_path: Path) -> None:
    state = slice_of_v100(tmp_path)
    with holding("3G", state, visible="0") as running:
        refused = run("cuda_malloc", "-size=1024", state=state, visible="0")
        assert (refused.returncode, refused.stdout, refused.stderr) == (1, MALLOC_REFUSED, CUDA_ERROR)
        assert running.poll() is None


def test_the_image_for_6g_fails_under_4301_mib_with_one_line(tmp_path: Path) -> None:
    failed = run("cuda_malloc", "6G", state=slice_of_v100(tmp_path), visible="0")
    assert (failed.returncode, failed.stdout, failed.stderr) == (1, "", CUDA_ERROR)


@pytest.mark.parametrize("arguments", [("3G",), ("-hold", "-size=3072"), ()])
def test_the_image_holds_its_memory_until_it_is_told_to_go(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    state = gpu.create(tmp_path / "state", ["V100-SXM2-16GB"])
    program = subprocess.Popen(
        [require_driver() / "cuda_malloc", *arguments], env=gpu.environment(state, BUILD)
    )
    with gpu.Machine(state) as machine:
        while machine.used_bytes() != 3193 * MIB:
            assert program.poll() is None
        program.send_signal(signal.SIGTERM)
        assert program.wait(timeout=HANG_S) == 0
        assert machine.used_bytes() == 0


def test_with_room_cuda_malloc_succeeds(tmp_path: Path) -> None:
    done = run("cuda_malloc", "-size=1024", state=gpu.create(tmp_path / "state", ["T4"]))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("Try to malloc 1024 MBytes memory on GPU 0\n")
