"""``gpuslice install-library``: keeps the library in place, so that the agent need not write there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import gpuslice
from gpuslice.adapters.web.app import Probes, make_app
from gpuslice.adapters.web.exposition import page_of
from gpuslice.adapters.web.logs import configure_logs
from gpuslice.adapters.web.serve import Listen, run, serving, until_stopped, work_until
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.library import IsolationMissingError
from gpuslice.apps.agent.settings import InstallLibrarySettings

_log = logging.getLogger(__name__)


async def keep(
    settings: InstallLibrarySettings,
    stopped: Awaitable[object],
    listening: Callable[[int], None] = lambda _: None,
) -> None:
    """Until stopped: ready while the library is there."""
    folders = Folders(Path(settings.root))
    waits = "starting"

    async def look() -> None:
        nonlocal waits
        while True:
            try:
                await asyncio.to_thread(folders.library.install, settings.library)  # leaves what is right
                await asyncio.to_thread(folders.library.check)
                await asyncio.to_thread(folders.sweep_libraries, settings.sweep_after_s)
                if waits:
                    _log.info("the library is in place", extra={"version": folders.library.version})
                waits = ""
            except (IsolationMissingError, OSError) as error:
                waits = str(error)
                _log.warning("the library is not in place, will try again", extra={"error": waits})
            await asyncio.sleep(settings.every_s)

    app = make_app(Probes(gpuslice.__version__, lambda: waits, page_of(tuple)))
    async with serving(app, Listen(settings.port, settings.host)) as port:
        listening(port)
        await work_until(stopped, {"library": look()})


def start(settings: InstallLibrarySettings) -> None:
    """Run the process until it is told to end."""

    async def main() -> None:
        await keep(settings, until_stopped())

    configure_logs(settings.log_level)
    run(main())
