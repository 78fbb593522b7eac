"""The exporter where dcgm-exporter was: divided cards, shared cards, claims, jobs and what it derives."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from gpuslice.adapters.kube.resources import CONFIG_MAPS
from gpuslice.adapters.kubelet.proto import podresources_pb2 as pr
from gpuslice.adapters.kubelet.rpc import Server
from gpuslice.apps.exporter.fields import load as load_fields
from simcluster import gpu
from simcluster.kubelet.rpc import PodResourcesService
from tests.integration.exporter_rig import (
    PROGRAM,
    RunningExporter,
    gpu_node,
    have_native,
    running_exporter,
)
from tests.integration.sim_node import NATIVE
from tests.integration.test_exporter_story import assert_promtool_accepts

pytestmark = pytest.mark.skipif(not have_native(), reason="native libraries are not built: run `make native`")

MIB = 1 << 20
UID = "0e1c2d3f-0000-4000-8000-00000000000{}"
USED = "gpuslice_container_memory_used_bytes"
XIDS = "gpuslice_gpu_xid_errors_total"
XIDS_SEEN = "DCGM_EXP_XID_ERRORS_TOTAL"  # the reference parser puts _total behind it, as behind any counter


class Kubelet(PodResourcesService):
    """A kubelet's device assignments, as the test writes it."""

    def __init__(self) -> None:
        self.pods: list[pr.PodResources] = []

    def give(self, pod: str, resource: str, *ids: str) -> None:
        devices = [pr.ContainerDevices(resource_name=resource, device_ids=[each]) for each in ids]
        self._add(pod, pr.ContainerResources(name="main", devices=devices))

    def claim(self, pod: str, device: str) -> None:
        found = pr.ClaimResource(driver_name="gpu.nvidia.com", pool_name="n1", device_name=device)
        dynamic = pr.DynamicResource(
            claim_name=f"{pod}-gpu", claim_namespace="default", claim_resources=[found]
        )
        self._add(pod, pr.ContainerResources(name="main", dynamic_resources=[dynamic]))

    def _add(self, pod: str, container: pr.ContainerResources) -> None:
        self.pods.append(pr.PodResources(name=pod, namespace="default", containers=[container]))

    async def list(self, request: pr.ListPodResourcesRequest) -> pr.ListPodResourcesResponse:
        return pr.ListPodResourcesResponse(pod_resources=self.pods)

    async def get(self, request: pr.GetPodResourcesRequest) -> pr.GetPodResourcesResponse:
        raise NotImplementedError

    async def get_allocatable_resources(
        self, request: pr.AllocatableResourcesRequest
    ) -> pr.AllocatableResourcesResponse:
        raise NotImplementedError


@dataclass
class Host:
    """A machine: kubelet's assignments, pods by their log folders, and processes by a /proc of its own."""

    folder: Path
    state: Path
    kubelet: Kubelet = field(default_factory=Kubelet)
    pods: dict[str, str] = field(default_factory=dict)

    def pod(self, name: str) -> None:
        self.pods[name] = UID.format(len(self.pods) + 1)
        (self.folder / "pods" / f"default_{name}_{self.pods[name]}" / "main").mkdir(parents=True)

    def process(self, pid: int, pod: str, entry: int, used_mib: int, percent: int = 0) -> None:
        """A process of a pod holds memory of a card, or of a MIG device, by its place in the machine."""
        place = self.folder / "proc" / str(pid)
        place.mkdir(parents=True)
        (place / "stat").write_text(f"{pid} (app) " + " ".join(["1"] * 30))
        (place / "cgroup").write_text(f"0::/kubepods/burstable/pod{self.pods[pod]}/{pid:064x}\n")
        with gpu.Machine(self.state) as machine:
            machine.add_ghost(entry, pid, used_mib, "app", percent)

    def exporter(
        self, *arguments: str, **settings: str
    ) -> contextlib.AbstractAsyncContextManager[RunningExporter]:
        own = {
            "node_name": "n1",
            "proc": str(self.folder / "proc"),
            "pod_logs": str(self.folder / "pods"),
            "pod_source": "logs",
            "pod_resources_kubelet_socket": str(self.folder / "kubelet.sock"),
            "pod_resources_interval_s": "0.2",
            "root": str(self.folder / "none"),
        }
        return running_exporter(self.state, *arguments, **{**own, **settings})

    def counters(self, *lines: str) -> str:
        path = self.folder / "counters.csv"
        path.write_text("".join(f"{line}, text\n" for line in lines))
        return str(path)


