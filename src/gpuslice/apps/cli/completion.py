"""Shell completion: ``gpuslice completion``, names from the cluster, and the protocol of kubectl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from gpuslice.apps.cli.flags import Flags, flags_of

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

_PATIENCE_S = 2.0
# cobra's ShellCompDirectiveDefault and NoFileComp, which kubectl reads from the last line
_FILES, _NO_FILES = ":0", ":4"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    Load it:
      bash   source <(gpuslice completion bash)
      zsh    source <(gpuslice completion zsh)     after compinit
      fish   gpuslice completion fish | source

    kubectl's own completion works for `kubectl inspect cgpu` too: it calls the program
    kubectl_complete-inspect-cgpu, which is installed next to kubectl-inspect-cgpu.
    """
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    root = context.find_root().command
    click.echo(kind(root, {}, "gpuslice", "_GPUSLICE_COMPLETE").source())


def nodes(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of nodes; none if the cluster does not answer soon, as Tab must not print errors."""
    return _of_cluster(context, incomplete, "NODES")


def pods(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the pods of the namespace; none under the same condition."""
    return _of_cluster(context, incomplete, "PODS")


def namespaces(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of namespaces; none under the same condition, or without the right to list them."""
    return _of_cluster(context, incomplete, "NAMESPACES")


def _of_cluster(context: click.Context, incomplete: str, kind: str) -> list[CompletionItem]:
    from gpuslice.adapters.kube import resources
    from gpuslice.apps.cli.cluster import ask, connection_of

    resource: resources.Resource[dict[str, Any]] = getattr(resources, kind).as_dict()

    def names(flags: Flags) -> list[str]:
        namespace = connection_of(flags).namespace if resource.namespaced else ""
        found = ask(flags, lambda client: client.all(resource, namespace), _PATIENCE_S)
        return sorted(each["metadata"]["name"] for each in found)

    return _proposals(context, incomplete, names)


def contexts(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of the kubeconfig's contexts."""
    from gpuslice.adapters.kube.config import context_names

    return _proposals(context, incomplete, lambda flags: context_names(flags.environ, flags.kubeconfig))


def files(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What the shell itself proposes for a file."""
    from click.shell_completion import CompletionItem

    return [CompletionItem(incomplete, type="file")]


def _proposals(
    context: click.Context, incomplete: str, names: Callable[[Flags], list[str]]
) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from gpuslice.core.errors import GpusliceError

    given = {name: context.params.get(name) or "" for name in ("kubeconfig", "context", "namespace")}
    try:
        found = names(flags_of(context, given))
    except GpusliceError:
        return []
    return [CompletionItem(name) for name in found if name.startswith(incomplete)]


def kubectl_answer(command: click.Command, words: Sequence[str]) -> str:
    """What ``kubectl_complete-<plugin> WORDS…`` prints: one proposal per line, then a directive."""
    from click.shell_completion import ShellComplete

    *before, incomplete = words or [""]
    completion = ShellComplete(command, {}, "kubectl", "_COMPLETE")
    found = completion.get_completions(list(before), incomplete)
    plain = [each for each in found if each.type == "plain"]
    lines = [f"{each.value}\t{each.help}" if each.help else each.value for each in plain]
    return "\n".join([*lines, _FILES if any(each.type == "file" for each in found) else _NO_FILES])
