"""Advice as a document and from measurements: what ``gpuslice advise`` and the console show.

The document::

    resizes[]     namespace, pod, node, card, cards, units, mib, suggestedUnits, suggestedMiB, peakMiB, more
    namespaces[]  namespace, mib: what its pods could give back
    cards[]       node, card, moves[]: namespace, pod, units, mib, node, card
    measured      pods of which a peak is known
    risks[]       sentences
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gpuslice.apps.diagnosis.usage import ContainerUsage
from gpuslice.core.advice import MOVE_RISK, SIZE_RISK, Advice, Peak, card_of
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod
from gpuslice.core.sizing import Suggestion, suggested_size
from gpuslice.core.units import MIB


def peaks_of(pods: Iterable[Pod], containers: Iterable[ContainerUsage]) -> dict[str, Peak]:
    """By uid, for pods with one container on cards: with more, it is unknown which part is too large."""
    by_pod: dict[str, list[ContainerUsage]] = {}
    for each in containers:
        by_pod.setdefault(f"{each.namespace}/{each.pod}", []).append(each)
    uids = {pod.key: pod.uid for pod in pods if pod.node and not pod.finished}
    return {
        uids[key]: peak for key, rows in by_pod.items() if key in uids and (peak := _peak(rows)) is not None
    }


def _peak(rows: Sequence[ContainerUsage]) -> Peak | None:
    """On whichever card it was most; None if it is unknown on one, or there are several containers."""
    peaks = [each.peak_bytes for each in rows if each.peak_bytes is not None]
    if len({each.container for each in rows}) != 1 or len(peaks) < len(rows):
        return None
    return Peak(max(peaks) / MIB, any(each.refused for each in rows))


def suggestion_of(ledger: Ledger, pod: Pod, usage: Sequence[ContainerUsage]) -> Suggestion | None:
    """A better size of its part of each card, for a pod with one container of which the peak is known."""
    card, peak = card_of(ledger, pod), _peak(usage)
    if card is None or pod.placement is None or peak is None:
        return None
    return suggested_size(
        units=pod.placement.slices[0].units,
        card_units=card.units,
        card_mib=card.memory_mib,
        peak_mib=peak.peak_mib,
        refused=peak.refused,
    )


def advice_document(found: Advice) -> dict[str, Any]:
    """The whole advice for programs."""
    resizes = [
        {
            "namespace": each.pod.namespace,
            "pod": each.pod.name,
            "node": each.pod.node,
            "card": each.pod.placement.slices[0].card if each.pod.placement else None,
            "cards": each.cards,
            "units": each.units,
            "mib": each.mib,
            "suggestedUnits": each.suggested_units,
            "suggestedMiB": each.suggested_mib,
            "peakMiB": round(each.peak_mib),
            "more": each.more,
        }
        for each in found.resizes
    ]
    cards = [
        {
            "node": each.node,
            "card": each.card,
            "moves": [
                {
                    "namespace": move.pod.namespace,
                    "pod": move.pod.name,
                    "units": move.units,
                    "mib": move.mib,
                    "node": move.node,
                    "card": move.card,
                }
                for move in each.moves
            ],
        }
        for each in found.cards
    ]
    return {
        "resizes": resizes,
        "namespaces": [{"namespace": name, "mib": mib} for name, mib in found.given_back.items()],
        "cards": cards,
        "measured": found.measured,
        "risks": [*([SIZE_RISK] if resizes else []), *([MOVE_RISK] if cards else [])],
    }
