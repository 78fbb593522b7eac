"""``gpuslice completion``: the script that teaches a shell our commands."""

from __future__ import annotations

import click


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    Load it:
      bash   source <(gpuslice completion bash)
      zsh    source <(gpuslice completion zsh)
      fish   gpuslice completion fish | source

    kubectl's own completion completes `kubectl inspect cgpu` too: it calls the program
    kubectl_complete-inspect-cgpu, which is installed beside kubectl-inspect-cgpu.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    root = context.find_root().command
    click.echo(kind(root, {}, "gpuslice", "_GPUSLICE_COMPLETE").source())
