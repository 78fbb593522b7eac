"""One run of the demo: story after story, each in a simulated cluster of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator

from gpuslice_demo.places import Places
from gpuslice_demo.player import Player, Score
from gpuslice_demo.steps import Story
from gpuslice_demo.world import World


async def play(places: Places, stories: tuple[Story, ...], *, keep: bool) -> int:
    """Play all stories, then keep the last one's cluster running if requested; returns the exit status."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    playing = Playing(places, Score(), colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    try:
        for story in stories:
            await playing.play(story, keep=keep and story is stories[-1])
    except asyncio.CancelledError:
        print("\nstopped", flush=True)
        return 0 if playing.concluded else 130
    return playing.conclude()


@contextlib.asynccontextmanager
async def console(places: Places) -> AsyncIterator[str]:
    """`gpuslice console` for a cluster that is kept; yields its address."""
    process = await asyncio.create_subprocess_exec(
        places.programs / "gpuslice", "console", "--no-open-browser", "--cluster-name=demo",
        "--usage-interval-s=5",
        env={**places.environment(), "PYTHONUNBUFFERED": "1"}, cwd=places.folder,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().rpartition(" ")[2].strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


class Playing:
    """One run of the demo over its stories."""

    def __init__(self, places: Places, score: Score, *, colour: bool) -> None:
        self.concluded = False
        self._places = places
        self._score = score
        self._colour = colour
        self._began = time.monotonic()

    async def play(self, story: Story, *, keep: bool) -> None:
        """Play one story in its own cluster; with `keep`, until cancelled."""
        places = self._places.below(story.name)
        logging.basicConfig(filename=places.folder / "simulation.log", level=logging.INFO, force=True)
        player = Player(places, self._score, colour=self._colour)
        player.title(story)
        async with World(places, story.nodes) as world, asyncio.TaskGroup() as group:
            watching = group.create_task(world.failed(), name="simulation")
            await player.play(story, world)
            if keep:
                if story.steps:
                    self.conclude()
                async with console(places) as address:
                    print(f"\nThe cluster in your browser: {address}", flush=True)
                    words = "The cluster keeps running until you press Ctrl-C. To use it from another shell:"
                    print(f"\n{words}\n\n{places.exports()}\ncd {places.folder / 'home'}\n", flush=True)
                    await watching
            watching.cancel()

    def conclude(self) -> int:
        """Print the result; returns the exit status."""
        score, seconds = self._score, time.monotonic() - self._began
        print(f"\n{score.right} of {score.total} outputs are as documented, {seconds:.0f} s", flush=True)
        for one in score.wrong:
            print(f"not as documented: {one}", flush=True)
        self.concluded = True
        return 1 if score.wrong else 0
