"""The command ``gpuslice webhook``. Its help imports the settings alone, not the process."""

from __future__ import annotations

import os
from typing import Any

import click

from gpuslice.apps.settings import load, options
from gpuslice.apps.webhook.settings import WebhookSettings


@click.command("webhook")
@options(WebhookSettings)
def command(**flags: Any) -> None:
    """Run the admission webhook: it checks and completes pods that ask for parts of a card."""
    settings = load(WebhookSettings, flags, os.environ)
    from gpuslice.apps.webhook.main import start

    start(settings)
