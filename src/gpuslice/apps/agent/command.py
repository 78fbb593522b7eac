"""The commands ``gpuslice agent`` and ``gpuslice switch``. Their help imports the settings alone."""

from __future__ import annotations

import os
from typing import Any

import click

from gpuslice.apps.agent.flags import VendorCommand
from gpuslice.apps.agent.settings import AgentSettings, SwitchSettings
from gpuslice.apps.settings import load, options


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
