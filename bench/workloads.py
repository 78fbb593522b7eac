"""Workloads to replay for which nothing was tuned: generated, or modified from a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from bench.traces import find_pods

from gpuslice.core.policy import FleetNode, Shape
from gpuslice.core.simulation.trace import CARD_MILLI
from gpuslice.diagnosis.simulate.facts import find_nodes, load_nodes, load_pods

PODS = 6_000  # of a generated workload, from which arrivals are drawn
CORES, MEMORY_MIB = 12_000, 64 << 10  # of a node for each of its cards
NO_MODELS: frozenset[str] = frozenset()

T = TypeVar("T")
Random = np.random.Generator
Order = Callable[[list[Shape], Random], list[Shape]]


@dataclass(frozen=True, slots=True)
class Workload:
    """Nodes, and pods to draw from; `order` rearranges the drawn pods, by default not at all."""

    nodes: list[FleetNode]
    pods: list[Shape]
    order: Order | None = None

    @property
    def capacity_units(self) -> int:
        return sum(sum(node.size) for node in self.nodes)


Named = tuple[str, Callable[[], Workload]]


@dataclass(frozen=True, slots=True)
class Pods:
    """How the pods of a generated workload are drawn. Weights need not add up to anything.

    `share`: fraction of the pods with GPU that request a share; `sizes`: of these, in milli, with their
    weights. `cards`: number of whole cards → weight. `cpu`, `memory`: what a pod of one card requests on
    average, as a fraction of what nodes have per card. `plain`: pods without GPU for each pod with GPU.
    `models`: of a restricted pod, with weights; `restricted`: the fraction of such pods.
    """

    share: float = 0.5
    sizes: dict[int, float] = field(default_factory=lambda: dict.fromkeys(range(100, 1000, 100), 1.0))
    cards: dict[int, float] = field(default_factory=lambda: {1: 45, 2: 4, 4: 3, 8: 3})
    cpu: float = 0.7
    memory: float = 0.5
    plain: float = 0.1
    models: dict[str, float] = field(default_factory=dict)
    restricted: float = 0.0

    def drawn(self, random: Random, count: int = PODS) -> list[Shape]:
        """`count` pods."""
        return [self._one(random) for _ in range(count)]

    def _one(self, random: Random) -> Shape:
        if random.random() < self.plain / (1 + self.plain):
            amount = float(random.choice([0.2, 0.5, 1.0, 2.0]))
            return Shape(0, 0, _use_host(CORES, amount), _use_host(MEMORY_MIB, amount))
        if random.random() < self.share:
            units, cards = _draw(random, self.sizes), 1
        else:
            units, cards = CARD_MILLI, _draw(random, self.cards)
        gpu = units * cards / CARD_MILLI
        cpu = _use_host(CORES, gpu * self.cpu * _uneven(random))
        memory = _use_host(MEMORY_MIB, gpu * self.memory * _uneven(random))
        models = NO_MODELS
        if random.random() < self.restricted:
            models = frozenset([_draw(random, self.models)])
        return Shape(units, cards, cpu, memory, models)


def _draw(random: Random, weights: dict[T, float]) -> T:
    values = list(weights)
    part = np.array(list(weights.values()), dtype=np.float64)
    return values[int(random.choice(len(values), p=part / part.sum()))]


def _uneven(random: Random) -> float:
    """About 1 on average, one of a few values: real workloads repeat the same requests."""
    return float(random.choice([0.4, 0.6, 0.8, 1.0, 1.2, 2.0]))


@dataclass(frozen=True, slots=True)
class Sized(Pods):
    """Pods that request units of memory, some on several cards: `amounts` are (units, cards) and weights."""

    amounts: dict[tuple[int, int], float] = field(default_factory=dict)

    def _one(self, random: Random) -> Shape:
        units, cards = _draw(random, self.amounts)
        cpu = _use_host(CORES, cards * self.cpu * min(1.0, units / 80 + 0.1))
        return Shape(units, cards, cpu, _use_host(MEMORY_MIB, cards * self.memory * min(1.0, units / 141)))


def _use_host(of_card: int, part: float) -> int:
    return round(of_card * part / 500) * 500


def nodes(
    count: int, cards: int = 8, model: str = "A", units: int = CARD_MILLI, host: float = 1.0
) -> list[FleetNode]:
    """Equal empty nodes."""
    size, cpu, memory = (units,) * cards, CORES * cards * host, MEMORY_MIB * cards * host
    first = f"{model}-{cards}-{units}-{host}"
    return [
        FleetNode(f"{first}-{number}", size, size, (), model, cpu, memory, cpu, memory)
        for number in range(count)
    ]


# -- orders ------------------------------------------------------------------------------------------------


def drifting(shapes: list[Shape], random: Random) -> list[Shape]:
    """More and more shares, fewer and fewer whole cards."""
    noise = random.random(len(shapes))
    place = [part + 0.3 * (shape.units >= CARD_MILLI) for shape, part in zip(shapes, 1 - noise, strict=True)]
    return [shapes[index] for index in np.argsort(-np.array(place), kind="stable")]


def drifting_back(shapes: list[Shape], random: Random) -> list[Shape]:
    """The other way round."""
    return drifting(shapes, random)[::-1]


def small_first(shapes: list[Shape], random: Random) -> list[Shape]:
    """All small requests before all large ones."""
    return sorted(shapes, key=lambda shape: shape.total_units)


def large_first(shapes: list[Shape], random: Random) -> list[Shape]:
    """And the other way round."""
    return small_first(shapes, random)[::-1]


def in_waves(shapes: list[Shape], random: Random) -> list[Shape]:
    """Bursts of about 200 pods, each with nearly one kind of request."""
    result: list[Shape] = []
    for start in range(0, len(shapes), 1000):
        part = shapes[start : start + 1000]
        kinds = sorted({shape.total_units for shape in part})
        place = {kind: float(value) for kind, value in zip(kinds, random.random(len(kinds)), strict=True)}
        result += sorted(part, key=lambda shape: place[shape.total_units])
    return result


# -- workloads ---------------------------------------------------------------------------------------------


def made(random: Random) -> Iterator[Named]:
    """Generated workloads: 1,600 cards unless stated otherwise."""
    usual = nodes(200)

    def of(name: str, pods: Pods, where: Sequence[FleetNode] = usual, order: Order | None = None) -> Named:
        return name, lambda: Workload(list(where), pods.drawn(random), order)

    yield of("usual", Pods())
    for cards in (1, 2, 4, 16):
        most = {count: weight for count, weight in Pods().cards.items() if count <= cards}
        yield of(f"{cards} cards a node", Pods(cards=most), nodes(1600 // cards, cards))
    mixed = [*nodes(400, 1), *nodes(200, 2), *nodes(100, 4), *nodes(50, 8)]
    yield of("1, 2, 4 and 8 cards a node", Pods(), mixed)
    rich = [*nodes(70, host=0.5), *nodes(70), *nodes(60, host=2.0)]
    yield of("nodes poor and rich in cores", Pods(), rich)
    yield of("whole cards only", Pods(share=0.0))
    yield of("single whole cards and eights", Pods(share=0.0, cards={1: 8, 8: 1}))
    yield of("several cards mostly", Pods(share=0.1, cards={1: 10, 2: 20, 4: 20, 8: 20}))
    yield of("threes and fives", Pods(share=0.3, cards={1: 10, 3: 5, 5: 5}))
    yield of("small shares only", Pods(share=1.0, sizes={50: 1, 100: 1, 200: 1}))
    yield of("tiny shares only", Pods(share=1.0, sizes=dict.fromkeys(range(20, 220, 20), 1)))
    yield of("shares only", Pods(share=1.0))
    yield of("shares of every size", Pods(share=0.8, sizes=dict.fromkeys(range(30, 1000, 10), 1)))
    yield of("halves and quarters", Pods(share=0.8, sizes={250: 2, 500: 1}))
    yield of("bimodal 10 and 90 %", Pods(share=0.8, sizes={100: 1, 900: 1}))
    yield of("just over half and thirds", Pods(share=0.8, sizes={510: 2, 340: 2, 150: 1}))
    yield of("60 % nearly alone", Pods(share=0.8, sizes={600: 8, 300: 1, 100: 1}))
    yield of("cores tight", Pods(cpu=1.0))
    yield of("cores scarce", Pods(cpu=1.5))
    yield of("cores very scarce", Pods(cpu=2.5))
    yield of("memory scarce", Pods(memory=1.5))
    yield of("cores plenty", Pods(cpu=0.1, memory=0.1, plain=0.0))
    yield of("many pods without GPU", Pods(plain=1.0))
    yield of("cores scarce on unequal nodes", Pods(cpu=1.5), rich)
    kinds = [*nodes(100, model="A"), *nodes(60, model="B"), *nodes(40, model="C")]
    everywhere = {"A": 50.0, "B": 30.0, "C": 20.0}
    yield of("20 % restricted to a model", Pods(models=everywhere, restricted=0.2), kinds)
    yield of("50 % restricted to a model", Pods(models=everywhere, restricted=0.5), kinds)
    yield of("all restricted to a model", Pods(models=everywhere, restricted=1.0), kinds)
    yield of("20 % restricted to the rarest", Pods(models={"C": 1.0}, restricted=0.2), kinds)
    yield of("40 % restricted to the most common", Pods(models={"A": 1.0}, restricted=0.4), kinds)
    yield of("40 cards", Pods(), nodes(5))
    yield of("100 nodes of 4 cards", Pods(cards={1: 45, 2: 4, 4: 3}), nodes(100, 4))
    yield of("more and more shares", Pods(), usual, drifting)
    yield of("fewer and fewer shares", Pods(), usual, drifting_back)
    yield of("small requests first", Pods(), usual, small_first)
    yield of("large requests first", Pods(), usual, large_first)
    yield of("in waves", Pods(), usual, in_waves)
    yield from of_sizes(random)
    yield from of_odd_shares(random)


def of_odd_shares(random: Random) -> Iterator[Named]:
    """Shares that fill a card exactly in few ways, or in none: 400 cards, no pods of whole cards."""

    def of(name: str, pods: Pods, where: list[FleetNode]) -> Named:
        return name, lambda: Workload(where, pods.drawn(random))

    yield of("thirds that fill a card", Pods(share=1.0, sizes={333: 2, 400: 2, 267: 1, 600: 1}), nodes(50))
    for size, cards, weights in (
        (80, 8, {7: 2, 11: 3, 17: 5, 23: 5, 27: 5, 41: 4}),
        (24, 4, {2: 3, 5: 5, 7: 5, 9: 5, 11: 2, 13: 4}),
    ):
        amounts = {(units, 1): float(weight) for units, weight in weights.items()}
        name = f"odd shares of {size}"
        yield of(name, Sized(cpu=0.2, memory=0.2, amounts=amounts), nodes(400 // cards, cards, name, size))


def of_sizes(random: Random) -> Iterator[Named]:
    """Cards of four sizes, and pods that request memory."""
    sizes = (16, 24, 80, 141)
    small, large = (1, 2, 4, 6, 8, 10, 12, 16), (20, 24, 40, 60, 70, 80, 100, 141)
    one = {(units, 1): 2.0 for units in small + large}
    several = {(80, 2): 1.0, (80, 4): 1.0, (80, 8): 1.0, (141, 8): 1.0, (16, 4): 1.0}
    mostly_small = {(units, 1): 5.0 for units in small} | {(units, 1): 1.0 for units in large}
    mostly_small |= {(80, 8): 1.0, (141, 8): 1.0}
    unequal = [node for size in sizes for node in nodes(50, 8, f"{size} GiB", size)]
    each = [replace(node, size=sizes, left=sizes) for node in nodes(200, 4)]

    def of(name: str, amounts: dict[tuple[int, int], float], where: list[FleetNode]) -> Named:
        return name, lambda: Workload(where, Sized(cpu=0.5, amounts=amounts).drawn(random))

    yield of("nodes with cards of 16, 24, 80 or 141 GiB", one | several, unequal)
    yield of("nodes with cards of 16 … 141 GiB, mostly small requests", mostly_small, unequal)
    yield of("cards of 16, 24, 80 and 141 GiB on each node", one, each)


class Bent:
    """Derives workloads from the pods of a trace, on its nodes."""

    def __init__(self, data: Path, random: Random) -> None:
        path = find_pods("default", data)
        self._data, self._random = data, random
        self._pods = load_pods(path).shapes
        self._nodes = load_nodes(find_nodes(path, None, data))

    def all(self) -> Iterator[Named]:
        """More of what published traces are made of, and what they do not contain."""
        for part in (0.6, 0.8):
            yield self._weighed(f"{part:.0%} of the demand in shares", part, _is_share)
        for part in (0.3, 0.5, 0.69):
            yield self._weighed(f"{part:.0%} of the demand in pods of several cards", part, _has_several)
        for part, like in ((0.05, "gpuspec10"), (0.2, "gpuspec25"), (0.33, "gpuspec25"), (0.5, "gpuspec25")):
            name = f"{part:.0%} restricted as in {like}"
            yield self._restricted(name, part, dict(Counter(self._models_of(like))))
        for part in (0.3, 0.5):
            name = f"{part:.0%} restricted by how many cards there are"
            yield self._restricted(name, part, self._cards_of_models())
        yield self._more_without_gpu(2.5)
        for times in (1.5, 2, 3):
            yield self._changed(f"{times:g} times the cores", cpu=times)
        yield self._changed("4 times the memory", memory=4)
        yield self._with_small_shares()

    def _of(self, name: str, draw: Callable[[], Sequence[Shape]]) -> Named:
        return f"default, {name}", lambda: Workload(self._nodes, list(draw()))

    def _drawn(self, weight: Callable[[Shape], float]) -> list[Shape]:
        part = np.array([weight(shape) for shape in self._pods])
        lines = self._random.choice(len(part), size=len(part), p=part / part.sum())
        return [self._pods[line] for line in lines]

    def _weighed(self, name: str, part: float, chosen: Callable[[Shape], bool]) -> Named:
        """Draw so that the `chosen` make up this fraction of the demand."""
        units = [0, 0]
        for shape in self._pods:
            units[chosen(shape)] += shape.total_units
        more = part / (1 - part) * units[0] / units[1]
        return self._of(name, lambda: self._drawn(lambda shape: more if chosen(shape) else 1.0))

    def _more_without_gpu(self, times: float) -> Named:
        name = f"{times:g} times the pods without GPU"
        return self._of(name, lambda: self._drawn(lambda shape: 1.0 if shape.cards else times))

    def _changed(self, name: str, cpu: float = 1.0, memory: float = 1.0) -> Named:
        def change(shape: Shape) -> Shape:
            cpu_milli, memory_mib = round(shape.cpu_milli * cpu), round(shape.memory_mib * memory)
            return msgspec.structs.replace(shape, cpu_milli=cpu_milli, memory_mib=memory_mib)

        return self._of(name, lambda: [change(shape) for shape in self._pods])

    def _with_small_shares(self) -> Named:
        def change(shape: Shape) -> Shape:
            units = 20 * int(self._random.integers(1, 11))
            return msgspec.structs.replace(shape, units=units, cards=1) if shape.cards else shape

        return self._of("shares of 2 … 20 % only", lambda: [change(shape) for shape in self._pods])

    def _restricted(self, name: str, part: float, models: dict[frozenset[str], float]) -> Named:
        def change(shape: Shape) -> Shape:
            if not shape.cards or self._random.random() >= part:
                return shape
            chosen = _draw(self._random, models)
            most = max((len(node.size) for node in self._nodes if node.model in chosen), default=0)
            return msgspec.structs.replace(shape, models=chosen) if most >= shape.cards else shape

        return self._of(name, lambda: [change(shape) for shape in self._pods])

    def _models_of(self, trace: str) -> list[frozenset[str]]:
        shapes = load_pods(find_pods(trace, self._data)).shapes
        return [shape.models for shape in shapes if shape.models]

    def _cards_of_models(self) -> dict[frozenset[str], float]:
        cards: Counter[frozenset[str]] = Counter()
        for node in self._nodes:
            cards[frozenset([node.model])] += len(node.size)
        return dict(cards)


def _is_share(shape: Shape) -> bool:
    return 0 < shape.units < CARD_MILLI


def _has_several(shape: Shape) -> bool:
    return shape.cards > 1
