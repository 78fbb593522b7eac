"""Checks of nodes and pods: do all sources agree about what each pod holds?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from datetime import timedelta

from gpuslice.adapters.kube.objects import Node
from gpuslice.adapters.kube.views import node_view
from gpuslice.core.annotations import decode_unhealthy
from gpuslice.core.contract import (
    EXCLUSIVE_GPU,
    LABEL_SCHEDULE,
    MEMORY_NAMES,
    NODE_GPUS,
    SYSTEM_NAMESPACE,
    UNHEALTHY_CONFIGMAP_PREFIX,
)
from gpuslice.core.ledger import Ledger
from gpuslice.core.lookalikes import node_label_hints
from gpuslice.core.mode import SCHEDULES, rules_of
from gpuslice.core.quantity import whole_number
from gpuslice.core.units import MOST_GIB
from gpuslice.diagnosis.doctor.facts import Facts, Finding, Level, amount, names_of, time_of
from gpuslice.diagnosis.doctor.plugins import not_offered

HEARD_WITHIN = timedelta(minutes=15)  # kubelet reports every five


def shared_nodes(facts: Facts) -> Iterator[Finding]:
    """Labels, resources and the annotation of the cards, node by node."""
    for node in facts.nodes:
        where = f"node {node.metadata.name}"
        labels = node.metadata.labels or {}
        memory = names_of(node).memory
        shared, whole = amount(node, memory), amount(node, EXCLUSIVE_GPU)
        if shared and whole:
            yield Finding(
                Level.ERROR,
                where,
                f"offers both {memory} ({shared}) and {EXCLUSIVE_GPU} ({whole}): cards are given out twice",
                f"label it {facts.node_label}=false, or take the exclusive device plugin off it",
            )
        if facts.is_to_share(node) and not shared:
            yield not_offered(facts, node)
        offers_nothing = NODE_GPUS in (node.metadata.annotations or {}) and not (shared or whole)
        if offers_nothing and facts.node_label not in labels and labels.get(LABEL_SCHEDULE) not in SCHEDULES:
            # the label was removed instead of being set to false: nobody gives the cards out any more
            yield Finding(
                Level.WARNING,
                where,
                f"has cards and offers neither {memory} nor {EXCLUSIVE_GPU}: without label "
                f"{facts.node_label} no device plugin runs there, and taking it away does not bring whole "
                "cards back",
                f"label it {facts.node_label}=false for whole cards, or "
                f"{facts.node_label}=true to share them",
            )
        for hint in node_label_hints(labels, facts.node_label):
            yield Finding(Level.WARNING, where, hint, "correct the label: a wrong value counts as no label")
        schedule, switch = labels.get(LABEL_SCHEDULE, ""), labels.get(facts.node_label)
        contradicts = (
            schedule in SCHEDULES
            and switch in ("true", "false")
            and rules_of({LABEL_SCHEDULE: schedule}).shared != (switch == "true")
        )
        if contradicts:
            yield Finding(
                Level.ERROR,
                where,
                f"labels disagree: {facts.node_label}={switch} and {LABEL_SCHEDULE}={schedule}",
                "keep one of the two",
            )
        if shared:
            yield from _cards(node, where)
        if shared and not rules_of(labels).shared and not contradicts:
            # sharing is ending there: a pod that holds a part of a card keeps it
            yield Finding(
                Level.NOTE,
                where,
                f"is to give out whole cards and still offers {shared} {memory}, which pods hold until they "
                "end",
                "if it is more than they hold, delete the device plugin's pod there, so that it reads the "
                "labels",
            )


def _cards(node: Node, where: str) -> Iterator[Finding]:
    """Whether its annotation, its number of cards and kubelet's number of units agree."""
    view, names = node_view(node), names_of(node)
    capacity = whole_number((node.status.capacity or {}).get(names.memory)) or 0
    if view.problem:
        yield Finding(Level.WARNING, where, view.problem, "restart the device plugin there: it rewrites it")
    if not amount(node, names.cards) and rules_of(node.metadata.labels or {}).shared:
        yield Finding(
            Level.WARNING,
            where,
            f"offers {names.memory} without {names.cards}: other tools then see no card",
            "the device plugin writes it again within a minute; see its log if it does not",
        )
    units = sum(card.units for card in view.cards)
    if NODE_GPUS in (node.metadata.annotations or {}) and not view.problem and units != capacity:
        yield Finding(
            Level.ERROR,
            where,
            f"kubelet counts {capacity} of {names.memory}, the cards make {units}: the memory unit was "
            "changed under running pods, or kubelet still counts the devices of before",
            "drain the node, restart the device plugin, and if it stays, remove kubelet's "
            "device-plugins/kubelet_internal_checkpoint and restart kubelet",
        )


