"""``gpuslice waste``: who holds GPU memory without using it, who uses more than it asked for, who waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gpuslice.apps.cli.flags import cluster_flags, flags_of
from gpuslice.apps.cli.output import DOCUMENTS, as_document, complain, listing_flags, print_repeatedly

if TYPE_CHECKING:
    from gpuslice.diagnosis.waste import PodUsage

SORTS = ("wasted", "idle", "held", "used", "peak", "excess")


@click.command("waste")
@click.option(
    "--sort",
    type=click.Choice(SORTS),
    default="wasted",
    show_default=True,
    help="The largest first: held and not used, time since it last computed, or more than it asked for.",
)
@listing_flags
@cluster_flags
@click.pass_context
def command(
    context: click.Context, /, sort: str, output: str, no_headers: bool, watch: bool, **cluster: Any
) -> None:
    """Find who holds GPU memory without using it.

    One row for each pod that holds a part of a card: what it holds, uses, and used at most, since when it has
    not computed, and which waiting pods would fit in its place. (+N) is what it uses beyond its
    request. Use is measured by the exporters. Nothing is changed: ask the owner.

    \b
    Examples:
      gpuslice waste
      gpuslice waste --sort idle -n team-a
      gpuslice waste -o json
    """
    from gpuslice.apps.cli.cluster import read_measured
    from gpuslice.diagnosis import waste

    flags = flags_of(context, cluster)

    def show() -> str:
        known = read_measured(flags)
        found = waste.usage_of_cluster(known, flags.namespace)
        found.sort(key=waste.ORDERS[sort], reverse=True)
        if output == "name":
            return "".join(f"pod/{each.pod}\n" for each in found)
        if output in DOCUMENTS:
            rows = [waste.document(each) for each in found]
            return as_document({"pods": rows, **waste.sums(found), "problems": list(known.problems)}, output)
        if not found:
            complain("No pod holds a part of a card.")
            return ""
        return text(found, headers=not no_headers, wide=output == "wide")

    print_repeatedly(show, output, watch=watch)


def text(found: Sequence[PodUsage], *, headers: bool = True, wide: bool = False) -> str:
    from gpuslice.core.words import lasting
    from gpuslice.diagnosis.table import fitted
    from gpuslice.diagnosis.waste import sums

    heads = ["NAMESPACE", "POD", "OWNER", "NODE", "GPU", "HELD", "USED", "PEAK", "WASTED", "IDLE", "WAITING"]
    rows = [heads] if headers else []
    for each in found:
        over = f" (+{_mib(each.excess_mib)})" if each.excess_mib else ""
        first = next(iter(each.wanted_by), "-")
        waits = ",".join(each.wanted_by) if wide else first
        more = f" +{len(each.wanted_by) - 1}" if len(each.wanted_by) > 1 and not wide else ""
        rows.append(
            [
                *(each.namespace, each.pod, each.owner or "-", each.node or "-", each.gpus),
                *(
                    _mib(each.held_mib),
                    _mib(each.used_mib) + over,
                    _mib(each.peak_mib),
                    _mib(each.wasted_mib),
                ),
                "-" if each.idle_s is None else lasting(each.idle_s),
                (waits or "-") + more,
            ]
        )
    table = fitted(rows, cut=(1, 2, 3, 0, 10), drop=(2, 7, 3, 10))
    if not headers:
        return table
    of = sums(found)
    extra = f", and {_mib(of['excessMiB'])} more than they asked for" if of["excessMiB"] else ""
    words = (
        f"{_mib(of['heldMiB'])} held, {_mib(of['usedMiB'])} used{extra}: {_mib(of['wastedMiB'])} wasted.\n"
    )
    return f"{table}\n{words}"


def _mib(amount: float | None) -> str:
    """Of memory: whole MiB below a GiB, else GiB with one decimal."""
    if amount is None:
        return "-"
    return f"{amount:.0f} MiB" if amount < 1024 else f"{amount / 1024:.1f} GiB"
