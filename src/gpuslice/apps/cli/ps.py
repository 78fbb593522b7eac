"""``gpuslice ps``: which programs on this machine run with a part of a card."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from gpuslice.adapters.region.budget import Budget, Budgets
from gpuslice.adapters.region.limits import LimitsEntry
from gpuslice.apps.cli.output import output_flag, print_document
from gpuslice.core.units import MIB
from gpuslice.diagnosis.table import aligned, row

BASE = Path("/tmp/gpuslice-budgets")

base_flag = click.option(
    "--base",
    type=click.Path(path_type=Path),
    default=BASE,
    show_default=True,
    help="Where budgets are kept: each user's in this path with -UID behind it.",
)


@click.command("ps")
@base_flag
@output_flag
def command(base: Path, output: str) -> None:
    """Show the budgets of this machine, their usage and their users.

    \b
    Examples:
      gpuslice ps
      gpuslice ps -o json
    """
    budgets = Budgets(base.absolute()).list()
    if output != "table":
        print_document([document(budget) for budget in budgets], output)
    elif not budgets:
        click.echo("Nothing runs here with `gpuslice run`.")
    else:
        click.echo(aligned("".join(table(budgets))), nl=False)


def document(budget: Budget) -> dict[str, object]:
    return {
        "name": budget.name,
        "cards": [card_document(budget, limit) for limit in budget.limits],
        "programs": [
            {"pid": member.pid, "user": member.user, "command": list(member.command)}
            for member in budget.members
        ],
    }


def card_document(budget: Budget, limit: LimitsEntry) -> dict[str, object]:
    """Unknown values are null: no program has used the card yet."""
    usage = budget.usages.get(limit.uuid)
    return {
        "gpu": limit.uuid,
        "limitBytes": limit.memory_bytes,
        "computePercent": limit.compute_percent,
        "usedBytes": usage.used_bytes if usage else None,
        "peakBytes": usage.peak_bytes if usage else None,
        "refused": usage.refused if usage else None,
        "throttledSeconds": usage.throttled_ns / 1e9 if usage else None,
    }


def table(budgets: Sequence[Budget]) -> Iterator[str]:
    """One row for each program on each card; programs of one budget share its figures."""
    yield row("NAME", "GPU", "USED", "LIMIT", "SHARE", "REFUSED", "WAITED", "USER", "PID", "COMMAND")
    for budget in budgets:
        for limit in budget.limits:
            for member in budget.members or (None,):
                who = (member.user, member.pid, shown(member.command)) if member else ("-", "-", "(ended)")
                yield row(budget.name, *amounts(budget, limit), *who)


def shown(command: Sequence[str]) -> str:
    """On a single terminal line, whatever characters it contains."""
    return " ".join(command).translate(dict.fromkeys(range(32), "?"))


def amounts(budget: Budget, limit: LimitsEntry) -> tuple[str, ...]:
    usage = budget.usages.get(limit.uuid)
    return (
        limit.uuid[:12],
        f"{usage.used_bytes // MIB}MiB" if usage else "-",
        f"{(limit.memory_bytes or 0) // MIB}MiB",
        f"{limit.compute_percent}%" if limit.compute_percent else "-",
        str(usage.refused) if usage else "-",
        f"{usage.throttled_ns / 1e9:.1f}s" if usage else "-",
    )
