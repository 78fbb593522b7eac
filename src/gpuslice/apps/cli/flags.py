"""The flags that select the cluster, before or after the command; the later one wins."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound=Callable[..., Any])


class Flags(NamedTuple):
    """The selected cluster and namespace; empty: as in the kubeconfig."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""
    environ: Mapping[str, str] = os.environ
    everywhere: bool = False

    def over(self, other: Flags) -> Flags:
        """These flags, completed from `other` where nothing was given."""
        everywhere = self.everywhere or (other.everywhere and not self.namespace)
        return Flags(
            self.kubeconfig or other.kubeconfig,
            self.context or other.context,
            "" if everywhere else self.namespace or other.namespace,
            self.environ,
            everywhere,
        )


def cluster_flags(command: F) -> F:
    """Add the flags to a command; `flags_of` combines them with those before the command."""
    everywhere = click.option(
        "--all-namespaces", "-A", "everywhere", is_flag=True, help="All namespaces, for the same commands."
    )
    command = everywhere(command)
    for names, metavar, words in (
        (("--namespace", "-n"), "NAME", "Namespace, for explain, top, waste, bill, advise and migrate."),
        (("--context",), "NAME", "Context of the kubeconfig to use."),
        (("--kubeconfig",), "FILE", "Kubeconfig file; without it $KUBECONFIG, then ~/.kube/config."),
    ):
        option = click.option(*names, default="", metavar=metavar, help=words, shell_complete=_proposals)
        command = option(command)
    return command


def _proposals(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from gpuslice.apps.cli import completion  # it imports this module

    kinds = {"namespace": completion.namespaces, "context": completion.contexts}
    return kinds.get(parameter.name or "", completion.files)(context, parameter, incomplete)


def flags_of(context: click.Context, values: Mapping[str, Any]) -> Flags:
    """The flags of a command, which override those of the group."""
    own = Flags(
        values["kubeconfig"],
        values["context"],
        values["namespace"],
        everywhere=values.get("everywhere", False),
    )
    return own.over(context.find_object(Flags) or Flags())
