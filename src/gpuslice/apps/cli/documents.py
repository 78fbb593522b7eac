"""What ``-o json`` and ``-o yaml`` print. A value that is not known has no key; it is never 0.

`inspect_document` is our own shape::

    unit         "GiB" or "MiB": what all amounts below count; absent where no card is shared
    allocated, total, percent        of all nodes listed; percent is cut off, not rounded
    nodes[]      name, address, allocated, total, percent, pending (held by pods without a card)
      gpus[]     index, allocated, total, and where known corePercent, uuid, model, memoryMiB
      pods[]     namespace, name, phase, units, pending, gpus {"<index>": units}, and where set
                 corePercent {"<index>": percent}

`arena_document` has the keys of current ``arena top node -o json``; memory is in bytes there. What exporters
measured is in ``gpuMetrics[]``: id, uuid, status, gpuDutyCycle (percent), usedGPUMemory and totalGPUMemory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from gpuslice.core.report import (
    ExclusiveUse,
    NodeFacts,
    NodeUse,
    Report,
    compute_total,
    percent,
    roles,
)
from gpuslice.core.views import names_offered
from gpuslice.diagnosis.usage import CardUsage, known

Document = dict[str, Any]


def inspect_document(report: Report) -> Document:
    nodes = []
    for node in report.shared:
        cards = [
            known(
                index=card.index,
                allocated=card.allocated,
                total=card.total,
                corePercent=card.compute_percent or None,
                uuid=(card.gpu.uuid or None) if card.gpu else None,
                model=(card.gpu.model or None) if card.gpu else None,
                memoryMiB=(card.gpu.memory_mib or None) if card.gpu else None,
            )
            for card in node.cards
        ]
        pods = [
            known(
                namespace=pod.namespace,
                name=pod.name,
                phase=pod.phase or None,
                units=pod.units,
                pending=pod.pending,
                gpus=_keyed(pod.by_card),
                corePercent=_keyed(pod.compute_by_card) or None,
            )
            for pod in node.pods
        ]
        nodes.append(
            known(
                name=node.name,
                address=node.facts.address or None,
                allocated=node.allocated,
                total=node.total,
                percent=percent(node.allocated, node.total),
                pending=node.pending,
                gpus=cards,
                pods=pods,
                problem=node.problem or None,
            )
        )
    head: Document = {"unit": report.unit} if report.unit else {}
    return head | {
        "allocated": report.allocated,
        "total": report.total,
        "percent": percent(report.allocated, report.total),
        "nodes": nodes,
    }


def _keyed(amounts: Any) -> dict[str, int]:
    return {str(card): amount for card, amount in sorted(amounts.items())}


# -- arena -------------------------------------------------------------------------------------------


def arena_document(report: Report, cards: Iterable[CardUsage] = ()) -> Document:
    """`cards`: measured by exporters, if that was requested."""
    metrics: dict[str, list[Document]] = defaultdict(list)
    for card in cards:
        metrics[card.node].append(
            known(
                id=card.gpu,
                uuid=card.uuid,
                status="" if card.up else "lost",
                gpuDutyCycle=None if card.utilization_ratio is None else card.utilization_ratio * 100,
                usedGPUMemory=card.used_bytes,
                totalGPUMemory=card.total_bytes,
            )
        )
    exclusive = [node for node in report.others if node.allocatable]
    normal = [node for node in report.others if not node.allocatable]
    return {
        "gpuShareNodes": [_share_node(node, report.unit_bytes, metrics[node.name]) for node in report.shared],
        "gpuTopologyNodes": [],
        "gpuExclusiveNodes": [_exclusive_node(node, metrics[node.facts.name]) for node in exclusive],
        "normalNodes": [_common(node.facts, "Normal") for node in normal],
    }


def _share_node(node: NodeUse, unit_bytes: int, metrics: list[Document]) -> Document:
    whole = round(sum(card.allocated / card.total for card in node.cards if card.total), 1)
    units = node.facts.built_in(names_offered(node.facts.allocatable).memory)
    return {
        "instances": [
            {
                "name": pod.name,
                "namespace": pod.namespace,
                "status": pod.status,
                "requestGPUMemory": pod.units,
                "requestGPUCore": sum(pod.compute_by_card.values()),
                "gpuMemoryAllocation": _keyed(pod.by_card),
                "gpuCoreAllocation": _keyed(pod.compute_by_card),
            }
            for pod in node.pods
        ],
        "totalGPUMemory": units * unit_bytes,
        "allocatedGPUMemory": node.allocated * unit_bytes,
        "totalGPUCore": compute_total(node.facts, node.card_count),
        "allocatedGPUCore": sum(card.compute_percent for card in node.cards),
        "devices": [
            {
                "id": str(card.index),
                "totalGPUMemory": card.total * unit_bytes,
                "allocatedGPUMemory": card.allocated * unit_bytes,
                "totalGPUCore": compute_total(node.facts, 1),
                "allocatedGPUCore": card.compute_percent,
            }
            for card in node.cards
        ],
        "totalGPUs": node.card_count,
        "allocatedGPUs": int(whole) if float(whole).is_integer() else whole,
        "unhealthyGPUs": node.card_count * max(units - node.total, 0) // max(units, 1),
        "gpuMetrics": metrics,
        **_common(node.facts, "GPUShare"),
    }


def _exclusive_node(node: ExclusiveUse, metrics: list[Document]) -> Document:
    return {
        "instances": [
            {
                "name": each.pod.name,
                "namespace": each.pod.namespace,
                "status": each.status,
                "requestGPUs": each.exclusive_gpus,
            }
            for each in node.pods
        ],
        **_common(node.facts, "GPUExclusive"),
        "totalGPUs": node.total,
        "allocatedGPUs": node.allocated,
        "unhealthyGPUs": max(node.total - node.allocatable, 0),
        "gpuMetrics": metrics,
    }


def _common(facts: NodeFacts, kind: str) -> Document:
    status = "Ready" if facts.ready else "NotReady"
    return {
        "name": facts.name,
        "description": "",
        "ip": facts.address or "N/A",
        "status": status if facts.schedulable else f"{status},SchedulingDisabled",
        "role": ",".join(roles(facts.labels)),
        "type": kind,
    }
