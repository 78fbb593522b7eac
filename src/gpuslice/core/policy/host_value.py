"""What a node can still sell where CPU or memory runs out before the cards do, while a cluster fills up.

The value in `node_value` gives each shape a node's CPU to itself, so that two nodes with 12 cores left are
worth as much as one with 24. That works while cards run out first. If CPU runs out first, whichever pod finds
room takes it, and which pods those are depends on how the room is divided: of 24 cores, a pod that needs many
cores for its card takes them all; on 12, only pods that need few fit. So a node is worth what arriving pods
make of it,

    W(c, v) = Σ_j n_j · (G_j + W(c - c_j, v - G_j)) / Σ_j n_j      over the shapes j with c_j ≤ c and G_j ≤ v

with c the free amount of the scarce resource, v the value of the free cards, n_j the number of arriving pods
of shape j, including those without GPU, and c_j and G_j what one of them takes. W is computed on a grid,
from less to more CPU or memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gpuslice.core.policy.fleet import Flags, Fleet, Floats, Ints, Rows, Shape

HOST_STEPS, CARD_STEPS = 96, 32  # of the grid, up to the largest node
FILLING_TURNOVER = 0.25  # a cluster fills up while fewer pods than this leave for each that is placed
LAST_PART = 0.125  # of the resource, on few nodes: with less than this left there is little to decide
CPU, MEMORY = 0, 1


@dataclass(frozen=True, slots=True)
class Scarce:
    """The resource that runs out before the cards do.

    `asked`: how much of it is requested by the time all cards are, as a fraction of the total. `rows`: the
    nodes with cards, which have `total` of it.
    """

    resource: int
    asked: float
    rows: Rows
    total: float

    def is_felt(self, fleet: Fleet) -> bool:
        """Whether no more is left than the part of the demand that cannot be met in the end."""
        left = (fleet.cpu_left, fleet.memory_left)[self.resource].take(self.rows)
        np.maximum(left, 0.0, out=left)
        return float(left.sum()) <= self.total * max(1.0 - 1.0 / self.asked, LAST_PART)


@dataclass(frozen=True, slots=True)
class HostValue:
    """The table of W, interpolated between its steps.

    `per_other`: how much of the scarce resource goes with one unit of the other; None if none of that is
    requested.
    """

    table: Floats  # [host step, card step], the last of each repeated
    scarce: int
    host_step: float
    card_step: float
    per_other: float | None

    def of(self, value: Floats, cpu_milli: Floats, memory_mib: Floats) -> Floats:
        """W in cards, of nodes with free cards of this value and this much free CPU and memory."""
        own, other = (cpu_milli, memory_mib) if self.scarce == CPU else (memory_mib, cpu_milli)
        if self.per_other is not None:
            own = np.minimum(own, other * self.per_other)
        line, line_part = _step(own * (1.0 / self.host_step), HOST_STEPS)
        place, place_part = _step(value * (1.0 / self.card_step), CARD_STEPS)
        width = self.table.shape[1]
        place += line * width
        below = self._between(place, place_part)
        place += width
        below += line_part * (self._between(place, place_part) - below)
        return below

    def _between(self, place: Ints, part: Floats) -> Floats:
        low: Floats = self.table.take(place)
        low += part * (self.table.take(place + 1) - low)
        return low


def _step(amount: Floats, most: int) -> tuple[Ints, Floats]:
    """The whole steps in an amount, and the fraction of a step that remains."""
    np.clip(amount, 0.0, most, out=amount)
    step = amount.astype(np.int64)
    amount -= step
    return step, amount


def scarce(fleet: Fleet, mean_units: float, counts: Mapping[Shape, float], turnover: float) -> Scarce | None:
    """Whether CPU or memory runs out first under a mix; None if cards do, or if pods come and go."""
    demand = sum(count * shape.total_units for shape, count in counts.items()) / mean_units
    supply = float(fleet.size.sum()) / mean_units
    if turnover >= FILLING_TURNOVER or demand <= 0.0 or supply <= 0.0:
        return None
    rows = np.flatnonzero(fleet.cards)
    wanted = (
        sum(count * shape.cpu_milli for shape, count in counts.items()),
        sum(count * shape.memory_mib for shape, count in counts.items()),
    )
    totals = [max(1e-9, float(each.take(rows).sum())) for each in (fleet.cpu_milli, fleet.memory_mib)]
    asked = [want / demand * supply / total for want, total in zip(wanted, totals, strict=True)]
    resource = int(np.argmax(asked))
    return Scarce(resource, asked[resource], rows, totals[resource]) if asked[resource] > 1.0 else None


def host_value(fleet: Fleet, mean_units: float, counts: Mapping[Shape, float], scarce: Scarce) -> HostValue:
    """W for a mix in which a resource is scarce."""
    wanted = [(shape, count) for shape, count in counts.items() if count > 0]
    count = np.array([count for _, count in wanted])
    cards = np.array([shape.total_units / mean_units for shape, _ in wanted])
    host = np.array([(shape.cpu_milli, shape.memory_mib) for shape, _ in wanted], dtype=np.float64).T
    most = (fleet.cpu_milli, fleet.memory_mib)[scarce.resource].take(scarce.rows).max()
    host_step = float(most) / HOST_STEPS
    card_step = float(fleet.size.sum(axis=1).max()) / mean_units / CARD_STEPS
    own, other = host[scarce.resource], host[1 - scarce.resource]
    table = worth_table(count, own / host_step, cards / card_step) * card_step
    of_other = float(count @ other)
    per_other = float(count @ own) / of_other if of_other else None
    return HostValue(np.pad(table, (0, 1), mode="edge"), scarce.resource, host_step, card_step, per_other)


def worth_table(count: Floats, host: Floats, cards: Floats) -> Floats:
    """W in card steps, as [host step, card step], for pods that take `host` and `cards` steps each.

    Amounts between two steps are split between them, so that the pods of a shape together take all they
    request. Pods that take less than a host step arrive several at once, as many as make up a step of cards.
    """
    several = np.where((host < 1.0) & (cards < 1.0), 1.0 / np.maximum(np.maximum(host, cards), 1e-6), 1.0)
    grid = _Grid.of(count / several, np.maximum(host * several, 1.0), cards * several)
    table = np.zeros((HOST_STEPS + 1, CARD_STEPS + 1))
    shift = np.arange(CARD_STEPS + 1) - grid.taken[:, None]
    back, reachable = np.maximum(shift, 0), (shift >= 0) & grid.with_card
    lines = np.arange(len(grid.taken))[:, None]
    for step in range(1, HOST_STEPS + 1):
        before = table[step - 1 :: -1]  # after 1, 2 … `step` host steps were taken
        after = ((grid.count[:, 1 : step + 1] @ before)[lines, back] * reachable).sum(axis=0)
        after += grid.plain[1 : step + 1] @ before + grid.sold[:, step]
        fitting = grid.fitting[:, step]
        np.divide(after, fitting, out=table[step], where=fitting > 0)
    return table


@dataclass(frozen=True, slots=True)
class _Grid:
    """Pods sorted by the steps they take. `count`: [taken, host step] of pods with GPU, `plain` of others.

    `fitting`, `sold`: [card step, host step] how many fit into that much, and the GPU that they take in
    total. `with_card`: [card step] whether there are any; less than one card step counts as none.
    """

    taken: Ints
    count: Floats
    plain: Floats
    fitting: Floats
    sold: Floats
    with_card: Flags

    @classmethod
    def of(cls, count: Floats, host: Floats, cards: Floats) -> _Grid:
        fits = (host <= HOST_STEPS) & (cards <= CARD_STEPS)
        count, host, cards = count[fits], host[fits], cards[fits]
        pods, sold = (np.zeros((CARD_STEPS + 2, HOST_STEPS + 2)) for _ in range(2))
        plain = np.zeros(HOST_STEPS + 2)
        with_gpu = cards > 0
        for host_step, host_part in _both_steps(host):
            np.add.at(plain, host_step[~with_gpu], (count * host_part)[~with_gpu])
            for card_step, card_part in _both_steps(cards):
                at, weight = (card_step[with_gpu], host_step[with_gpu]), count * host_part * card_part
                np.add.at(pods, at, weight[with_gpu])
                np.add.at(sold, at, (weight * cards)[with_gpu])
        with_card = np.arange(CARD_STEPS + 1) > 0
        fitting = _up_to(pods) * with_card[:, None] + plain.cumsum()[: HOST_STEPS + 1]
        taken = np.flatnonzero(pods.any(axis=1))
        return cls(taken, pods[taken], plain, fitting, _up_to(sold) * with_card[:, None], with_card)


def _both_steps(amount: Floats) -> tuple[tuple[Ints, Floats], tuple[Ints, Floats]]:
    """The steps below and above an amount, each with its fraction of the amount."""
    below = np.floor(amount + 1e-9).astype(np.int64)
    above = np.clip(amount - below, 0.0, 1.0)
    return (below, 1.0 - above), (below + 1, above)


def _up_to(amount: Floats) -> Floats:
    """Cumulated over pods that take at most as much of either."""
    summed: Floats = amount.cumsum(axis=0).cumsum(axis=1)[: CARD_STEPS + 1, : HOST_STEPS + 1]
    return summed
