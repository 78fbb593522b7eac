"""Exporters that do not answer hold up no others on the page; in virtual time."""

from __future__ import annotations

import asyncio

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.apps.console.cluster_state import ClusterState
from gpuslice.apps.console.observed_client import ObservedClient
from gpuslice.apps.console.rows import Rows
from gpuslice.apps.console.usage_reader import AT_ONCE, UsageReader
from gpuslice.diagnosis.exporters import IN_VAIN_S, PAGE_TIMEOUT_S, proxied
from tests.integration.virtual import VirtualLoop

EXPORTERS = 1000


class Silent:
    """An API server that gets no answer from any exporter but the last one's."""

    def __init__(self) -> None:
        self.asked = 0

    async def request(self, request: ApiRequest) -> ApiResponse:
        self.asked += 1
        if f"/e{EXPORTERS}:" not in request.path:
            await asyncio.Event().wait()
        return ApiResponse(200, body=b'gpuslice_gpu_up{node="last",gpu="0",gpu_uuid="GPU-0"} 1\n')


def exporter(number: int) -> objects.Pod:
    return objects.Pod(
        metadata=objects.Metadata(name=f"e{number}", namespace="x"),
        spec=objects.PodSpec(node_name=f"n{number}"),
    )


def test_a_thousand_exporters_that_do_not_answer_are_not_waited_for() -> None:
    loop, rows, silent = VirtualLoop(), Rows(), Silent()
    state = ClusterState(ObservedClient(silent, manager="test"), rows)  # type: ignore[arg-type]
    state.exporters = {f"n{number}": exporter(number) for number in range(1, EXPORTERS + 1)}
    reader = UsageReader(state, proxied(KubeClient(silent)))  # type: ignore[arg-type]

    def look() -> None:
        begun_s, reading = loop.time(), loop.create_task(reader.read())
        loop.settle()
        loop.advance(IN_VAIN_S + PAGE_TIMEOUT_S)
        assert reading.done(), loop.time() - begun_s
        reading.result()

    try:
        look()
        assert silent.asked <= AT_ONCE * (IN_VAIN_S / PAGE_TIMEOUT_S + 1)
        assert reader.problem.startswith("not asked, after 5 s of waiting for ")
        for _ in range(EXPORTERS):  # those that were not asked come first, so all have their turn
            if rows.keys("cardUsage"):
                break
            look()
        look()
        assert set(rows.keys("cardUsage")) == {"last"}
    finally:
        loop.close()
