"""NVML as NVIDIA's own Python binding reads it, and what happens to cards from outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simcluster import gpu

from .sim_driver_client import MIB, DriverProcess, out, python

HEAD = """
import json, pynvml as N
N.nvmlInit()
h = N.nvmlDeviceGetHandleByIndex(0)
def ask(call, *arguments, **named):
    try:
        return call(*arguments, **named)
    except N.NVMLError as error:
        return "error %d" % error.value
"""


def nvml(body: str, state: Path, **options: str) -> Any:
    return json.loads(python(HEAD + body, state=state, **options))


def test_a_card_answers_all_that_an_exporter_asks(tmp_path: Path) -> None:
    body = """
f = N.nvmlDeviceGetFieldValues(h, [N.NVML_FI_DEV_MEMORY_TEMP, N.NVML_FI_DEV_ECC_DBE_VOL_TOTAL,
                                   N.NVML_FI_DEV_REMAPPED_COR, N.NVML_FI_DEV_RETIRED_DBE,
                                   N.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
print(json.dumps({
    "name": N.nvmlDeviceGetName(h), "minor": N.nvmlDeviceGetMinorNumber(h),
    "bus": N.nvmlDeviceGetPciInfo(h).busId, "temperature": N.nvmlDeviceGetTemperature(h, 0),
    "power": N.nvmlDeviceGetPowerUsage(h), "limit": N.nvmlDeviceGetEnforcedPowerLimit(h),
    "clock": N.nvmlDeviceGetClockInfo(h, N.NVML_CLOCK_SM), "pstate": N.nvmlDeviceGetPerformanceState(h),
    "fan": ask(N.nvmlDeviceGetFanSpeed, h), "ecc": N.nvmlDeviceGetEccMode(h),
    "uncorrected": N.nvmlDeviceGetTotalEccErrors(h, 1, 0), "retired": ask(N.nvmlDeviceGetRetiredPages, h, 1),
    "remapped": N.nvmlDeviceGetRemappedRows(h), "capability": N.nvmlDeviceGetCudaComputeCapability(h),
    "encoder": N.nvmlDeviceGetEncoderUtilization(h)[0], "pcie": N.nvmlDeviceGetCurrPcieLinkGeneration(h),
    "driver": N.nvmlSystemGetDriverVersion(), "cuda": N.nvmlSystemGetCudaDriverVersion(),
    "energy": N.nvmlDeviceGetTotalEnergyConsumption(h) >= 0,
    "bar1": N.nvmlDeviceGetBAR1MemoryInfo(h).bar1Total,
    "fields": [(v.nvmlReturn, v.value.uiVal) for v in f],
    "by uuid": N.nvmlDeviceGetIndex(N.nvmlDeviceGetHandleByUUID(N.nvmlDeviceGetUUID(h))),
    "limits": ask(N.nvmlDeviceGetMemoryLimits_v1, h, N.c_nvmlGetMemoryLimits_v1_t()),
}))
"""
    state = gpu.create(tmp_path / "state", ["H100-80GB-HBM3"])
    with gpu.Machine(state) as machine:
        machine.set_gauge(0, ecc_uncorrected_volatile=3, recovery_action=1)
    assert nvml(body, state) == {
        "name": "NVIDIA H100 80GB HBM3",
        "minor": 0,
        "bus": "00000000:00:07.0",
        "temperature": 28,
        "power": 71_000,
        "limit": 700_000,
        "clock": 1980,
        "pstate": 0,
        "fan": "error 3",
        "ecc": [1, 1],
        "uncorrected": 3,
        "retired": "error 3",
        "remapped": [0, 0, 0, 0],
        "capability": [9, 0],
        "encoder": 0,
        "pcie": 5,
        "driver": "550.90.07",
        "cuda": 12040,
        "energy": True,
        "bar1": 131072 * MIB,
        "fields": [[0, 38], [0, 3], [0, 0], [3, 0], [3, 0]],
        "by uuid": 0,
        "limits": "error 13",
    }


MEMORY = """
v1 = N.nvmlDeviceGetMemoryInfo(h)
v2 = ask(N.nvmlDeviceGetMemoryInfo, h, version=N.nvmlMemory_v2)
if not isinstance(v2, str):
    v2 = [each >> 20 for each in (v2.total, v2.reserved, v2.used, v2.free)]
print(json.dumps([[v1.total >> 20, v1.used >> 20, v1.free >> 20], v2]))
"""


def test_memory_in_both_forms(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "new", ["T4-15360"])
    with DriverProcess(state) as process:
        process.start().alloc(1000 * MIB)
        assert nvml(MEMORY, state) == [[15360, 449 + 1105, 13806], [15360, 449, 1105, 13806]]
    old = gpu.create(tmp_path / "old", ["T4"])
    assert nvml(MEMORY, old) == [[15079, 10, 15069], "error 13"]


PROCESSES = """
print(json.dumps([[p.pid, p.usedGpuMemory >> 20] for p in N.nvmlDeviceGetComputeRunningProcesses(h)]))
"""


def test_processes_are_listed_on_the_host_and_hidden_in_a_container(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "state", ["H200"])
    with DriverProcess(state, visible="0") as first, DriverProcess(state) as second:
        first.start().alloc(4 * MIB)
        second.start()
        assert nvml(PROCESSES, state) == [[first.pid, 531], [second.pid, 527]]
        assert nvml(PROCESSES, state, visible="all") == []
        assert nvml(PROCESSES, state, visible="all", GPUSLICE_SIM_HOST_PID="1") == [
            [first.pid, 531],
            [second.pid, 527],
        ]
        first.kill()
        assert nvml(PROCESSES, state) == [[second.pid, 527]]


READER = """
from gpuslice.adapters.gpu.processes import ProcessReader
print(json.dumps([[each.pid, each.memory_bytes >> 20] for each in ProcessReader(h, "").read(1.0)]))
"""


@pytest.mark.parametrize("version", ["418.87.01", "470.57.02", "535.54.03", "580.82.07"])
def test_the_exporter_reads_the_process_list_of_any_driver(tmp_path: Path, version: str) -> None:
    """They have it in different forms; some of 535 write entries that are longer than the form says."""
    state = gpu.create(tmp_path / "state", ["V100-SXM2-16GB"], driver_version=version)
    with gpu.Machine(state) as machine:
        for pid in (4711, 4712, 4713):
            machine.add_ghost(0, pid, pid - 4000, "python")
    assert nvml(READER, state) == [[4711, 711], [4712, 712], [4713, 713]]


SOURCE = """
import asyncio
from gpuslice.adapters.gpu.nvml import NvmlSource

async def processes():
    source = NvmlSource()
    try:
        found = await source.processes()
        again = await source.processes()
        assert found == again
        print(json.dumps([[each.pid, each.uuid, each.memory_bytes >> 20] for each in found]))
    finally:
        await source.close()

asyncio.run(processes())
"""


def test_the_agent_reads_the_processes_of_every_card(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "state", ["V100-SXM2-16GB", "V100-SXM2-16GB"])
    with gpu.Machine(state) as machine:
        machine.add_ghost(0, 100, 1000, "python")
        machine.add_ghost(1, 100, 2000, "python")
    found = nvml(SOURCE, state)
    assert [[pid, mib] for pid, _, mib in found] == [[100, 1000], [100, 2000]]
    assert len({uuid for _, uuid, _ in found}) == 2


LINKS = """
import asyncio
from gpuslice.adapters.gpu.nvml import NvmlSource

async def links():
    source = NvmlSource()
    try:
        found = await source.inventory()
        assert (await source.inventory()).links == found.links
        index = {card.uuid: card.index for card in found.cards}
        pairs = [(*sorted((index[one.uuid], index[one.other])), one.link) for one in found.links]
        print(json.dumps(sorted(pairs)))
    finally:
        await source.close()

asyncio.run(links())
"""


def test_the_agent_reads_how_each_pair_of_cards_is_joined(tmp_path: Path) -> None:
    """Of the simulated cards those with links reach each other by NVLink; the others sit on buses apart."""
    models = ["V100-SXM2-16GB", "V100-SXM2-16GB", "RTX-2080-Ti", "RTX-2080-Ti"]
    state = gpu.create(tmp_path / "state", models)
    nvlink, numa = 3, 1
    apart = [[one, other, numa] for one, other in ((0, 2), (0, 3), (1, 2), (1, 3), (2, 3))]
    assert nvml(LINKS, state) == [[0, 1, nvlink], *apart]


DIVIDED = """
import asyncio
from gpuslice.adapters.gpu.nvml import NvmlSource

async def divided():
    source = NvmlSource()
    try:
        print(json.dumps([card.divided for card in (await source.inventory()).cards]))
    finally:
        await source.close()

asyncio.run(divided())
"""


def test_the_agent_reads_which_cards_are_in_mig_mode(tmp_path: Path) -> None:
    """A V100 cannot tell, which means no."""
    divided = gpu.CardSpec("A100-SXM4-40GB", mig=("3g.20gb",))
    assert nvml(DIVIDED, gpu.create(tmp_path / "divided", [divided, "A100-SXM4-40GB"])) == [True, False]
    assert nvml(DIVIDED, gpu.create(tmp_path / "older", ["V100-SXM2-16GB"])) == [False]


def test_a_process_without_a_figure_has_none(tmp_path: Path) -> None:
    """Drivers of 535 to 560 list processes in a PID namespace with 0 bytes, which is not what they hold."""
    state = gpu.create(tmp_path / "state", ["H200"])
    with gpu.Machine(state) as machine:
        machine.add_ghost(0, 4711, 500, "python")
    for figures in ("none", "unknown"):
        code = READER.replace(" >> 20", "")
        assert nvml(code, state, visible="all", GPUSLICE_SIM_PROCESS_FIGURES=figures) == [[4711, None]]


def test_an_xid_reaches_each_listener_once(tmp_path: Path) -> None:
    body = """
from simcluster import gpu
import os
events = N.nvmlEventSetCreate()
N.nvmlDeviceRegisterEvents(h, N.nvmlEventTypeXidCriticalError, events)
with gpu.Machine(os.environ["GPUSLICE_SIM_STATE"]) as machine:
    machine.inject_xid(1, 31)
    machine.inject_xid(0, 79)
first = N.nvmlEventSetWait_v2(events, 1000)
print(json.dumps([first.eventData, N.nvmlDeviceGetIndex(first.device), first.gpuInstanceId,
                  ask(N.nvmlEventSetWait_v2, events, 30)]))
"""
    state = gpu.create(tmp_path / "state", ["T4", "T4"])
    with gpu.Machine(state) as machine:
        machine.inject_xid(0, 13)  # before anyone listened
    assert nvml(body, state) == [79, 0, 0xFFFFFFFF, "error 10"]


def test_a_lost_card_is_lost_to_nvml_and_cuda_until_it_is_back(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "state", ["T4", "T4"])
    body = """
print(json.dumps([N.nvmlDeviceGetCount(), N.nvmlDeviceGetTemperature(h, 0)]))
"""
    with gpu.Machine(state) as machine, DriverProcess(state) as process:
        process.start()
        machine.lose(0)
        process.cu("nvmlInit_v2")
        assert process.call("nvmlDeviceGetHandleByIndex_v2", 0, out()).result == 15
        assert process.call("nvmlDeviceGetHandleByIndex_v2", 1, out()).result == 0
        assert process.call("cuMemAlloc_v2", out(), MIB).result == 999
        machine.restore(0)
        assert nvml(body, state) == [2, 49]
        machine.fail(0, 719)
        assert process.call("cuCtxSynchronize").result == 719


def test_mig_devices_are_found_below_their_card(tmp_path: Path) -> None:
    body = """
def one(i):
    m = N.nvmlDeviceGetMigDeviceHandleByIndex(h, i)
    a = N.nvmlDeviceGetAttributes_v2(m)
    return [N.nvmlDeviceGetName(m), N.nvmlDeviceGetGpuInstanceId(m), N.nvmlDeviceGetComputeInstanceId(m),
            N.nvmlDeviceGetMemoryInfo(m).total >> 20, a.multiprocessorCount, a.gpuInstanceSliceCount,
            N.nvmlDeviceIsMigDeviceHandle(m).value, ask(N.nvmlDeviceGetUtilizationRates, m)]
print(json.dumps([N.nvmlDeviceGetMigMode(h), N.nvmlDeviceGetMaxMigDeviceCount(h), one(0), one(1),
                  ask(N.nvmlDeviceGetMigDeviceHandleByIndex, h, 2), ask(N.nvmlDeviceGetUtilizationRates, h)]))
"""
    card = gpu.CardSpec("H200", mig=("3g.71gb", "1g.18gb"))
    assert nvml(body, gpu.create(tmp_path / "state", [card])) == [
        [1, 1],
        7,
        ["NVIDIA H200 MIG 3g.71gb", 1, 0, 71424, 60, 4, 1, "error 3"],
        ["NVIDIA H200 MIG 1g.18gb", 2, 0, 16384, 16, 1, 1, "error 3"],
        "error 6",
        "error 3",
    ]


BUSY = """
import time
time.sleep(0.4)
try:
    samples = [[s.pid, s.smUtil] for s in N.nvmlDeviceGetProcessUtilization(h, 0)]
except N.NVMLError as error:
    samples = "error %d" % error.value
print(json.dumps([N.nvmlDeviceGetUtilizationRates(h).gpu, samples]))
"""


def test_utilisation_follows_the_kernels_and_whose_they_are(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "state", ["H200"])
    assert nvml(BUSY, state) == [0, "error 6"]
    with DriverProcess(state) as first, DriverProcess(state) as second:
        for process in (first.start(), second.start()):
            process.launch(process.kernel(), 5_000_000_000)
        percent, samples = nvml(BUSY, state)
        assert percent == 100
        assert sorted(samples) == sorted([[first.pid, 50], [second.pid, 50]])
        second.kill()
        percent, samples = nvml(BUSY, state)
        assert (percent, dict(samples)[first.pid]) == (100, 100)


def test_gpm_exists_from_hopper_on(tmp_path: Path) -> None:
    body = """
import time
a, b = N.nvmlGpmSampleAlloc(), N.nvmlGpmSampleAlloc()
N.nvmlGpmSampleGet(h, a); time.sleep(0.2); N.nvmlGpmSampleGet(h, b)
g = N.c_nvmlGpmMetricsGet_t(); g.version = 1; g.sample1, g.sample2 = a, b
for i, m in enumerate((2, 10, 999)): g.metrics[i].metricId = m
g.numMetrics = 3
N.nvmlGpmMetricsGet(g)
print(json.dumps([[g.metrics[i].nvmlReturn, g.metrics[i].value] for i in range(3)]))
"""
    state = gpu.create(tmp_path / "state", ["H200"])
    with DriverProcess(state) as process:
        process.start().launch(process.kernel(), 5_000_000_000)
        busy, memory, unknown = nvml(body, state)
    assert busy == [0, pytest.approx(100, abs=1)]
    assert memory == [0, pytest.approx(40, abs=1)]
    assert unknown[0] == 3
    support = "print(json.dumps(N.nvmlGpmQueryDeviceSupport(h).isSupportedDevice))"
    assert nvml(support, state) == 1
    assert nvml(support, gpu.create(tmp_path / "old", ["T4"])) == 0
