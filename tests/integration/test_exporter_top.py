"""``gpuslice top``: the picture of cards and containers, through the API server and by address."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.kube.resources import PODS
from tests.integration.exporter_rig import PROGRAM, GpuNode, gpu_node, have_native
from tests.integration.test_exporter_story import LIMIT, MIB, USED, app, running

pytestmark = pytest.mark.skipif(not have_native(), reason="native libraries are not built: run `make native`")


async def top(host: GpuNode, *arguments: str, code: int = 0) -> str:
    kubeconfig = host.root.parent / "kubeconfig"
    process = await asyncio.create_subprocess_exec(
        PROGRAM,
        "top",
        "--once",
        *arguments,
        env={**os.environ, "KUBECONFIG": str(kubeconfig), "COLUMNS": "200"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == code, output.decode()
    return output.decode()


async def test_it_shows_who_uses_what(tmp_path: Path) -> None:
    async with gpu_node(tmp_path) as host, host.exporter() as exporter:
        await host.node.create(app("app-0", 4))
        await running(host, "app-0")
        await exporter.page_when(
            lambda page: page.value(USED, pod="app-0") == 3193 * MIB and page.all(LIMIT, pod="app-0")
        )
        found: dict[str, Any] = json.loads(await top(host, "--exporter", exporter.url, "-o", "json"))
        (container,) = found["containers"]
        assert (container["pod"], container["used_bytes"]) == ("app-0", 3193 * MIB)
        assert container["limit_bytes"] == 4301 * MIB
        (card,) = found["cards"]
        assert card["total_bytes"] == 16130 * MIB
        await host.node.client.create(PODS.as_dict(), exporter_pod(exporter.port), "kube-system")
        text = await top(host)
        assert "app-0" in text
        assert "3.1G/4.2G" in text
        assert "74%" in text
        assert "Tesla V100-SXM2-16GB" in text
        assert "app-0" in await top(host, "-n", "default")
        elsewhere = json.loads(await top(host, "-n", "elsewhere", "-o", "json"))  # as the live view
        assert (elsewhere["containers"], elsewhere["cards"]) == ([], [])
        assert "No container of namespace elsewhere" in await top(host, "-n", "elsewhere")


async def test_without_an_exporter_it_says_so(tmp_path: Path) -> None:
    async with gpu_node(tmp_path) as host:
        host.exporter()  # writes the kubeconfig
        assert "is the exporter installed?" in await top(host, code=1)


def exporter_pod(port: int) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "gpuslice-exporter",
            "namespace": "kube-system",
            "labels": {"component": "gpuslice-exporter"},
            "annotations": {"prometheus.io/port": str(port)},
        },
        "spec": {"containers": [{"name": "exporter", "image": "busybox"}]},
    }


async def test_explain_tells_what_the_exporter_saw_of_a_pod(tmp_path: Path) -> None:
    async with gpu_node(tmp_path) as host, host.exporter() as exporter:
        await host.node.create(app("app-0", 4))
        await running(host, "app-0")
        await exporter.page_when(lambda page: page.value(USED, pod="app-0") == 3193 * MIB)
        pod = exporter_pod(exporter.port)
        pod["spec"]["nodeName"] = host.node.settings.name
        await host.node.client.create(PODS.as_dict(), pod, "kube-system")
        kubeconfig = host.root.parent / "kubeconfig"
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *("explain", "app-0"),
            env={**os.environ, "KUBECONFIG": str(kubeconfig)},
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await process.communicate()
        assert "Container main on card 0: uses 3193 MiB" in output.decode()
        assert "its limit is 4301 MiB.\n" in output.decode()
