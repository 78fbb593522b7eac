"""``gpuslice top``: the cards of a cluster, in the tables of ``arena top node`` 0.4.0."""

from __future__ import annotations

import sys
from typing import Any

import click

from gpuslice.apps.cli.flags import Flags, cluster_flags, flags_of
from gpuslice.apps.cli.output import complain, output_flag, print_document
from gpuslice.apps.finite import FiniteRange
from gpuslice.core.errors import GpusliceError
from gpuslice.core.report import Report


class BothKindsError(GpusliceError):
    """A node offers whole cards and parts of the same cards, so no figure about it is true."""


@click.group("top", invoke_without_command=True)
@click.option("--once", is_flag=True, help="Print it once in place of a live view, as into a pipe or a file.")
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
@output_flag
@cluster_flags
@click.pass_context
def command(
    context: click.Context,
    /,
    once: bool,
    every_s: float,
    urls: tuple[str, ...],
    output: str,
    **cluster: Any,
) -> None:
    """Watch cards and containers: what they use now, with a little history.

    \b
    Examples:
      gpuslice top                   a live view of the cluster, through the API server
      gpuslice top --once -o json    the same figures for a program
      gpuslice top node              the table of `arena top node`
    """
    flags = flags_of(context, cluster)
    context.obj = flags
    if context.invoked_subcommand is None:
        _live(flags, urls, once, every_s, output)


def _live(flags: Flags, urls: tuple[str, ...], once: bool, every_s: float, output: str) -> None:
    from gpuslice.apps.cli import live, live_view

    source = live.UrlSource(urls) if urls else live.cluster_source(flags)
    if output == "table" and not once and sys.stdout.isatty():
        live_view.watch(source, every_s)
        return
    found = source.read()
    nothing = bool(found.problems) and not found.cards
    if output != "table":
        print_document(live.documents(found), output)
    elif nothing:
        for problem in found.problems:
            complain(f"Error: {problem}")
    else:
        live_view.show_once(found)
    if nothing:
        raise SystemExit(1)  # what could be read is shown beside what went wrong


@command.command("node")
@click.option("-s", "--gpushare", "shared", is_flag=True, help="Only nodes that share cards, by memory.")
@click.option("-d", "--details", is_flag=True, help="List the pods of each node.")
@output_flag
@cluster_flags
@click.pass_context
def node(context: click.Context, /, shared: bool, details: bool, output: str, **cluster: Any) -> None:
    """Show all nodes with their cards.

    \b
    Examples:
      gpuslice top node              cards of each node, shared or not
      gpuslice top node -s           memory of shared cards
      gpuslice top node -s -d        with the pods that hold it
      gpuslice top node -o json      the keys of `arena top node -o json`; memory in bytes
    """
    from gpuslice.apps.cli.cluster import client_of, read_report

    report = read_report(client_of(flags_of(context, cluster)))
    _check(report)
    if output != "table":
        from gpuslice.apps.cli.documents import arena_document

        print_document(arena_document(report), output)
    elif shared and not report.shared:
        complain("No node shares its GPUs: nothing allocatable of aliyun.com/gpu-mem.")
    else:
        click.echo(_table(report, shared, details), nl=False)


def _table(report: Report, shared: bool, details: bool) -> str:
    from gpuslice.apps.cli import top_table

    if shared:
        return top_table.shared_details(report) if details else top_table.shared_summary(report)
    return top_table.details(report) if details else top_table.summary(report)


def _check(report: Report) -> None:
    from gpuslice.core.contract import EXCLUSIVE_GPU

    for use in report.shared:
        if use.facts.amount(EXCLUSIVE_GPU):
            raise BothKindsError(
                f"nvidia.com/gpu and aliyun.com/gpu-mem are both used in node {use.name}: its cards are "
                "given out twice. Remove the exclusive device plugin from it, or label it cgpu=false"
            )
