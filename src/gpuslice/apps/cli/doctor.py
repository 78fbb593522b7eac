"""``gpuslice doctor``: looks for what is wrong with a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from gpuslice.apps.cli.flags import cluster_flags, flags_of
from gpuslice.apps.cli.output import counted, output_flag, print_document

if TYPE_CHECKING:
    from gpuslice.apps.cli.doctor_facts import Facts, Finding

FOUND = 3
"""The exit code when something is wrong: 1 means that the cluster could not be read."""


@click.command("doctor")
@output_flag
@cluster_flags
@click.pass_context
def command(context: click.Context, /, output: str, **cluster: Any) -> None:
    """Look for what is wrong with a cluster that shares cards, and tell how to put it right.

    Labels and resources of nodes, the device plugin, annotations of pods, cards promised twice, the extender,
    the scheduler's configuration where it can be read, the webhook and its certificates.

    Ends with 0 when nothing is wrong (notes do not count), with 3 for warnings and errors, with 1 when the
    cluster cannot be read.

    \b
    Examples:
      gpuslice doctor
      gpuslice doctor -o json        for programs: findings with level, where, what, fix
    """
    from gpuslice.apps.cli.cluster import client_of
    from gpuslice.apps.cli.doctor_facts import Level, read_facts

    facts = read_facts(client_of(flags_of(context, cluster)))
    findings = examine(facts)
    if output == "table":
        click.echo(_text(facts, findings), nl=False)
    else:
        fields = ("level", "where", "what", "fix")
        shown = [{name: str(getattr(each, name)) for name in fields} for each in findings]
        print_document({"findings": shown}, output)
    context.exit(FOUND if any(each.level is not Level.NOTE for each in findings) else 0)


def examine(facts: Facts) -> list[Finding]:
    """All findings, the worst first. A check is one function from facts to findings."""
    from gpuslice.apps.cli import doctor_nodes, doctor_services
    from gpuslice.apps.cli.doctor_facts import Finding, Level

    checks = (
        doctor_nodes.shared_nodes,
        doctor_nodes.one_unit,
        doctor_nodes.pods_and_cards,
        doctor_nodes.running_without_devices,
        doctor_nodes.promised_twice,
        doctor_nodes.cards_out_of_use,
        doctor_services.extender,
        doctor_services.scheduler_configuration,
        doctor_services.webhook,
    )
    found = [finding for check in checks for finding in check(facts)]
    found += [
        Finding(
            Level.NOTE, what, "may not be read, so what depends on it was not checked", "ask for that right"
        )
        for what in facts.unreadable
    ]
    order = list(Level)
    return sorted(found, key=lambda each: order.index(each.level))


def _text(facts: Facts, findings: list[Finding]) -> str:
    from gpuslice.apps.cli.doctor_facts import Level

    lines = [
        f"{each.level.upper():<8} {each.where}\n         {each.what}\n         to do: {each.fix}\n\n"
        for each in findings
    ]
    counts = ", ".join(counted(sum(each.level is level for each in findings), level) for level in Level)
    seen = f"{counted(len(facts.nodes), 'node')} and {counted(len(facts.pods), 'pod')} looked at"
    return "".join(lines) + f"{seen}: {counts}.\n"
