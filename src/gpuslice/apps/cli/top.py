"""``gpuslice top``: the cards of a cluster, in the tables of ``arena top node`` 0.4.0."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpuslice.apps.cli.flags import Flags, cluster_flags, flags_of
from gpuslice.apps.cli.output import complain, output_flag, print_document, tell
from gpuslice.apps.command_line import FiniteRange
from gpuslice.core.errors import GpusliceError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from gpuslice.diagnosis.cluster import UsageSource
    from gpuslice.diagnosis.usage import ClusterUsage

T = TypeVar("T")
SORTS = ("used", "held", "wasted", "idle", "peak", "excess", "sm", "refused")


class BothKindsError(GpusliceError):
    """A node offers both whole cards and parts of the same cards, so no figure about it is true."""


@click.group("top", invoke_without_command=True)
@click.option(
    "--once", is_flag=True, help="Print once instead of a live view, as when writing to a pipe or file."
)
@click.option(
    "--every",
    "every_s",
    type=FiniteRange(min=0.1),
    default=2.0,
    show_default=True,
    help="Seconds between two looks.",
)
@click.option(
    "--exporter",
    "urls",
    multiple=True,
    metavar="URL",
    envvar="GPUSLICE_EXPORTERS",
    help="An exporter's /metrics, for machines without a cluster; may be repeated.",
)
@click.option(
    "--sort", type=click.Choice(SORTS), help="Containers by this figure, the highest first. [default: node]"
)
@output_flag
@cluster_flags
@click.pass_context
def command(
    context: click.Context,
    /,
    *,
    once: bool,
    every_s: float,
    urls: tuple[str, ...],
    sort: str | None,
    output: str,
    **cluster: Any,
) -> None:
    """Watch cards and containers: what they use now, with a little history.

    In a terminal it is live: s sorts, / filters, n chooses a namespace, t shows a tree, Enter a container's
    own page, ? all keys, q quits.

    \b
    Examples:
      gpuslice top                   a live view of the cluster, through the API server
      gpuslice top --once -o json    the same figures for a program
      gpuslice top --sort wasted     who holds most without using it, first
      gpuslice top node              the table of `arena top node`
    """
    flags = flags_of(context, cluster)
    context.obj = flags
    if context.invoked_subcommand is not None:
        return
    from gpuslice.apps.cli.cluster import ask
    from gpuslice.diagnosis import exporters

    def with_source(do: Callable[[UsageSource], Coroutine[Any, Any, T]]) -> T:
        if urls:
            import asyncio

            return asyncio.run(do(exporters.UrlSource(urls)))
        return ask(flags, lambda client: do(exporters.ClusterSource(client)))

    draws = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    if output == "table" and not once and draws:
        from gpuslice.apps.cli.top_app import TopApp

        explain = None if urls else lambda name: explained(flags, name)
        ground = os.environ.get("COLORFGBG", "").rpartition(";")[2]  # set by many terminals
        shown: dict[str, Any] = {"context": flags.context, "namespace": flags.namespace, "explain": explain}
        shown["sort"] = sort or ""
        with_source(lambda source: TopApp(source, every_s, **shown, light=ground in {"7", "15"}).run_async())
        return
    _print(with_source(lambda source: source.read()), flags.namespace, sort, output)


def _print(read: ClusterUsage, namespace: str, sort: str | None, output: str) -> None:
    """One reading, of the namespace; ends with 1 if nothing could be read."""
    from gpuslice.diagnosis import usage

    nothing = bool(read.problems) and not read.cards
    found = read.of_namespace(namespace)  # as in the live view
    if sort is not None:
        found = replace(found, containers=usage.by_most(found.containers, sort))
    if output == "table" and namespace and not (found.containers or nothing):
        complain(f"No container of namespace {namespace} is measured.")
    if output != "table":
        print_document(usage.documents(found), output)
    elif nothing:
        for problem in found.problem_lines:
            complain(f"Error: {problem}")
    else:
        from gpuslice.apps.cli.top_print import show_once

        show_once(found)
    if nothing:
        raise SystemExit(1)  # what could be read is shown together with what failed


def explained(flags: Flags, name: str) -> str:
    """What `gpuslice explain NAME` prints."""
    from gpuslice.apps.cli.explain import read
    from gpuslice.diagnosis.explain.words import text

    return text(read(flags, name))


@command.command("node")
@click.option("-s", "--gpushare", "shared", is_flag=True, help="Only nodes that share cards, by memory.")
@click.option("-d", "--details", is_flag=True, help="List the pods of each node.")
@click.option("--metric", is_flag=True, help="Also show current usage of each card, from the exporters.")
@output_flag
@cluster_flags
@click.pass_context
def node(
    context: click.Context, /, shared: bool, details: bool, metric: bool, output: str, **cluster: Any
) -> None:
    """Show all nodes with their cards.

    \b
    Examples:
      gpuslice top node              cards of each node, shared or not
      gpuslice top node -s           memory of shared cards
      gpuslice top node -s -d        with the pods that hold it
      gpuslice top node --metric     with what each card uses now
      gpuslice top node -o json      the keys of `arena top node -o json`; memory in bytes
    """
    from gpuslice.apps.cli import top_table
    from gpuslice.apps.cli.cluster import ask, read_report
    from gpuslice.core.contract import EXCLUSIVE_GPU
    from gpuslice.core.views import names_offered
    from gpuslice.diagnosis.exporters import ClusterSource

    flags = flags_of(context, cluster)
    report = ask(flags, read_report)
    for use in report.shared:
        if use.facts.amount(EXCLUSIVE_GPU):
            raise BothKindsError(
                f"nvidia.com/gpu and {names_offered(use.facts.allocatable).memory} are both used in node "
                f"{use.name}: its cards are given out twice. Remove the exclusive device plugin from it, "
                "or label it cgpu=false"
            )
    found = ask(flags, lambda client: ClusterSource(client).read()) if metric else None
    if output != "table":
        from gpuslice.apps.cli.documents import arena_document

        print_document(arena_document(report, found.cards if found else ()), output)
    elif shared and not report.shared:
        complain("No node shares its GPUs: nothing allocatable of aliyun.com/gpu-mem or gpuslice.io/memory.")
    else:
        if shared:
            table = top_table.shared_details if details else top_table.shared_summary
        else:
            table = top_table.details if details else top_table.summary
        tell(table(report))
        if found:
            names = {each.name for each in report.shared}
            cards = [card for card in found.cards if card.node in names or not shared]
            tell(top_table.measured(report, cards))
    for problem in found.problem_lines if found else ():
        complain(problem)
    if found and found.problems and not found.cards:
        raise SystemExit(1)
