"""Any pod may call itself an exporter: what it says and where it wants to be asked is taken with care."""

from __future__ import annotations

import pytest

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.web.scrape import parse
from gpuslice.apps.console.cluster_state import ClusterState
from gpuslice.apps.console.observed_client import ObservedClient
from gpuslice.apps.console.rows import Rows
from gpuslice.apps.console.usage_reader import UsageReader
from gpuslice.diagnosis.exporters import PORT, proxied
from gpuslice.diagnosis.usage import usage_of

AT = '{node="n",gpu="0",gpu_uuid="GPU-0",namespace="ns",pod="p",container="%s"}'


def page(used: str) -> str:
    """A pod of two containers on one card."""
    lines = [
        f"gpuslice_container_info{AT % name} 1\n"
        f"gpuslice_container_memory_used_bytes{AT % name} {used}\n"
        f"gpuslice_container_memory_refused_total{AT % name} {used}\n"
        f"gpuslice_container_sm_utilization_ratio{AT % name} {used}\n"
        for name in ("a", "b")
    ]
    return "".join(lines)


class Exporter:
    """An API server through which one exporter is asked."""

    def __init__(self, answer: str) -> None:
        self.answer = answer
        self.paths: list[str] = []

    async def request(self, request: ApiRequest) -> ApiResponse:
        self.paths.append(request.path)
        return ApiResponse(200, body=self.answer.encode())


def reader_of(exporter: Exporter, *pods: objects.Pod, **annotations: str) -> UsageReader:
    state = ClusterState(ObservedClient(exporter, manager="test"), Rows())  # type: ignore[arg-type]
    metadata = objects.Metadata(name="e", namespace="tenant", annotations=annotations)
    state.exporters = {"n": objects.Pod(metadata=metadata, spec=objects.PodSpec(node_name="n"))}
    state.pods = {f"{pod.metadata.namespace}/{pod.metadata.name}": pod for pod in pods}
    return UsageReader(state, proxied(KubeClient(exporter)))  # type: ignore[arg-type]


@pytest.mark.parametrize("figure", ["+Inf", "-Inf", "NaN", "1e308", "-1e308"])
async def test_a_figure_that_nothing_can_have_is_unknown(figure: str) -> None:
    found = usage_of([parse(page(figure))])
    assert [(each.used_bytes, each.refused, each.sm_ratio) for each in found.containers] == [(None,) * 3] * 2
    reader = reader_of(Exporter(page(figure)))
    await reader.read()
    assert set(reader.containers) == {"ns/p"}


@pytest.mark.parametrize(
    ("annotation", "port"),
    [
        ("9401", 9401),
        ("9400/proxy/../../../secrets?x=", PORT),
        ("", PORT),
        ("0", PORT),
        ("65536", PORT),
        ("٣", PORT),
    ],
)
async def test_an_exporter_is_asked_for_its_page_alone(annotation: str, port: int) -> None:
    exporter = Exporter(page("1"))
    await reader_of(exporter, **{"prometheus.io/port": annotation}).read()
    assert exporter.paths == [f"/api/v1/namespaces/tenant/pods/e:{port}/proxy/metrics"]
