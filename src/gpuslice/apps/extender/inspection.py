"""What the extender knows, for people and tools: ``/inspect`` in the vendor's form, the rest to debug."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

from gpuslice.core.holds import NodeHolds
from gpuslice.core.ledger import Ledger

SLICE = 200  # nodes described before other requests get their turn


class PodShare(msgspec.Struct):
    name: str
    namespace: str
    used_gpu: int = msgspec.field(name="usedGPU")


class Device(msgspec.Struct):
    id: int
    total_gpu: int = msgspec.field(name="totalGPU")
    used_gpu: int = msgspec.field(name="usedGPU")
    pods: list[PodShare]


class InspectedNode(msgspec.Struct):
    name: str
    total_gpu: int = msgspec.field(name="totalGPU")
    used_gpu: int = msgspec.field(name="usedGPU")
    devs: list[Device]


class Inspection(msgspec.Struct, omit_defaults=True):
    nodes: list[InspectedNode] | None
    error: str = ""


async def inspect_all(ledger: Ledger) -> Inspection:
    """Every node with shared cards, sorted by name; each is consistent in itself."""
    known = _known(ledger, ledger.node_names())
    return Inspection([_node(each) async for each in known if each.node is not None and each.node.cards])


async def _known(ledger: Ledger, names: Iterable[str]) -> AsyncIterator[NodeHolds]:
    for number, name in enumerate(names):
        if number % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        if (holds := ledger.holds.on(name)) is not None:
            yield holds


def inspect_node(ledger: Ledger, name: str) -> Inspection:
    """One node, or an error if it is unknown."""
    holds = ledger.holds.on(name)
    if holds is None or holds.node is None:
        return Inspection(None, f"node {name} is not known; /gpushare-scheduler/inspect lists those that are")
    return Inspection([_node(holds)])


def _node(holds: NodeHolds) -> InspectedNode:
    assert holds.node is not None
    devices = []
    for card in holds.node.cards:
        pods = [
            PodShare(each.pod.name, each.pod.namespace, part.units)
            for each in holds.by_uid.values()
            if each.placement is not None
            for part in each.placement.slices
            if part.card == card.index
        ]
        pods += [
            PodShare(f"{name} (gone)", namespace, part.units)
            for orphan in holds.node.orphans
            for namespace, _, name in [orphan.pod.partition("/")]
            for part in orphan.slices
            if part.card == card.index
        ]
        pods.sort(key=lambda pod: (pod.namespace, pod.name))
        devices.append(Device(card.index, card.units, sum(pod.used_gpu for pod in pods), pods))
    total, used = sum(each.total_gpu for each in devices), sum(each.used_gpu for each in devices)
    return InspectedNode(holds.name, total, used, devices)


async def debug_nodes(ledger: Ledger, names: Iterable[str]) -> list[dict[str, Any]]:
    """Those of the nodes that are known, in full."""
    return [debug_node(each) async for each in _known(ledger, names)]


def debug_node(holds: NodeHolds) -> dict[str, Any]:
    """A node in full: what a bug report needs to become a test."""
    state = holds.state()
    return {
        "name": holds.name,
        "gpus": [
            {"index": card.index, "uuid": card.uuid, "units": card.units, "left": left, "coreLeft": core}
            for card, left, core in zip(state.node.cards, state.left, state.compute_left, strict=True)
        ],
        "unhealthy": sorted(state.node.unhealthy),
        "packing": state.node.packing,
        "problem": state.node.problem,
        "unplacedUnits": holds.unplaced_units(),
        "pods": [
            {
                "uid": each.pod.uid,
                "name": each.pod.key,
                "hold": each.kind,
                "assigned": each.pod.assigned,
                "terminating": each.pod.terminating,
                "units": each.pod.request.units if each.pod.request else None,
                "cards": {part.card: part.units for part in each.placement.slices}
                if each.placement
                else None,
                "problem": each.pod.problem,
            }
            for _, each in (*sorted(holds.by_uid.items()), *sorted(holds.reserved.items()))
        ],
    }
