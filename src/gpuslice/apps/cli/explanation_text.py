"""What explains one pod, in words for people and as a document for programs.

`document`::

    namespace, name, phase, reason, scheduler
    request      units, gpuCount, unitsPerGpu, corePercent
    problem      why the request or the annotations cannot be read
    node, gpus   where it is, and its units by card; assigned, neighbours[]
    classes[]    reason, nodes[], fits, never, and where known best, card, most, detail
    hints[]      sentences
    events[]     time, type, reason, message, count; the newest last
"""

from __future__ import annotations

from typing import Any

from gpuslice.adapters.kube import objects
from gpuslice.apps.cli.explanation import Told, event_time
from gpuslice.apps.cli.table import aligned, row
from gpuslice.core.errors import printable
from gpuslice.core.explanation import Explanation, NodeClass
from gpuslice.core.model import Card, Pod
from gpuslice.core.units import limit_mib
from gpuslice.core.words import counted


def text(told: Told) -> str:
    """The whole story for people."""
    pod = told.pod
    parts = [f"Pod {pod.key} is {told.phase or 'Pending'}{_at(told)}.\n"]
    parts.append(_asked(pod))
    if _holds(pod):
        parts.append(_where(told))
    if told.explanation is not None:
        parts.append("\n" + aligned(_rows(told.explanation)))
    if told.hints:
        parts.append("\n" + "".join(f"{hint}\n" for hint in told.hints))
    if told.events:
        parts.append("\nEvents:\n" + aligned("".join(map(_event_row, told.events))))
    return "".join(parts)


def _at(told: Told) -> str:
    reason = f" ({printable(told.reason)})" if told.reason else ""
    return f" on {told.pod.node}{reason}" if told.pod.node else reason


def _holds(pod: Pod) -> bool:
    return pod.placement is not None and bool(pod.node) and not pod.finished


def _asked(pod: Pod) -> str:
    problem = f"Problem: {pod.problem}\n" if pod.problem else ""
    if pod.request is None:
        return problem
    units, cards = counted(pod.request.units_per_card, "unit"), pod.request.card_count
    each = f"{units} on each of {cards} cards of one node" if cards > 1 else f"{units} of one card"
    core = f", and {pod.request.compute_percent} % of its compute" if pod.request.compute_percent else ""
    return f"{problem}It asks for {each}{core}.\n"


def _where(told: Told) -> str:
    assert told.pod.placement is not None
    lines = []
    for part in told.pod.placement.slices:
        gpu = next((each for each in told.node.cards if each.index == part.card), None) if told.node else None
        of, limit = f" of {gpu.units}" if gpu else "", _limit(gpu, part.units)
        lines.append(f"It holds {part.units}{of} units of card {part.card}{limit}.\n")
    if told.neighbours:
        beside = ", ".join(f"{key} ({units})" for key, units in told.neighbours)
        lines.append(f"Beside it: {beside}.\n")
    return "".join(lines)


def _limit(gpu: Card | None, units: int) -> str:
    if gpu is None or not gpu.memory_mib or units > gpu.units:
        return ""
    return f", limit {limit_mib(gpu.memory_mib, units, gpu.units)} MiB"


def _rows(explanation: Explanation) -> str:
    lines = [row("NODES", "WHY NOT", "MOST FREE ON ONE CARD", "EXAMPLE")]
    for each in explanation.classes:
        most = "-" if each.most is None else f"{each.most} ({each.best}, card {each.card})"
        names = ", ".join(each.nodes[:2]) + (", …" if len(each.nodes) > 2 else "")
        reason = f"it fits: {each.reason[0].lower()}{each.reason[1:]}" if each.fits else each.reason
        lines.append(row(len(each.nodes), reason, most, names))
    return "".join(lines)


def _event_row(event: objects.Event) -> str:
    times = f" (x{event.count})" if event.count > 1 else ""
    return "  " + row(event_time(event), event.type, event.reason + times, printable(event.message))


# -- document ----------------------------------------------------------------------------------------------


def document(told: Told) -> dict[str, Any]:
    pod, request = told.pod, told.pod.request
    return _known(
        namespace=pod.namespace,
        name=pod.name,
        phase=told.phase or None,
        reason=told.reason or None,
        scheduler=told.scheduler or None,
        request=_request(pod) if request else None,
        problem=pod.problem or None,
        node=pod.node or None,
        gpus={str(part.card): part.units for part in pod.placement.slices}
        if pod.placement and _holds(pod)
        else None,
        assigned=pod.assigned if _holds(pod) else None,
        neighbours=[{"pod": key, "units": units} for key, units in told.neighbours] or None,
        classes=[_class(each) for each in told.explanation.classes] if told.explanation else None,
        hints=list(told.hints),
        events=[
            _known(
                time=event_time(each) or None,
                type=each.type,
                reason=each.reason,
                message=each.message,
                count=each.count or None,
            )
            for each in told.events
        ],
    )


def _request(pod: Pod) -> dict[str, Any]:
    assert pod.request is not None
    return _known(
        units=pod.request.units,
        gpuCount=pod.request.card_count,
        unitsPerGpu=pod.request.units_per_card,
        corePercent=pod.request.compute_percent or None,
    )


def _class(each: NodeClass) -> dict[str, Any]:
    return _known(
        reason=each.reason,
        nodes=list(each.nodes),
        fits=each.fits,
        never=each.never,
        best=each.best,
        card=each.card,
        most=each.most,
        detail=each.detail or None,
    )


def _known(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
