"""Checks of nodes and pods: does everybody say the same about who has what?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import timedelta

from gpuslice.adapters.kube.objects import Node
from gpuslice.adapters.kube.views import node_view
from gpuslice.apps.cli.doctor_facts import Facts, Finding, Level
from gpuslice.apps.cli.doctor_plugins import not_offered
from gpuslice.core.annotations import decode_unhealthy
from gpuslice.core.contract import (
    EXCLUSIVE_GPU,
    GPU_COUNT,
    GPU_MEM,
    LABEL_SCHEDULE,
    NODE_GPUS,
    SYSTEM_NAMESPACE,
    UNHEALTHY_CONFIGMAP_PREFIX,
)
from gpuslice.core.lookalikes import node_label_hints
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
        offers_nothing = NODE_GPUS in (node.metadata.annotations or {}) and not (shared or whole)
        if offers_nothing and facts.node_label not in labels:
            # the label was taken away instead of being set to false: nobody gives the cards out any more
            yield Finding(
                Level.WARNING,
                where,
                f"has cards and offers neither {GPU_MEM} nor {EXCLUSIVE_GPU}: without label "
                f"{facts.node_label} no device plugin runs there, and taking it away does not bring whole "
                "cards back",
                f"label it {facts.node_label}=false for whole cards, or "
                f"{facts.node_label}=true to share them",
            )
        for hint in node_label_hints(labels, facts.node_label):
            yield Finding(Level.WARNING, where, hint, "correct the label: as it is, it is as good as absent")
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
            # sharing comes to its end there: whoever holds a part of a card keeps it
            yield Finding(
                Level.NOTE,
                where,
                f"is to give out whole cards and still offers {shared} {GPU_MEM}, which pods hold until they "
                "end",
                "if it is more than they hold, delete the device plugin's pod there, so that it reads the "
                "labels",
            )


def _cards(node: Node, where: str) -> Iterator[Finding]:
    """Whether its annotation, its count of cards and kubelet's count of units agree."""
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


def promised_twice(facts: Facts) -> Iterator[Finding]:
    """Cards of which more is promised than there is."""
    ledger = facts.ledger(all_cards=True)
    for name, card, promised, units in ledger.overcommitted():
        allocations = ledger.allocations(name)
        holders = sorted(
            each.pod.key
            for each in (allocations.by_uid.values() if allocations else ())
            if each.placement and any(part.card == card for part in each.placement.slices)
        )
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


def _amount(node: Node, resource: str) -> int:
    return whole_number((node.status.allocatable or {}).get(resource)) or 0
