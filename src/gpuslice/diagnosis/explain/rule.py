"""The explanation of one pod, derived from the cluster's objects without further requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import msgspec

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.rejected_pod import refusal_in
from gpuslice.core.annotations import decode_tiers
from gpuslice.core.contract import EXCLUSIVE_GPU, GATE_POD_GROUP, NODE_TIER
from gpuslice.core.errors import printable
from gpuslice.core.explanation import (
    NOT_SHARED,
    THERE_IS_ROOM,
    Explanation,
    explain,
    room_by_eviction,
    room_in_the_making,
    why_there,
)
from gpuslice.core.ledger import Ledger
from gpuslice.core.lookalikes import resource_hints
from gpuslice.core.model import Node, Pod, Refusal, Tier
from gpuslice.core.node_filters import Volume
from gpuslice.core.parking import parked
from gpuslice.core.resize import grown, less, more
from gpuslice.core.units import MIB
from gpuslice.core.words import counted
from gpuslice.diagnosis.claims import ClaimedPod, view_with_claims
from gpuslice.diagnosis.cluster import Cluster
from gpuslice.diagnosis.explain.decisions import Decision
from gpuslice.diagnosis.explain.others import (
    about_scheduler,
    label_hints,
    none_of_ours,
    of_nvidia,
    of_others,
    resources_of,
)
from gpuslice.diagnosis.explain.use import (
    about_size,
    about_use,
    neighbours_of,
    taken_by_neighbours,
)
from gpuslice.diagnosis.places import place_of, wish_of
from gpuslice.diagnosis.rejections import why_kept_off
from gpuslice.diagnosis.usage import ContainerUsage
from gpuslice.diagnosis.waste import hints_of_room

SHOWN_EVENTS = 5
SHOWN_ORPHANS = 3
BOTH = f"It asks for whole cards ({EXCLUSIVE_GPU}) beside {{asked}}, and no node offers both: ask for one."


@dataclass(frozen=True, slots=True)
class PodExplanation:
    """All that is known about one pod. `neighbours`: units by pod key on the cards that it holds.

    `ends`: how its containers last ended, in one sentence each; `usage`: what they use now, if known;
    `claims`: its claims, if it uses any. `tiers`: what enforces each container's limits. `decision`: the
    extender's last about it, if its log may be read.
    """

    pod: Pod
    phase: str
    scheduler: str
    events: tuple[objects.Event, ...] = ()
    reason: str = ""
    node: Node | None = None
    neighbours: tuple[tuple[str, int], ...] = ()
    explanation: Explanation | None = None
    ends: tuple[str, ...] = ()
    usage: tuple[ContainerUsage, ...] = ()
    hints: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    decision: Decision | None = None


def explained(
    found: objects.Pod,
    cluster: Cluster,
    *,
    events: Sequence[objects.Event] = (),
    volumes: Sequence[Volume] = (),
) -> PodExplanation:
    """One pod. `events` are of this pod; `volumes`: those that it claims, if they may be read."""
    view, claimed = view_with_claims(found, cluster.claims)
    begun = PodExplanation(
        view,
        found.status.phase,
        found.spec.scheduler_name,
        _last(events, view),
        found.status.reason or next(filter(None, map(waits_for, found.status.container_statuses or ())), ""),
        ends=tuple(_ends(found)),
        usage=tuple(cluster.usage_of(view.key)),
        claims=claimed.names if claimed else (),
    )
    if view.finished:
        taken = taken_by_neighbours(view, cluster.ledger, cluster.usage_of)
        return replace(begun, hints=(*_after_the_end(found, view), *taken))
    if claimed is not None:
        answered = _of_claims(begun, found, cluster, volumes)
        return replace(answered, hints=(*claimed.hints, *answered.hints))
    if view.request is None and not view.problem and not view.node:
        return replace(begun, hints=tuple(of_others(found, cluster.ledger, cluster.by_name)))
    if view.node or view.request is None:
        return _on_its_node(begun, found, cluster, cluster.ledger)
    waits = _waiting(begun, found, cluster, volumes)
    fits = waits.explanation is not None and waits.explanation.fits
    kept_off = why_kept_off(cluster.rejections, view, cluster.now.timestamp())
    held = () if fits else _held_without_pod(cluster.ledger)
    return replace(waits, hints=(*kept_off, *waits.hints, *held))


def _waiting(
    begun: PodExplanation, pod: objects.Pod, cluster: Cluster, volumes: Sequence[Volume]
) -> PodExplanation:
    """Why no node takes it, and what would help."""
    view, ledger, places = begun.pod, cluster.ledger, cluster.places
    assert view.request is not None
    wish = wish_of(pod, view.request, volumes=volumes)
    explanation = _in_doubt(explain(ledger, places, wish), pod)
    if EXCLUSIVE_GPU in of_nvidia(pod):
        return replace(begun, explanation=explanation, hints=(BOTH.format(asked=view.request.names.memory),))
    hints = [*resource_hints(resources_of(pod)), *label_hints(pod)]
    about_group = tuple(_about_group(view, ledger))
    hints += about_group
    if set(view.gates) - {GATE_POD_GROUP}:
        hints.append("It has scheduling gates: no scheduler looks at it until they are taken away.")
    hints += about_scheduler(pod)
    if not (about_group and explanation.fits):  # a member does not wait for room for itself alone
        hints += explanation.hints
    hints += room_in_the_making(ledger, view)
    if not explanation.fits and not view.nominated and pod.spec.preemption_policy != "Never":
        hints += room_by_eviction(ledger, places, wish, view)
    if not explanation.fits:
        hints += hints_of_room(ledger, places, wish, cluster.usage_of)
    return replace(begun, explanation=explanation, hints=tuple(hints))


def _in_doubt(explanation: Explanation, pod: objects.Pod) -> Explanation:
    """Where there seems to be room and kube-scheduler said no, its words are added: what keeps the pod out
    may be something that is not read here, or may have gone since."""
    scheduled = [each for each in pod.status.conditions or () if each.type == "PodScheduled"]
    said = next((each.message for each in scheduled if each.reason == "Unschedulable"), "")
    if not (said and explanation.fits):
        return explanation
    hints = [each for each in explanation.hints if each != THERE_IS_ROOM]
    said = f"As far as is read here there is room now; kube-scheduler's last answer was: {printable(said)}"
    return replace(explanation, hints=(*hints, said))


def _held_without_pod(ledger: Ledger) -> Iterator[str]:
    """Room that nobody lets go, of the first few nodes."""
    states = filter(None, map(ledger.state, ledger.node_names()))
    found = ((state.node.name, orphan) for state in states for orphan in state.node.orphans)
    for name, orphan in islice(found, SHOWN_ORPHANS):
        cards = ", ".join(f"{counted(part.units, 'unit')} of card {part.card}" for part in orphan.slices)
        yield f"On {name}, containers of pod {orphan.pod} still hold {cards}, though the pod is gone."


def _about_group(view: Pod, ledger: Ledger) -> Iterator[str]:
    """What a member of a pod group waits for, besides room for itself."""
    if view.group is None:
        return
    name, least = view.group.name, view.group.least
    members = [
        pod
        for pod in ledger.pods.values()
        if pod.namespace == view.namespace and pod.group is not None and pod.group.name == name
    ]
    if len(members) < least:
        missing = least - len(members)
        yield (
            f"It waits for {missing} of {least} members of pod group {name}: they start together or not at "
            "all."
        )
        return
    placed = sum(bool(pod.node) for pod in members)
    yield (
        f"Pod group {name} has {counted(len(members), 'member')}, {placed} of them on a node: those that "
        f"wait start once {least} in all have room at once."
    )


def _of_claims(
    begun: PodExplanation, pod: objects.Pod, cluster: Cluster, volumes: Sequence[Volume]
) -> PodExplanation:
    """The same for a pod that gets its part of a card by a claim."""
    view = begun.pod
    if view.problem:
        never = "Nothing allocates a claim like this: correct the field and recreate the pod."
        return replace(begun, hints=(never,))
    if view.node:
        return _on_its_node(begun, pod, cluster, cluster.ledger_of_claims)
    if view.request is None or view.placement is not None:
        return begun
    wish = wish_of(pod, view.request, claims=True, volumes=volumes)
    explanation = _in_doubt(explain(cluster.ledger_of_claims, cluster.places, wish), pod)
    return replace(begun, explanation=explanation, hints=explanation.hints)


def _on_its_node(begun: PodExplanation, pod: objects.Pod, cluster: Cluster, ledger: Ledger) -> PodExplanation:
    """Which card it holds and who shares it; what is wrong with that, or with what it asks for."""
    view, at = begun.pod, cluster.by_name.get(begun.pod.node)
    state = ledger.state(view.node) if view.node else None
    node = state.node if state else None
    hints = []
    if view.terminating and view.placement is not None and view.node:
        hints.append("It is being deleted, and holds its card until its containers have ended.")
    if view.node and view.request is not None and at is None:
        hints.append(
            f"Its node {view.node} no longer exists. Kubernetes deletes such pods after a while; "
            "if it stays, delete it by hand."
        )
    elif view.node and view.request is not None and at is not None and not place_of(at).ready:
        hints.append(
            f"Its node {view.node} is not ready: it is unknown whether the pod runs there. It holds its "
            "card until the node is back, or the pod is deleted."
        )
    else:
        out_of_use = list(_out_of_use(view, node)) if node is not None else []
        hints += out_of_use
        hints += _what_it_asks_for(view, pod) if not begun.claims else ()
        hints += label_hints(pod)
        hints += [*_about_resize(view, ledger), *_about_parking(pod)]
        hints += about_use(view, ledger, begun.usage)
        hints += taken_by_neighbours(view, ledger, cluster.usage_of)
        hints += about_size(view, ledger, begun.usage)
        hints += why_there(state, view) if state and not begun.ends and not out_of_use else ()
        if any(each.restart_count for each in pod.status.container_statuses or ()):
            meta = pod.metadata
            hints.append(f"Its previous log: kubectl -n {meta.namespace} logs {meta.name} --previous")
    tiers = {}
    if at is not None and NODE_TIER in (at.metadata.annotations or {}) and node and view.request:
        said = decode_tiers(pod.metadata.annotations or {})
        tiers = {each.name: said.get(each.name, node.tier) for each in view.request.containers}
    return replace(begun, node=node, neighbours=neighbours_of(view, ledger), hints=tuple(hints), tiers=tiers)


def _about_resize(view: Pod, ledger: Ledger) -> Iterator[str]:
    """What it waits for if its author wants another amount while it runs, and what it may borrow."""
    larger, smaller, holds = more(view), less(view), ledger.holds.on(view.node)
    if larger is not None and holds is not None and view.request is not None:
        found = grown(view, larger, holds.state(), dict(holds.beside(view)))
        why = str(found) if isinstance(found, Refusal) else "the extender grants that, within the quota"
        yield f"It is to hold {larger.units} units instead of {view.request.units} (resize): {why}."
    if smaller is not None and view.request is not None:
        yield (
            f"It is to hold {smaller.units} units instead of {view.request.units} (resize): its node's agent "
            "takes the rest back once its containers use no more than that."
        )
    for each in view.request.containers if view.request else ():
        if each.borrowable:
            yield (
                f"Container {each.name} may use up to {each.limit} units while nobody requests them, where "
                f"its node lends (devicePlugin.watchdog: stop); {each.units} are its own."
            )


def _about_parking(pod: objects.Pod) -> Iterator[str]:
    """What of it is off its cards."""
    for container, held in parked(pod.metadata.annotations or {}).items():
        yield (
            f"{sum(held.values()) // MIB} MiB of container {container} are in its host memory, and lent "
            "to others meanwhile (parking): its next use of the card, or gpuslice wake, brings them back."
        )


def _out_of_use(view: Pod, node: Node) -> Iterator[str]:
    """A pod stays on a card that is taken out of use, and its program often fails there."""
    held = {part.card for part in view.placement.slices} if view.placement is not None else set()
    for card in sorted(held & node.unhealthy):
        yield (
            f"Card {card} of {node.name} is out of use, for the reason that ConfigMap "
            f"kube-system/unhealthy-gpu-{node.name} names: no new pod is put there. If the program fails, "
            "delete the pod, so that it is recreated elsewhere."
        )


def _what_it_asks_for(view: Pod, pod: objects.Pod) -> Sequence[str]:
    if view.problem:
        return [] if view.node else ["Nothing places a pod like this: correct the field and recreate it."]
    if view.request is None:
        return none_of_ours(pod)
    if view.placement is None:
        return [
            "No annotation says which card it holds, so it counts against every card of its node. "
            "The node's agent writes the annotation when kubelet has given the device out."
        ]
    if not view.assigned and pod.status.phase == "Running":
        return ["The node's agent has not confirmed the card yet: see that it runs on that node."]
    return []


def waits_for(container: objects.ContainerStatus) -> str:
    """Why a container does not run, as in kubectl's STATUS; "" if it runs or is about to."""
    reason = container.waiting_reason
    return "" if reason in ("ContainerCreating", "PodInitializing") else reason


