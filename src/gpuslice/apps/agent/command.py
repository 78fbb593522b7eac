"""The commands of what runs on nodes: ``gpuslice agent``, ``switch``, … Help imports the settings alone."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import click

from gpuslice.apps.agent.settings import (
    AgentSettings,
    InstallExtenderSettings,
    InstallLibrarySettings,
    KeepOffSettings,
    SwitchSettings,
)
from gpuslice.apps.settings import load, options

WITH_VALUE = frozenset(
    {
        "kubelet-address",
        "kubelet-port",
        "client-cert",
        "client-key",
        "token",
        "timeout",
        "v",
        "vmodule",
        "log_dir",
        "log_backtrace_at",
        "stderrthreshold",
    }
)
"""Flags of the vendor's plugin that have a value and mean nothing here."""
SWITCHES = frozenset({"mps", "query-kubelet", "logtostderr", "alsologtostderr"})
OWN_SWITCHES = frozenset({"health-check"})


class VendorCommand(click.Command):
    """Takes the vendor's command lines unchanged, so that existing DaemonSets start it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(translated(args)))


def translated(arguments: Sequence[str]) -> Iterator[str]:
    """The same command line with two dashes instead of one, and without flags that have no meaning here."""
    rest = iter(arguments)
    for argument in rest:
        name, separator, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or (len(name) == 1 and name != "v"):
            yield argument
        elif name in WITH_VALUE:
            if not separator:
                next(rest, None)
        elif name in SWITCHES:
            continue
        elif name in OWN_SWITCHES and separator:
            true = value.lower() in {"1", "t", "true"}  # Go's way to write a boolean flag
            yield f"--{'' if true else 'no-'}{name}"
        else:
            yield f"--{name}{separator}{value}"


@click.command("agent", cls=VendorCommand)
@options(AgentSettings)
def command(**flags: Any) -> None:
    """Run the node agent: kubelet's device plugin for aliyun.com/gpu-mem."""
    settings = load(AgentSettings, flags, os.environ)
    from gpuslice.apps.agent.main import start

    start(settings)


@click.command("switch")
@options(SwitchSettings)
def switch(**flags: Any) -> None:
    """Switch a node between shared and whole cards: take the plugin of whole cards off it, or put it back."""
    settings = load(SwitchSettings, flags, os.environ)
    from gpuslice.apps.agent.switch import start

    start(settings)


@click.command("keep-off")
@options(KeepOffSettings)
def keep_off(**flags: Any) -> None:
    """Keep a DaemonSet off the nodes that share their cards, or let it back."""
    settings = load(KeepOffSettings, flags, os.environ)
    from gpuslice.apps.agent.keep_off import start

    start(settings)


@click.command("install-library")
@options(InstallLibrarySettings)
def install_library(**flags: Any) -> None:
    """Keep the library in place on a node, for an agent that does not write there."""
    settings = load(InstallLibrarySettings, flags, os.environ)
    from gpuslice.apps.agent.install_library import start

    start(settings)


@click.command("install-extender")
@options(InstallExtenderSettings)
def install_extender(**flags: Any) -> None:
    """Let the kube-scheduler of a control-plane node call the extender, or give it its old manifest back."""
    settings = load(InstallExtenderSettings, flags, os.environ)
    from gpuslice.apps.agent.install_extender import start

    start(settings)
