"""What pods had of cards over a time, from the series that the rules of monitoring/ record: their bill.

It adds up: what pods are charged, what was idle and what nobody is known to have had is what the cards have.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, NamedTuple

from gpuslice.core.errors import GpusliceError
from gpuslice.diagnosis.prometheus import CARD_LABELS, Prometheus, one, quoted
from gpuslice.diagnosis.usage import known

GRID_S = 60
PIECE_S = 3600
"""One query's length: of 10,000 containers an hour is 600,000 samples, and a Prometheus takes 50 million."""


class Meter(NamedTuple):
    """Four series of one quantity: at every moment the first three are together the last."""

    charged: str
    idle: str
    unattributed: str
    card: str
    unit: str
    per_unit: float  # seconds of the series' unit


PARTS = ("idle", "unattributed", "card")


def _meter(quantity: str, unit_of_series: str, unit: str, per_unit: float) -> Meter:
    idle, unattributed, card = (f"gpu:gpuslice_{quantity}_{part}:{unit_of_series}" for part in PARTS)
    charged = f"container:gpuslice_{quantity}_charged:{unit_of_series}"
    return Meter(charged, idle, unattributed, card, unit, per_unit)


GIB_HOUR = 3600.0 * (1 << 30)
MEMORY = _meter("memory", "bytes", "GiB-Hours", GIB_HOUR)
SM = _meter("sm", "ratio", "Hours", 3600.0)
POWER = _meter("power", "watts", "kWh", 3600.0 * 1000)
METERS = {"memory": MEMORY, "sm": SM, "energy": POWER}
GUARANTEED, BORROWED, USED = (
    f"container:gpuslice_memory_{name}:bytes" for name in ("guaranteed", "borrowed", "used")
)
PARKED = "gpuslice_container_memory_parked_bytes"
"""A series that no exporter has yet counts as 0."""
OF_MEMORY = {"guaranteed": GUARANTEED, "borrowed": BORROWED, "used": USED, "parked": PARKED}

KEYS = {name: f"{name}GiBHours" for name in OF_MEMORY} | {
    "memory": "chargedGiBHours",
    "sm": "smHours",
    "energy": "energyKWh",
}

Owner = tuple[str, str, str]  # cluster, namespace, pod
Card = tuple[str, str, str]  # cluster, node, uuid
Amounts = dict[str, float]
OWNER, CARD = ("cluster", "namespace", "pod"), ("cluster", "node", "gpu_uuid")


class NothingRecordedError(GpusliceError):
    """Prometheus has none of the series of which bills are made."""


@dataclass(slots=True)
class Bill:
    """Of the time from `start_s` to `end_s`: GiB-hours by the names of `OF_MEMORY`, other units by `METERS`.

    A card's amounts are named ``memory idle``, ``memory unattributed``, ``memory card`` and so on.
    """

    start_s: int
    end_s: int
    pods: defaultdict[Owner, Amounts] = field(default_factory=lambda: defaultdict(dict))
    cards: defaultdict[Card, Amounts] = field(default_factory=lambda: defaultdict(dict))

    def add(self, other: Bill) -> None:
        """The next piece of time."""
        self.end_s = other.end_s
        for owner, amounts in other.pods.items():
            _add(self.pods[owner], amounts)
        for card, amounts in other.cards.items():
            _add(self.cards[card], amounts)

    def by_namespace(self) -> dict[tuple[str, str], Amounts]:
        """Sums of pods, by cluster and namespace."""
        found: defaultdict[tuple[str, str], Amounts] = defaultdict(dict)
        for (cluster, namespace, _), amounts in self.pods.items():
            _add(found[cluster, namespace], amounts)
        return dict(found)


def pieces(start_s: int, end_s: int) -> list[tuple[int, int]]:
    """The time in whole hours, from minute to minute, as what is read at once."""
    start_s, end_s = (at_s - at_s % GRID_S for at_s in (start_s, end_s))
    cuts = [start_s, *range(start_s - start_s % PIECE_S + PIECE_S, end_s, PIECE_S), end_s]
    return list(pairwise(cuts))


def read_piece(prometheus: Prometheus, start_s: int, end_s: int, namespace: str = "") -> Bill:
    """What the series say from minute to minute, the first included and the last not."""
    found = Bill(start_s, end_s)
    # half a second more: whether Prometheus counts the range's first moment depends on its version
    minutes = f"[{(end_s - start_s) * 1000 - 500}ms:{GRID_S}s]"
    chosen = f"{{namespace={quoted(namespace)}}}" if namespace else ""

    def of_pods(name: str, series: str, per_unit: float) -> None:
        question = f"sum_over_time({one(series + chosen)}{minutes})"
        for (cluster, space, pod), value in prometheus.sums(question, OWNER, end_s - 1):
            found.pods[cluster, space, pod][name] = value * GRID_S / per_unit

    for name, series in OF_MEMORY.items():
        of_pods(name, series, GIB_HOUR)
    for name, meter in METERS.items():
        of_pods(name, meter.charged, meter.per_unit)
        for part in PARTS if not namespace else ():
            question = f"sum_over_time({one(getattr(meter, part), labels=CARD_LABELS)}{minutes})"
            for (cluster, node, uuid), value in prometheus.sums(question, CARD, end_s - 1):
                found.cards[cluster, node, uuid][f"{name} {part}"] = value * GRID_S / meter.per_unit
    return found


