"""What the page says when something cannot be read: absent, never 0, and with a reason."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from simcluster import gpu
from tests import HANG_S
from tests.integration.exporter_rig import Page, gpu_node, have_native, running_exporter
from tests.integration.sim_node import NATIVE
from tests.integration.test_exporter_story import app, running

pytestmark = pytest.mark.skipif(not have_native(), reason="native libraries are not built: run `make native`")

WORKS = "gpuslice_exporter_collector_success"
XIDS = "gpuslice_gpu_xid_errors_total"
CARDS = ["V100-SXM2-16GB", "T4"]
NOT_SUPPORTED, UNKNOWN = 3, 999  # of nvmlReturn_t


async def test_a_lost_card_leaves_the_others_and_is_named(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", CARDS)
    async with running_exporter(state, kubernetes="false") as exporter:
        await exporter.page_when(lambda page: len(page.all("gpuslice_gpu_up")) == 2)
        with gpu.Machine(state) as machine:
            machine.lose(0)
            uuid = machine.cards()[0].uuid
            page = await exporter.page_when(lambda page: page.value("gpuslice_gpu_up", gpu_uuid=uuid) == 0)
            assert page.one("gpuslice_gpu_up", gpu="1") == 1
            assert page.one("gpuslice_unavailable", gpu_uuid=uuid, what="card") == 1
            assert page.all("DCGM_FI_DEV_GPU_TEMP", UUID=uuid) == []
            assert len(page.all("DCGM_FI_DEV_GPU_TEMP")) == 1
            assert page.one("gpuslice_exporter_devices") == 1
            assert page.one("gpuslice_exporter_devices_expected") == 2
            machine.restore(0)
        await exporter.page_when(lambda page: page.value("gpuslice_gpu_up", gpu_uuid=uuid) == 1)


async def test_a_driver_that_is_away_and_its_return_are_logged_once(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", CARDS)
    async with running_exporter(state, kubernetes="false") as exporter:
        await exporter.page_when(lambda page: page.value(WORKS, collector="xid") == 1)
        with gpu.Machine(state) as machine:
            machine.lose(0)
            machine.unload_driver()
            await exporter.page_when(
                lambda page: {page.value(WORKS, collector=name) for name in ("driver", "xid")} == {0}
            )
            before = len(exporter.log)
            await asyncio.sleep(5)  # it is asked again each two seconds
            assert [each for each in exporter.log[before:] if each["event"].startswith("collector")] == []
            machine.restore(0)
            machine.load_driver()
        await exporter.page_when(lambda page: page.value(WORKS, collector="xid") == 1)
        again = [each["collector"] for each in exporter.logged("collector works again")]
        assert sorted(again) == ["driver", "xid"]


async def test_an_exporter_whose_driver_was_replaced_is_started_again(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", CARDS)
    async with running_exporter(state, kubernetes="false") as exporter:
        await exporter.page_when(lambda page: len(page.all("gpuslice_gpu_up")) == 2)
        with gpu.Machine(state) as machine:
            machine.lose(0)
            machine.load_driver("999.1")
        assert await asyncio.wait_for(exporter.process.wait(), HANG_S) == 1
    assert "the driver was replaced" in exporter.log[-1]["event"]


async def test_a_card_without_memory_of_its_own_is_there_all_the_same(tmp_path: Path) -> None:
    """As GB10 and Jetson: the driver has no figure of memory, and all others."""
    state = gpu.create(tmp_path / "machine", CARDS)
    with gpu.Machine(state) as machine:
        machine.refuse(0, "nvmlDeviceGetMemoryInfo", NOT_SUPPORTED)
    async with running_exporter(state, kubernetes="false") as exporter:
        page = await exporter.page_when(lambda page: len(page.all("gpuslice_gpu_temperature_celsius")) == 2)
        assert page.one("gpuslice_gpu_up", gpu="0") == 1
        assert page.one("gpuslice_unavailable", gpu="0", what="card_memory") == 1
        assert page.all("DCGM_FI_DEV_GPU_UTIL", gpu="0")
        assert not page.all("DCGM_FI_DEV_FB_USED", gpu="0")
        assert not page.all("gpuslice_gpu_memory_used_bytes", gpu="0")
        assert page.all("gpuslice_gpu_memory_used_bytes", gpu="1")


async def test_a_figure_that_failed_once_is_back_soon(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", CARDS)
    warm = "gpuslice_gpu_temperature_celsius"
    async with running_exporter(state, kubernetes="false") as exporter:
        await exporter.page_when(lambda page: page.all(warm, gpu="0"))
        with gpu.Machine(state) as machine:
            machine.refuse(0, "nvmlDeviceGetTemperature", UNKNOWN)
            page = await exporter.page_when(lambda page: not page.all(warm, gpu="0"))
            assert page.all("gpuslice_gpu_power_watts", gpu="0")
            machine.refuse(0, "", 0)
        await exporter.page_when(lambda page: page.all(warm, gpu="0"))  # not ten minutes later


async def test_xid_counters_start_at_zero_and_have_a_last_time(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", CARDS)
    async with running_exporter(state, kubernetes="false") as exporter:
        page = await exporter.page_when(lambda page: page.value(XIDS, gpu="0", xid="79") == 0)
        assert page.all("gpuslice_gpu_xid_last_timestamp_seconds") == []
        assert page.one("DCGM_FI_DEV_XID_ERRORS", gpu="0") == 0
        with gpu.Machine(state) as machine:
            machine.inject_xid(0, 79)
            machine.inject_xid(0, 79)
        page = await exporter.page_when(lambda page: page.value(XIDS, gpu="0", xid="79") == 2)
        assert page.one(XIDS, gpu="1", xid="79") == 0
        assert page.one("gpuslice_gpu_xid_last_timestamp_seconds", gpu="0", xid="79") > 1.7e9
        assert page.one("DCGM_FI_DEV_XID_ERRORS", gpu="0", err_code="79") == 79


async def test_without_a_driver_the_page_answers_and_shows_no_card(tmp_path: Path) -> None:
    async with running_exporter(tmp_path / "no such machine", kubernetes="false") as exporter:
        page = await exporter.page_when(
            lambda page: page.value("gpuslice_exporter_collector_success", collector="driver") == 0
        )
        assert page.all("gpuslice_gpu_up") == []
        assert page.all("gpuslice_exporter_sample_age_seconds") == []
        gpu.create(tmp_path / "no such machine", CARDS)  # the driver is loaded at last
        await exporter.page_when(lambda page: len(page.all("gpuslice_gpu_up")) == 2)


async def test_a_library_that_is_not_there_is_a_reason_until_it_is(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", CARDS)
    empty = tmp_path / "driver"
    empty.mkdir()
    async with running_exporter(state, driver=str(empty), kubernetes="false") as exporter:
        await exporter.page_when(
            lambda page: page.value("gpuslice_exporter_collector_success", collector="driver") == 0
        )
        failed = [each for each in exporter.logged("collector failed") if each["collector"] == "driver"]
        assert len(failed) == 1
        assert "Library Not Found" in failed[0]["reason"]
        (empty / "libnvidia-ml.so.1").symlink_to(NATIVE / "libnvidia-ml.so.1")
        await exporter.page_when(lambda page: len(page.all("gpuslice_gpu_up")) == 2)


async def test_a_library_outside_the_loaders_way_is_named(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", CARDS)
    empty = tmp_path / "driver"
    empty.mkdir()
    library = str(NATIVE / "libnvidia-ml.so.1")
    named = {"driver": str(empty), "nvml_library": library, "kubernetes": "false"}
    async with running_exporter(state, **named) as exporter:
        page = await exporter.page_when(lambda page: len(page.all("gpuslice_gpu_up")) == 2)
        assert len(page.all("DCGM_FI_DEV_GPU_TEMP")) == 2


async def test_pods_that_are_not_known_are_said_to_be_and_not_shown_as_idle(tmp_path: Path) -> None:
    async with gpu_node(tmp_path) as host, host.exporter(pod_source="off") as exporter:
        await host.node.create(app("app-0", 4))
        await running(host, "app-0")
        page = await exporter.page_when(lambda page: page.all("gpuslice_unavailable", what="attribution"))
        assert page.one("gpuslice_exporter_attribution_available") == 0
        # the interposer's own count is what is left
        page = await exporter.page_when(
            lambda page: page.value("gpuslice_container_memory_used_bytes", pod="app-0")
        )
        assert page.all("gpuslice_container_sm_utilization_ratio", pod="app-0") == []
        assert page.all("gpuslice_container_processes", pod="app-0") == []
        for parts, used in page.balance().values():
            assert parts == used


async def test_a_kubelet_that_goes_away_leaves_the_last_book_until_it_is_back(tmp_path: Path) -> None:
    held = "gpuslice_gpu_memory_allocated_bytes"

    def book_is(success: int) -> Callable[[Page], bool]:
        name = "gpuslice_exporter_collector_success"
        return lambda page: page.value(name, collector="pod_resources") == success

    async with gpu_node(tmp_path) as host, host.exporter() as exporter:
        await host.node.create(app("app-0", 4))
        await running(host, "app-0")
        page = await exporter.page_when(lambda page: page.value(held))
        given_bytes = page.one(held)
        await host.node.crash()
        page = await exporter.page_when(book_is(0))
        assert page.one("gpuslice_gpu_up") == 1
        assert page.one(held) == given_bytes
        await host.node.start()
        await exporter.page_when(lambda page: book_is(1)(page) and page.value(held) == given_bytes)


async def test_a_hung_driver_does_not_hang_the_page_and_its_old_values_end(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", CARDS)
    settings = {"stale_after_s": "0.6", "driver_timeout_s": "0.5"}
    async with running_exporter(state, kubernetes="false", **settings) as exporter:
        await exporter.page_when(lambda page: page.all("gpuslice_gpu_up"))
        with gpu.Machine(state) as machine, hung(machine, state):
            page = await exporter.page_when(
                lambda page: (
                    not page.all("gpuslice_gpu_up")
                    and page.value("gpuslice_exporter_collector_success", collector="driver") == 0
                )
            )
            assert page.one("gpuslice_exporter_sample_age_seconds") > 0.6
            assert page.all("DCGM_FI_DEV_GPU_TEMP") == []
        await exporter.page_when(lambda page: page.all("gpuslice_gpu_up"))


@contextlib.contextmanager
def hung(machine: gpu.Machine, state: Path) -> Iterator[None]:
    """The driver's lock is held by somebody who lives and does nothing: us."""
    machine._state.attached += 1
    number = int(machine._state.attached)
    with Path(f"{state}.alive").open("r+b") as living:
        fcntl.lockf(living, fcntl.LOCK_EX, 1, len(machine._state.processes) + number)
        while machine._state.lock:  # its holder would end our time with its own
            pass
        machine._state.lock = number
        try:
            yield
        finally:
            machine._state.lock = 0


