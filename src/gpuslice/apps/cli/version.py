"""``gpuslice version``."""

from __future__ import annotations

import click

from gpuslice import __version__


@click.command("version")
def command() -> None:
    """Print the version of gpuslice."""
    click.echo(f"gpuslice {__version__}")