def read_bills(
    prometheus: Prometheus, parts: Iterable[tuple[int, int]], namespace: str = ""
) -> Iterator[Bill]:
    """Piece by piece. Raises NothingRecordedError at the end if there was nothing."""
    nothing = True
    for start_s, end_s in parts:
        piece = read_piece(prometheus, start_s, end_s, namespace)
        nothing = nothing and not piece.pods and not piece.cards
        yield piece
    if nothing and not prometheus.sums(f"last_over_time({MEMORY.card}[7d])", CARD, end_s):
        raise NothingRecordedError(
            f"Prometheus has no series {MEMORY.card}: let it evaluate monitoring/alerts/gpuslice.rules.yaml "
            "(in the chart: monitoring.alerts.enabled)"
        )


def by_day(found: Iterable[Bill]) -> Iterator[Bill]:
    """The pieces of each day, UTC, together; a day is given out when it is complete."""
    day: Bill | None = None
    for piece in found:
        if day is not None and day.start_s // 86400 != piece.start_s // 86400:
            yield day
            day = None
        if day is None:
            day = piece
        else:
            day.add(piece)
    if day is not None:
        yield day


def total(amounts: Iterable[Mapping[str, float]]) -> Amounts:
    found: Amounts = {}
    for each in amounts:
        _add(found, each)
    return found


def _add(amounts: Amounts, more: Mapping[str, float]) -> None:
    for name, amount in more.items():
        amounts[name] = amounts.get(name, 0.0) + amount


def document(found: Bill) -> dict[str, Any]:
    """The whole bill, for programs."""

    def amounts(of: Mapping[str, float]) -> dict[str, float]:
        return {KEYS[name]: round(of[name], 6) for name in KEYS if name in of}

    return {
        "from": _time(found.start_s),
        "to": _time(found.end_s),
        "namespaces": [
            known(cluster=cluster or None, namespace=namespace, **amounts(each))
            for (cluster, namespace), each in sorted(found.by_namespace().items())
        ],
        "pods": [
            known(cluster=cluster or None, namespace=namespace, pod=pod, **amounts(each))
            for (cluster, namespace, pod), each in sorted(found.pods.items())
        ],
        "cards": [
            known(cluster=cluster or None, node=node, gpuUuid=uuid)
            | {
                part: amounts({name: each[f"{name} {part}"] for name in METERS if f"{name} {part}" in each})
                for part in PARTS
            }
            for (cluster, node, uuid), each in sorted(found.cards.items())
        ],
    }


FOCUS_COLUMNS = (
    "ChargePeriodStart",
    "ChargePeriodEnd",
    "ChargeCategory",
    "ChargeDescription",
    "ServiceCategory",
    "ServiceName",
    "SubAccountId",
    "SubAccountName",
    "ResourceId",
    "ResourceName",
    "ResourceType",
    "SkuId",
    "ConsumedQuantity",
    "ConsumedUnit",
    "Tags",
)
"""Of FOCUS 1.2; its columns of costs and prices are for who knows prices."""


def focus_rows(found: Bill) -> Iterator[tuple[str, ...]]:
    """One row for each amount of a pod, and for what is left of each card.

    The quantities of ``charged``, ``idle`` and ``unattributed`` of a meter are together what the cards have.
    """
    when = (_time(found.start_s), _time(found.end_s), "Usage")
    service = ("AI and Machine Learning", "gpuslice")
    units = {name: meter.unit for name, meter in METERS.items()}
    for (cluster, namespace, pod), amounts in sorted(found.pods.items()):
        who = (namespace, namespace, "/".join(filter(None, (cluster, namespace, pod))), pod, "Pod")
        for name, amount in amounts.items():
            meter, part = (name, "charged") if name in METERS else ("memory", name)
            what = (f"gpu-{meter}-{part}", f"{amount:.6f}", units[meter], _tags(cluster=cluster))
            yield *when, f"GPU {meter}, {part}", *service, *who, *what
    for (cluster, node, uuid), amounts in sorted(found.cards.items()):
        for name, amount in amounts.items():
            meter, part = name.split()
            if part != "card":
                what = (
                    f"gpu-{meter}-{part}",
                    f"{amount:.6f}",
                    units[meter],
                    _tags(cluster=cluster, node=node),
                )
                yield *when, f"GPU {meter}, {part}", *service, "", "", uuid, uuid, "GPU", *what


def _tags(**tags: str) -> str:
    return json.dumps({name: value for name, value in tags.items() if value})


def _time(at_s: int) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat().replace("+00:00", "Z")
