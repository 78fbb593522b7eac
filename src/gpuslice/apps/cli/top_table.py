"""The tables of ``gpuslice top node``, byte for byte those of ``arena top node`` 0.4.0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuslice.apps.cli.inspect_table import UNKNOWN_ADDRESS, address, card_cells, columns_of, node_blocks
from gpuslice.core.report import ExclusiveUse, NodeFacts, NodeUse, Report, percent, roles
from gpuslice.diagnosis.table import aligned, closed_row, dashes, row, size
from gpuslice.diagnosis.usage import CardUsage

GIB = 1 << 30
_RULERS = {  # by (some card is shared, some card is unhealthy): constants of the original
    (False, False): 89,
    (True, False): 96,
    (False, True): 99,
    (True, True): 107,
}


@dataclass(frozen=True, slots=True)
class _Cards:
    """The whole cards of one node, shared or not."""

    facts: NodeFacts
    shared: NodeUse | None
    total: int
    allocated: int
    unhealthy: int


def shared_summary(report: Report) -> str:
    """``-s``: one line per node that shares cards."""
    columns = columns_of(report.shared)
    heads = [f"GPU{index}(Allocated/Total)" for index in range(columns)]
    rows = [closed_row(node.name, address(node), *card_cells(node, columns)) for node in report.shared]
    ruler = dashes(size(rows[0]) + 20 if rows else 0)
    held = sum(card.allocated for node in report.shared for card in node.cards)
    return aligned(
        closed_row("NAME", "IPADDRESS", *heads) + "".join(rows) + ruler + _shared_tail(report, held)
    )


def shared_details(report: Report) -> str:
    """``-s -d``: a block per node that shares cards."""
    return aligned(
        node_blocks(report.shared, pending_column=False) + "\n\n" + _shared_tail(report, report.allocated)
    )


def _shared_tail(report: Report, allocated: int) -> str:
    """The last two lines. The summary has no column for pods without a card, so it does not count them."""
    share = percent(allocated, report.total)
    return row("Allocated/Total GPU Memory In GPUShare Node:") + closed_row(
        f"{allocated}/{report.total} ({report.unit}) ({share}%)"
    )


def summary(report: Report) -> str:
    """One line per node, counting whole cards."""
    nodes = _nodes(report)
    shares, ails = bool(report.shared), any(node.unhealthy for node in nodes)
    heads = ["NAME", "IPADDRESS", "ROLE", "STATUS", "GPU(Total)", "GPU(Allocated)"]
    heads += ["GPU(Unhealthy)"] if ails else []
    heads += ["GPU(Shareable)"] if shares else []
    rows = []
    for node in nodes:
        cells: list[object] = [
            node.facts.name,
            node.facts.address or UNKNOWN_ADDRESS,
            _roles(node.facts),
            "ready" if node.facts.ready else "notReady",
            node.total,
            node.allocated,
        ]
        cells += [node.unhealthy] if ails else []
        cells += ["Yes" if node.shared is not None else "No"] if shares else []
        rows.append(row(*cells))
    total, allocated = _sum(nodes)
    active = sum(node.total for node in nodes if node.facts.ready)
    tail = row("Allocated/Total GPUs In Cluster:") + closed_row(_ratio(allocated, total))
    if active != total:
        tail += row("Allocated/Total GPUs(Active) In Cluster:") + closed_row(_ratio(allocated, active))
    if ails:
        unhealthy = sum(node.unhealthy for node in nodes)
        tail += row("Unhealthy/Total GPUs In Cluster:") + closed_row(_ratio(unhealthy, total))
    return aligned(row(*heads) + "".join(rows) + dashes(_RULERS[shares, ails]) + tail)


def details(report: Report) -> str:
    """``-d``: a block per node with the pods that hold cards or parts of one."""
    nodes = _nodes(report)
    ails = any(node.unhealthy for node in nodes)
    others = {node.facts.name: node for node in report.others}
    blocks = "".join(_block(node, others.get(node.facts.name), ails) for node in nodes)
    total, allocated = _sum(nodes)
    tail = closed_row("Allocated/Total GPUs In Cluster:", _ratio(allocated, total))
    if ails:
        unhealthy = sum(node.unhealthy for node in nodes)
        tail += closed_row("Unhealthy/Total GPUs In Cluster:", _ratio(unhealthy, total))
    return aligned("\n" + blocks + "\n\n" + tail)


def measured(report: Report, cards: Sequence[CardUsage]) -> str:
    """``--metric``: a block per node with the current usage of its cards, in the columns of a current arena.

    As there, the total is truncated to whole GiB; unlike there, unknown values are ``-``, not 0.
    """
    given_out = {
        (node.name, str(card.index)): card.allocated * report.unit_bytes
        for node in report.shared
        for card in node.cards
    }
    blocks = []
    for name in dict.fromkeys(card.node for card in cards):
        heads = ("INDEX", "MEMORY(Total)", "MEMORY(Allocated)", "MEMORY(Used)", "DUTY_CYCLE")
        lines = [heads, tuple("-" * len(head) for head in heads)]
        for card in (each for each in cards if each.node == name):
            whole_gib = card.total_bytes and card.total_bytes // GIB * GIB
            amounts = (whole_gib, given_out.get((name, card.gpu)), card.used_bytes)
            busy = "-" if card.utilization_ratio is None else f"{card.utilization_ratio * 100:.1f}%"
            lines.append(
                (card.gpu, *(f"{each / GIB:.1f} GiB" if each is not None else "-" for each in amounts), busy)
            )
        blocks.append(
            f"\nGPUs of {name}:\n" + aligned("".join(row(f"  {first}", *rest) for first, *rest in lines))
        )
    return "".join(blocks)


def _nodes(report: Report) -> list[_Cards]:
    shared = [_Cards(node.facts, node, node.card_count, node.cards_in_use, 0) for node in report.shared]
    others = [
        _Cards(node.facts, None, node.total, node.allocated, max(node.total - node.allocatable, 0))
        for node in report.others
    ]
    return sorted([*shared, *others], key=lambda node: node.facts.name)


def _block(node: _Cards, other: ExclusiveUse | None, ails: bool) -> str:
    name = node.facts.name
    if node.shared is not None:  # parts of a card with two decimals, or whole cards
        size_units = next((card.total for card in node.shared.cards if card.total), 0)
        pods = [
            closed_row(pod.namespace, pod.name, f"{pod.units / size_units:.2f}")
            for pod in node.shared.pods
            if size_units and not pod.pending
        ]
    else:
        takers = other.pods if other is not None else ()
        pods = [closed_row(each.pod.namespace, each.pod.name, each.exclusive_gpus) for each in takers]
    head = "\n" + row("NAMESPACE", "NAME", "GPU REQUESTS", " ")
    lines = (
        "\n"
        + row("NAME:", name)
        + row("IPADDRESS:", node.facts.address or UNKNOWN_ADDRESS)
        + row("ROLE:", _roles(node.facts))
        + (head + "".join(pods) + "\n" if pods else "")
        + ("" if node.total else "\n")
        + closed_row(f"Total GPUs In Node {name}:", f"{node.total} ")
        + closed_row(
            f"Allocated GPUs In Node {name}:", f"{node.allocated} ({percent(node.allocated, node.total)}%)"
        )
    )
    if node.shared is not None:
        lines += row("If Node is Shareable :", "Yes ")
    if ails:
        lines += closed_row(
            f"Unhealthy GPUs In Node {name}:", f"{node.unhealthy} ({percent(node.unhealthy, node.total)}%)"
        )
    return lines + dashes(_RULERS[False, False])


def _sum(nodes: Sequence[_Cards]) -> tuple[int, int]:
    return sum(node.total for node in nodes), sum(node.allocated for node in nodes)


def _ratio(part: int, whole: int) -> str:
    return f"{part}/{whole} ({percent(part, whole)}%)"


def _roles(facts: NodeFacts) -> str:
    return ",".join(roles(facts.labels)) or "<none>"
