"""``gpuslice doctor``: looks for what is wrong with a cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gpuslice.apps.cli.flags import cluster_flags, flags_of
from gpuslice.apps.cli.output import output_flag, print_document
from gpuslice.core.contract import LABEL_SHARED
from gpuslice.core.words import counted

if TYPE_CHECKING:
    from gpuslice.apps.cli.doctor_facts import Facts, Finding

PAUSE_S = 2.0
FOUND = 3
"""The exit code when something is wrong: 1 means that the cluster could not be read."""


@click.command("doctor")
@click.option(
    "--answers",
    "urls",
    multiple=True,
    metavar="URL",
    help="Ask this address too, which must answer with success; may be repeated. For use in the cluster.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning"]),
    default="warning",
    show_default=True,
    help="From which level on a finding makes the exit code 3.",
)
@click.option(
    "--node-label", default=LABEL_SHARED, show_default=True, metavar="LABEL", help="The chart's nodeLabel."
)
@click.option(
    "--want-cards",
    is_flag=True,
    help="Take it for an error, and not for a note, that no node shares its cards.",
)
@click.option(
    "--patience-s",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Look again for so long while something is wrong: what was just installed needs a while.",
)
@output_flag
@cluster_flags
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    urls: tuple[str, ...],
    fail_on: str,
    node_label: str,
    want_cards: bool,
    patience_s: float,
    output: str,
    **cluster: Any,
) -> None:
    """Look for what is wrong with a cluster that shares cards, and tell how to put it right.

    Labels and resources of nodes, the device plugin, annotations of pods, pods that wait, never fit or fall
    over, cards promised twice, the extender, the scheduler's configuration where it can be read, the webhook
    and its certificates.

    Ends with 0 when nothing is wrong (notes do not count), with 3 for warnings and errors, with 1 when the
    cluster cannot be read. `helm test` runs it in the cluster.

    \b
    Examples:
      gpuslice doctor
      gpuslice doctor -o json        for programs: findings with level, where, what, fix
    """
    from gpuslice.apps.cli.cluster import client_of
    from gpuslice.apps.cli.doctor_answers import places_of
    from gpuslice.apps.cli.doctor_facts import Level, read_facts

    client, ends = client_of(flags_of(context, cluster)), time.monotonic() + patience_s
    while True:
        facts = read_facts(client, node_label=node_label, wants_cards=want_cards, places=places_of(urls))
        findings = examine(facts, urls)
        wrong = any(each.level in {Level.ERROR, Level(fail_on)} for each in findings)
        if not wrong or time.monotonic() >= ends:
            break
        time.sleep(PAUSE_S)
    if output == "table":
        for each in findings:
            click.echo(
                f"{each.level.upper():<8} {each.where}\n         {each.what}\n         to do: {each.fix}\n"
            )
        counts = ", ".join(counted(sum(each.level is level for each in findings), level) for level in Level)
        seen = f"{counted(len(facts.nodes), 'node')} and {counted(len(facts.pods), 'pod')} looked at"
        click.echo(f"{seen}: {counts}.")
    else:
        fields = ("level", "where", "what", "fix")
        shown = [{name: str(getattr(each, name)) for name in fields} for each in findings]
        print_document({"findings": shown}, output)
    context.exit(FOUND if wrong else 0)


def examine(facts: Facts, urls: Sequence[str] = ()) -> list[Finding]:
    """All findings, the worst first. A check is one function from facts to findings."""
    from gpuslice.apps.cli import (
        doctor_answers,
        doctor_nodes,
        doctor_plugins,
        doctor_pods,
        doctor_scheduler,
        doctor_services,
    )
    from gpuslice.apps.cli.doctor_facts import Finding, Level

    checks = (
        doctor_plugins.somewhere,
        doctor_nodes.shared_nodes,
        doctor_plugins.updates,
        doctor_nodes.one_unit,
        doctor_pods.pods_and_cards,
        doctor_pods.running_without_devices,
        doctor_pods.misspelt,
        doctor_pods.waiting,
        doctor_pods.falling_over,
        doctor_nodes.promised_twice,
        doctor_nodes.cards_out_of_use,
        doctor_services.extender,
        doctor_scheduler.scheduler_configuration,
        doctor_scheduler.second_scheduler,
        doctor_services.webhook,
    )
    found = [finding for check in checks for finding in check(facts)]
    found += doctor_answers.answers(facts, urls)
    found += [
        Finding(
            Level.NOTE,
            what,
            "may not be read, so what depends on it was not checked",
            "run gpuslice doctor as somebody who may, or ask for the right",
        )
        for what in facts.unreadable
    ]
    order = list(Level)
    return sorted(found, key=lambda each: order.index(each.level))
