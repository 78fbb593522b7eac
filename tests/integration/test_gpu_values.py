"""Figures that we unpack ourselves are those that NVIDIA's own binding reads, on the simulated driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simcluster import gpu
from tests.integration.exporter_rig import have_native
from tests.integration.sim_node import NATIVE

pytestmark = pytest.mark.skipif(not have_native(), reason="native libraries are not built: run `make native`")

VALUES = """
import json, pynvml as N
from gpuslice.adapters.gpu.values import FieldValues, field_id
N.nvmlInit()
card = N.nvmlDeviceGetHandleByIndex(0)
ids = [field_id(name) for name in sorted(vars(N)) if name.startswith("NVML_FI_DEV_")]
ids += [field_id("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX", 0xFFFFFFFF), (999999, 0)]
members = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
reader, found = FieldValues(card), []
def theirs(asked):
    return [
        (one.nvmlReturn, 0.0 if one.nvmlReturn else float(getattr(one.value, members[one.valueType])))
        for one in N.nvmlDeviceGetFieldValues(card, asked)
    ]
for asked in (ids, ids[:3], ids):
    before, ours, after = theirs(asked), reader.read(asked), theirs(asked)  # counters go on meanwhile
    verdicts = [[verdict for verdict, _ in each] for each in (before, ours, after)]
    assert verdicts[0] == verdicts[1] == verdicts[2]
    wrong = [one for one in zip(asked, before, ours, after) if not one[1] <= one[2] <= one[3]]
    found.append([wrong, len(ours), sum(not verdict for verdict, _ in ours)])
print(json.dumps(found))
"""
COUNTERS = """
import json, time, pynvml as N
from gpuslice.adapters.gpu.gpm import PROFILING_FIELDS, GpmReader
N.nvmlInit()
card = N.nvmlDeviceGetHandleByIndex(0)
reader = GpmReader(card)
found = []
for fields in ([1001], [1001], sorted(PROFILING_FIELDS), [1009]):
    found.append(reader.read(fields))
    time.sleep(0.05)
print(json.dumps(found))
"""


PCIE_TOTAL = """
import asyncio, json, sys, pynvml as N
from gpuslice.adapters.gpu.telemetry import NvmlTelemetry
from simcluster import gpu
async def play():
    telemetry, found, moved = NvmlTelemetry(), [], 0
    with gpu.Machine({state!r}) as machine:
        for gib in (0, 0, 6, 5):
            moved += gib << 30
            machine.set_gauge(0, pcie_tx_bytes=moved)
            (card,) = (await telemetry.sample({{-1009: "", -1010: ""}})).cards
            found.append(card.fields.get(-1009))
            await asyncio.sleep(0.2)
    return found, N.nvmlDeviceGetFieldValues(N.nvmlDeviceGetHandleByIndex(0), [197])[0].value.ullVal
print(json.dumps(asyncio.run(play())))
"""
NO_VALUES = """
import asyncio, json, pynvml as N
from gpuslice.adapters.gpu.telemetry import NvmlTelemetry
N.nvmlInit()
N._nvmlGetFunctionPointer_cache["nvmlDeviceGetFieldValues"] = lambda *_: N.NVML_ERROR_NOT_SUPPORTED
wanted = {150: "", 1009: "", 449: "", 230: "NVML_FI_DEV_ECC_CURRENT", -197: "NVML_FI_DEV_PCIE_COUNT_TX_BYTES"}
async def samples():
    telemetry = NvmlTelemetry()
    return [await telemetry.sample(wanted) for _ in range(2)]
def told(sample):
    return sample.lost, [(sorted(card.fields), card.unsupported) for card in sample.cards]
print(json.dumps([told(sample) for sample in asyncio.run(samples())]))
"""


SAMPLES = """
import asyncio, json, pynvml as N
from gpuslice.adapters.gpu.telemetry import RETRY_UNSUPPORTED_S, NvmlTelemetry
N.nvmlInit()
card, alive, now_s = N.nvmlDeviceGetHandleByIndex(0), 0, 0.0
def counted(name, by):
    call = N._nvmlGetFunctionPointer(name)
    def count(*given):
        global alive
        alive += by
        return call(*given)
    N._nvmlGetFunctionPointer_cache[name] = count
counted("nvmlGpmSampleAlloc", 1)
counted("nvmlGpmSampleFree", -1)
get = N._nvmlGetFunctionPointer("nvmlGpmSampleGet")
async def play():
    global now_s
    telemetry = NvmlTelemetry(clock=lambda: now_s)
    N._nvmlGetFunctionPointer_cache["nvmlGpmSampleGet"] = lambda *_: N.NVML_ERROR_NO_PERMISSION
    for _ in range(3):
        await telemetry.sample({1001: ""})
        now_s += RETRY_UNSUPPORTED_S
    refused = alive
    N._nvmlGetFunctionPointer_cache["nvmlGpmSampleGet"] = get
    await telemetry.sample({1001: ""})
    assert alive == 2
    await telemetry.renew()
    return refused, alive
print(json.dumps(asyncio.run(play())))
"""


def on_card(body: str, state: Path) -> Any:
    environment = {**os.environ, **gpu.environment(state, NATIVE)}
    told = subprocess.run(
        [sys.executable, "-c", body], env=environment, capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    return json.loads(told.stdout)


def test_field_values_are_those_of_nvidias_binding(tmp_path: Path) -> None:
    whole, few, again = on_card(VALUES, gpu.create(tmp_path / "state", ["H100-80GB-HBM3"]))
    assert [wrong for wrong, *_ in (whole, few, again)] == [[]] * 3
    assert whole[1] > 200
    assert whole[2] > 20  # that the card gives


def test_counters_are_read_between_two_samples(tmp_path: Path) -> None:
    first, one, all_of_them, another = on_card(COUNTERS, gpu.create(tmp_path / "state", ["H100-80GB-HBM3"]))
    assert first == {}
    assert one.keys() == {"1001"}
    ratios = ("1001", "1002", "1003", "1004", "1005")
    assert {*ratios, "1009", "1010"} <= all_of_them.keys()  # at once when they are asked for
    assert all(0 <= all_of_them[field] <= 1 for field in ratios)
    assert another.keys() == {"1009"}


def test_bytes_over_pcie_add_up_beyond_the_4_gib_at_which_nvmls_counter_begins_anew(tmp_path: Path) -> None:
    """A total is summed from rates, so a busy machine's clock shows in it."""
    state = gpu.create(tmp_path / "state", ["H100-80GB-HBM3"])
    (first, none, six, eleven), nvmls = on_card(PCIE_TOTAL.format(state=str(state)), state)
    assert (first, none) == (None, 0)
    assert nvmls < 4 << 30
    assert 0.7 < six / (6 << 30) < 1.4
    assert 0.7 < (eleven - six) / (5 << 30) < 1.4


def test_a_driver_without_field_values_loses_these_alone(tmp_path: Path) -> None:
    first, second = on_card(NO_VALUES, gpu.create(tmp_path / "state", ["H100-80GB-HBM3"]))
    assert (first[0], first[1][0][0]) == ([], [150])
    lost, ((fields, unsupported),) = second
    assert (lost, fields, unsupported.keys()) == ([], [150, 1009], {"230", "-197", "449"})
    assert unsupported["-197"] == "Not Supported"


def test_counters_that_are_refused_or_looked_for_anew_leave_no_samples_behind(tmp_path: Path) -> None:
    after_refusals, after_renewal = on_card(SAMPLES, gpu.create(tmp_path / "state", ["H100-80GB-HBM3"]))
    assert after_refusals == after_renewal == 0
