"""Checks of nodes and pods: does everybody say the same about who has what?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta

from gpuslice.adapters.kube.objects import Node, Pod
from gpuslice.adapters.kube.views import node_view, pod_view
from gpuslice.apps.cli.doctor_facts import Facts, Finding, Level, is_ready
from gpuslice.apps.cli.doctor_plugins import not_offered
from gpuslice.core.annotations import decode_unhealthy
from gpuslice.core.contract import (
    ANN_ASSIGNED,
    ANN_INDEX,
    EXCLUSIVE_GPU,
    GPU_COUNT,
    GPU_MEM,
    LABEL_SCHEDULE,
    NODE_GPUS,
    SYSTEM_NAMESPACE,
    UNHEALTHY_CONFIGMAP_PREFIX,
)
from gpuslice.core.ledger import Ledger
from gpuslice.core.mode import SCHEDULES, rules_of
from gpuslice.core.quantity import whole_number

CONFIRMED = timedelta(seconds=60)  # the agent needs a second; give it a minute
_MOST_GIB = 1000  # no card has this many GiB: such units are MiB


def shared_nodes(facts: Facts) -> Iterator[Finding]:
    """Labels, resources and the annotation of the cards, node by node."""
    for node in facts.nodes:
        where = f"node {node.metadata.name}"
        labels = node.metadata.labels or {}
        shared, whole = _amount(node, GPU_MEM), _amount(node, EXCLUSIVE_GPU)
        if shared and whole:
            yield Finding(
                Level.ERROR,
                where,
                f"offers both {GPU_MEM} ({shared}) and {EXCLUSIVE_GPU} ({whole}): cards are given out twice",
                f"label it {facts.node_label}=false, or take the exclusive device plugin off it",
            )
        if facts.is_to_share(node) and not shared:
            yield not_offered(facts, node)
        yield from _left_without(facts.node_label, node, shared, whole)
        contradictions = list(_contradiction(facts.node_label, where, labels))
        yield from contradictions
        yield from _cards(node, where, shared)
        if shared and not rules_of(labels).shared and not contradictions:
            yield _leaving(where, shared)


def _leaving(where: str, shared: int) -> Finding:
    """Sharing comes to its end there: whoever holds a part of a card keeps it."""
    return Finding(
        Level.NOTE,
        where,
        f"is to give out whole cards and still offers {shared} {GPU_MEM}, which pods hold until they end",
        "if it is more than they hold, delete the device plugin's pod there, so that it reads the labels",
    )


def _left_without(label: str, node: Node, shared: int, whole: int) -> Iterator[Finding]:
    """The label was taken away instead of being set to false: nobody gives the cards out any more."""
    if (
        NODE_GPUS in (node.metadata.annotations or {})
        and not (shared or whole)
        and label not in (node.metadata.labels or {})
    ):
        yield Finding(
            Level.WARNING,
            f"node {node.metadata.name}",
            f"has cards and offers neither {GPU_MEM} nor {EXCLUSIVE_GPU}: without label {label} no "
            "device plugin runs there, and taking it away does not bring whole cards back",
            f"label it {label}=false for whole cards, or {label}=true to share them",
        )


def _contradiction(label: str, where: str, labels: dict[str, str]) -> Iterator[Finding]:
    mode, shared = labels.get(LABEL_SCHEDULE, ""), labels.get(label)
    if mode not in SCHEDULES or shared not in ("true", "false"):
        return
    if rules_of({LABEL_SCHEDULE: mode}).shared != (shared == "true"):
        yield Finding(
            Level.ERROR,
            where,
            f"labels disagree: {label}={shared} and {LABEL_SCHEDULE}={mode}",
            "keep one of the two",
        )


def _cards(node: Node, where: str, shared: int) -> Iterator[Finding]:
    if not shared:
        return
    view, capacity = node_view(node), whole_number((node.status.capacity or {}).get(GPU_MEM)) or 0
    if view.problem:
        yield Finding(
            Level.WARNING, where, view.problem, "restart the device plugin there: it writes it anew"
        )
    if not _amount(node, GPU_COUNT) and rules_of(node.metadata.labels or {}).shared:
        yield Finding(
            Level.WARNING,
            where,
            f"offers {GPU_MEM} without {GPU_COUNT}: other tools then see no card",
            "the device plugin writes it again within a minute; see its log if it does not",
        )
    units = sum(card.units for card in view.cards)
    if NODE_GPUS in (node.metadata.annotations or {}) and not view.problem and units != capacity:
        yield Finding(
            Level.ERROR,
            where,
            f"kubelet counts {capacity} of {GPU_MEM}, the cards make {units}: the memory unit was changed "
            "under running pods, or kubelet still counts the devices of before",
            "drain the node, restart the device plugin, and if it stays, remove kubelet's "
            "device-plugins/kubelet_internal_checkpoint and restart kubelet",
        )


def one_unit(facts: Facts) -> Iterator[Finding]:
    """GiB here and MiB there: the same number in a pod then means different things."""
    sizes = {
        node.metadata.name: max((card.units for card in node_view(node).cards), default=0)
        for node in facts.nodes
        if _amount(node, GPU_MEM)
    }
    mib = sorted(name for name, units in sizes.items() if units >= _MOST_GIB)
    gib = sorted(name for name, units in sizes.items() if 0 < units < _MOST_GIB)
    if mib and gib:
        yield Finding(
            Level.ERROR,
            f"nodes {gib[0]}, {mib[0]}",
            f"count {GPU_MEM} in different units: {gib[0]} in GiB, {mib[0]} in MiB",
            "start every device plugin with the same --memory-unit; drain the nodes that change",
        )


def pods_and_cards(facts: Facts) -> Iterator[Finding]:
    """Annotations against cards: unreadable, absent, unconfirmed, of cards that are not there."""
    cards = {node.metadata.name: {gpu.index for gpu in node_view(node).cards} for node in facts.nodes}
    for found in facts.pods:
        pod = pod_view(found)
        where = f"pod {pod.key}"
        if pod.problem:
            yield Finding(Level.WARNING, where, pod.problem, "correct the field; a pod must be created anew")
            continue
        if pod.request is None or not pod.node:
            continue
        if pod.placement is None:
            yield Finding(
                Level.WARNING,
                where,
                f"is on {pod.node} without annotation {ANN_INDEX}: no one knows its card, so it counts "
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
        if pod.problem or pod.request is None or pod.assigned or not _runs_for(found, facts.now, CONFIRMED):
            continue
        where = f"pod {pod.key}"
        if pod.node in attended:
            yield Finding(
                Level.ERROR,
                where,
                f"runs without the {GPU_MEM} it asks for, and so without a limit: {ANN_ASSIGNED} is not true "
                f"although the device plugin of {pod.node} is there; kubelet started it when it knew none",
                "delete the pod so that it is made anew",
            )
        elif pod.placement is not None:
            yield Finding(
                Level.WARNING,
                where,
                f"runs and its card is not confirmed ({ANN_ASSIGNED} is not true): the annotation may name "
                "another card than kubelet gave, or kubelet gave it none, and it has no limit",
                f"see that the device plugin of gpuslice runs on {pod.node}: it compares the two and repairs",
            )


def _runs_for(pod: Pod, now: datetime, least: timedelta) -> bool:
    """Whether one of its containers has been running that long; what cannot be read counts as long."""
    if pod.status.phase != "Running":
        return False
    states = [each.state or {} for each in pod.status.container_statuses or ()]
    since = [_time(state["running"].get("startedAt")) for state in states if "running" in state]
    return not states or any(now - each >= least for each in since)


def _time(text: str | None) -> datetime:
    try:
        return datetime.fromisoformat(text or "")
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)


def promised_twice(facts: Facts) -> Iterator[Finding]:
    """Cards of which more is promised than there is."""
    ledger = Ledger()
    for node in facts.nodes:
        ledger.apply_node(node_view(node))
    for pod in facts.pods:
        ledger.apply_pod(pod_view(pod))
    for name, card, promised, units in ledger.overcommitted():
        holders = sorted(_holders(ledger, name, card))
        yield Finding(
            Level.ERROR,
            f"node {name}, card {card}",
            f"{promised} units are promised of {units}, to {', '.join(holders)}",
            "delete one of the pods; one scheduler only, with one extender, may place pods that share cards",
        )


def cards_out_of_use(facts: Facts) -> Iterator[Finding]:
    """Cards that the agent or an operator keeps from being given out, and entries that keep none."""
    known = {node.metadata.name for node in facts.nodes}
    for each in facts.config_maps:
        prefix, _, name = each.metadata.name.partition(UNHEALTHY_CONFIGMAP_PREFIX)
        if prefix or name not in known or each.metadata.namespace != SYSTEM_NAMESPACE:
            continue
        where = f"ConfigMap {SYSTEM_NAMESPACE}/{each.metadata.name}"
        data = each.data or {}
        cards, problem = decode_unhealthy(data)
        if problem:
            yield Finding(Level.WARNING, where, problem, "correct data.gpus")
        by_agent, _ = decode_unhealthy({"gpus": data.get("agent", "")})
        if found := cards & by_agent:
            what = (
                f"card {_listed(found)} of {name} is out of use: {data.get('reasons') or 'nobody says why'}"
            )
            fix = f"see the kernel log of {name}; the agent gives the card out again when it is well"
            yield Finding(Level.WARNING, where, what, fix)
        if by_hand := cards - by_agent:
            what = f"card {_listed(by_hand)} of {name} was taken out of use by hand"
            yield Finding(Level.NOTE, where, what, "take it out of data.gpus to give it out again")


def _listed(cards: Iterable[int]) -> str:
    return ", ".join(str(card) for card in sorted(cards))


def _holders(ledger: Ledger, name: str, card: int) -> Iterable[str]:
    book = ledger.allocations(name)
    for allocation in book.by_uid.values() if book else ():
        if allocation.placement and any(part.card == card for part in allocation.placement.slices):
            yield allocation.pod.key


def _amount(node: Node, resource: str) -> int:
    return whole_number((node.status.allocatable or {}).get(resource)) or 0