async def test_counters_are_taken_up_when_their_config_map_changes(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", CARDS)
    volume = ConfigMapVolume(tmp_path / "config")
    volume.write("DCGM_FI_DEV_GPU_TEMP, gauge, old name\nDCGM_FI_DEV_GPU_TEMP_CELSIUS, gauge, new name\n")
    async with running_exporter(state, "-f", str(volume.file), kubernetes="false") as exporter:
        page = await exporter.page_when(lambda page: page.all("DCGM_FI_DEV_GPU_TEMP"))
        assert page.one("DCGM_FI_DEV_GPU_TEMP", gpu="0") == page.one("DCGM_FI_DEV_GPU_TEMP_CELSIUS", gpu="0")
        volume.write("DCGM_FI_DEV_POWER_USAGE, gauge, power\nnonsense\nDCGM_FI_NOT_THERE, gauge, x\n")
        page = await exporter.page_when(lambda page: page.all("DCGM_FI_DEV_POWER_USAGE"))
        assert page.all("DCGM_FI_DEV_GPU_TEMP") == []
        assert page.one("gpuslice_exporter_config_problems") == 2
        assert page.one("gpuslice_exporter_config_last_reload_successful") == 1
        volume.write("only nonsense\n")
        page = await exporter.page_when(
            lambda page: page.value("gpuslice_exporter_config_last_reload_successful") == 0
        )
        assert page.all("DCGM_FI_DEV_POWER_USAGE")  # the counters before stay in force


async def test_hardware_counters_are_taken_up_too_and_those_there_stay(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", ["H100-80GB-HBM3"])
    volume = ConfigMapVolume(tmp_path / "config")
    volume.write("DCGM_FI_PROF_GR_ENGINE_ACTIVE, gauge, engine\n")
    async with running_exporter(state, "-f", str(volume.file), kubernetes="false") as exporter:
        await exporter.page_when(lambda page: page.all("DCGM_FI_PROF_GR_ENGINE_ACTIVE"))
        volume.write("DCGM_FI_PROF_GR_ENGINE_ACTIVE, gauge, engine\nDCGM_FI_PROF_SM_ACTIVE, gauge, SMs\n")
        page = await exporter.page_when(lambda page: page.all("DCGM_FI_PROF_SM_ACTIVE"))
        assert page.all("DCGM_FI_PROF_GR_ENGINE_ACTIVE")


class ConfigMapVolume:
    """A mounted ConfigMap, changed as kubelet changes it: by renaming the link ..data."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._turn = 0
        folder.mkdir()
        self.file = folder / "counters.csv"
        self.file.symlink_to("..data/counters.csv")

    def write(self, text: str) -> None:
        self._turn += 1
        version = self._folder / f"..{self._turn}"
        version.mkdir()
        (version / "counters.csv").write_text(text)
        (self._folder / "..data_tmp").symlink_to(version.name)
        (self._folder / "..data_tmp").rename(self._folder / "..data")