@contextlib.asynccontextmanager
async def host(folder: Path, *cards: str | gpu.CardSpec) -> AsyncIterator[Host]:
    state = gpu.create(folder / "machine", list(cards), seed="drop-in")
    found = Host(folder, state)
    (folder / "pods").mkdir()
    server = Server([found.kubelet])
    await server.start(path=str(folder / "kubelet.sock"))
    try:
        yield found
    finally:
        server.close()
        await server.wait_closed()


def uuids(state: Path) -> list[str]:
    with gpu.Machine(state) as machine:
        return [card.uuid for card in machine.cards()]


async def test_each_mig_device_has_its_memory_and_its_holder(tmp_path: Path) -> None:
    divided = gpu.CardSpec("A100-SXM4-40GB", ("1g.5gb", "2g.10gb"))
    async with host(tmp_path, divided, "A100-SXM4-40GB") as machine:
        card, small, large, whole = uuids(machine.state)
        for name in ("app-0", "app-1", "app-2"):
            machine.pod(name)
        machine.kubelet.give("app-0", "nvidia.com/mig-1g.5gb", small)
        machine.kubelet.give("app-1", "nvidia.com/mig-2g.10gb", large)
        machine.kubelet.give("app-2", "nvidia.com/gpu", whole)
        machine.process(101, "app-0", 1, 700)
        machine.process(102, "app-1", 2, 900)
        async with machine.exporter("-k") as exporter:
            page = await exporter.page_when(
                lambda page: page.value(USED, pod="app-1") == 900 * MIB and page.value(USED, pod="app-2") == 0
            )
            assert page.one(USED, pod="app-0", gpu_uuid=card) == 700 * MIB
            assert page.one("gpuslice_container_memory_limit_bytes", pod="app-0") == 4864 * MIB
            assert page.one("gpuslice_gpu_memory_allocated_bytes", gpu_uuid=card) == (4864 + 9856) * MIB
            assert page.one("gpuslice_gpu_allocate_mode", gpu_uuid=card) == 2
            assert page.one("gpuslice_gpu_allocate_mode", gpu_uuid=whole) == 1
            assert page.one("gpuslice_mig_memory_used_bytes", mig_uuid=large) == 900 * MIB
            ((about, _),) = page.all("gpuslice_mig_info", mig_uuid=large)
            assert (about["mig_profile"], about["gpu_instance"]) == ("2g.10gb", "2")
            assert page.one("gpuslice_container_mig_info", pod="app-1", mig_uuid=large) == 1
            assert page.all("gpuslice_container_sm_utilization_ratio", gpu_uuid=card) == []
            assert page.one("gpuslice_unavailable", gpu_uuid=card, what="sm_utilization") == 2
            for parts, used in page.balance().values():
                assert parts == used
            assert_promtool_accepts(page)
            ((labels, used),) = page.all("DCGM_FI_DEV_FB_USED", UUID=card, GPU_I_ID="1")
            assert used == 700
            assert list(labels) == [
                "gpu", "UUID", "pci_bus_id", "device", "modelName", "GPU_I_PROFILE", "GPU_I_ID", "hostname",
                "DCGM_FI_DRIVER_VERSION", "container", "namespace", "pod",
            ]  # fmt: skip
            assert (labels["GPU_I_PROFILE"], labels["pod"]) == ("1g.5gb", "app-0")
            assert (
                len(page.all("DCGM_FI_DEV_GPU_TEMP", UUID=card)) == 2
            )  # the card's, on each of its instances
            assert page.all("DCGM_FI_DEV_GPU_UTIL", UUID=card) == []
            told = [line["field"] for line in exporter.logged("field not supported by this card")]
            assert told.count("DCGM_FI_DEV_GPU_UTIL") == 1
            assert (
                told.count("DCGM_FI_PROF_GR_ENGINE_ACTIVE") == 2
            )  # an A100 has no such counters, either card


