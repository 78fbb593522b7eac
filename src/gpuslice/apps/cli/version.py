"""``gpuslice version``."""

from __future__ import annotations

import click

import gpuslice


@click.command("version", short_help="Print the version.")
def command() -> None:
    """Print the version of gpuslice."""
    click.echo(f"gpuslice {gpuslice.__version__}")
