"""``gpuslice explain POD``: why it waits, or why it is where it is."""

from __future__ import annotations

from typing import Any

import click

from gpuslice.apps.cli.complete import pods
from gpuslice.apps.cli.flags import cluster_flags, flags_of
from gpuslice.apps.cli.output import output_flag, print_document


@click.command("explain")
@output_flag
@cluster_flags
@click.argument("pod", shell_complete=pods)
@click.pass_context
def command(context: click.Context, /, pod: str, output: str, **cluster: Any) -> None:
    """Tell why POD waits for a part of a card, or which card it holds and who shares it.

    Every node is put into a class with why not and the most that is free there on one card.
    It is worked out from the API server alone, as the scheduler extender does.

    \b
    Examples:
      gpuslice explain train-0
      gpuslice explain -n team-a train-0
      gpuslice explain team-a/train-0 -o json
    """
    from gpuslice.apps.cli.explanation import read
    from gpuslice.apps.cli.explanation_text import document, text

    told = read(flags_of(context, cluster), pod)
    if output == "table":
        click.echo(text(told), nl=False)
    else:
        print_document(document(told), output)
