"""Quotas and ranges that do not do what they say, and those that do."""

from __future__ import annotations

import pytest

from gpuslice.core.contract import NEUTRAL_NAMES, VENDOR_NAMES, ResourceNames
from gpuslice.core.quota import quota_hints, range_hints

VENDOR, NEUTRAL, BOTH = (VENDOR_NAMES,), (NEUTRAL_NAMES,), (VENDOR_NAMES, NEUTRAL_NAMES)
MEM, OTHER, CORE = VENDOR_NAMES.memory, NEUTRAL_NAMES.memory, VENDOR_NAMES.compute
Sets = tuple[ResourceNames, ...]


@pytest.mark.parametrize(
    ("key", "offered", "right"),
    [
        (f"requests.{MEM}", VENDOR, ""),
        (f"requests.{MEM}", BOTH, ""),
        (f"requests.{OTHER}", BOTH, ""),
        (f"requests.{MEM}", (), ""),
        ("requests.nvidia.com/gpu", VENDOR, ""),
        ("pods", VENDOR, ""),
        ("requests.example.com/fpga", VENDOR, ""),
        ("requests.nvidia.com/mig-1g.10gb", VENDOR, ""),
        (MEM, VENDOR, f"limit requests.{MEM}"),
        (MEM, (), f"limit requests.{MEM}"),
        (f"limits.{MEM}", VENDOR, f"limit requests.{MEM}"),
        (f"count/{MEM}", VENDOR, f"limit requests.{MEM}"),
        (f"requests.{OTHER}", VENDOR, f"limit requests.{MEM}"),
        (f"requests.{MEM}", NEUTRAL, f"limit requests.{OTHER}"),
        (f"limits.{CORE}", NEUTRAL, "limit requests.gpuslice.io/compute"),
        ("requests.gpuslice.io/compute", VENDOR, f"limit requests.{CORE}"),
        ("requests.nvidia.com/gpumem", VENDOR, f"limit requests.{MEM}"),
        ("requests.nvidia.com/gpucores", VENDOR, f"limit requests.{CORE}"),
        ("requests.aliyun.com/gpu-count", VENDOR, "is a label of the pod, not a resource"),
        ("requests.aliyun.com/gpu_mem", VENDOR, f"did you mean {MEM}?"),
    ],
)
def test_a_quota_that_counts_nothing_is_told_what_would(key: str, offered: Sets, right: str) -> None:
    hints = list(quota_hints({"spec": {"hard": {key: "8"}}}, offered, {"nvidia.com/gpu", "cpu"}))
    assert len(hints) == bool(right)
    assert all(hint.startswith(f"limits {key}, under which nothing is counted: ") for hint in hints)
    assert all(right in hint for hint in hints)


def test_what_a_node_of_another_system_offers_is_counted() -> None:
    quota = {"spec": {"hard": {"requests.nvidia.com/gpumem": "8"}}}
    assert not list(quota_hints(quota, VENDOR, {"nvidia.com/gpumem"}))
    assert not list(quota_hints({"spec": {}}, VENDOR, ()))


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"max": {MEM: "8"}}, "gives 8 aliyun.com/gpu-mem to every container"),
        ({"default": {MEM: "2"}, "max": {MEM: "8"}}, "gives 2 aliyun.com/gpu-mem to every container"),
        ({"default": {MEM: "0"}, "max": {MEM: "8"}}, ""),
        ({"type": "Pod", "max": {MEM: "8"}}, ""),
        ({"max": {"cpu": "8"}}, ""),
        ({"max": {OTHER: "8"}, "default": {OTHER: "0"}}, f"limit {MEM}"),
        ({"type": "Pod", "min": {OTHER: "8"}}, f"limit {MEM}"),
    ],
)
def test_a_range_that_gives_what_nobody_asked_for(limits: dict[str, object], said: str) -> None:
    hints = list(range_hints({"spec": {"limits": [{"type": "Container", **limits}]}}, VENDOR))
    assert len(hints) == bool(said)
    assert all(said in hint for hint in hints)
