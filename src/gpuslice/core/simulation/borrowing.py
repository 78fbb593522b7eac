"""Pods that request less than they use at their peak, and borrow the rest: how often somebody lacks room.

Each pod requests its peak divided by a factor, and may use its peak. It is put where the sum of requests
fits, and there where least is expected to be in use at once: by mean and variance of what the pods on a card
hold while they compute, as measured before. What an idle pod holds is taken for who needs the room, the
longest idle first.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from typing import NamedTuple

IDLE_S = 60.0
"""What a pod holds may be taken once it has computed nothing for so long."""
SPREADS = 2.0
"""Standard deviations that are added to the mean: what a card's pods hold at once is less in most minutes."""


class Sample(NamedTuple):
    """What a pod held at a moment, and whether it computed."""

    at_s: float
    busy: bool
    held_bytes: float


Usage = Mapping[str, Sequence[Sample]]
"""By pod, in order of time."""


@dataclass(frozen=True, slots=True)
class Lacking:
    """Of a number of cards: samples of pods that compute, and those of them without room for their memory."""

    cards: int
    busy: int
    lacking: int

    @property
    def ratio(self) -> float:
        return self.lacking / self.busy if self.busy else 0.0


def spread(
    usage: Usage, card_bytes: float, factor: float, cards: int, *, seed: int, measured: Usage | None = None
) -> list[list[str]] | None:
    """The pods of each card, come in an order given by the seed; None if one finds no card.

    `measured`: what is known of them before, if it is not all of their usage.
    """
    pods = sorted(usage)
    random.Random(seed).shuffle(pods)
    placed: list[list[str]] = [[] for _ in range(cards)]
    free, means, variances = [card_bytes] * cards, [0.0] * cards, [0.0] * cards
    for pod in pods:
        request = max(each.held_bytes for each in usage[pod]) / factor
        held = [each.held_bytes if each.busy else 0.0 for each in (measured or usage)[pod]]
        mean = sum(held) / len(held)
        variance = sum((each - mean) ** 2 for each in held) / len(held)
        fitting = [card for card in range(cards) if request <= free[card]]
        if not fitting:
            return None

        def expected(card: int, mean: float = mean, variance: float = variance) -> tuple[float, float]:
            return means[card] + mean + SPREADS * sqrt(variances[card] + variance), -free[card]

        best = min(fitting, key=expected)
        placed[best].append(pod)
        free[best] -= request
        means[best] += mean
        variances[best] += variance
    return placed


def played(usage: Usage, placed: Sequence[Sequence[str]], card_bytes: float) -> Lacking:
    """The samples in order of time on each card."""
    busy = lacking = 0
    for pods in placed:
        held: dict[str, float] = {}
        idle_since: dict[str, float] = {}
        samples = sorted((each.at_s, each.busy, pod, each.held_bytes) for pod in pods for each in usage[pod])
        for at_s, computes, pod, wanted in samples:
            if computes:
                idle_since.pop(pod, None)
            else:
                idle_since.setdefault(pod, at_s)
                if held.get(pod) == 0.0:
                    continue  # taken, and not wanted back before it computes
            missing = sum(held.values()) - held.get(pod, 0.0) + wanted - card_bytes
            for since_s, other in sorted((since_s, other) for other, since_s in idle_since.items()):
                if missing <= 0 or at_s - since_s < IDLE_S:
                    break
                if other != pod:
                    missing -= held.get(other, 0.0)
                    held[other] = 0.0
            lacks = missing > 0 and wanted > held.get(pod, 0.0)
            busy += computes
            lacking += computes and lacks
            if not lacks:
                held[pod] = wanted
    return Lacking(len(placed), busy, lacking)


def needed(usage: Usage, card_bytes: float, factor: float, most_ratio: float, seed: int) -> Lacking | None:
    """The fewest cards on which the pods fit, and lack room in no more of their samples; None if there is no
    such number.
    """
    requests = sum(max(each.held_bytes for each in samples) for samples in usage.values()) / factor
    for cards in range(max(1, ceil(requests / card_bytes)), len(usage) + 1):
        placed = spread(usage, card_bytes, factor, cards, seed=seed)
        if placed is not None and (found := played(usage, placed, card_bytes)).ratio <= most_ratio:
            return found
    return None
