"""The shape of -o json is a promise to programs."""

from __future__ import annotations

import json

from gpuslice.apps.cli.documents import arena_document, inspect_document
from gpuslice.diagnosis.usage import CardUsage
from tests.golden.clusters import (
    T4_NODE,
    V100_NODE,
    five_nodes,
    node,
    pod,
    report_of,
    three_notebooks,
    two_apps,
    v100_node,
)

GIB = 1 << 30


def test_inspect_tells_nodes_cards_and_pods() -> None:
    assert inspect_document(report_of(v100_node(), two_apps()[:1])) == {
        "unit": "GiB",
        "allocated": 4,
        "total": 15,
        "percent": 26,
        "nodes": [
            {
                "name": V100_NODE,
                "address": "192.168.2.167",
                "allocated": 4,
                "total": 15,
                "percent": 26,
                "pending": 0,
                "gpus": [{"index": 0, "allocated": 4, "total": 15}],
                "pods": [
                    {
                        "namespace": "default",
                        "name": "app-3g-v1-0",
                        "phase": "Running",
                        "units": 4,
                        "pending": False,
                        "gpus": {"0": 4},
                    }
                ],
            }
        ],
    }


def test_what_the_node_tells_of_its_cards_is_passed_on() -> None:
    card = {"index": 0, "uuid": "GPU-a", "memory_mib": 16130, "units": 15, "model": "V100"}
    told = node("n", units=15, cards=1, annotations={"gpuslice.io/gpus": json.dumps([card])}, address="")
    (found,) = inspect_document(report_of([told]))["nodes"]
    assert found["gpus"] == [
        {"index": 0, "allocated": 0, "total": 15, "uuid": "GPU-a", "model": "V100", "memoryMiB": 16130}
    ]
    assert "address" not in found


def test_an_empty_cluster_is_an_empty_document() -> None:
    assert inspect_document(report_of([])) == {"allocated": 0, "total": 0, "percent": 0, "nodes": []}


def test_top_node_has_the_keys_of_arena_with_memory_in_bytes() -> None:
    document = arena_document(report_of(five_nodes(), three_notebooks()))
    assert list(document) == ["gpuShareNodes", "gpuTopologyNodes", "gpuExclusiveNodes", "normalNodes"]
    (shared,) = document["gpuShareNodes"]
    assert shared["allocatedGPUMemory"] == 12884901888
    assert shared["totalGPUMemory"] == 14 * GIB
    assert (shared["totalGPUs"], shared["allocatedGPUs"]) == (1, 0.9)
    assert shared["instances"][0] == {
        "name": "tf-notebook-2-7b4d68d8f7-wxlff",
        "namespace": "default",
        "status": "Running",
        "requestGPUMemory": 4,
        "requestGPUCore": 0,
        "gpuMemoryAllocation": {"0": 4},
        "gpuCoreAllocation": {},
    }
    assert shared["devices"] == [
        {
            "id": "0",
            "totalGPUMemory": 14 * GIB,
            "allocatedGPUMemory": 12 * GIB,
            "totalGPUCore": 0,
            "allocatedGPUCore": 0,
        }
    ]
    assert {name: shared[name] for name in ("ip", "status", "role", "type")} == {
        "ip": "192.168.3.184",
        "status": "Ready",
        "role": "",
        "type": "GPUShare",
    }
    assert [each["role"] for each in document["normalNodes"]] == ["master", "master", "", "master"]


def test_nodes_with_whole_cards_are_exclusive() -> None:
    whole = node("a", allocatable={"nvidia.com/gpu": "1"}, capacity={"nvidia.com/gpu": "2"}, ready=False)
    taker = pod("p", 0, "a", card=None, exclusive=1)
    (found,) = arena_document(report_of([whole], [taker]))["gpuExclusiveNodes"]
    assert (found["totalGPUs"], found["allocatedGPUs"], found["unhealthyGPUs"]) == (2, 1, 1)
    assert found["status"] == "NotReady"
    assert found["instances"] == [
        {"name": "p", "namespace": "default", "status": "Running", "requestGPUs": 1}
    ]


def test_compute_shares_are_told_where_they_are_set() -> None:
    divided = node("n", units=15, cards=1, allocatable={"aliyun.com/gpu-core.percentage": "100"})
    report = report_of([divided], [pod("p", 4, "n", core=20)])
    (shared,) = arena_document(report)["gpuShareNodes"]
    assert (shared["totalGPUCore"], shared["allocatedGPUCore"]) == (100, 20)
    assert inspect_document(report)["nodes"][0]["pods"][0]["corePercent"] == {"0": 20}


def test_what_exporters_measured_has_the_keys_of_arena_and_what_is_unknown_has_none() -> None:
    busy = CardUsage(T4_NODE, "0", "GPU-a", used_bytes=3 * GIB, total_bytes=15.0 * GIB, utilization_ratio=0.5)
    lost = CardUsage("a", "1", "GPU-b", up=False)
    whole = node("a", allocatable={"nvidia.com/gpu": "2"}, capacity={"nvidia.com/gpu": "2"})
    document = arena_document(report_of([*five_nodes(), whole]), [busy, lost])
    assert document["gpuShareNodes"][0]["gpuMetrics"] == [
        {
            "id": "0",
            "uuid": "GPU-a",
            "status": "",
            "gpuDutyCycle": 50.0,
            "usedGPUMemory": 3 * GIB,
            "totalGPUMemory": 15.0 * GIB,
        }
    ]
    assert document["gpuExclusiveNodes"][0]["gpuMetrics"] == [{"id": "1", "uuid": "GPU-b", "status": "lost"}]
