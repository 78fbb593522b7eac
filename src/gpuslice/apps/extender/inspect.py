"""What the extender knows, for people and tools: ``/inspect`` in the vendor's form, metrics, state."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from gpuslice.adapters.web.exposition import Family, MetricKind, labels
from gpuslice.apps.extender.timing import ApiTimes
from gpuslice.core.ledger import Ledger
from gpuslice.core.node_allocations import Allocation, NodeAllocations

NO_COUNTS: Mapping[str, int] = {}
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
    nodes = []
    for number, name in enumerate(ledger.node_names()):
        if number % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        allocations = ledger.allocations(name)
        if allocations is not None and allocations.node is not None and allocations.node.cards:
            nodes.append(_node(allocations))
    return Inspection(nodes)


def inspect_node(ledger: Ledger, name: str) -> Inspection:
    """One node; with an error when it is not known."""
    allocations = ledger.allocations(name)
    if allocations is None or allocations.node is None:
        return Inspection(None, f"node {name} is not known; /gpushare-scheduler/inspect lists those that are")
    return Inspection([_node(allocations)])


def _node(allocations: NodeAllocations) -> InspectedNode:
    assert allocations.node is not None
    devices = [_device(allocations, card.index, card.units) for card in allocations.node.cards]
    return InspectedNode(
        allocations.name,
        sum(device.total_gpu for device in devices),
        sum(device.used_gpu for device in devices),
        devices,
    )


def _device(allocations: NodeAllocations, index: int, units: int) -> Device:
    pods = sorted(_pods_on(allocations.by_uid.values(), index), key=lambda pod: (pod.namespace, pod.name))
    return Device(index, units, sum(pod.used_gpu for pod in pods), pods)


def _pods_on(by_uid: Iterable[Allocation], index: int) -> list[PodShare]:
    return [
        PodShare(allocation.pod.name, allocation.pod.namespace, part.units)
        for allocation in by_uid
        if allocation.placement is not None
        for part in allocation.placement.slices
        if part.card == index
    ]


async def debug_nodes(ledger: Ledger, names: Iterable[str]) -> list[dict[str, Any]]:
    """Those of the nodes that are known, with everything."""
    nodes = []
    for number, name in enumerate(names):
        if number % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        allocations = ledger.allocations(name)
        if allocations is not None:
            nodes.append(debug_node(allocations))
    return nodes


def debug_node(allocations: NodeAllocations) -> dict[str, Any]:
    """A node's page with everything: what a bug report needs to become a test."""
    state = allocations.state()
    return {
        "name": allocations.name,
        "gpus": [
            {"index": card.index, "uuid": card.uuid, "units": card.units, "left": left, "coreLeft": core}
            for card, left, core in zip(state.node.cards, state.left, state.compute_left, strict=True)
        ],
        "unhealthy": sorted(state.node.unhealthy),
        "placement": state.node.packing,
        "problem": state.node.problem,
        "unplacedUnits": allocations.unplaced_units(),
        "pods": [_debug_pod(allocation) for _, allocation in sorted(allocations.by_uid.items())],
    }


def _debug_pod(allocation: Allocation) -> dict[str, Any]:
    pod, placement = allocation.pod, allocation.placement
    return {
        "uid": pod.uid,
        "name": pod.key,
        "assumed": allocation.assumed,
        "planned": allocation.planned,
        "assigned": pod.assigned,
        "terminating": pod.terminating,
        "units": pod.request.units if pod.request else None,
        "cards": {part.card: part.units for part in placement.slices} if placement else None,
        "problem": pod.problem,
    }


