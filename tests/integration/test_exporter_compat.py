"""The exporter in the place of others: dcgm-exporter's command line, the vendor's two sets, TLS."""

from __future__ import annotations

import base64
import ssl
from pathlib import Path

import aiohttp
import bcrypt
import pytest
import trustme

from gpuslice_demo.ports import free_port
from simcluster import gpu
from tests.integration.exporter_rig import OPENMETRICS, Page, gpu_node, have_native, running_exporter
from tests.integration.test_exporter_story import MIB, app, assert_promtool_accepts, running

pytestmark = pytest.mark.skipif(not have_native(), reason="native libraries are not built: run `make native`")


async def test_the_charts_command_line_of_dcgm_exporter_starts_it(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", ["H100-80GB-HBM3"])
    counters = tmp_path / "counters.csv"
    counters.write_text("DCGM_FI_PROF_GR_ENGINE_ACTIVE, gauge, busy\nDCGM_FI_DEV_FB_USED, gauge, used\n")
    arguments = ["-k=false", "-f", str(counters), "-r", "localhost:5555", "--fake-gpus", "-n", "-rbmn"]
    async with running_exporter(state, *arguments) as exporter:
        page = await exporter.page_when(lambda page: page.all("DCGM_FI_PROF_GR_ENGINE_ACTIVE"))
        said = {line["setting"] for line in exporter.logged("setting without an effect here")}
        assert said == {"--remote-hostengine-info", "--fake-gpus"}
        ((labels, _),) = page.all("DCGM_FI_DEV_FB_USED")
        assert list(labels) == ["gpu", "UUID", "pci_bus_id", "device", "modelName"]
        assert labels["modelName"] == "NVIDIA-H100-80GB-HBM3"
        url = exporter.url.replace("/metrics", "/health")
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            assert (answer.status, await answer.text()) == (200, "OK")


async def test_every_default_field_of_a_hopper_card_comes_from_nvml(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", ["H100-80GB-HBM3"])
    async with running_exporter(state, kubernetes="false") as exporter:
        page = await exporter.page_when(lambda page: page.all("DCGM_FI_PROF_DRAM_ACTIVE"))
        absent = [
            labels["field"] for labels, given in page.all("gpuslice_exporter_field_supported") if not given
        ]
        assert absent == ["DCGM_FI_DEV_VGPU_LICENSE_STATUS"]  # a card without vGPU has no licence to tell of
        assert "# TYPE DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL gauge" in page.text
        told = [line["field"] for line in exporter.logged("field not supported by this card")]
        assert told == absent
        ((labels, _),) = page.all("DCGM_FI_DEV_GPU_TEMP")
        assert labels["DCGM_FI_DRIVER_VERSION"].split(".")[0].isdecimal()
        assert_promtool_accepts(page)


async def test_types_as_written_and_old_label_names_on_request(tmp_path: Path) -> None:
    state = gpu.create(tmp_path / "machine", ["H100-80GB-HBM3"])
    async with running_exporter(state, "-o", kubernetes="false", metric_types="upstream") as exporter:
        page = await exporter.page_when(
            lambda page: "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL counter" in page.text
        )
        ((labels, _),) = page.all("DCGM_FI_DEV_GPU_TEMP")
        assert "uuid" in labels


async def test_the_vendors_two_sets_and_pod_labels_are_behind_switches(tmp_path: Path) -> None:
    port = free_port()
    switches = {
        "ack_metrics": "true",
        "legacy_address": f"127.0.0.1:{port}",
        "compat_pod_labels": "exclusive",
        "metric_types": "upstream",
        "kubernetes_enable_pod_labels": "true",
        "kubernetes_pod_label_allowlist_regex": "app.*|1st",
    }
    cards = ("V100-SXM2-16GB", "V100-SXM2-16GB")
    async with gpu_node(tmp_path, cards) as host, host.exporter(**switches) as exporter:
        pod = app("app-0", 4)
        pod["metadata"]["labels"] = {"app.kubernetes.io/name": "x", "other": "y", "1st": "z"}
        await host.node.create(pod)
        await running(host, "app-0")
        page = await exporter.page_when(
            lambda page: page.all("DCGM_CUSTOM_PROCESS_MEM_USED", PodName="app-0")
        )
        ((labels, used),) = page.all("DCGM_CUSTOM_PROCESS_MEM_USED", PodName="app-0")
        assert used == 3193
        assert (labels["AllocateMode"], labels["ContainerName"], labels["NodeName"]) == (
            "share",
            "main",
            "n1",
        )
        assert page.one("DCGM_CUSTOM_ALLOCATE_MODE") == 2
        allocated = page.one("DCGM_CUSTOM_CONTAINER_MEM_ALLOCATED", PodName="app-0")
        total = page.one("DCGM_CUSTOM_DEV_FB_TOTAL", gpu=labels["gpu"])
        assert page.one("DCGM_CUSTOM_DEV_FB_ALLOCATED", gpu=labels["gpu"]) == pytest.approx(allocated / total)
        assert page.all("DCGM_CUSTOM_ILLEGAL_PROCESS_MEM_USED") == []
        assert page.all("DCGM_FI_DEV_GPU_UTIL", pod="app-0", namespace="default", container="main")
        ((pod_labels, _),) = page.all("gpuslice_pod_labels")
        assert pod_labels == {
            "node": "n1",
            "namespace": "default",
            "pod": "app-0",
            "label_app_kubernetes_io_name": "x",
            "label_1st": "z",
        }
        # a name that begins with a digit would make Prometheus refuse the whole page
        assert page.all("DCGM_FI_DEV_GPU_UTIL", _1st="z", app_kubernetes_io_name="x")
        assert_promtool_accepts(page)
        for path in ("", "metrics"):
            old = await exporter.page(f"http://127.0.0.1:{port}/{path}")
            assert_vendors_old_page(old)
        for url in ("", f"http://127.0.0.1:{port}/metrics"):
            text, opened = await exporter.page(url), await exporter.page(url, OPENMETRICS)
            assert opened.series() == text.series()
            assert opened.text.endswith("# EOF\n")
            assert not text.text.endswith("# EOF\n")


def assert_vendors_old_page(page: Page) -> None:
    assert page.names() == {
        "nvidia_gpu_duty_cycle",
        "nvidia_gpu_memory_total_bytes",
        "nvidia_gpu_memory_used_bytes",
        "nvidia_gpu_num_devices",
        "nvidia_gpu_power_usage_milliwatts",
        "nvidia_gpu_temperature_celsius",
    }
    ((labels, used),) = page.all("nvidia_gpu_memory_used_bytes", pod_name="app-0")
    assert used == 3193 * MIB
    assert set(labels) == {
        "allocate_mode", "container_name", "minor_number", "name",
        "namespace_name", "node_name", "pod_name", "uuid",
    }  # fmt: skip
    assert labels["allocate_mode"] == "share"
    ((_, total),) = page.all("nvidia_gpu_memory_total_bytes", pod_name="")  # the idle card
    assert total == 16130 * MIB
    assert page.one("nvidia_gpu_num_devices", node_name="n1") == 2


async def test_tls_and_passwords_by_the_web_config_file(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("localhost", "127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "tls.key")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "tls.crt")
    hashed = bcrypt.hashpw(b"secret", bcrypt.gensalt(rounds=4)).decode()
    config = tmp_path / "web.yaml"
    config.write_text(
        "tls_server_config:\n  cert_file: tls.crt\n  key_file: tls.key\n  min_version: TLS13\n"
        f"basic_auth_users:\n  prometheus: {hashed}\n"
    )
    state = gpu.create(tmp_path / "machine", ["T4"])
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    async with (
        running_exporter(state, "--web-config-file", str(config), kubernetes="false") as exporter,
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted)) as session,
    ):
        url = f"https://127.0.0.1:{exporter.port}/metrics"
        for credentials, status in (
            ("", 401),
            (":", 401),
            ("prometheus:wrong", 401),
            ("prometheus:secret", 200),
        ):
            encoded = base64.b64encode(credentials.encode()).decode()
            async with session.get(url, headers={"Authorization": f"Basic {encoded}"}) as answer:
                assert answer.status == status, credentials
        trusted.maximum_version = ssl.TLSVersion.TLSv1_2
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=trusted)) as old:
            with pytest.raises(aiohttp.ClientConnectorError):
                await old.get(url)
