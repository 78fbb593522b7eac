"""``gpuslice inspect`` and ``kubectl inspect cgpu``: what is allocated on which card."""

from __future__ import annotations

from typing import Any

import click

from gpuslice.apps.cli.completion import nodes
from gpuslice.apps.cli.flags import cluster_flags, flags_of
from gpuslice.apps.cli.output import complain, output_flag, print_document, tell


@click.command("inspect")
@click.option("-d", "--details", is_flag=True, help="List the pods of each node.")
@output_flag
@cluster_flags
@click.argument("node", required=False, default="", shell_complete=nodes)
@click.pass_context
def command(context: click.Context, /, node: str, details: bool, output: str, **cluster: Any) -> None:
    """Show what is allocated on which card, on all nodes or on NODE.

    Amounts count the resource aliyun.com/gpu-mem: GiB, or MiB if the nodes are configured so.

    \b
    Examples:
      kubectl inspect cgpu                 one line a node
      kubectl inspect cgpu -d              with the pods of each node
      kubectl inspect cgpu -d node-1       one node only
      gpuslice inspect -o json             for programs
    """
    from gpuslice.apps.cli.cluster import ask, read_report

    report = ask(flags_of(context, cluster), lambda client: read_report(client, node))
    if not report.shared:
        where = f'Node "{node}" shares no GPU' if node else "No node shares its GPUs"
        complain(
            f"{where}: nothing allocatable of aliyun.com/gpu-mem or gpuslice.io/memory. Label a GPU node "
            "cgpu=true to share it."
        )
    for use in report.shared:
        if use.problem:
            complain(f"node {use.name}: {use.problem}")
    if output != "table":
        from gpuslice.apps.cli.documents import inspect_document

        print_document(inspect_document(report), output)
    elif report.shared:
        from gpuslice.apps.cli import inspect_table

        text = inspect_table.details(report) if details else inspect_table.summary(report)
        tell(text)
