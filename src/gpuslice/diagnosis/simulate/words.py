"""How ``gpuslice simulate`` tells what came of it.

`document` is the shape of ``-o json``::

    nodes, cards, pods, askedPercent        what was simulated; of the cluster
    now {…}                                 with --from-cluster: the cluster as it is, without changes
    policies[]  policy, allocatedPercent, placed, pods, freeCards, freeNodes
                joined {NVLINK, SWITCH, NUMA, SYSTEM}   pods of several cards by the weakest link between
                                                        them; on nodes whose cards are not alike
                needed {nodes, cards, added}        absent when not asked for or not found
                unplaced[]  pods, cards, unitsPerCard, corePercent, cpuMilli, memoryMiB, models, reason, never
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from gpuslice.core.policy import Shape
from gpuslice.core.simulation.borrowing import Lacking
from gpuslice.core.simulation.capacity import Outcome
from gpuslice.core.words import counted
from gpuslice.diagnosis.simulate.rule import Simulation
from gpuslice.diagnosis.table import aligned, row
from gpuslice.diagnosis.usage import known

MOST_LINES = 10  # of what does not fit, in a table


def document(simulation: Simulation) -> dict[str, Any]:
    """For programs; described at the top of this file."""
    chosen = simulation.plan
    head: dict[str, Any] = {
        "nodes": sum(any(node.size) for node in chosen.nodes),
        "cards": simulation.cards,
        "pods": len(chosen.pods),
        "askedPercent": round(asked_percent(simulation), 2),
    }
    if chosen.now is not None:
        head["now"] = _outcome(chosen.now)
    policies = []
    for name, result in simulation.policies.items():
        policy = {"policy": name, **_outcome(result.outcome)}
        if (needed := result.needed) is not None:
            policy["needed"] = {"nodes": needed.nodes, "cards": needed.cards, "added": needed.added}
        policies.append(policy)
    return head | {"policies": policies}


def _outcome(outcome: Outcome) -> dict[str, Any]:
    unplaced = []
    for each in outcome.unplaced:
        shape = each.shape
        unplaced.append(
            known(
                pods=each.pods,
                cards=shape.cards,
                unitsPerCard=shape.units or None,
                corePercent=shape.compute_percent or None,
                cpuMilli=shape.cpu_milli or None,
                memoryMiB=shape.memory_mib or None,
                models=sorted(shape.models) or None,
                reason=each.reason,
                never=each.never,
            )
        )
    return {
        "allocatedPercent": round(outcome.allocation_pct, 2),
        "pods": outcome.pods,
        "placed": outcome.placed,
        "freeCards": outcome.free_cards,
        "freeNodes": outcome.free_nodes,
        **({"joined": joined} if (joined := {link.name: n for link, n in outcome.joined.items()}) else {}),
        "unplaced": unplaced,
    }


def table(simulation: Simulation) -> str:
    """For people: what is requested, a line for each policy, then what does not fit with the best of them."""
    wanted = ("CARDS NEEDED",) if simulation.plan.needed else ()
    text = row("POLICY", "ALLOCATED", "PODS PLACED", "FREE CARDS", "FREE NODES", *wanted)
    now, of = simulation.plan.now, ""
    if now is not None:
        others = any(result.outcome.units != now.units for result in simulation.policies.values())
        of = " of {0.units} units" if others else ""  # a part of other nodes is a different amount
        text += _line("(now)", now, of.format(now), *("" for _ in wanted))
    for name, result in simulation.policies.items():
        needed = []
        for _ in wanted:
            if result.needed is None:
                needed.append("not found")
                continue
            more = f", {result.needed.added} more" if result.needed.added else ""
            never = sum(each.pods for each in result.outcome.unplaced if each.never)
            without = f", without {counted(never, 'pod')} that fit nowhere" if never else ""
            needed.append(f"{result.needed.cards} ({counted(result.needed.nodes, 'node')}{more}{without})")
        text += _line(name, result.outcome, of.format(result.outcome), *needed)
    findings = _freed(simulation) + _joined(simulation) + _not_fitting(simulation)
    return f"{question(simulation)}.\n\n" + aligned(text) + findings


def question(simulation: Simulation) -> str:
    """What is requested, and from how much."""
    chosen = simulation.plan
    borrow = (
        f", parts of cards divided by {chosen.borrow:g}: the rest is borrowed" if chosen.borrow > 1 else ""
    )
    return (
        f"{counted(len(chosen.pods), 'pod')} for {_cards(simulation, simulation.asked_units)} cards, "
        f"{asked_percent(simulation):.1f} % of the {simulation.cards} "
        f"on {counted(sum(any(node.size) for node in chosen.nodes), 'node')}{borrow}"
    )


def borrowing(
    pods: int, factor: float, card_gib: float, own: Lacking | None, lent: Lacking | None
) -> dict[str, Any]:
    """For programs: what pods need that request their peaks, or less and borrow the rest."""

    def needs(found: Lacking | None) -> dict[str, Any] | None:
        return (
            None
            if found is None
            else {"cards": found.cards, "busySamples": found.busy, "lackingSamples": found.lacking}
        )

    return {
        "pods": pods,
        "factor": factor,
        "cardGiB": card_gib,
        "requested": needs(own),
        "borrowed": needs(lent),
    }


def borrowing_table(found: dict[str, Any]) -> str:
    """For people."""
    text = row("REQUEST", "CARDS NEEDED", "BUSY SAMPLES WITHOUT ROOM")
    for name, each in (("peak", found["requested"]), (f"peak / {found['factor']:g}", found["borrowed"])):
        cells = ("not found", "")
        if each is not None:
            share = 100 * each["lackingSamples"] / max(each["busySamples"], 1)
            cells = (each["cards"], f"{each['lackingSamples']} of {each['busySamples']} ({share:.2f} %)")
        text += row(name, *cells)
    pods = counted(found["pods"], "pod")
    return f"{pods} on cards of {found['cardGiB']:g} GiB; what is not requested is borrowed.\n\n" + aligned(
        text
    )


def asked_percent(simulation: Simulation) -> float:
    """GPU that all pods request together, in % of the cluster."""
    return 100 * simulation.asked_units / (simulation.cards * simulation.card_units)


def _cards(simulation: Simulation, units: int) -> str:
    """Units in cards of mean size."""
    return f"{units / simulation.card_units:.1f}"


def _line(name: str, outcome: Outcome, of: str, *needed: str) -> str:
    placed = f"{outcome.placed} of {outcome.pods}"
    allocated = f"{outcome.allocation_pct:.1f} %{of}"
    return row(name, allocated, placed, outcome.free_cards, outcome.free_nodes, *needed)


def _freed(simulation: Simulation) -> str:
    """What placing all pods again with each policy would free, compared with the present state."""
    now = simulation.plan.now
    if now is None:
        return ""
    text = ""
    for name, result in simulation.policies.items():
        cards = result.outcome.free_cards - now.free_cards
        nodes = result.outcome.free_nodes - now.free_nodes
        if cards or nodes:
            text += f"{name} instead of the current placement: "
            text += f"{cards:+d} wholly free cards, {nodes:+d} free nodes\n"
    return "\n" + (text or "Placing all pods again would leave exactly as many cards wholly free as now.\n")


def _joined(simulation: Simulation) -> str:
    """How well the cards of multi-card pods are connected, on nodes where that differs."""
    text = ""
    for name, result in simulation.policies.items():
        by = sorted(result.outcome.joined.items(), reverse=True)
        if by:
            pods = ", ".join(f"{pods} by {link.word}" for link, pods in by)
            text += f"{name} joins the cards of pods of several: {pods}\n"
    return "\n" + text if text else ""


def _not_fitting(simulation: Simulation) -> str:
    name = simulation.best
    unplaced = simulation.policies[name].outcome.unplaced
    if not unplaced:
        return f"\nEverything fits with {name}.\n"
    lines: Counter[tuple[str, str]] = Counter()
    for each in unplaced:
        lines[asked(each.shape), each.reason] += each.pods
    text = row("PODS", "ASKS FOR", "WHY NOT")
    for (words, reason), pods in lines.most_common(MOST_LINES):
        text += row(pods, words, reason)
    more = sum(pods for _, pods in lines.most_common()[MOST_LINES:])
    rest = f"… and {more} more pods; -o json lists all\n" if more > 0 else ""
    pods = sum(each.pods for each in unplaced)
    units = sum(each.pods * each.shape.total_units for each in unplaced)
    what = f"{counted(pods, 'pod')} for {_cards(simulation, units)} cards"
    return f"\nDoes not fit with {name}: {what}\n" + aligned(text) + rest


def asked(shape: Shape) -> str:
    """What a shape requests, in words: cards, or for a pod without GPU, other resources."""
    if not shape.cards:
        return f"{shape.cpu_milli} milli CPU, {shape.memory_mib} MiB"
    words = [counted(shape.units, "unit") + (f" on each of {shape.cards} cards" if shape.cards > 1 else "")]
    if shape.compute_percent:
        words.append(f"{shape.compute_percent} % compute")
    if shape.models:
        words.append("|".join(sorted(shape.models)))
    return ", ".join(words)
