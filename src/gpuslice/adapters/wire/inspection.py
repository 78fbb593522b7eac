"""What the extender knows of a node as JSON: the vendor's inspect, and in full for a bug report."""

from __future__ import annotations

from typing import Any

import msgspec

from gpuslice.core.holds import NodeHolds


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


def inspected(holds: NodeHolds) -> InspectedNode:
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
