"""The tables of ``kubectl inspect cgpu``, byte for byte those of the vendor's plugin.

Differences on purpose: nodes and pods are sorted (the original's order changes from call to call), a card's
column shows its true size where the node tells it, and gaps in the card numbers stay gaps.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpuslice.core.report import CardUse, NodeUse, PodUse, Report, percent
from gpuslice.diagnosis.table import aligned, closed_row, dashes, row, size

UNKNOWN_ADDRESS = "unknown"


def summary(report: Report) -> str:
    """One line per node: its cards, then its total."""
    columns = columns_of(report.shared)
    some_pending = any(node.pending for node in report.shared)
    heads = [f"GPU{index}(Allocated/Total)" for index in range(columns)]
    heads += ["PENDING(Allocated)"] if some_pending else []
    rows = []
    for node in report.shared:
        cells = card_cells(node, columns)
        if some_pending:
            cells.append(str(node.pending) if node.pending else "")
        rows.append(row(node.name, address(node), *cells, f"{node.allocated}/{node.total}"))
    ruler = dashes(size(rows[0]) + 20 if rows else 0)
    share = f"{report.allocated}/{report.total} ({percent(report.allocated, report.total)}%)"
    return aligned(
        row("NAME", "IPADDRESS", *heads, f"GPU Memory({report.unit})")
        + "".join(rows)
        + ruler
        + row("Allocated/Total GPU Memory In Cluster:")
        + closed_row(share)
    )


def details(report: Report) -> str:
    """A block per node: its pods and what each holds of each card."""
    share = f"{report.allocated}/{report.total} ({percent(report.allocated, report.total)}%)"
    tail = closed_row("Allocated/Total GPU Memory In Cluster:", share)
    return aligned(node_blocks(report.shared) + "\n\n" + tail)


def node_blocks(nodes: Sequence[NodeUse], *, pending_column: bool = True) -> str:
    """The blocks of the detailed tables, not yet aligned. All rulers are as long as the first node's rows."""
    parts = []
    ruler = ""
    for node in nodes:
        rows = "".join(pod_row(pod, node, pending_column=pending_column) for pod in node.pods)
        ruler = ruler or dashes(size(rows) + 10)
        heads = [f"GPU{index}(Allocated)" for index in range(columns_of([node]))]
        heads += ["Pending(Allocated)"] if pending_column and node.pending else []
        heading = row("NAME:", node.name) + row("IPADDRESS:", address(node)) + "\n"
        heading += closed_row("NAME", "NAMESPACE", *heads)
        used = f"{node.allocated} ({percent(node.allocated, node.total)}%)"
        totals = closed_row("Allocated :", used) + closed_row("Total :", f"{node.total} ")
        parts.append("\n" + heading + rows + totals + ruler)
    return "".join(parts)


def pod_row(pod: PodUse, node: NodeUse, *, pending_column: bool) -> str:
    cells = [pod.by_card.get(index, 0) for index in range(columns_of([node]))]
    if pending_column and node.pending:
        cells.append(pod.units if pod.pending else 0)
    return closed_row(pod.name, pod.namespace, *cells)


def address(node: NodeUse) -> str:
    return node.facts.address or UNKNOWN_ADDRESS


def columns_of(nodes: Sequence[NodeUse]) -> int:
    """How many columns the cards of `nodes` need: one for each number up to the highest."""
    return max((card.index + 1 for node in nodes for card in node.cards), default=0)


def card_cells(node: NodeUse, columns: int) -> list[str]:
    """``allocated/total`` of each card; ``0/0`` if the node has no card of that number."""
    cards: dict[int, CardUse] = {card.index: card for card in node.cards}
    absent = CardUse(index=-1, allocated=0, total=0)
    found = (cards.get(index, absent) for index in range(columns))
    return [f"{card.allocated}/{card.total}" for card in found]
