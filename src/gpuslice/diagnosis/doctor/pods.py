"""Checks of pods: does each have its card, and why does one wait, crash, or ask for what nobody offers?"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from gpuslice.adapters.kube.views import node_view, pod_view
from gpuslice.core.contract import ANN_ASSIGNED, ANN_INDEX
from gpuslice.core.errors import printable
from gpuslice.core.lookalikes import pod_label_hints, resource_hints
from gpuslice.core.words import counted
from gpuslice.diagnosis.claims import view_with_claims
from gpuslice.diagnosis.doctor.facts import Facts, Finding, Level, is_ready, time_of
from gpuslice.diagnosis.explain.others import resources_of
from gpuslice.diagnosis.explain.rule import explained, sentences_of

CONFIRMED = timedelta(seconds=60)  # the agent needs a second; it gets a minute
PATIENCE = timedelta(seconds=60)  # how long a pod may wait without a finding
MOST_EXPLAINED = 20  # waiting pods: each is compared with every node
FALLS = 3  # restarts that are more than bad luck
STARTING = frozenset({"ContainerCreating", "PodInitializing", "CrashLoopBackOff"})
"""Reasons of a container that is about to start, or about which more is said elsewhere."""


def pods_and_cards(facts: Facts) -> Iterator[Finding]:
    """Annotations compared with cards: unreadable, absent, unconfirmed, or naming missing cards."""
    cards = {node.metadata.name: {gpu.index for gpu in node_view(node).cards} for node in facts.nodes}
    for found in facts.pods:
        pod = pod_view(found)
        where = f"pod {pod.key}"
        if pod.problem:
            yield Finding(Level.WARNING, where, pod.problem, "correct the field; the pod must be recreated")
            continue
        if pod.request is None or not pod.node:
            continue
        if pod.placement is None:
            yield Finding(
                Level.WARNING,
                where,
                f"is on {pod.node} without annotation {ANN_INDEX}: its card is unknown, so it counts "
                "against every card there",
                "the agent there writes it when kubelet gave the devices out; else delete the pod, and see "
                "that its scheduler calls the extender",
            )
            continue
        gone = sorted(part.card for part in pod.placement.slices if part.card not in cards.get(pod.node, ()))
        if gone:
            yield Finding(
                Level.ERROR,
                where,
                f"is annotated with card {gone[0]}, which {pod.node} does not have",
                "delete the pod so that it is placed again",
            )


def running_without_devices(facts: Facts) -> Iterator[Finding]:
    """Pods that run although nobody confirmed that they got their devices."""
    attended = {pod.spec.node_name for pod in facts.plugins if is_ready(pod)}
    for found in facts.pods:
        pod = pod_view(found)
        if pod.problem or pod.request is None or pod.assigned or found.status.phase != "Running":
            continue
        states = [each.state or {} for each in found.status.container_statuses or ()]
        since = [time_of(state["running"].get("startedAt")) for state in states if "running" in state]
        if states and not any(each is None or facts.now - each >= CONFIRMED for each in since):
            continue
        where = f"pod {pod.key}"
        if pod.node in attended:
            yield Finding(
                Level.ERROR,
                where,
                f"runs without the {pod.request.names.memory} it asks for, and so without a limit: "
                f"{ANN_ASSIGNED} is not true although the device plugin of {pod.node} is there; kubelet "
                "started it while no plugin was registered",
                "delete the pod so that it is recreated",
            )
        elif pod.placement is not None:
            yield Finding(
                Level.WARNING,
                where,
                f"runs and its card is not confirmed ({ANN_ASSIGNED} is not true): the annotation may name "
                "another card than kubelet gave, or kubelet gave it none, and it has no limit",
                f"see that the device plugin of gpuslice runs on {pod.node}: it compares the two and repairs",
            )


def waiting(facts: Facts) -> Iterator[Finding]:
    """Pods without a node: those that fit nowhere, not even on empty cards, and those that wait for room."""
    queue = []
    for each in facts.pods:
        if each.spec.node_name:
            continue
        pod, _ = view_with_claims(each, facts.claims)
        created = time_of(each.metadata.creation_timestamp)
        is_new = created is not None and facts.now - created < PATIENCE
        if pod.request is not None and not pod.problem and not is_new:
            queue.append((each, pod))
    if not queue:
        return
    for each, pod in queue[:MOST_EXPLAINED]:
        answer = explained(each, facts)
        why = next(iter(sentences_of(answer)), "no node takes it")
        since = each.metadata.creation_timestamp or "an unknown time"
        classes = answer.explanation.classes if answer.explanation else ()
        never = bool(classes) and all(nodes.never for nodes in classes)
        level = Level.WARNING if never else Level.NOTE
        what = f"has been waiting since {since}: {why[:1].lower()}{why[1:].rstrip('.')}"
        yield Finding(level, f"pod {pod.key}", what, f"gpuslice explain {pod.key}")
    if (more := len(queue) - MOST_EXPLAINED) > 0:
        where, what = "pods", f"{counted(more, 'more pod')} that ask for a part of a card wait"
        yield Finding(Level.NOTE, where, what, "gpuslice explain -n NAMESPACE explains each")


def falling_over(facts: Facts) -> Iterator[Finding]:
    """Pods that hold a part of a card and restart repeatedly, or cannot be started."""
    for each in facts.pods:
        pod, _ = view_with_claims(each, facts.claims)
        if pod.request is None or not pod.node:
            continue
        for status in each.status.container_statuses or ():
            reason = status.waiting_reason
            if not status.restart_count and reason and reason not in STARTING:
                yield Finding(
                    Level.WARNING,
                    f"pod {pod.key}",
                    f"container {status.name} does not start ({printable(reason)}): it keeps its card",
                    f"kubectl -n {pod.namespace} describe pod {pod.name}; gpuslice explain {pod.key}",
                )
            if reason != "CrashLoopBackOff" and status.restart_count < FALLS:
                continue
            ended = (status.last_state or {}).get("terminated") or {}
            how = f", last with exit code {ended['exitCode']}" if "exitCode" in ended else ""
            yield Finding(
                Level.WARNING,
                f"pod {pod.key}",
                f"container {status.name} restarted {counted(status.restart_count, 'time')}{how}"
                f"{', and is waiting: ' + reason if reason else ''}: it keeps its card",
                f"kubectl -n {pod.namespace} logs {pod.name} -c {status.name} --previous; gpuslice explain "
                f"{pod.key}",
            )


def misspelt(facts: Facts) -> Iterator[Finding]:
    """Pods with a resource or label that is nearly ours, or another system's: it has no effect."""
    offered = {name for node in facts.nodes for name in node.status.allocatable or {}}
    for each in facts.pods:
        names = [name for name in resources_of(each) if name not in offered]
        for hint in (*resource_hints(names), *pod_label_hints(each.metadata.labels or {})):
            where = f"pod {each.metadata.namespace}/{each.metadata.name}"
            yield Finding(Level.WARNING, where, hint.rstrip("."), "correct the manifest and recreate it")
