"""One pod as its page shows it: its explanation, its steps with times, and its usage."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.resources import EVENTS
from gpuslice.apps.console.cluster_state import ClusterState
from gpuslice.apps.console.usage_reader import UsageReader
from gpuslice.core.advice import card_of
from gpuslice.core.model import Pod
from gpuslice.diagnosis.explain.rule import explained
from gpuslice.diagnosis.explain.words import pod_document
from gpuslice.diagnosis.prometheus import PrometheusError

MOST_EVENTS = 100


class PodPages:
    """Creates the document of a pod. Its events are read on request; everything else is known already."""

    def __init__(self, client: KubeClient, state: ClusterState, usage: UsageReader) -> None:
        self._client = client
        self._state = state
        self._usage = usage

    async def document(self, namespace: str, name: str) -> dict[str, Any] | None:
        """None if there is no pod of that name that shares cards."""
        state, key = self._state, f"{namespace}/{name}"
        if key not in state.pods:
            return None
        events, events_problem = list[objects.Event](), ""
        fields = f"involvedObject.kind=Pod,involvedObject.name={name}"
        try:
            listing = await self._client.list(EVENTS, namespace, fields=fields, page=MOST_EVENTS)
            events = listing.items or []
        except KubeError as error:  # without them, everything else can still be shown
            events_problem = str(error)
        history = await self._history(namespace, name)
        found = state.pods.get(key)  # it may have gone in the meantime
        view = state.view(found) if found is not None else None
        if found is None or view is None:
            return None
        explanation = explained(found, state.cluster(self._usage.containers), events=events)
        document = {**pod_document(explanation), "eventsProblem": events_problem}
        better = self._usage.suggestion(key)
        if better is not None:
            document["suggestion"] = {
                "units": better.units,
                "limitMiB": better.limit_mib,
                "more": better.more,
            }
        if (card := card_of(state.ledger_of(view.node), view)) is not None:
            document["card"] = {"units": card.units, "memoryMiB": card.memory_mib, "model": card.model}
        return {**document, "way": way(view, found), "history": history}

    async def _history(self, namespace: str, name: str) -> dict[str, Any]:
        usage = self._usage
        if usage.prometheus is not None:
            try:
                found = await asyncio.to_thread(usage.prometheus.history, namespace, name, time.time())
                used = [None if each is None else round(each / (1 << 20)) for each in found["used"]]
                sm = [None if each is None else round(each * 100) for each in found["sm"]]
                refused = [round(each or 0) for each in found["refused"]]
                curves = {"times": found["times"], "used": used, "sm": sm, "refused": refused}
                return {"source": "prometheus", **curves}
            except PrometheusError as error:
                nothing: dict[str, Any] = {"times": [], "used": [], "sm": [], "refused": []}
                return {"source": "prometheus", "problem": str(error), **nothing}
        points = usage.history.of(f"{namespace}/{name}")
        return {
            "source": "memory",
            "times": [round(at) for at, _ in points],
            "used": [point.used_mib for _, point in points],
            "sm": [point.sm_percent for _, point in points],
            "refused": [point.refused for _, point in points],
        }


def way(view: Pod, pod: objects.Pod) -> list[dict[str, Any]]:
    """The steps from creation to running: which are done, and when, if known.

    ``again``: how often it was restarted; the time is then that of the last start.
    """
    decided = (
        datetime.fromtimestamp(view.assume_time_ns / 1e9, UTC).isoformat(timespec="seconds")
        if view.assume_time_ns
        else None
    )
    bound = next((each for each in pod.status.conditions or () if each.type == "PodScheduled"), None)
    started, again = [], 0
    for each in pod.status.container_statuses or ():
        runs = [(each.state or {}).get("running"), (each.state or {}).get("terminated")]
        last = next(filter(None, [*runs, (each.last_state or {}).get("terminated")]), None)
        started += [last.get("startedAt")] if last is not None else []
        again += each.restart_count
    steps = [
        ("created", True, pod.metadata.creation_timestamp),
        ("decided", view.placement is not None, decided),
        ("bound", bool(view.node), bound.last_transition_time if bound and bound.status == "True" else None),
        ("allocated", view.assigned, pod.status.start_time),
        ("started", bool(started), max(filter(None, started), default=None)),
    ]
    found = [
        {"step": name, "done": done, **({"time": at} if at and done else {})} for name, done, at in steps
    ]
    found[-1] |= {"again": again} if again else {}
    return found
