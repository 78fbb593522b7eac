"""``gpuslice doctor``: finds problems in a cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from gpuslice.apps.cli.flags import cluster_flags, flags_of
from gpuslice.apps.cli.output import output_flag, print_document, tell, wrapped
from gpuslice.core.contract import LABEL_SHARED
from gpuslice.core.words import counted

if TYPE_CHECKING:
    from gpuslice.adapters.kube.client import KubeClient
    from gpuslice.diagnosis.doctor.facts import Facts, Finding
    from gpuslice.diagnosis.doctor.groups import Group

PAUSE_S = 2.0
INDENT = " " * 9
MOST_SHOWN = 20
"""Number of findings shown, the worst first: people read what fits on two screens."""
FOUND = 3
"""The exit code if problems were found; 1 means that the cluster could not be read."""


@click.command("doctor")
@click.option(
    "--answers",
    "urls",
    multiple=True,
    metavar="URL",
    help="Also check that this URL answers with success; may be repeated. For use in the cluster.",
)
@click.option(
    "--fail-on",
    type=click.Choice(["error", "warning"]),
    default="warning",
    show_default=True,
    help="Lowest level of a finding that sets exit code 3.",
)
@click.option(
    "--node-label", default=LABEL_SHARED, show_default=True, metavar="LABEL", help="The chart's nodeLabel."
)
@click.option(
    "--want-cards",
    is_flag=True,
    help="Report an error, not a note, if no node shares its cards.",
)
@click.option(
    "--patience-s",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    metavar="SECONDS",
    help="Keep retrying this long while something is wrong: a new installation needs a moment.",
)
@click.option(
    "--all",
    "one_by_one",
    is_flag=True,
    help="Print every finding, also those that say the same of many objects.",
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
    one_by_one: bool,
    output: str,
    **cluster: Any,
) -> None:
    """Find problems in a cluster that shares cards, and say how to fix them.

    Checks labels and resources of nodes, the device plugin and its rights, annotations of pods, pods that
    wait, never fit or keep failing, over-committed cards, the extender, the scheduler's configuration if it
    can be read, the webhook and its certificates.

    Findings that say the same of many objects are printed as one, with placeholders such as POD for what
    differs, and the 20 worst at most.

    Exits with 0 if nothing is wrong (notes do not count), with 3 for warnings and errors, and with 1 if the
    cluster cannot be read. `helm test` runs it in the cluster.

    \b
    Examples:
      gpuslice doctor
      gpuslice doctor --all | less   every finding by itself
      gpuslice doctor -o json        for programs: the same, with level, where, what, fix
    """
    from gpuslice.apps.cli.cluster import ask
    from gpuslice.apps.cli.doctor_answers import answers, places_of
    from gpuslice.diagnosis.doctor.checks import examine, worst_first
    from gpuslice.diagnosis.doctor.facts import Level, read_facts
    from gpuslice.diagnosis.exporters import ClusterSource

    async def look(client: KubeClient) -> Facts:
        known: dict[str, Any] = {
            "node_label": node_label,
            "wants_cards": want_cards,
            "places": places_of(urls),
        }
        return await read_facts(client, **known, source=ClusterSource(client))

    ends = time.monotonic() + patience_s
    while True:
        facts = ask(flags_of(context, cluster), look)
        findings = worst_first([*examine(facts), *answers(facts, urls)])
        wrong = any(each.level in {Level.ERROR, Level(fail_on)} for each in findings)
        if not wrong or time.monotonic() >= ends:
            break
        time.sleep(PAUSE_S)
    if output == "table":
        print_findings(findings, facts, one_by_one=one_by_one)
    else:
        fields = ("level", "where", "what", "fix")
        document = [{name: str(getattr(each, name)) for name in fields} for each in findings]
        print_document({"findings": document}, output)
    context.exit(FOUND if wrong else 0)


def print_findings(findings: Sequence[Finding], facts: Facts, *, one_by_one: bool) -> None:
    """Print findings as text: those shared by many objects once, and no more than people read."""
    from gpuslice.diagnosis.ages import aged
    from gpuslice.diagnosis.doctor.facts import Level
    from gpuslice.diagnosis.doctor.groups import grouped

    groups: Sequence[Finding | Group] = findings if one_by_one else grouped(findings, facts)
    shown = groups if one_by_one else groups[:MOST_SHOWN]
    for each in shown:
        lines = [
            f"{each.level.upper():<8} {each.where}",
            INDENT + aged(each.what),
            f"{INDENT}to do: {each.fix}",
        ]
        tell("".join(f"{wrapped(line, INDENT)}\n" for line in lines) + "\n")
    if (more := len(groups) - len(shown)) > 0:
        tell(f"{counted(more, 'more finding')} not shown: gpuslice doctor --all\n")
    counts = ", ".join(counted(sum(each.level is level for each in findings), level) for level in Level)
    seen = f"{counted(len(facts.nodes), 'node')} and {counted(len(facts.pods), 'pod')} looked at"
    tell(f"{seen}: {counts}.\n")
