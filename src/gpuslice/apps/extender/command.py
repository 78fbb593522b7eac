"""The command ``gpuslice extender``. Its help imports the settings alone, not the process."""

from __future__ import annotations

import os
from typing import Any

import click

from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.apps.settings import load, options


@click.command("extender")
@options(ExtenderSettings)
def command(**flags: Any) -> None:
    """Run the scheduler extender: kube-scheduler asks it which nodes and cards, and it binds."""
    settings = load(ExtenderSettings, flags, os.environ)
    from gpuslice.apps.extender.main import start

    start(settings)
