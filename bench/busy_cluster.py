"""A full cluster of mixed cards, pods that wait, and others that come and go: for `full_cluster.py`.

The same cluster is played twice: with parts of cards, and with whole cards, where a node has a card for each
pod that holds a part of one in the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.builders import api_container, api_node, api_pod, make_node, make_placement, make_request
from tests.e2e.cluster import BindingLog, Card, Cluster, Object

from gpuslice.adapters.kube.errors import NotFoundError
from gpuslice.adapters.kube.resources import DICT, Resource
from gpuslice.adapters.kube.slim import SLIM_PODS, SlimPod
from gpuslice.core.annotations import placement_annotations
from gpuslice.core.contract import ANN_ASSIGNED, GPU_MEM, LABEL_SHARED

NODES = ((2, 16), (4, 32), (2, 16), (4, 80), (1, 24), (4, 32), (2, 16), (4, 80), (4, 32), (2, 16))
PIECES = ((4, 3), (7,), (4, 2, 1), (5, 2))  # eighths of a card that pods hold
MOST_FREE = 4  # units of a card, once it is filled
IMPORTANCE = {"low": 0, "middle": 1_000, "high": 10_000}
DRAWN = (60, 30, 10)  # of a hundred pods
WAITING = (("low", 12), ("low", 6), ("middle", 96))  # in pieces, in smaller pieces, on no card
WHOLE_CARD, NO_NODE_HAS = "nvidia.com/gpu", 100
PRIORITIES = Resource("scheduling.k8s.io/v1", "priorityclasses", "PriorityClass", DICT, namespaced=False)
KUBELETS = 8  # at work at a time
LARGEST = max(units for _, units in NODES)
GATE, PROMISED_FOR_S = "bench.gpuslice.io/room", 2.0


@dataclass(frozen=True)
class Want:
    """What a pod asks for."""

    units: int
    priority: str

    def limits(self, *, whole: bool) -> dict[str, str]:
        if not whole:
            return {GPU_MEM: str(self.units)}
        return {WHOLE_CARD: str(NO_NODE_HAS if self.units > LARGEST else 1)}


@dataclass(frozen=True)
class Held:
    """A part of a card that is held from the start."""

    node: str
    card: int
    want: Want


def drawn(dice: random.Random) -> str:
    (found,) = dice.choices(tuple(IMPORTANCE), DRAWN)
    return found


def filled(nodes: int, dice: random.Random) -> Iterator[Held]:
    """A full cluster: of each card `MOST_FREE` units are left, or an eighth."""
    for number in range(nodes):
        cards, units = NODES[number % len(NODES)]
        for card in range(cards):
            first, *others = (units * eighths // 8 for eighths in dice.choice(PIECES))
            first = units - min(units // 8, MOST_FREE) - sum(others)
            for piece in (first, *others):
                yield Held(f"node-{number:04}", card, Want(piece, drawn(dice)))


@dataclass
class Diary(BindingLog):
    """What became of the pods, with the events that kubelets react to."""

    units_on: dict[str, int] = field(default_factory=dict)  # units of each card, by node
    asked_at: dict[str, float] = field(default_factory=dict)  # by name
    waited_s: dict[str, float] = field(default_factory=dict)
    running: dict[str, str] = field(default_factory=dict)  # name → node
    node_of: dict[str, str] = field(default_factory=dict)  # by uid, of all pods that ever had one
    evicted: list[str] = field(default_factory=list)
    to_start: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    to_end: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    def units_of(self, node: str) -> int:
        return self.units_on[node]

    def apply(self, kind: str, pod: SlimPod) -> None:
        super().apply(kind, pod)
        name = pod.metadata.name
        if kind == "DELETED":
            self.running.pop(name, None)
        elif pod.metadata.deletion_timestamp:
            if self.running.pop(name, None):
                self.evicted.append(name)
                self.to_end.put_nowait(name)
        elif pod.spec.node_name and pod.metadata.uid not in self.node_of:
            self.node_of[pod.metadata.uid] = self.running[name] = pod.spec.node_name
            if name in self.asked_at:
                self.waited_s[name] = time.perf_counter() - self.asked_at[name]
                self.to_start.put_nowait(name)


class BusyCluster:
    """Fills the cluster, and plays users, their controllers, kubelets and agents."""

    def __init__(self, made: Cluster, diary: Diary, *, whole: bool, gated: bool, seed: int) -> None:
        self.diary, self.writes = diary, Counter[str]()  # requests of ours, which are not the control plane's
        self.wants: dict[str, Want] = {}
        self._made, self._whole, self._dice = made, whole, random.Random(seed)
        self._gated, self._behind_gates = gated, dict[str, Want]()

    async def fill(self, nodes: int) -> None:
        held = list(filled(nodes, self._dice))
        count = Counter(each.node for each in held)
        kinds = {f"node-{number:04}": NODES[number % len(NODES)] for number in range(nodes)}
        self.diary.units_on |= {name: units for name, (_, units) in kinds.items()}
        for name, value in IMPORTANCE.items():
            kind = {"apiVersion": PRIORITIES.api_version, "kind": PRIORITIES.kind}
            await self._made.client.create(PRIORITIES, {**kind, "metadata": {"name": name}, "value": value})
        await self._made.add_nodes([self._node(name, *kinds[name], count[name]) for name in kinds])
        await self._made.add_pods([self._placed(number, each) for number, each in enumerate(held)])
        await self._made.until(lambda: len(self.diary.running) == len(held), 60)

    def _node(self, name: str, cards: int, units: int, whole_cards: int) -> Object:
        if self._whole:
            made = api_node(name, 0)
            for amounts in (made["status"]["capacity"], made["status"]["allocatable"]):
                amounts[WHOLE_CARD] = str(whole_cards)
        else:
            made = api_node(name, units * cards, cards, labels={LABEL_SHARED: "true"})
        made["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
        return made

    def _placed(self, number: int, held: Held) -> Object:
        cards, units = NODES[int(held.node[-4:]) % len(NODES)]
        placement = make_placement(held.node, held.want.units, held.card)
        node = make_node(held.node, (units,) * cards)
        written = placement_annotations(placement, make_request(held.want.units), node, 1)
        name = f"first-{number:05}"
        self.wants[name] = held.want
        annotations = None if self._whole else written | {ANN_ASSIGNED: "true"}
        return self._pod(name, held.want, node=held.node, annotations=annotations)

    def _pod(self, name: str, want: Want, **fields: Any) -> Object:
        made = api_pod(
            name,
            containers=[api_container(**want.limits(whole=self._whole))],
            schedulerName="gpuslice-scheduler",
            priorityClassName=want.priority,
            **fields,
        )
        del made["metadata"]["uid"], made["status"]
        return made

    async def wait_in_line(self, count: int) -> None:
        """Pods for which there is no room."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                priority, units = WAITING[number % len(WAITING)]
                tasks.create_task(self._ask(Want(units, priority)))

    async def _ask(self, want: Want) -> None:
        name = f"{want.priority}-{len(self.wants):05}"
        self.wants[name] = want
        self.diary.asked_at[name] = time.perf_counter()
        gates = [{"name": GATE}] if self._gated and (want.priority == "low" or want.units > LARGEST) else None
        self.writes["POST pods"] += 1
        await self._made.client.create(SLIM_PODS, self._pod(name, want, schedulingGates=gates), "default")
        if gates:
            self._behind_gates[name] = want
            self.diary.on_bound.set()

    async def come_and_go(self, rate: float, seconds: float) -> None:
        """At this rate a pod that runs ends, and another asks for as much; it may be more important."""
        start = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as tasks:
            for number in range(int(rate * seconds)):
                await asyncio.sleep(start + number / rate - asyncio.get_running_loop().time())
                name = self._dice.choice(list(self.diary.running))
                del self.diary.running[name]
                tasks.create_task(self._replace(name, drawn(self._dice)))

    async def _replace(self, name: str, priority: str) -> None:
        await self._remove(name)
        await self._ask(Want(self.wants[name].units, priority))

    async def _remove(self, name: str) -> None:
        self.writes["DELETE pods"] += 1
        with contextlib.suppress(NotFoundError):
            await self._made.remove_pod(name)

    def units_in_use(self) -> int:
        return sum(self.wants[name].units for name in self.diary.running)

    async def nodes(self) -> None:
        """Kubelets and agents; who is evicted is replaced by its controller."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(KUBELETS):
                tasks.create_task(self._start())
                tasks.create_task(self._end())

    async def gates(self) -> None:
        """Opens the gates of pods for which some card has room, the first come first.

        Pods that may preempt have none: kube-scheduler is to choose victims for them. Those that no card
        holds stay behind theirs.
        """
        promised: dict[str, tuple[Card, int, float]] = {}
        while True:
            self.diary.on_bound.clear()
            await self.diary.on_bound.wait()
            now, sums = time.perf_counter(), self.diary.sums
            promised = {
                name: kept
                for name, kept in promised.items()
                if name not in self.diary.running and kept[2] > now - PROMISED_FOR_S
            }
            free = {card: self.diary.units_of(card[0]) - sums.get(card, 0) for card in self._cards}
            for card, units, _ in promised.values():
                free[card] -= units
            for name, want in list(self._behind_gates.items()):
                best = min(
                    (card for card in free if free[card] >= want.units), key=free.__getitem__, default=None
                )
                if best is not None:
                    free[best] -= want.units
                    promised[name] = best, want.units, now
                    del self._behind_gates[name]
                    opened = {"spec": {"schedulingGates": None}}
                    await self._made.client.merge_patch(SLIM_PODS, name, opened, "default")

    @functools.cached_property
    def _cards(self) -> list[Card]:
        kinds = {name: NODES[int(name[-4:]) % len(NODES)] for name in self.diary.units_on}
        return [(name, str(card)) for name, (cards, _) in kinds.items() for card in range(cards)]

    async def _start(self) -> None:
        client = self._made.client
        while True:
            name = await self.diary.to_start.get()
            with contextlib.suppress(NotFoundError):
                self.writes["PATCH pods/status"] += 2
                sandbox = {"type": "PodReadyToStartContainers", "status": "True"}
                await client.add_condition(SLIM_PODS, name, sandbox, "default")
                await client.patch_status(SLIM_PODS, name, {"phase": "Running"}, "default")
                if not self._whole:
                    self.writes["PATCH pods"] += 1
                    assigned = {"metadata": {"annotations": {ANN_ASSIGNED: "true"}}}
                    await client.merge_patch(SLIM_PODS, name, assigned, "default")

    async def _end(self) -> None:
        while True:
            name = await self.diary.to_end.get()
            await self._remove(name)
            await self._ask(self.wants[name])
