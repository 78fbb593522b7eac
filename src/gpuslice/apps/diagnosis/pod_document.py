"""The explanation of a pod as a document for programs. `apps/cli/explanation_text` documents the keys."""

from __future__ import annotations

from typing import Any

from gpuslice.apps.diagnosis.decisions import Decision
from gpuslice.apps.diagnosis.pod_explanation import PodExplanation, event_time, holds
from gpuslice.apps.diagnosis.usage import ContainerUsage, known


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