async def test_hardware_counters_of_a_divided_hopper_card_are_its_instances(tmp_path: Path) -> None:
    divided = gpu.CardSpec("H100-80GB-HBM3", ("1g.10gb", "3g.40gb"))
    async with host(tmp_path, divided) as machine, machine.exporter() as exporter:
        page = await exporter.page_when(lambda page: len(page.all("DCGM_FI_PROF_GR_ENGINE_ACTIVE")) == 2)
        assert {labels["GPU_I_ID"] for labels, _ in page.all("DCGM_FI_PROF_DRAM_ACTIVE")} == {"1", "2"}
        assert len(page.all("gpuslice_mig_sm_active_ratio")) == 2
        assert page.one("gpuslice_exporter_field_supported", field="DCGM_FI_PROF_GR_ENGINE_ACTIVE") == 1


@pytest.mark.parametrize(("devices", "shown"), [("g", {""}), ("i", {"1", "2"}), ("i:2", {"2"})])
async def test_cards_or_instances_are_chosen_as_of_dcgm_exporter(
    tmp_path: Path, devices: str, shown: set[str]
) -> None:
    divided = gpu.CardSpec("A100-SXM4-40GB", ("1g.5gb", "2g.10gb"))
    async with host(tmp_path, divided) as machine, machine.exporter("-d", devices) as exporter:
        page = await exporter.page_when(lambda page: page.all("DCGM_FI_DEV_FB_USED"))
        found = {labels.get("GPU_I_ID", "") for labels, _ in page.all("DCGM_FI_DEV_FB_USED")}
        assert found == shown


async def test_several_containers_on_one_card_have_series_of_their_own_on_request(tmp_path: Path) -> None:
    async with host(tmp_path, "T4") as machine:
        (card,) = uuids(machine.state)
        for number, name in enumerate(("app-0", "app-1")):
            machine.pod(name)
            machine.kubelet.give(name, "nvidia.com/gpu", f"{card}::{number}")
        machine.process(101, "app-0", 0, 700, percent=40)
        async with machine.exporter("-k", "--kubernetes-virtual-gpus") as exporter:
            page = await exporter.page_when(
                lambda page: page.value("DCGM_FI_DEV_FB_USED", pod="app-0") == 700
            )
            assert page.one("DCGM_FI_DEV_FB_USED", pod="app-1", vgpu="1") == 0
            assert len(page.all("DCGM_FI_DEV_FB_USED")) == 3  # the card's own beside them
            assert {labels["pod"] for labels, _ in page.all("DCGM_FI_DEV_GPU_TEMP")} == {"app-0", "app-1"}
            assert_promtool_accepts(page)
        async with machine.exporter("-k") as exporter:
            page = await exporter.page_when(lambda page: page.value(USED, pod="app-0") == 700 * MIB)
            ((labels, _),) = page.all("DCGM_FI_DEV_FB_USED")
            assert "pod" not in labels  # of two holders neither is the card's


async def test_cards_held_by_a_claim_name_it(tmp_path: Path) -> None:
    async with host(tmp_path, "T4") as machine:
        machine.pod("app-0")
        machine.kubelet.claim("app-0", "gpu-0")
        async with machine.exporter("-k", "--kubernetes-enable-dra") as exporter:
            page = await exporter.page_when(lambda page: page.all("DCGM_FI_DEV_FB_USED", pod="app-0"))
            ((labels, _),) = page.all("DCGM_FI_DEV_FB_USED")
            assert labels["dra_claim_name"] == "app-0-gpu"
            assert labels["dra_driver_name"] == "gpu.nvidia.com"
            ((about, _),) = page.all("gpuslice_container_info")
            assert (about["resource"], about["share_mode"]) == ("gpu.nvidia.com", "exclusive")


