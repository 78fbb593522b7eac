"""The command ``gpuslice exporter``. Its help imports the settings alone, not the process."""

from __future__ import annotations

import os
from typing import Any

import click

from gpuslice.apps.exporter.flags import DcgmCommand, translated_environment, with_upstream_file
from gpuslice.apps.exporter.settings import ExporterSettings
from gpuslice.apps.settings import load, options


@click.command("exporter", cls=DcgmCommand)
@options(ExporterSettings)
def command(**flags: Any) -> None:
    """Run the metrics exporter of a node; takes dcgm-exporter's flags and counter files."""
    environ = with_upstream_file(flags, translated_environment(os.environ))
    settings = load(ExporterSettings, flags, environ)
    from gpuslice.apps.exporter.main import start

    start(settings)
