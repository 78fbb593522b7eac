"""The command ``gpuslice console``. Its help imports only the settings, not the process."""

from __future__ import annotations

import os
from typing import Any

import click

from gpuslice.apps.console.settings import ConsoleSettings
from gpuslice.apps.settings import load, options


@click.command("console")
@options(ConsoleSettings)
@click.pass_context
def command(context: click.Context, /, **flags: Any) -> None:
    """Show a cluster on a page in the browser.

    Who has what of which card, which pods wait and why, what each uses and what it ought to ask for, what a
    namespace holds idle, and what is wrong with the cluster. Nothing on the page changes anything.

    \b
    Examples:
      gpuslice console                     the cluster of your kubeconfig, in your browser
      gpuslice console -n team-a           where you may list the pods of one namespace alone
      gpuslice console --no-open-browser   print the address instead
    """
    for name in ("kubeconfig", "context", "namespace"):  # as before any other command: gpuslice -n NAME ...
        flags[name] = flags[name] or getattr(context.obj, name, "") or None
    settings = load(ConsoleSettings, flags, os.environ)
    from gpuslice.apps.console.main import start

    start(settings)