def unwell(facts: Facts) -> Iterator[Finding]:
    """A node that shares cards and reports that it is down, under pressure, or has a wrong clock.

    A kubelet reports every five minutes by its own clock, and the control plane decides by its own clock
    whether it is alive. So if a node is ready and its last report is from another time, its clock is wrong.
    """
    for node in facts.nodes:
        if not (facts.is_to_share(node) or amount(node, names_of(node).memory)):
            continue
        where = f"node {node.metadata.name}"
        for condition in node.status.conditions or ():
            said = f" ({words})" if (words := condition.message or condition.reason) else ""
            if condition.type == "Ready" and condition.status != "True":
                what = f"is not ready{said}: no pods start there, and its pods are evicted after five minutes"
                yield Finding(Level.ERROR, where, what, "check that its kubelet runs, and the kubelet's log")
            elif condition.type.endswith("Pressure") and condition.status == "True":
                what = f"has {condition.type}{said}: kubelet starts no pods there, not even the device plugin"
                yield Finding(Level.ERROR, where, what, "free what it is short of, or drain the node")
            elif condition.type == "Ready" and (heard := time_of(condition.last_heartbeat_time)) is not None:
                ahead = heard - facts.now
                if abs(ahead) <= HEARD_WITHIN:
                    continue
                minutes = abs(ahead) // timedelta(minutes=1)
                what = (  # two whole sentences: the console translates them
                    f"its clock seems {minutes} minutes ahead: certificates and tokens may be refused"
                    if ahead > timedelta()
                    else f"its clock seems {minutes} minutes behind: certificates and tokens may be refused"
                )
                cure = "check its time synchronization (chrony, systemd-timesyncd)"
                yield Finding(Level.WARNING, where, what, cure)


def one_unit(facts: Facts) -> Iterator[Finding]:
    """GiB on some nodes and MiB on others: the same number in a pod then means different amounts."""
    sizes = {
        node.metadata.name: max((card.units for card in node_view(node).cards), default=0)
        for node in facts.nodes
        if amount(node, names_of(node).memory)
    }
    mib = sorted(name for name, units in sizes.items() if units >= MOST_GIB)
    gib = sorted(name for name, units in sizes.items() if 0 < units < MOST_GIB)
    if mib and gib:
        yield Finding(
            Level.ERROR,
            f"nodes {gib[0]}, {mib[0]}",
            f"count card memory in different units: {gib[0]} in GiB, {mib[0]} in MiB",
            "start every device plugin with the same --memory-unit; drain the nodes that change",
        )


def one_set_of_names(facts: Facts) -> Iterator[Finding]:
    """A pod uses one set of names, so it cannot run on nodes that offer another."""
    for node in facts.nodes:
        if all(amount(node, name) for name in MEMORY_NAMES):
            yield Finding(
                Level.ERROR,
                f"node {node.metadata.name}",
                f"offers its cards under two names, {' and '.join(MEMORY_NAMES)}: they are given out twice",
                "see that one device plugin runs there; the chart's resourceNames says which of them",
            )
    by_name = {
        names_of(node).memory: node.metadata.name
        for node in reversed(facts.nodes)
        if amount(node, names_of(node).memory)
    }
    if len(by_name) > 1:
        shown = " and ".join(f"{node} {name}" for name, node in sorted(by_name.items()))
        yield Finding(
            Level.WARNING,
            "cluster",
            f"nodes offer their cards under different names: {shown}; a pod fits on nodes of one name only",
            "start every device plugin and the webhook with the same --resource-names",
        )


def promised_twice(facts: Facts) -> Iterator[Finding]:
    """Cards of which more is promised than exists."""
    ledger = facts.ledger_of_all_cards
    for name, card, promised, units in ledger.overcommitted():
        holders = _holders(ledger, name, {card})
        yield Finding(
            Level.ERROR,
            f"node {name}, card {card}",
            f"{promised} units are promised of {units}, to {', '.join(holders)}",
            "delete one of the pods; one scheduler only, with one extender, may place pods that share cards",
        )


def cards_out_of_use(facts: Facts) -> Iterator[Finding]:
    """Cards that the agent or an operator has taken out of use, and entries without effect."""
    known, ledger = {node.metadata.name for node in facts.nodes}, facts.ledger_of_all_cards
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
            why, on_it = data.get("reasons") or "nobody says why", _holders(ledger, name, found)
            what = f"card {_listed(found)} of {name} is out of use: {why}"
            fix = f"see the kernel log of {name}; the agent gives the card out again when it has recovered"
            if on_it:
                what += f"; on it: {', '.join(on_it)}"
                fix = f"delete the pods that fail there, so that they are recreated elsewhere; {fix}"
            yield Finding(Level.ERROR if on_it else Level.WARNING, where, what, fix)
        if by_hand := cards - by_agent:
            what = f"card {_listed(by_hand)} of {name} was taken out of use by hand"
            yield Finding(Level.NOTE, where, what, "take it out of data.gpus to give it out again")


def _holders(ledger: Ledger, node: str, cards: Set[int]) -> list[str]:
    """The pods that hold a part of any of these cards."""
    holds = ledger.holds.on(node)
    return sorted(
        each.pod.key
        for each in (holds.by_uid.values() if holds else ())
        if each.placement and any(part.card in cards for part in each.placement.slices)
    )


def _listed(cards: Iterable[int]) -> str:
    return ", ".join(str(card) for card in sorted(cards))
