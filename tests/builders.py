"""Values for tests: mention only what matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpuslice.core.annotations import placement_annotations
from gpuslice.core.contract import GPU_COUNT, GPU_MEM
from gpuslice.core.model import Card, CardSlice, ContainerRequest, Node, Placement, Pod, Request

UNIT_MIB = 1024


def make_card(index: int = 0, units: int = 15, *, uuid: str = "", node: str = "n1", model: str = "") -> Card:
    memory_mib = units * UNIT_MIB + 770  # 15 units: the 16130 MiB of a V100
    return Card(index, uuid or f"GPU-{node}-{index}", memory_mib, units, model)


def make_node(name: str = "n1", cards: Sequence[int] = (15,), **fields: Any) -> Node:
    """`cards`: the units of each card, in index order."""
    made = tuple(make_card(index, units, node=name) for index, units in enumerate(cards))
    return Node(name, made, **fields)


def make_request(memory: int = 4, *, cards: int = 1, core: int = 0) -> Request:
    container = ContainerRequest("main", 0, memory, core)
    return Request(memory, cards, core, (container,))


def make_placement(node: str = "n1", units: int = 4, *cards: int, core: int = 0) -> Placement:
    on = cards or (0,)
    return Placement(node, tuple(CardSlice(card, units // len(on), core) for card in on))


def make_pod(
    name: str = "p",
    memory: int = 4,
    *,
    uid: str = "",
    node: str = "",
    card: int | None = None,
    cards: Sequence[int] = (),
    core: int = 0,
    **fields: Any,
) -> Pod:
    """`card` or `cards`: where the annotations say that it sits on `node`."""
    on = tuple(cards) or (() if card is None else (card,))
    request = make_request(memory, cards=max(1, len(on)), core=core)
    placement = make_placement(node, memory, *on, core=core) if on else None
    fields = {"namespace": "default", "request": request, **fields}
    return Pod(uid=uid or f"uid-{name}", name=name, node=node, placement=placement, **fields)


# -- objects of the Kubernetes API, as JSON ----------------------------------------------------------------


def api_container(memory: Any = None, name: str = "main", **limits: Any) -> dict[str, Any]:
    if memory is not None:
        limits = {GPU_MEM: memory, **limits}
    return {"name": name, "image": "app", "resources": {"limits": limits, "requests": limits}}


def api_pod(
    name: str = "p",
    memory: Any = "4",
    *,
    namespace: str = "default",
    uid: str = "",
    node: str = "",
    version: str = "",
    annotations: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    owners: list[dict[str, Any]] | None = None,
    containers: list[dict[str, Any]] | None = None,
    phase: str = "Pending",
    **spec: Any,
) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": name, "namespace": namespace, "uid": uid or f"uid-{name}"}
    if version:
        metadata["resourceVersion"] = version
    if annotations:
        metadata["annotations"] = annotations
    if labels:
        metadata["labels"] = labels
    if owners:
        metadata["ownerReferences"] = owners
    spec = {"containers": containers or [api_container(memory)], **spec}
    if node:
        spec["nodeName"] = node
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": spec,
        "status": {"phase": phase},
    }


def api_node(
    name: str = "n1",
    units: int = 15,
    cards: int = 1,
    *,
    annotations: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
) -> dict[str, Any]:
    """A node of `cards` equal cards with `units` in all, as the open-source gpushare describes it."""
    amounts = {"cpu": "64", "memory": "256Gi", "pods": "250"}
    if units:
        amounts |= {GPU_MEM: str(units), GPU_COUNT: str(cards)}
    metadata: dict[str, Any] = {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}}
    if annotations:
        metadata["annotations"] = annotations
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": metadata,
        "spec": {},
        "status": {"capacity": dict(amounts), "allocatable": dict(amounts)},
    }


def placed_annotations(pod: Pod, node: Node, now_ns: int = 1) -> dict[str, str]:
    """The annotations of a placed pod."""
    assert pod.placement is not None
    assert pod.request is not None
    return placement_annotations(pod.placement, pod.request, node, now_ns)
