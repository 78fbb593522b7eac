"""The clusters of the vendor's documents, as the API server tells them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from gpuslice.adapters.kube import objects
from gpuslice.apps.cli.cluster import node_facts, pod_facts
from gpuslice.core.report import Report, report

Json = dict[str, Any]

V100_NODE = "cn-hangzhou.192.168.2.167"
T4_NODE = "cn-zhangjiakou.192.168.3.184"
NOTEBOOKS = (
    "tf-notebook-2-7b4d68d8f7-wxlff",
    "tf-notebook-3-86c48d4c7d-lk9h8",
    "tf-notebook-7cf4575d78-9gxzd",
)


def node(name: str, *, units: int = 0, cards: int = 0, role: str = "", **more: Any) -> Json:
    """A node; its address is the end of its name, as in the documents.

    More: address, annotations, labels, ready, capacity (beside what is allocatable), allocatable.
    """
    resources = {"aliyun.com/gpu-mem": str(units), "aliyun.com/gpu-count": str(cards)} if cards else {}
    resources |= more.get("allocatable", {})
    address = more.get("address", name.partition(".")[2])
    labels = ({f"node-role.kubernetes.io/{role}": ""} if role else {}) | more.get("labels", {})
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": labels, "annotations": more.get("annotations", {})},
        "spec": {},
        "status": {
            "addresses": [{"type": "InternalIP", "address": address}] if address else [],
            "capacity": resources | more.get("capacity", {}),
            "allocatable": resources,
            "conditions": [{"type": "Ready", "status": "True" if more.get("ready", True) else "False"}],
        },
    }


def pod(name: str, units: int, on: str, card: str | None = "0", **more: Any) -> Json:
    """A pod of `units` on a card of node `on`; without a card its annotations are empty.

    More: namespace, phase, annotations, exclusive (whole cards asked for), core (percent of a card), labels.
    """
    limits = {"aliyun.com/gpu-mem": str(units)} if units else {}
    limits |= {"nvidia.com/gpu": str(more["exclusive"])} if "exclusive" in more else {}
    limits |= {"aliyun.com/gpu-core.percentage": str(more["core"])} if "core" in more else {}
    chosen = (
        {"ALIYUN_COM_GPU_MEM_IDX": card, "ALIYUN_COM_GPU_MEM_POD": str(units)} if card is not None else {}
    )
    namespace = more.get("namespace", "default")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": f"{namespace}/{name}",
            "labels": more.get("labels", {}),
            "annotations": chosen | more.get("annotations", {}),
        },
        "spec": {
            "nodeName": on,
            "containers": [{"name": "app", "image": "x", "resources": {"limits": limits}}],
        },
        "status": {"phase": more.get("phase", "Running")},
    }


def v100_node() -> list[Json]:
    return [node(V100_NODE, units=15, cards=1)]


def two_apps() -> list[Json]:
    return [pod(f"app-3g-v1-{number}", 4, V100_NODE) for number in (0, 1)]


def five_nodes() -> list[Json]:
    masters = ("cn-zhangjiakou.192.168.0.138", "cn-zhangjiakou.192.168.1.112", "cn-zhangjiakou.192.168.3.115")
    plain = node("cn-zhangjiakou.192.168.1.113")
    return [node(T4_NODE, units=14, cards=1), plain, *(node(name, role="master") for name in masters)]


def three_notebooks() -> list[Json]:
    return [pod(name, 4, T4_NODE) for name in NOTEBOOKS]


def report_of(nodes: Iterable[Json], pods: Iterable[Json] = ()) -> Report:
    """The report on API objects, decoded as from the wire."""
    read_nodes = [msgspec.convert(each, objects.Node) for each in nodes]
    read_pods = [msgspec.convert(each, objects.Pod) for each in pods]
    return report(map(node_facts, read_nodes), map(pod_facts, read_pods))
