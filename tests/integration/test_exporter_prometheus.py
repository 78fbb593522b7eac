"""A real Prometheus scrapes the real exporter, and every panel has something to show."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import aiohttp.web
import pytest
from monitoring.boards import dashboards
from monitoring.build import ROOT, RULES
from monitoring.records import RECORDED
from monitoring.scaling import adapter_values, scaled_object

from gpuslice.adapters.web.app import Probes, make_app
from gpuslice.adapters.web.exposition import page_of
from gpuslice.adapters.web.histogram import Histogram
from gpuslice.adapters.web.serve import Listen, serving
from gpuslice_demo.ports import free_port
from simcluster import gpu
from tests import HANG_S
from tests.integration.exporter_rig import RunningExporter, gpu_node, have_native, running_exporter
from tests.integration.extender_rig import cluster, rig
from tests.integration.test_exporter_story import app, running
from tests.tools import find

pytestmark = pytest.mark.skipif(not have_native(), reason="native libraries are not built: run `make native`")

TEXT = "text/plain;version=0.0.4"
_CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: [{rules}]
scrape_configs:
- job_name: gpuslice-exporter
  honor_labels: true
  static_configs: [{{targets: [{targets}], labels: {{cluster: lab}}}}]
"""


@contextlib.asynccontextmanager
async def prometheus(folder: Path, *targets: int, native: bool = False) -> AsyncIterator[str]:
    """Prometheus' URL; it scrapes the ports `targets` each second."""
    port = free_port()
    folder.mkdir(exist_ok=True)
    config = folder / "prometheus.yaml"
    config.write_text(
        _CONFIG.format(rules=ROOT / RULES, targets=", ".join(f'"127.0.0.1:{each}"' for each in targets))
    )
    process = await asyncio.create_subprocess_exec(
        find("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        *(["--enable-feature=native-histograms"] if native else []),
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        await process.wait()


async def query(session: aiohttp.ClientSession, url: str, expression: str) -> list[Any]:
    async with session.get(f"{url}/api/v1/query", params={"query": expression}) as answer:
        body = await answer.json()
    assert body["status"] == "success", f"{expression}: {body}"
    found: list[Any] = body["data"]["result"]
    return found


async def wait_for(session: aiohttp.ClientSession, url: str, expression: str) -> list[Any]:
    deadline = asyncio.get_running_loop().time() + HANG_S
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            if found := await query(session, url, expression):
                return found
        assert asyncio.get_running_loop().time() < deadline, f"nothing: {expression}"
        await asyncio.sleep(0.3)


@contextlib.asynccontextmanager
async def only_text(exporter: RunningExporter) -> AsyncIterator[int]:
    """A port with the exporter's page as clients get it that know no OpenMetrics."""

    async def page(_: aiohttp.web.Request) -> aiohttp.web.Response:
        text = (await exporter.page(accept=TEXT)).text
        return aiohttp.web.Response(body=text.encode(), headers={"Content-Type": f"{TEXT}; charset=utf-8"})

    application = aiohttp.web.Application()
    application.router.add_get("/metrics", page)
    runner = aiohttp.web.AppRunner(application)
    await runner.setup()
    port = free_port()
    try:
        await aiohttp.web.TCPSite(runner, "127.0.0.1", port).start()
        yield port
    finally:
        await runner.cleanup()


async def stored(session: aiohttp.ClientSession, url: str, port: int) -> set[frozenset[tuple[str, str]]]:
    """The series that came from a port."""
    found = await wait_for(session, url, f'{{instance="127.0.0.1:{port}", __name__=~"DCGM_.+|gpuslice_.+"}}')
    return {frozenset({**each["metric"], "instance": ""}.items()) for each in found}


async def told_types(session: aiohttp.ClientSession, url: str, port: int, *names: str) -> list[str]:
    """What Prometheus was told that these are."""
    found = []
    for name in names:
        asked = {"match_target": f'{{instance="127.0.0.1:{port}"}}', "metric": name}
        async with session.get(f"{url}/api/v1/targets/metadata", params=asked) as answer:
            found += [each["type"] for each in (await answer.json())["data"]]
    return found


async def test_prometheus_stores_the_same_series_from_either_format(tmp_path: Path) -> None:
    find("prometheus")
    state = gpu.create(tmp_path / "machine", ["H100-80GB-HBM3"])
    async with (
        running_exporter(state, kubernetes="false", metric_types="upstream") as exporter,
        only_text(exporter) as plain,
        prometheus(tmp_path, exporter.port, plain) as url,
        aiohttp.ClientSession() as session,
    ):
        await exporter.page_when(lambda page: page.all("DCGM_FI_PROF_DRAM_ACTIVE"))
        counter, ours = "DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "gpuslice_gpu_pcie_bytes"
        for port in (exporter.port, plain):
            await wait_for(session, url, f'{counter}{{instance="127.0.0.1:{port}"}}')
            await wait_for(session, url, f'DCGM_FI_PROF_DRAM_ACTIVE{{instance="127.0.0.1:{port}"}}')
        assert await stored(session, url, exporter.port) == await stored(session, url, plain)
        assert await told_types(session, url, exporter.port, counter, ours) == ["unknown", "counter"]
        assert await told_types(session, url, plain, counter, f"{ours}_total") == ["counter", "counter"]


async def test_native_and_classic_buckets_give_the_same_quantile(tmp_path: Path) -> None:
    """As `rate` sees them: a native histogram that Prometheus took from the page, and a classic one."""
    calls = Histogram("call_seconds", "Time of a call.", ("verb",))
    app = make_app(Probes("1", lambda: "", page_of(lambda: [calls.family()])))
    luck = random.Random(1)

    async def observe() -> None:
        while True:
            calls.observe(luck.lognormvariate(-4, 1), "bind")
            await asyncio.sleep(0.001)

    async with (
        serving(app, Listen(0, "127.0.0.1")) as port,
        prometheus(tmp_path / "native", port, native=True) as native,
        prometheus(tmp_path / "classic", port) as classic,
        aiohttp.ClientSession() as session,
    ):
        observing = asyncio.create_task(observe())
        found = []
        for url, of in ((native, "call_seconds"), (classic, "call_seconds_bucket")):
            await wait_for(session, url, f"count_over_time({of}[1m]) > 2")
            for quantile in (0.5, 0.99):
                (one,) = await wait_for(session, url, f"histogram_quantile({quantile}, rate({of}[1m])) > 0")
                found.append(float(one["value"][1]))
            assert await wait_for(session, url, "process_max_fds")
        observing.cancel()
    median, high, classic_median, classic_high = found
    assert median == pytest.approx(math.exp(-4), rel=0.2)
    assert high == pytest.approx(math.exp(-4 + 2.326), rel=0.4)
    # a classic bucket is up to 2.5 times as wide as the one below it
    assert classic_median == pytest.approx(median, rel=0.4)
    assert classic_high == pytest.approx(high, rel=0.6)


NO_CONSOLE = {"Why pods wait"}
"""What a console alone knows, and none runs here."""

# What dashboard 12239, made for dcgm-exporter, asks for.
_AT = '{instance=~"$instance", gpu=~"$gpu"}'
PUBLIC_DASHBOARD = (
    f"DCGM_FI_DEV_GPU_TEMP{_AT}",
    f"avg(DCGM_FI_DEV_GPU_TEMP{_AT})",
    f"DCGM_FI_DEV_POWER_USAGE{_AT}",
    f"sum(DCGM_FI_DEV_POWER_USAGE{_AT})",
    f"DCGM_FI_DEV_SM_CLOCK{_AT} * 1000000",
    f"DCGM_FI_DEV_GPU_UTIL{_AT}",
    f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{_AT}",
    f"DCGM_FI_DEV_FB_USED{_AT}",
)


async def label_values(session: aiohttp.ClientSession, url: str, text: str) -> list[str]:
    """Grafana's label_values(selector, label), as Grafana asks Prometheus for it."""
    found = re.fullmatch(r"label_values\((.+), (\w+)\)", text)
    assert found is not None, text
    match = {"match[]": re.sub(r"\$\w+", ".*", found[1])}
    async with session.get(f"{url}/api/v1/label/{found[2]}/values", params=match) as answer:
        values: list[str] = (await answer.json())["data"]
    return values


async def assert_pods_can_be_scaled_on(session: aiohttp.ClientSession, url: str, pod: str) -> None:
    """The adapter's way: which series there are, what they belong to, then one figure a pod; and KEDA's."""
    for rule in adapter_values()["rules"]["custom"]:
        async with session.get(f"{url}/api/v1/series", params={"match[]": rule["seriesQuery"]}) as answer:
            series = (await answer.json())["data"]
        assert series, rule["seriesQuery"]
        for label in rule["resources"]["overrides"]:
            assert all(each[label] for each in series)
        label_of = {each["resource"]: label for label, each in rule["resources"]["overrides"].items()}
        asked = rule["metricsQuery"].replace("<<.GroupBy>>", label_of["pod"])
        which = f'{label_of["namespace"]}="default",{label_of["pod"]}=~"{pod}|other"'
        asked = asked.replace("<<.LabelMatchers>>", which)
        assert [each["metric"] for each in await query(session, url, asked)] == [{label_of["pod"]: pod}]
    (trigger,) = scaled_object()["spec"]["triggers"]
    deployment, itself = (
        'workload_kind="Deployment",workload="infer"',
        f'workload_kind="Pod",workload="{pod}"',
    )
    asked = trigger["metadata"]["query"].replace(deployment, itself)
    assert asked != trigger["metadata"]["query"]
    assert len(await query(session, url, asked)) == 1


async def test_prometheus_takes_the_page_and_every_panel_shows_something(tmp_path: Path) -> None:
    find("prometheus")
    legacy = free_port()
    async with (
        gpu_node(tmp_path, ("H100-80GB-HBM3",)) as host,
        host.exporter(legacy_address=f"127.0.0.1:{legacy}") as exporter,
        rig(cluster(n1=(15, 1))) as extender,
        aiohttp.ClientSession() as session,
    ):
        await extender.add_and_bind("a")
        await extender.filter(extender.api.add_pod("b", 4), "n1")
        await extender.filter(extender.api.add_pod("c", 15), "n1")
        for name in ("app-0", "app-1"):
            await host.node.create(app(name, 4))
        await running(host, "app-0", "app-1")
        with gpu.Machine(host.state) as machine:
            machine.inject_xid(0, 31)
        await exporter.page_when(
            lambda page: (
                len(page.all("gpuslice_container_memory_used_bytes")) == 2
                and page.value("gpuslice_gpu_xid_errors_total", xid="31")
            )
        )
        async with prometheus(tmp_path, exporter.port, legacy, urlsplit(extender.url).port or 0) as url:
            await wait_for(session, url, "nvidia_gpu_temperature_celsius")
            await wait_for(session, url, "rate(gpuslice_container_sm_seconds_total[5m])")
            await wait_for(session, url, "rate(gpuslice_extender_requests_total[5m])")
            await wait_for(session, url, "sum_over_time(namespace:gpuslice_sm_seconds:rate5m[1m:1s])")
            for name, board in dashboards().items():
                for panel in board.panels:
                    for each in panel.queries:
                        expression = each.expression.replace("$__range", "10m").replace("$price", "0.05")
                        expression = expression.replace(":1m]", ":1s]")  # all of this is seconds old
                        expression = re.sub(r"\$\w+", ".*", expression)
                        shown = await query(session, url, expression)
                        assert bool(shown) != (panel.title in NO_CONSOLE), f"{name}: {panel.title}"
                        labels = re.findall(r"\{\{(\w+)\}\}", each.legend)
                        lines = [tuple(one["metric"].get(label, "") for label in labels) for one in shown]
                        if labels:  # each line of the panel has a name, and one of its own
                            assert all(map(any, lines)), f"{name}: {panel.title}: {lines}"
                            assert len(set(lines)) == len(lines), f"{name}: {panel.title}: {lines}"
                for variable in board.variables:
                    assert await label_values(session, url, variable.query), f"{name}: {variable.name}"
            for expression in PUBLIC_DASHBOARD:
                filled = expression.replace("$instance", ".*").replace("$gpu", ".*")
                assert await query(session, url, filled), expression
            for name in ("instance", "gpu"):
                assert await label_values(session, url, f"label_values(DCGM_FI_DEV_GPU_TEMP, {name})")
            await assert_pods_can_be_scaled_on(session, url, "app-0")
            for record in RECORDED:
                assert await wait_for(session, url, record), record
            balance = await query(session, url, "gpu:gpuslice_memory_balance:bytes")
            assert [float(each["value"][1]) for each in balance] == [0]
            assert not await query(session, url, "up == 0")