async def test_jobs_of_a_batch_scheduler_label_their_cards(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    (jobs / "1").write_text("101\n102\n")
    (jobs / "0.2").write_text("103\n")
    (jobs / "notes").write_text("nothing\n")
    divided = gpu.CardSpec("A100-SXM4-40GB", ("1g.5gb", "2g.10gb"))
    async with (
        host(tmp_path, divided, "A100-SXM4-40GB") as machine,
        machine.exporter("--hpc-job-mapping-dir", str(jobs)) as exporter,
    ):
        page = await exporter.page_when(lambda page: page.all("DCGM_FI_DEV_GPU_TEMP"))
        found = {
            (labels["gpu"], labels.get("GPU_I_ID"), labels.get("hpc_job"))
            for labels, _ in page.all("DCGM_FI_DEV_GPU_TEMP")
        }
        assert found == {("1", None, "101"), ("1", None, "102"), ("0", "1", None), ("0", "2", "103")}
        (jobs / "1").unlink()
        await exporter.page_when(lambda page: not page.all("DCGM_FI_DEV_GPU_TEMP", hpc_job="101"))


async def test_what_dcgm_exporter_derives_is_there_as_far_as_the_driver_tells(tmp_path: Path) -> None:
    names = ["XID_ERRORS_COUNT", "CLOCK_EVENTS_COUNT", "GPU_HEALTH_STATUS", "P2P_STATUS"]
    names += ["XID_ERRORS_TOTAL", "CLOCK_EVENTS_TOTAL"]  # since 4.8.3
    async with host(tmp_path, "A100-SXM4-40GB", "A100-SXM4-40GB", "T4") as machine:
        file = machine.counters(*(f"DCGM_EXP_{name}, counter" for name in names))
        async with machine.exporter("-f", file, "-x", "60000") as exporter:
            page = await exporter.page_when(lambda page: page.all("DCGM_EXP_P2P_STATUS"))
            health = {
                labels["health_watch"]: (labels["health_error_code"], value)
                for labels, value in page.all("DCGM_EXP_GPU_HEALTH_STATUS", gpu="0")
            }
            assert {"MEM", "ALL"} <= health.keys()
            assert not {"PMU", "MCU", "SM", "DRIVER"} & health.keys()  # NVML knows nothing of these
            assert set(health.values()) == {("DCGM_FR_OK", 0)}
            assert page.one("DCGM_EXP_P2P_STATUS", gpu="0", peer_gpu="1", link_status="OK") == 0
            assert page.all("DCGM_EXP_P2P_STATUS", gpu="2", peer_gpu="0", link_status="OK") == []
            assert page.one("DCGM_EXP_XID_ERRORS_COUNT", gpu="0", window_size_in_ms="60000") == 0
            assert page.one(f"{XIDS_SEEN}_total", gpu="1", xid="79") == 0
            assert page.one("DCGM_EXP_CLOCK_EVENTS_TOTAL_total", gpu="0", clock_event="hw_thermal") == 0
            with gpu.Machine(machine.state) as cards:
                cards.set_gauge(0, ecc_uncorrected_volatile=3)
                cards.inject_xid(1, 79)
            page = await exporter.page_when(
                lambda page: page.value("DCGM_EXP_GPU_HEALTH_STATUS", gpu="1", health_watch="ALL") == 20
            )
            assert page.one("DCGM_EXP_XID_ERRORS_COUNT", gpu="1", xid="79") == 1
            assert page.one(f"{XIDS_SEEN}_total", gpu="1", xid="79") == 1
            assert f"# TYPE {XIDS_SEEN} counter" in page.text
            assert_promtool_accepts(page)


async def test_memory_that_fails_is_told_whatever_the_counter_file_asks_for(tmp_path: Path) -> None:
    async with host(tmp_path, "A100-SXM4-40GB", "T4") as machine:
        with gpu.Machine(machine.state) as cards:
            cards.set_gauge(0, ecc_uncorrected_volatile=3)
        file = machine.counters("DCGM_FI_DEV_GPU_TEMP, gauge")
        async with machine.exporter("-f", file) as exporter:
            page = await exporter.page_when(
                lambda page: page.all("gpuslice_gpu_uncorrected_memory_errors_total", gpu="0")
            )
            assert page.one("gpuslice_gpu_uncorrected_memory_errors_total", gpu="0") == 3
            assert page.one("gpuslice_gpu_row_remap_failed", gpu="0") == 0
            assert page.all("gpuslice_gpu_row_remap_failed", gpu="1") == []  # a T4 has no spare rows
            assert not page.all("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL")


async def test_the_host_label_of_released_images(tmp_path: Path) -> None:
    async with (
        host(tmp_path, "T4") as machine,
        machine.exporter(compat_hostname_label="Hostname") as exporter,
    ):
        page = await exporter.page_when(lambda page: page.all("DCGM_FI_DEV_GPU_TEMP"))
        ((labels, _),) = page.all("DCGM_FI_DEV_GPU_TEMP")
        assert labels["Hostname"] == "n1"


async def test_a_card_that_comes_is_seen_without_a_restart(tmp_path: Path) -> None:
    listed = tmp_path / "proc" / "driver" / "nvidia" / "gpus"
    (listed / "0000:07:00.0").mkdir(parents=True)
    async with host(tmp_path, "T4", "T4") as machine:
        with gpu.Machine(machine.state) as cards:
            cards._state.card_count = 1  # the driver counts them when it is opened
            async with machine.exporter() as exporter:
                await exporter.page_when(lambda page: len(page.all("gpuslice_gpu_up")) == 1)
                cards._state.card_count = 2
                (listed / "0000:08:00.0").mkdir()
                page = await exporter.page_when(lambda page: len(page.all("gpuslice_gpu_up")) == 2, 30)
                assert page.one("gpuslice_exporter_devices") == 2
                assert exporter.logged("driver is reopened")[0]["reason"] == "cards came or went"
                cards.inject_xid(1, 79)  # faults are still followed
                await exporter.page_when(lambda page: page.value(XIDS, gpu="1", xid="79") == 1)


async def test_counters_of_a_config_map_are_read_and_followed(tmp_path: Path) -> None:
    async with gpu_node(tmp_path) as node, node.exporter("-m", "default:counters") as exporter:
        await exporter.page_when(lambda page: page.all("DCGM_FI_DEV_GPU_TEMP"))  # the built-in ones so far
        counters = {"metrics": "DCGM_FI_DEV_POWER_USAGE, gauge, power\n"}
        config = {"metadata": {"name": "counters", "namespace": "default"}, "data": counters}
        created = await node.node.client.create(CONFIG_MAPS.as_dict(), config, "default")
        page = await exporter.page_when(lambda page: not page.all("DCGM_FI_DEV_GPU_TEMP"))
        assert page.all("DCGM_FI_DEV_POWER_USAGE")
        created["data"] = {"metrics": "DCGM_FI_DEV_FB_USED, gauge, used\n"}
        await node.node.client.replace(CONFIG_MAPS.as_dict(), created)
        page = await exporter.page_when(lambda page: page.all("DCGM_FI_DEV_FB_USED"))
        assert page.all("DCGM_FI_DEV_POWER_USAGE") == []
        assert page.one("gpuslice_exporter_collector_success", collector="config_map") == 1


async def test_a_socket_from_systemd_is_served(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", ["T4"])
    variables = gpu.environment(state, NATIVE) | {"GPUSLICE_KUBERNETES": "false", "LISTEN_FDS": "1"}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        handed = listening.fileno()
        start = f'exec 3<&{handed}; LISTEN_PID=$$ exec "{PROGRAM}" exporter --web-systemd-socket'
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", start, env=variables, pass_fds=[handed], stderr=asyncio.subprocess.PIPE
        )
        try:
            assert process.stderr is not None
            async for line in process.stderr:
                if b'"serving"' in line:
                    break
            url = f"http://127.0.0.1:{port}/health"
            async with aiohttp.ClientSession() as session, session.get(url) as answer:
                assert answer.status == 200
        finally:
            process.terminate()
            await process.communicate()


async def test_a_counter_file_may_ask_for_every_field_there_is(tmp_path: Path) -> None:
    fields = {each.id: each for each in load_fields().values()}
    numbers = {each.name: each for each in fields.values() if each.kind == "number"}
    async with host(tmp_path, "H100-80GB-HBM3", "T4") as machine:
        file = machine.counters(*(f"{name}, gauge" for name in numbers))
        async with machine.exporter("-f", file) as exporter:
            page = await exporter.page_when(lambda page: page.all("DCGM_FI_DEV_NVLINK_THROUGHPUT_TOTAL"))
            assert_promtool_accepts(page)
            assert page.one("gpuslice_exporter_config_problems") == 0
            supported = page.all("gpuslice_exporter_field_supported")
            assert len(supported) == len(numbers)
            given = {labels["field"] for labels, is_given in supported if is_given}
            assert len(given) > 100
            assert {
                "DCGM_FI_DEV_MAX_SM_CLOCK",
                "DCGM_FI_DEV_GPU_COMPUTE_MODE",
                "DCGM_FI_CUDA_DRIVER_VERSION",
                "DCGM_FI_DEV_BANK_REMAP_AVAIL_MAX",
                "DCGM_FI_DEV_NVLINK_TX_THROUGHPUT_TOTAL",
            } <= given
            told = [
                (line["field"], line["gpu"]) for line in exporter.logged("field not supported by this card")
            ]
            assert len(set(told)) == len(told)
            assert ("DCGM_FI_PROF_SM_CYCLES_ACTIVE_TOTAL", 0) in told  # that card has others of its kind
            assert {field for field, _ in told} >= numbers.keys() - given - {"DCGM_FI_DEV_XID_ERROR"}
