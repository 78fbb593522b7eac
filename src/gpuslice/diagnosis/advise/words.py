"""Advice in words, and as a document.

The document::

    resizes[]     namespace, pod, node, card, cards, units, mib, suggestedUnits, suggestedMiB, peakMiB, more
    namespaces[]  namespace, mib: what its pods could give back
    cards[]       node, card, moves[]: namespace, pod, units, mib, node, card
    measured      pods of which a peak is known
    risks[]       sentences
"""

from __future__ import annotations

from typing import Any

from gpuslice.core.advice import MOVE_RISK, SETTLED_S, SIZE_RISK, Advice
from gpuslice.core.words import counted
from gpuslice.diagnosis.table import fitted

MOST_SHOWN = 40


def text(found: Advice, width: int | None = None) -> str:
    """The advice as text: sizes, what namespaces could give back, cards to empty, and the risk.

    `width` is the terminal's unless given.
    """
    parts = []
    if found.resizes:
        rows = [["POD", "ASKS FOR", "PEAK", "BETTER", "WHY"]]
        for each in found.resizes[:MOST_SHOWN]:
            better = f"{counted(each.suggested_units, 'unit')} ({each.suggested_mib} MiB)"
            better = f"at least {better}" if each.more else better if each.suggested_units else "nothing"
            spare = f"{each.mib - each.suggested_mib} MiB" if each.suggested_units else "all of it"
            why = "memory was refused" if each.more else f"{spare} never used"
            on = f" on each of {each.cards} cards" if each.cards > 1 else ""
            asks = f"{counted(each.units, 'unit')} ({each.mib} MiB)"
            rows.append([each.pod.key, asks, f"{each.peak_mib:.0f} MiB{on}", better, why])
        parts.append(fitted(rows, cut=(0,), drop=(4, 2), width=width) + _rest(len(found.resizes)))
        parts.append("")
        rows = [["NAMESPACE", "COULD GIVE BACK"]]
        rows += [[name, f"{mib} MiB"] for name, mib in found.given_back.items()]
        parts.append(fitted(rows, cut=(0,), width=width) if found.given_back else "")
        parts.append(f"{SIZE_RISK}\n")
    if found.cards:
        rows = [["CARD TO EMPTY", "POD", "MEMORY", "TO"]]
        for card in found.cards[:MOST_SHOWN]:
            for move in card.moves:
                place = f"{card.node}, card {card.card}"
                rows.append([place, move.pod.key, f"{move.mib} MiB", f"{move.node}, card {move.card}"])
        parts.append(fitted(rows, cut=(0, 1, 3), width=width) + _rest(len(found.cards)))
        parts.append(f"{MOVE_RISK}\n")
    if found.young:
        minutes = round(SETTLED_S / 60)
        parts.append(
            f"{counted(found.young, 'pod')} may need less: ask again {minutes} minutes after the start.\n"
        )
    if not parts:
        known = f"the peak of {counted(found.measured, 'pod')} is known"
        return f"Nothing to advise: {known}, and no card in use could be emptied.\n"
    return "\n".join(filter(None, parts))


def _rest(number: int) -> str:
    return f"… and {number - MOST_SHOWN} more: -o json has all.\n" if number > MOST_SHOWN else ""


def document(found: Advice) -> dict[str, Any]:
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