class Metrics:
    """Counters of the process; `render` adds what the ledger says now."""

    def __init__(self, ledger: Ledger, api_times: ApiTimes) -> None:
        self._ledger = ledger
        self._api_times = api_times
        self.calls: dict[tuple[str, str], int] = {}  # (verb, result)
        self.seconds: dict[str, float] = {}

    def observe(self, verb: str, result: str, seconds: float) -> None:
        self.calls[verb, result] = self.calls.get((verb, result), 0) + 1
        self.seconds[verb] = self.seconds.get(verb, 0.0) + seconds

    def families(
        self,
        *,
        ready: bool,
        leading: bool,
        sampled: int = 0,
        preemptions: Mapping[str, int] = NO_COUNTS,
        preempted: int = 0,
        guided: Mapping[str, int] = NO_COUNTS,
    ) -> list[Family]:
        """What a scrape gets. `sampled`: pods refused because not all nodes were asked about."""
        seen = Family(
            "gpuslice_extender_sampled_pods_total",
            MetricKind.COUNTER,
            "Pods refused on the sample of nodes that kube-scheduler showed, though another node would do.",
        )
        seen.add(sampled)
        others = [*_preemption(preemptions, preempted), _guided(guided)]
        return [*self._requests(), seen, *others, *self._cluster(), *_flags(ready, leading)]

    def _requests(self) -> list[Family]:
        calls = Family("gpuslice_extender_requests_total", MetricKind.COUNTER, "Calls by verb and result.")
        for (verb, result), count in sorted(self.calls.items()):
            calls.add(count, labels({"verb": verb, "result": result}))
        seconds = Family(
            "gpuslice_extender_request_seconds_total", MetricKind.COUNTER, "Time spent answering calls."
        )
        for verb, total in sorted(self.seconds.items()):
            seconds.add(total, labels({"verb": verb}))
        asked = Family(
            "gpuslice_extender_api_requests_total", MetricKind.COUNTER, "Requests to the API server."
        )
        asked.add(self._api_times.requests)
        waited = Family(
            "gpuslice_extender_api_seconds_total", MetricKind.COUNTER, "Time waited for the API server."
        )
        waited.add(self._api_times.seconds)
        return [calls, seconds, asked, waited]

    def _cluster(self) -> list[Family]:
        fleet = self._ledger.flush()
        units = Family("gpuslice_extender_units", MetricKind.GAUGE, "Units of all usable cards.")
        units.add(int(fleet.size.sum()))
        free = Family("gpuslice_extender_free_units", MetricKind.GAUGE, "Units nobody holds.")
        free.add(int(fleet.left.sum()))
        nodes = Family("gpuslice_extender_nodes", MetricKind.GAUGE, "Nodes with shared cards.")
        nodes.add(len(fleet.row_of))
        pods = Family("gpuslice_extender_pods", MetricKind.GAUGE, "Living pods that ask for GPU memory.")
        pods.add(len(self._ledger.pods))
        assumed = Family(
            "gpuslice_extender_assumed_pods", MetricKind.GAUGE, "Placements the API server has not shown yet."
        )
        assumed.add(len(self._ledger.assumed()))
        nominated = Family(
            "gpuslice_extender_nominated_pods", MetricKind.GAUGE, "Waiting pods that cards are kept for."
        )
        nominated.add(len(self._ledger.nominations))
        return [units, free, nodes, pods, assumed, nominated]


def _preemption(results: Mapping[str, int], preempted: int) -> list[Family]:
    tried = Family(
        "gpuslice_extender_preemptions_total",
        MetricKind.COUNTER,
        "Preemption attempts by result.",
    )
    for result, count in sorted(results.items()):
        tried.add(count, labels({"result": result}))
    evicted = Family("gpuslice_extender_preempted_pods_total", MetricKind.COUNTER, "Pods evicted for others.")
    evicted.add(preempted)
    return [tried, evicted]


def _guided(results: Mapping[str, int]) -> Family:
    family = Family(
        "gpuslice_extender_guided_pods_total",
        MetricKind.COUNTER,
        "Waiting pods for which the best node was nominated, by result.",
    )
    for result in ("guided", "late", "missed", "taken back"):
        family.add(results.get(result, 0), labels({"result": result.replace(" ", "_")}))
    return family


def _flags(ready: bool, leading: bool) -> list[Family]:
    is_ready = Family(
        "gpuslice_extender_ready", MetricKind.GAUGE, "1 when calls are answered from a full ledger."
    )
    is_ready.add(int(ready))
    leader = Family("gpuslice_extender_leader", MetricKind.GAUGE, "1 on the replica that may bind.")
    leader.add(int(leading))
    return [is_ready, leader]
