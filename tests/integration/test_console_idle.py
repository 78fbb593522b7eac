"""Since when pods have been idle, as the console tells it: over lost readings and its own restarts."""

from __future__ import annotations

import time

from gpuslice.adapters.kube import objects
from tests.integration.test_console_hostile_exporter import AT, Exporter, reader_of

NODE_S = 5_000.0  # the node's clock is years behind ours


def page(sm_ratio: float, idle_s: float | None) -> str:
    at = AT % "main"
    lines = [
        f"gpuslice_container_info{at} 1",
        f"gpuslice_container_memory_used_bytes{at} 0",
        f"gpuslice_container_sm_utilization_ratio{at} {sm_ratio}",
    ]
    if idle_s is not None:
        lines.append(f'gpuslice_exporter_time_seconds{{node="n"}} {NODE_S}')
        lines.append(f"gpuslice_container_last_active_timestamp_seconds{at} {NODE_S - idle_s}")
    return "\n".join(lines) + "\n"


async def test_the_exporter_tells_a_new_console_since_when_by_its_own_clock() -> None:
    reader = reader_of(Exporter(page(0, idle_s=3600)))
    await reader.read()
    assert abs(time.time() - reader.idle_at_s["ns/p"] - 3600) < 60


async def test_one_reading_without_an_answer_forgets_nothing() -> None:
    exporter = Exporter(page(0, idle_s=None))  # of an exporter that does not tell
    reader = reader_of(exporter, objects.Pod(metadata=objects.Metadata(name="p", namespace="ns")))
    await reader.read()
    since = reader.idle_at_s["ns/p"]
    exporter.answer = ""
    await reader.read()
    exporter.answer = page(0, idle_s=None)
    await reader.read()
    assert reader.idle_at_s["ns/p"] == since
    exporter.answer = page(0.5, idle_s=None)
    await reader.read()
    assert "ns/p" not in reader.idle_at_s


async def test_a_pod_that_is_gone_is_forgotten() -> None:
    exporter = Exporter(page(0, idle_s=60))
    reader = reader_of(exporter)
    await reader.read()
    exporter.answer = ""
    await reader.read()
    assert reader.idle_at_s == {}
