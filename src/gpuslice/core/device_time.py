"""How much of a card's time each of its users had, from the driver's samples and the library's charges.

Neither is enough. On a card whose processes take turns, the driver's percentage of a process includes its
wait for a turn: two that always have work are both near 100. The library charges a container for the time
that its work took, but not all work, only when it ends, and in a file that the tenant can write.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp

from gpuslice.core.attribution import Owner

REMEMBERED_S = 10.0
"""A sample covers a moment, and a kernel of seconds is charged at its end: only means can be compared."""
TOLERANCE = 0.05
"""By how much the users' samples together may exceed the card's own before they are taken for waits.

The driver rounds each, and takes them at different moments.
"""
FORGOTTEN = 0.001


def divide_time(
    time_ratio: float, sampled: Mapping[Owner, float], charged: Mapping[Owner, float]
) -> dict[Owner, float]:
    """Divide `time_ratio` of a card's time among its users; all amounts are fractions of its time.

    Nobody gets more than was `sampled`; who was not charged counts as charged 0. If less was charged than
    there is to divide, those who were charged least for what was sampled get more, each the same fraction of
    its samples; if more was charged, those who were charged most get less, likewise. So a tenant who writes
    a wrong charge does not change the sum, and goes back to what the samples alone say of it.
    """
    if time_ratio >= sum(sampled.values()):
        return dict(sampled)
    known = {user: min(max(charged.get(user, 0.0), 0.0), ratio) for user, ratio in sampled.items()}
    rest = sum(known.values())
    missing = rest < time_ratio
    fractions = sorted(
        ((known[user] / ratio, user) for user, ratio in sampled.items() if ratio > 0),
        key=lambda each: each[0],
        reverse=not missing,
    )
    level, levelled = 0.0, 0.0
    for fraction, user in fractions:
        if levelled and (fraction >= level if missing else fraction <= level):
            break
        rest -= known[user]
        levelled += sampled[user]
        level = (time_ratio - rest) / levelled
    choose = max if missing else min
    return {user: choose(known[user], level * ratio) for user, ratio in sampled.items()}


@dataclass(slots=True)
class TimeAccount:
    """One card's samples and charges of the last `REMEMBERED_S`, as means that fade."""

    card_ratio: float = 0.0
    sampled: dict[Owner, float] = field(default_factory=dict)
    charged: dict[Owner, float] = field(default_factory=dict)
    totals_ns: dict[Owner, int] = field(default_factory=dict)

    def divide(
        self,
        card_ratio: float,
        sampled: Mapping[Owner, float],
        charged_ns: Mapping[Owner, int],
        step_s: float,
    ) -> dict[Owner, float]:
        """The users' fractions of the card's time now, after `step_s` seconds.

        `card_ratio` and `sampled` are the driver's, `charged_ns` the library's totals. A total that fell is
        that of a new run, or of work paid back: nothing is known of this step.
        """
        fade = exp(-step_s / REMEMBERED_S)
        self.card_ratio = fade * self.card_ratio + (1 - fade) * card_ratio
        for user in sampled.keys() | self.sampled.keys():
            mean = fade * self.sampled.get(user, 0.0) + (1 - fade) * sampled.get(user, 0.0)
            if mean < FORGOTTEN and user not in sampled:
                del self.sampled[user], self.charged[user]
                self.totals_ns.pop(user, None)
                continue
            self.sampled[user] = mean
            before_ns, now_ns = self.totals_ns.get(user), charged_ns.get(user)
            gained = 0.0
            if now_ns is not None:
                self.totals_ns[user] = now_ns
                if before_ns is not None and step_s > 0:
                    gained = max(now_ns - before_ns, 0) / 1e9 / step_s
            self.charged[user] = min(1.0, fade * self.charged.get(user, 0.0) + (1 - fade) * gained)
        lately = sum(self.sampled.values())
        overlap = self.card_ratio / lately if lately > self.card_ratio + TOLERANCE else 1.0
        charges = {
            user: ratio * self.charged[user] / self.sampled[user]
            for user, ratio in sampled.items()
            if self.sampled[user] > 0
        }
        return divide_time(min(1.0, overlap * sum(sampled.values())), sampled, charges)
