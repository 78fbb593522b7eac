"""What explains pods, in words for people and as a document for programs.

`document`, of one pod::

    namespace, name, phase, reason, scheduler
    request      units, gpuCount, unitsPerGpu, corePercent
    problem      why the request or the annotations cannot be read
    node, gpus   where it is, and its units by card; assigned, neighbours[]
    classes[]    reason, nodes[], fits, never, and where known best, card, most, detail
    ends[]       how its containers ended, sentences
    usage[]      container, gpu, and where known usedBytes, limitBytes, peakBytes, refused, allocatedBytes,
                 excessBytes (over its request), idleSeconds
    claims[]     by which it asks, or the templates they are made from
    tiers        by container, what holds its limits: driver, library, watchdog or none
    decision     the extender's last: time, node, gpus, policy, passed, nominated, replica, seconds, error
    hints[]      sentences
    events[]     time, type, reason, message, count; the newest last

Of several: ``name``, ``problems[]`` and ``pods[]``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gpuslice.core.errors import printable
from gpuslice.core.model import Card, CardSlice, Tier
from gpuslice.core.units import MIB, limit_mib, worth_mib
from gpuslice.core.words import counted, lasting
from gpuslice.diagnosis.ages import aged
from gpuslice.diagnosis.explain.decisions import Decision, sentence_of
from gpuslice.diagnosis.explain.facts import Explanations
from gpuslice.diagnosis.explain.rule import (
    PodExplanation,
    event_time,
    holds,
    sentences_of,
)
from gpuslice.diagnosis.table import aligned, fitted, row
from gpuslice.diagnosis.usage import ContainerUsage, known
from gpuslice.diagnosis.waste import IDLE_S

MOST_TOLD = 3
"""How many of several pods are described in full: those with something to report first."""
_HOLDERS = {
    Tier.DRIVER: "the driver",
    Tier.LIBRARY: "the library",
    Tier.WATCHDOG: "the watchdog",
    Tier.NONE: "nothing (this node has no isolation, or the pod is exempt)",
}


def text(found: Explanations, *, headers: bool = True, wide: bool = False) -> str:
    """The full explanation as text; without `headers` the rows of the table alone."""
    if found.single:
        return "".join(map(pod_text, found.pods))
    parts = [f"{counted(len(found.pods), 'pod')} of {found.name}.\n"]
    parts += [f"{problem}\n" for problem in found.problems]
    table = ""
    if found.pods:
        spaces = len({each.pod.namespace for each in found.pods}) > 1
        rows = [["POD", "STATUS", "NODE", "CARD", "MEMORY", "WHY"]] if headers else []
        for each in found.pods:
            slices = each.pod.placement.slices if each.pod.placement is not None and holds(each.pod) else ()
            cards = ",".join(str(part.card) for part in slices) or "-"
            sizes = {card.index: card for card in each.node.cards} if each.node else {}
            held = sum(_limit(sizes.get(part.card), part.units) for part in slices)
            asked = counted(each.pod.request.units, "unit") if each.pod.request is not None else "nothing"
            why = aged(next(iter(sentences_of(each)), "-"))
            status = printable(each.reason) or each.phase or "Pending"
            name = each.pod.key if spaces else each.pod.name
            memory = f"{held} MiB" if held else f"asks {asked}"
            rows.append([name, status, each.pod.node or "-", cards, memory, why])
        table = fitted(rows, cut=(0, 2), drop=() if wide else (4, 3, 2), prose=not wide)
        parts.append("\n" + table)
    if not headers:
        return table
    with_something = [each for each in found.pods if each.explanation or each.ends or each.pod.problem]
    parts += ["\n" + pod_text(each) for each in with_something[:MOST_TOLD]]
    return "".join(parts)


def _limit(card: Card | None, units: int) -> int:
    return worth_mib(card.memory_mib, units, card.units) if card is not None and units <= card.units else 0


def pod_text(explained: PodExplanation) -> str:
    """One pod."""
    pod, reason = explained.pod, f" ({printable(explained.reason)})" if explained.reason else ""
    where = f" on {pod.node}{reason}" if pod.node else reason
    parts = [f"Pod {pod.key} is {explained.phase or 'Pending'}{where}.\n"]
    parts += [f"Problem: {pod.problem}\n"] if pod.problem else []
    if pod.request is not None:
        units, cards = counted(pod.request.units_per_card, "unit"), pod.request.card_count
        each = f"{units} on each of {cards} cards of one node" if cards > 1 else f"{units} of one card"
        core = f", and {pod.request.compute_percent} % of its compute" if pod.request.compute_percent else ""
        by = f", by claim {', '.join(explained.claims)}" if explained.claims else ""
        parts.append(f"It asks for {each}{core}{by}.\n")
    if pod.placement is not None and holds(pod):
        parts += _what_it_holds(explained, pod.placement.slices)
    parts += [f"{aged(sentence_of(explained.decision))}\n"] if explained.decision is not None else []
    for use in explained.usage:
        amounts = [f"uses {_mib(use.used_bytes)}"]
        amounts += [f"{_mib(use.peak_bytes)} at its peak"] if use.peak_bytes is not None else []
        if use.limit_bytes is not None:
            amounts.append(f"its limit is {_mib(use.limit_bytes)}")
        elif use.allocated_bytes is not None:
            amounts.append(f"it asked for {_mib(use.allocated_bytes)}")
            if explained.tiers.get(use.container, Tier.NONE) is Tier.NONE:  # else it has not started yet
                amounts[-1] += ", and nothing limits it here"
        if use.idle_seconds is not None and use.idle_seconds >= IDLE_S:
            amounts.append(f"idle for {lasting(use.idle_seconds)}")
        parts.append(f"Container {use.container} on card {use.gpu}: {', '.join(amounts)}.\n")
    if explained.explanation is not None:
        rows = [row("NODES", "WHY NOT", "MOST FREE ON ONE CARD", "EXAMPLE")]
        for nodes in explained.explanation.classes:  # by the reason why they cannot hold the pod
            most = "-" if nodes.most is None else f"{nodes.most} ({nodes.best}, card {nodes.card})"
            names = ", ".join(nodes.nodes[:2]) + (", …" if len(nodes.nodes) > 2 else "")
            why = f"it fits: {nodes.reason[0].lower()}{nodes.reason[1:]}" if nodes.fits else nodes.reason
            rows.append(row(len(nodes.nodes), why, most, names))
        parts.append("\n" + aligned("".join(rows)))
    if explained.ends or explained.hints:
        sentences = (aged(sentence) for sentence in (*explained.ends, *explained.hints))
        parts.append("\n" + "".join(f"{sentence}\n" for sentence in sentences))
    if explained.events:
        rows = []
        for event in explained.events:
            times = f" (x{event.count})" if event.count > 1 else ""
            reason = event.reason + times
            rows.append("  " + row(aged(event_time(event)), event.type, reason, printable(event.message)))
        parts.append("\nEvents:\n" + aligned("".join(rows)))
    return "".join(parts)


def _what_it_holds(explained: PodExplanation, slices: Sequence[CardSlice]) -> Iterator[str]:
    by_index = {card.index: card for card in explained.node.cards} if explained.node else {}
    for part in slices:
        card, of, limit = by_index.get(part.card), "", ""
        if card is not None:
            of = f" of {card.units}"
            if card.memory_mib and part.units <= card.units:
                limit = f", limit {limit_mib(card.memory_mib, part.units, card.units)} MiB"
        yield f"It holds {part.units}{of} units of card {part.card}{limit}.\n"
    if explained.tiers:
        enforced = [f"for {name} by {_HOLDERS[tier]}" for name, tier in explained.tiers.items()]
        yield f"Its limits are enforced {', '.join(enforced)}.\n"
    if explained.neighbours:
        size = by_index.get(slices[0].card)
        others = ", ".join(
            f"{key} ({_limit(size, units)} MiB)" if size else key for key, units in explained.neighbours
        )
        yield f"Other pods on its {'card' if len(slices) == 1 else 'cards'}: {others}.\n"


def _mib(amount: float | None) -> str:
    return "an unknown amount" if amount is None else f"{amount / MIB:.0f} MiB"


# -- document ----------------------------------------------------------------------------------------------


def document(found: Explanations) -> dict[str, Any]:
    if found.single:
        return pod_document(found.pods[0])
    return {
        "name": found.name,
        "problems": list(found.problems),
        "pods": [pod_document(each) for each in found.pods],
    }


def pod_document(explained: PodExplanation) -> dict[str, Any]:
    """One pod."""
    pod, request = explained.pod, explained.pod.request
    asked = None
    if request is not None:
        asked = known(
            units=request.units,
            gpuCount=request.card_count,
            unitsPerGpu=request.units_per_card,
            corePercent=request.compute_percent or None,
        )
    slices = pod.placement.slices if pod.placement is not None and holds(pod) else None
    classes = [
        known(
            reason=each.reason,
            nodes=list(each.nodes),
            fits=each.fits,
            never=each.never,
            best=each.best,
            card=each.card,
            most=each.most,
            detail=each.detail or None,
        )
        for each in (explained.explanation.classes if explained.explanation else ())
    ]
    events = [
        known(
            time=event_time(each) or None,
            type=each.type,
            reason=each.reason,
            message=each.message,
            count=each.count or None,
        )
        for each in explained.events
    ]
    return known(
        namespace=pod.namespace,
        name=pod.name,
        phase=explained.phase or None,
        reason=explained.reason or None,
        scheduler=explained.scheduler or None,
        request=asked,
        problem=pod.problem or None,
        node=pod.node or None,
        gpus={str(part.card): part.units for part in slices} if slices is not None else None,
        assigned=pod.assigned if slices is not None else None,
        neighbours=[{"pod": key, "units": units} for key, units in explained.neighbours] or None,
        classes=classes if explained.explanation else None,
        ends=list(explained.ends) or None,
        usage=[_usage_document(each) for each in explained.usage] or None,
        claims=list(explained.claims) or None,
        tiers={name: tier.word for name, tier in explained.tiers.items()} or None,
        decision=_decision_document(explained.decision),
        hints=list(explained.hints),
        events=events,
    )


def _usage_document(each: ContainerUsage) -> dict[str, Any]:
    return known(
        container=each.container,
        gpu=each.gpu,
        usedBytes=each.used_bytes,
        limitBytes=each.limit_bytes,
        peakBytes=each.peak_bytes,
        allocatedBytes=each.allocated_bytes,
        excessBytes=each.excess_bytes or None,
        idleSeconds=each.idle_seconds,
        refused=each.refused,
    )


def _decision_document(each: Decision | None) -> dict[str, Any] | None:
    if each is None:
        return None
    return known(
        time=each.time,
        node=each.node,
        gpus=dict(each.cards),
        policy=each.policy,
        passed=each.passed,
        nominated=each.nominated,
        replica=each.replica,
        seconds=each.seconds,
        error=each.error or None,
    )
