"""The command ``gpuslice claims``. Its help imports the settings alone."""

from __future__ import annotations

import os
from typing import Any

import click

from gpuslice.apps.claims.settings import ClaimsSettings
from gpuslice.apps.settings import load, options


@click.command("claims")
@options(ClaimsSettings)
def command(**flags: Any) -> None:
    """Make the ResourceClaimTemplates of pods whose requests a policy turned into claims."""
    settings = load(ClaimsSettings, flags, os.environ)
    from gpuslice.apps.claims.main import start

    start(settings)
