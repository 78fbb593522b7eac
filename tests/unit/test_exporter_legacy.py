"""The vendor's own metrics: whose series those of a whole, idle or shared card are, and what it supports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuslice.adapters.gpu.telemetry import CardSample
from gpuslice.adapters.web.exposition import render
from gpuslice.apps.exporter.ack import custom_families, legacy_families
from gpuslice.apps.exporter.card_snapshot import CardSnapshot, NodeFacts, NodeSnapshot, build_card
from gpuslice.apps.exporter.device_grants import DeviceGrant, DeviceGrants, ShareMode
from gpuslice.apps.exporter.isolation import Isolation
from gpuslice.core.attribution import ContainerKey, Owner, ProcessReading
from gpuslice.core.units import MIB
from tests.integration.exporter_rig import Page

UUID = "GPU-a"
A, B = ContainerKey("default", "app-0", "main"), ContainerKey("team", "app-1", "main")
WHOLE = DeviceGrant("nvidia.com/gpu", ShareMode.EXCLUSIVE)
PART = DeviceGrant("aliyun.com/gpu-mem", ShareMode.SHARE, 4)


def card(grants: dict[ContainerKey, DeviceGrant], *processes: ProcessReading) -> CardSnapshot:
    sample = CardSample(
        position=0,
        index=2,
        uuid=UUID,
        model="Tesla V100-SXM2-16GB",
        total_bytes=16130 * MIB,
        used_bytes=6396 * MIB,
        fields={150: 37.0, 155: 57.0, 203: 20.0},
        processes=processes,
    )
    owners: dict[int, Owner] = dict(enumerate(grants))
    return build_card(
        sample, NodeFacts(owners, DeviceGrants({UUID: grants} if grants else {}), Isolation({}))
    )


def page(*cards: CardSnapshot) -> Page:
    return Page(render(legacy_families(NodeSnapshot(cards, (), "418.87.01", 1.0, {}), "n1")).decode())


def test_a_whole_card_is_one_series_of_its_pod() -> None:
    """The card's own figures: nobody else is on it."""
    ((labels, used),) = page(card({A: WHOLE})).all("nvidia_gpu_memory_used_bytes")
    assert labels == {
        "allocate_mode": "exclusive",
        "container_name": "main",
        "minor_number": "2",
        "name": "Tesla V100-SXM2-16GB",
        "namespace_name": "default",
        "node_name": "n1",
        "pod_name": "app-0",
        "uuid": UUID,
    }
    assert used == 6396 * MIB


def test_a_shared_card_is_one_series_for_each_container_with_what_that_uses() -> None:
    processes = [ProcessReading(0, UUID, 3193 * MIB, 0.25), ProcessReading(1, UUID, 100 * MIB, 0.1)]
    shared = page(card({A: PART, B: PART}, *processes))
    used = {labels["pod_name"]: value for labels, value in shared.all("nvidia_gpu_memory_used_bytes")}
    assert used == {"app-0": 3193 * MIB, "app-1": 100 * MIB}
    busy = {labels["pod_name"]: value for labels, value in shared.all("nvidia_gpu_duty_cycle")}
    assert busy == {"app-0": 25, "app-1": 10}
    assert {labels["allocate_mode"] for labels, _ in shared.all("nvidia_gpu_duty_cycle")} == {"share"}
    assert [value for _, value in shared.all("nvidia_gpu_memory_total_bytes")] == [16130 * MIB] * 2


def test_an_idle_card_has_a_series_without_a_pod() -> None:
    idle = page(card({}))
    ((labels, total),) = idle.all("nvidia_gpu_memory_total_bytes")
    assert (labels["pod_name"], labels["allocate_mode"], total) == ("", "", 16130 * MIB)
    assert idle.one("nvidia_gpu_power_usage_milliwatts") == 57_000
    assert idle.one("nvidia_gpu_temperature_celsius") == 37
    assert idle.one("nvidia_gpu_duty_cycle") == pytest.approx(20)
    assert idle.one("nvidia_gpu_num_devices") == 1


def test_a_card_supports_dcgm_when_it_has_figures_of_its_fields() -> None:
    full = card({})
    bare = replace(full, sample=replace(full.sample, fields={}))
    for one, wanted in ((full, "true"), (bare, "false")):
        told = Page(render(custom_families(NodeSnapshot((one,)), "n1")).decode())
        ((labels, _),) = told.all("DCGM_CUSTOM_DEV_FB_TOTAL")
        assert labels["SupportDCGM"] == wanted