def _ends(pod: objects.Pod) -> Iterator[str]:
    """How containers ended that were restarted, or that wait for that."""
    for each in pod.status.container_statuses or ():
        ended = (each.last_state or {}).get("terminated") or (each.state or {}).get("terminated") or {}
        waiting = (each.state or {}).get("waiting") or {}
        if not each.restart_count and not waiting.get("reason") and not ended.get("exitCode"):
            continue
        parts = []
        if each.restart_count:
            parts.append(f"restarted {counted(each.restart_count, 'time')}")
        if ended:
            why = f" ({printable(ended['reason'])})" if ended.get("reason") else ""
            at = f" at {ended['finishedAt']}" if ended.get("finishedAt") else ""
            parts.append(f"last ended with exit code {ended.get('exitCode', '?')}{why}{at}")
        if waits_for(each):
            shown = waiting.get("message", "").partition(" restarting failed ")[0]  # its name is above
            message = f": {printable(shown)}" if shown else ""
            parts.append(f"is waiting: {printable(waiting['reason'])}{message}")
        if parts:
            yield f"Container {each.name} {', '.join(parts)}."


def _after_the_end(pod: objects.Pod, view: Pod) -> Iterator[str]:
    """What a pod that has ended still shows in its annotations is over."""
    if view.node and (refusal := refusal_in(pod)) is not None:
        yield (
            f"kubelet on {view.node} did not let it start: {refusal.reason} ({refusal.message}). It held no "
            "card; pods like it are kept off there for a while."
        )
    elif view.placement is not None:
        cards = ", ".join(str(part.card) for part in view.placement.slices)
        which = f"card {cards}" if len(view.placement.slices) == 1 else f"cards {cards}"
        units = counted(view.placement.units, "unit")
        yield f"It has ended and released {units} of {which}."
    elif view.request is not None:
        yield "It has ended and holds no card."


