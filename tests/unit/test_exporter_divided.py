"""Divided cards without processes to go by, and what a card's health is judged from."""

from __future__ import annotations

import pytest

from gpuslice.adapters.gpu.mig import MigSample
from gpuslice.adapters.gpu.telemetry import CardSample
from gpuslice.apps.exporter.card_history import WINDOW_S, CounterRises, Result, judge
from gpuslice.apps.exporter.card_snapshot import CardSnapshot, NodeFacts, build_card
from gpuslice.apps.exporter.device_grants import grants_of
from gpuslice.apps.exporter.isolation import Isolation
from gpuslice.core.attribution import ContainerKey, Stranger
from gpuslice.core.device_assignment import DeviceAssignment

GIB = 1 << 30
A, B = ContainerKey("default", "a", "main"), ContainerKey("default", "b", "main")


def drawn(first: list[str], second: list[str]) -> CardSnapshot:
    """A card of three devices, two of them in one instance, whose processes cannot be seen."""
    devices = (
        MigSample("MIG-1", "1c.2g", 1, 0, 10 * GIB, 3 * GIB),
        MigSample("MIG-2", "1c.2g", 1, 1, 10 * GIB, 3 * GIB),
        MigSample("MIG-3", "1g", 2, 0, 5 * GIB, GIB),
    )
    sample = CardSample(
        0, 0, "GPU-a", total_bytes=40 * GIB, used_bytes=5 * GIB, mig=devices, mig_enabled=True
    )
    held = [
        DeviceAssignment(key.namespace, key.pod, "main", frozenset(ids))
        for key, ids in ((A, first), (B, second))
    ]
    return build_card(
        sample, NodeFacts({}, grants_of({"nvidia.com/mig-x": held}), Isolation({}), obstacle="hidden")
    )


def test_without_processes_a_devices_memory_is_its_only_holders() -> None:
    card = drawn(["MIG-1", "MIG-2"], ["MIG-3"])
    assert (card.containers[A].used_bytes, card.containers[B].used_bytes) == (3 * GIB, GIB)
    assert card.containers[A].limit_bytes == 10 * GIB
    assert sum(use.memory_bytes or 0 for use in card.strangers.values()) == GIB


def test_an_instance_that_two_share_tells_of_neither() -> None:
    card = drawn(["MIG-1"], ["MIG-2"])
    assert [each.used_bytes for each in card.containers.values()] == [None, None]
    assert card.missing["memory_used", "hidden"] == 2
    assert card.strangers[Stranger.UNKNOWN].memory_bytes == 5 * GIB


def test_devices_of_one_instance_are_given_out_once() -> None:
    assert drawn(["MIG-1"], ["MIG-2"]).allocated_bytes == 10 * GIB
    assert drawn(["MIG-1"], ["MIG-3"]).allocated_bytes == 15 * GIB


def test_a_card_that_two_plugins_give_out_is_given_out_twice() -> None:
    """Which is what the alert for it looks at; time slices by one plugin are one card."""

    def allocated(*given: tuple[str, str]) -> int | None:
        held: dict[str, list[DeviceAssignment]] = {}
        for number, (resource, device) in enumerate(given):
            one = DeviceAssignment("default", f"pod-{number}", "main", frozenset({device}))
            held.setdefault(resource, []).append(one)
        sample = CardSample(0, 0, "GPU-a", total_bytes=16 * GIB, used_bytes=0)
        return build_card(sample, NodeFacts({}, grants_of(held), Isolation({}))).allocated_bytes

    share, whole = ("aliyun.com/gpu-mem", "GPU-a-_-1"), ("nvidia.com/gpu", "GPU-a")
    time_slices = [("nvidia.com/gpu.shared", f"GPU-a::{number}") for number in range(3)]
    assert allocated(share) == GIB
    assert allocated(*time_slices) == allocated(whole) == 16 * GIB
    assert allocated(share, whole) == 17 * GIB
    assert allocated(whole, *time_slices) == 32 * GIB


@pytest.mark.parametrize(
    ("fields", "rises", "xids", "watch", "result", "code"),
    [
        ({395: 1.0, 396: 1.0}, {}, set(), "MEM", Result.FAIL, "DCGM_FR_ROW_REMAP_FAILURE"),
        ({396: 1.0}, {}, set(), "MEM", Result.WARN, "DCGM_FR_PENDING_ROW_REMAP"),
        ({311: 0.0}, {}, set(), "MEM", Result.PASS, "DCGM_FR_OK"),
        ({84: 0.0}, {}, set(), "INFOROM", Result.WARN, "DCGM_FR_CORRUPT_INFOROM"),
        ({84: 1.0}, {}, set(), "INFOROM", Result.PASS, "DCGM_FR_OK"),
        ({}, {202: 8}, set(), "PCIE", Result.PASS, "DCGM_FR_OK"),
        ({}, {202: 9}, set(), "PCIE", Result.WARN, "DCGM_FR_PCI_REPLAY_RATE"),
        ({}, {439: 1}, set(), "NVLINK", Result.FAIL, "DCGM_FR_NVLINK_ERROR_CRITICAL"),
        ({}, {}, {79}, "ALL", Result.FAIL, "DCGM_FR_XID_ERROR"),
        ({}, {}, {31}, "ALL", Result.PASS, "DCGM_FR_OK"),
    ],
)
def test_a_watch_is_as_bad_as_the_worst_that_is_known(  # noqa: PLR0917 — one row each
    fields: dict[int, float | str],
    rises: dict[int, float],
    xids: set[int],
    watch: str,
    result: Result,
    code: str,
) -> None:
    found = {each.watch: (each.result, each.code) for each in judge(fields, rises, xids)}
    assert found[watch] == (result, code)
    assert found.keys() == {watch, "ALL"}  # of the others nothing is known


def test_only_what_rose_within_the_last_minute_counts() -> None:
    rises = CounterRises()
    for now_s, replays in ((0.0, 100.0), (10.0, 120.0), (10.0 + WINDOW_S, 120.0)):
        rises.add("GPU-a", {202: replays}, now_s)
    assert rises.of("GPU-a") == {202: 0.0}
    rises.add("GPU-a", {202: 5.0}, 80.0)  # the driver was loaded anew
    assert rises.of("GPU-a") == {202: 0.0}
