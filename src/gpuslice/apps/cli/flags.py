"""The flags that select the cluster, before or after the command; the later one wins."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class Flags(NamedTuple):
    """The selected cluster and namespace; empty: as in the kubeconfig."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""
    environ: Mapping[str, str] = os.environ

    def over(self, other: Flags) -> Flags:
        """These flags, completed from `other` where nothing was given."""
        return Flags(
            self.kubeconfig or other.kubeconfig,
            self.context or other.context,
            self.namespace or other.namespace,
            self.environ,
        )


def cluster_flags(command: F) -> F:
    """Add the flags to a command; `flags_of` combines them with those before the command."""
    for name, short, words in (
        ("--namespace", "-n", "Namespace, for explain, top, advise and migrate."),
        ("--context", "", "Context of the kubeconfig to use."),
        ("--kubeconfig", "", "Kubeconfig file; without it $KUBECONFIG, then ~/.kube/config."),
    ):
        names = (name, short) if short else (name,)
        command = click.option(*names, default="", metavar="TEXT", help=words)(command)
    return command


def flags_of(context: click.Context, values: Mapping[str, Any]) -> Flags:
    """The flags of a command, which override those of the group."""
    own = Flags(values["kubeconfig"], values["context"], values["namespace"])
    outer = context.find_object(Flags)
    return own.over(outer) if outer is not None else own