def event_time(event: objects.Event) -> str:
    return event.last_timestamp or event.first_timestamp or event.metadata.creation_timestamp or ""


def kind_of(pod: objects.Pod, view: Pod, claimed: ClaimedPod | None) -> bytes:
    """Equal for pods that wait for the same reasons. A pod on a node has reasons of its own."""
    if view.node or view.problem or view.nominated or view.finished:
        return view.uid.encode()
    spec = pod.spec
    if any(each.ephemeral is not None for each in spec.volumes or ()):  # they have the pod's name
        return view.uid.encode()
    same = (spec.containers, spec.init_containers, spec.node_selector, spec.tolerations, spec.affinity)
    near = (spec.volumes, spec.topology_spread_constraints)
    more = (spec.scheduler_name, spec.priority, spec.preemption_policy, spec.scheduling_gates)
    labels = (pod.metadata.labels, pod.status.conditions, pod.status.reason, view.namespace)
    claims = (claimed.pod.request, claimed.hints) if claimed is not None else ()
    return msgspec.json.encode((same, near, more, labels, claims))


def alike(
    known: PodExplanation, view: Pod, claimed: ClaimedPod | None, events: Sequence[objects.Event]
) -> PodExplanation:
    """The explanation for another pod of the same kind."""
    return replace(
        known, pod=view, events=_last(events, view), claims=claimed.names if claimed is not None else ()
    )


def _last(events: Sequence[objects.Event], view: Pod) -> tuple[objects.Event, ...]:
    own = [each for each in events if each.involved_object.uid in ("", view.uid)]
    return tuple(sorted(own, key=event_time)[-SHOWN_EVENTS:])


def sentences_of(explained: PodExplanation) -> list[str]:
    """What there is to say of it, the most important first; else why nodes refuse it."""
    found = [*filter(None, [explained.pod.problem]), *explained.ends, *explained.hints]
    if found or explained.explanation is None:
        return found
    classes = explained.explanation.classes
    reasons = [each for each in classes if each.reason != NOT_SHARED] or classes
    return [f"{counted(len(each.nodes), 'node')}: {each.reason}." for each in reasons]


def holds(pod: Pod) -> bool:
    return pod.placement is not None and bool(pod.node) and not pod.finished
