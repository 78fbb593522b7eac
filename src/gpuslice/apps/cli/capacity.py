"""``gpuslice capacity``: what waits, how many nodes would hold it, and which nodes could be emptied."""

from __future__ import annotations

from typing import Any

import click

from gpuslice.apps.cli.flags import cluster_flags, flags_of
from gpuslice.apps.cli.output import complain, output_flag, print_document, tell


@click.command("capacity")
@output_flag
@cluster_flags
@click.pass_context
def command(context: click.Context, /, output: str, **cluster: Any) -> None:
    """Find how many nodes the waiting pods need, and which nodes could be emptied.

    Counts card by card, as the extender does. An autoscaler counts a node's cards as one sum: nodes that are
    hidden from it are named. Nodes are grouped by the labels that providers give node pools and instance
    types. -n NAMESPACE shows the waiting pods of one namespace; those of others need room too. Nothing is
    changed.

    \b
    Examples:
      gpuslice capacity
      gpuslice capacity -n team-a
      gpuslice capacity -o json
    """
    from gpuslice.apps.cli.cluster import read_measured
    from gpuslice.diagnosis import capacity

    flags = flags_of(context, cluster)
    found = capacity.capacity_of(read_measured(flags, by_exporters=False), flags.namespace)
    if output != "table":
        print_document(capacity.document(found), output)
    elif found.nodes or found.waiting:
        tell(capacity.text(found))
    else:
        complain("No node shares its cards, and no pod waits for a part of one.")
