"""``gpuslice bill``: what namespaces and pods had of cards, adding up to what the cards have."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from gpuslice.apps.cli.flags import cluster_flags, flags_of
from gpuslice.apps.cli.output import DOCUMENTS, complain, print_document, tell

if TYPE_CHECKING:
    from gpuslice.diagnosis.bill import Bill

TIMES = ("%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z")
HEADS = {
    "guaranteed": "GUARANTEED",
    "borrowed": "BORROWED",
    "used": "USED",
    "parked": "PARKED",
    "memory": "CHARGED",
    "sm": "SM",
    "energy": "ENERGY",
}
"""By an amount's name; the units are in the line below the table."""


@click.command("bill")
@click.option(
    "--prometheus",
    required=True,
    metavar="URL",
    envvar="GPUSLICE_PROMETHEUS_URL",
    show_envvar=True,
    help="The Prometheus that evaluates the recording rules of monitoring/.",
)
@click.option(
    "--from",
    "start",
    metavar="TIME",
    type=click.DateTime(TIMES),
    required=True,
    help="Begin: a day or time, UTC if it says no zone.",
)
@click.option(
    "--to", "end", metavar="TIME", type=click.DateTime(TIMES), help="End, not included; now if not given."
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "csv", *DOCUMENTS]),
    default="table",
    show_default=True,
    help="How to print; csv has the columns of FOCUS, one row for each day, pod and kind of amount.",
)
@cluster_flags
@click.pass_context
def command(
    context: click.Context,
    /,
    prometheus: str,
    start: datetime,
    end: datetime | None,
    output: str,
    **cluster: Any,
) -> None:
    """Say what namespaces and pods had of cards, for a bill.

    Memory in GiB-hours: guaranteed, borrowed beyond that, used, parked, and charged, which is the larger of
    guaranteed and used; card time in hours, and the energy of that time in kWh. What is charged, idle and
    unattributed adds up to what the cards have. -n NAMESPACE lists the pods of one namespace. Prices are not
    known here.

    \b
    Examples:
      gpuslice bill --from 2026-11-01 --to 2026-12-01
      gpuslice bill --from 2026-11-01 --to 2026-12-01 -o csv > november.csv
      gpuslice bill --from 2026-11-28 -n team-a
    """
    from gpuslice.diagnosis import bill
    from gpuslice.diagnosis.prometheus import Prometheus

    flags = flags_of(context, cluster)
    start_s, end_s = (_seconds(each) for each in (start, end or datetime.now(UTC)))
    if end_s - start_s < bill.GRID_S:
        raise click.UsageError("--to must be later than --from")
    parts = bill.pieces(start_s, end_s)
    with click.progressbar(
        bill.read_bills(Prometheus(prometheus), parts, flags.namespace),
        length=len(parts),
        label="reading",
        file=sys.stderr,
        hidden=not sys.stderr.isatty(),
    ) as read:
        if output == "csv":
            writer = csv.writer(sys.stdout, lineterminator="\n")
            writer.writerow(bill.FOCUS_COLUMNS)
            for day in bill.by_day(read):
                writer.writerows(bill.focus_rows(day))
                sys.stdout.flush()
            return
        found = bill.Bill(*parts[0])
        for piece in read:
            found.add(piece)
    if output in DOCUMENTS:
        print_document(bill.document(found), output)
    elif not found.pods and not found.cards:
        complain("No pod had a part of a card.")
    else:
        tell(text(found, flags.namespace))


def _seconds(at: datetime) -> int:
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp())


def text(found: Bill, namespace: str = "") -> str:
    """One row for each namespace, or each pod of `namespace`; then what is nobody's, and the cards."""
    from gpuslice.core.words import counted
    from gpuslice.diagnosis.bill import METERS, PARTS, total
    from gpuslice.diagnosis.table import fitted

    named = found.pods if namespace else found.by_namespace()
    many = len({key[0] for key in (*named, *found.cards)}) > 1  # clusters in one Prometheus
    rows = [["POD" if namespace else "NAMESPACE", *HEADS.values()]]
    rows += [
        _row("/".join((key[0], key[-1]) if many else key[-1:]), each) for key, each in sorted(named.items())
    ]
    cards = total(found.cards.values())
    rows += [
        _row(f"({part})", {name: cards[f"{name} {part}"] for name in METERS if f"{name} {part}" in cards})
        for part in (PARTS if cards else ())
    ]
    several = counted(len(found.cards), "card")
    hours = f"{several} measured for {cards.get('sm card', 0):.1f} h. " if cards else ""
    return f"{fitted(rows, cut=(0,))}\n{hours}Memory in GiB-hours, SM in hours of a card, energy in kWh.\n"


def _row(name: str, amounts: Mapping[str, float]) -> list[str]:
    return [name, *(f"{amounts[each]:.2f}" if each in amounts else "-" for each in HEADS)]
