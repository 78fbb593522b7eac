"""The flags that say which cluster: before the command or behind it, the later one wins."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


class Flags(NamedTuple):
    """Which cluster and namespace; empty means what the kubeconfig says."""

    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""
    environ: Mapping[str, str] = os.environ

    def over(self, other: Flags) -> Flags:
        """These flags, filled up from `other` where nothing was given."""
        return Flags(
            self.kubeconfig or other.kubeconfig,
            self.context or other.context,
            self.namespace or other.namespace,
            self.environ,
        )


def cluster_flags(command: F) -> F:
    """Give a command the flags; `flags_of` reads them together with those before it."""
    for name, short, words in (
        ("--namespace", "-n", "Namespace, for explain, top, advise and migrate."),
        ("--context", "", "Context of the kubeconfig to use."),
        ("--kubeconfig", "", "Kubeconfig file; without it $KUBECONFIG, then ~/.kube/config."),
    ):
        names = (name, short) if short else (name,)
        command = click.option(*names, default="", metavar="TEXT", help=words)(command)
    return command


def flags_of(context: click.Context, values: Mapping[str, Any]) -> Flags:
    """The flags of a command, over those of the group it was called through."""
    own = Flags(values["kubeconfig"], values["context"], values["namespace"])
    outer = context.find_object(Flags)
    return own.over(outer) if outer is not None else own
