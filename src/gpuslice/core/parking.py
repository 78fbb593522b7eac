"""Parking: memory of a holder that is idle moves to its host memory, and comes back when it is used.

    annotation gpuslice.io/when-idle: park       of a pod, by its author; keep is the default
    annotation gpuslice.io/idle-after: 5m        how long it is idle before that; 30s, 5m, 2h
    annotation gpuslice.io/park: park | wake     by anybody who may change the pod: the agent does it, and
                                                 takes the annotation away
    annotation gpuslice.io/parked: {"main":{"GPU-…":1048576}}   by the agent, before it begins: bytes by card

What is parked stays the holder's: its units are counted as before. What it lends goes to containers that may
have more than their request (`core.lending`), and to nobody else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from gpuslice.core.contract import ANN_IDLE_AFTER, ANN_PARK, ANN_PARKED, ANN_WHEN_IDLE
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.lending import Name

Amounts = Mapping[str, Mapping[str, int]]
"""Bytes by container and card uuid."""
PARKING_ANNOTATIONS = (ANN_WHEN_IDLE, ANN_IDLE_AFTER, ANN_PARK)
"""Those that people write."""
IDLE_AFTER_S = 300.0
LEFT_ALONE_S = 120.0
"""After a holder was woken, or could not be parked."""
LEAST_IDLE_S = 10.0
MOST_IDLE_S = 7 * 86400.0
_UNIT_S = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(?P<number>[0-9]{1,6})(?P<unit>[smh])")


class Order(StrEnum):
    """What somebody asked the agent for."""

    PARK = "park"
    WAKE = "wake"


@dataclass(frozen=True, slots=True)
class WhenIdle:
    """What its author wants of an idle pod."""

    parks: bool = False
    after_s: float = IDLE_AFTER_S


def when_idle(annotations: Mapping[str, str]) -> WhenIdle:
    """Raises `InvalidRequestError`, which names the annotation."""
    wish, after = annotations.get(ANN_WHEN_IDLE, "keep"), annotations.get(ANN_IDLE_AFTER)
    if wish not in ("keep", "park"):
        raise InvalidRequestError(_field(ANN_WHEN_IDLE), wish, "keep or park")
    if after is None:
        return WhenIdle(wish == "park")
    found = _DURATION.fullmatch(after)
    after_s = int(found["number"]) * _UNIT_S[found["unit"]] if found else 0.0
    if not LEAST_IDLE_S <= after_s <= MOST_IDLE_S:
        must_be = f"a whole number of s, m or h such as 5m, from {LEAST_IDLE_S:g}s to {MOST_IDLE_S / 3600:g}h"
        raise InvalidRequestError(_field(ANN_IDLE_AFTER), after, must_be)
    return WhenIdle(wish == "park", after_s)


def order(annotations: Mapping[str, str]) -> Order | None:
    """What is asked for now. Raises `InvalidRequestError`."""
    text = annotations.get(ANN_PARK)
    if text is None:
        return None
    try:
        return Order(text)
    except ValueError:
        raise InvalidRequestError(_field(ANN_PARK), text, "park or wake") from None


def check_parking(annotations: Mapping[str, str]) -> None:
    """Raises `InvalidRequestError` for what the agent could not read."""
    when_idle(annotations)
    order(annotations)


def parked(annotations: Mapping[str, str]) -> Amounts:
    """What the agent took off cards, or was about to. What cannot be read is nothing."""
    try:
        return msgspec.json.decode(annotations.get(ANN_PARKED, "{}"), type=dict[str, dict[str, int]])
    except msgspec.MsgspecError:
        return {}


def encode_parked(amounts: Amounts) -> str | None:
    """The annotation; None for no annotation."""
    return msgspec.json.encode(amounts, order="sorted").decode() if amounts else None


@dataclass(frozen=True, slots=True)
class Idle:
    """A holder that consented. Times in seconds of one clock.

    `last_s`: when it last used its card; `left_alone_s`: until when it is not parked.
    """

    name: Name
    last_s: float
    after_s: float
    left_alone_s: float = 0.0


def due(holders: Iterable[Idle], now_s: float) -> list[Idle]:
    """Those that may be parked now, the longest idle first."""
    found = [each for each in holders if now_s >= max(each.last_s + each.after_s, each.left_alone_s)]
    return sorted(found, key=lambda each: each.last_s)


def _field(name: str) -> str:
    return f'metadata.annotations["{name}"]'
