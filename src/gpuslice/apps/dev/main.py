"""``gpuslice demo``: the stories of the published documents, played on this machine without a GPU."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import click

from gpuslice.apps.dev import guard
from gpuslice.apps.dev.places import Places, find_places
from gpuslice.apps.dev.player import Player, Score
from gpuslice.apps.dev.steps import Story
from gpuslice.apps.dev.stories import STORIES
from gpuslice.apps.dev.world import World


@click.command("demo")
@click.option(
    "--story",
    type=click.Choice([*STORIES, "all"]),
    help="Which story to play; all of them by default, cgpu with --keep.",
)
@click.option("--keep", is_flag=True, help="Leave the cluster running afterwards, until Ctrl-C.")
@click.option("--dir", "folder", default="", help="Keep files in this folder; a temporary one by default.")
def command(story: str | None, keep: bool, folder: str) -> None:
    """Play the whole story on this machine: no GPU, cluster, root or container engine is needed.

    The extender and the agent are the very processes that run in a cluster. API server, kube-scheduler,
    kubelet and driver are simulated, kubectl is the real one. Ends with status 1 when an output is not what
    the documents show.
    """
    name = story or ("cgpu" if keep else "all")
    stories = tuple(STORIES.values()) if name == "all" else (STORIES[name],)
    places = find_places(folder)
    with _guarded(places):
        sys.exit(asyncio.run(_main(places, stories, keep=keep)))


async def _main(places: Places, stories: tuple[Story, ...], *, keep: bool) -> int:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    playing = Playing(places, Score(), colour=sys.stdout.isatty())
    try:
        for story in stories:
            await playing.play(story, keep=keep and story is stories[-1])
    except asyncio.CancelledError:
        print("\nstopped", flush=True)
        return 0 if playing.concluded else 130
    return playing.conclude()


class Playing:
    """One run of the demo over its stories."""

    def __init__(self, places: Places, score: Score, *, colour: bool) -> None:
        self.concluded = False
        self._places = places
        self._score = score
        self._colour = colour
        self._began = time.monotonic()

    async def play(self, story: Story, *, keep: bool) -> None:
        """One story in a cluster of its own; with `keep`, until cancelled."""
        places = self._places.below(story.name)
        logging.basicConfig(filename=places.folder / "simulation.log", level=logging.INFO, force=True)
        player = Player(places, self._score, colour=self._colour)
        player.title(story)
        async with World(places, story.nodes) as world, asyncio.TaskGroup() as group:
            watching = group.create_task(world.failed(), name="simulation")
            await player.play(story, world)
            if keep:
                self.conclude()
                words = "The cluster goes on until Ctrl-C. In another shell:"
                print(f"\n{words}\n\n{places.exports()}\n", flush=True)
                await watching
            watching.cancel()

    def conclude(self) -> int:
        """Say how it went; the exit status."""
        score, seconds = self._score, time.monotonic() - self._began
        print(f"\n{score.right} of {score.total} outputs are as documented, {seconds:.0f} s", flush=True)
        for one in score.wrong:
            print(f"not as documented: {one}", flush=True)
        self.concluded = True
        return 1 if score.wrong else 0


@contextlib.contextmanager
def _guarded(places: Places) -> Iterator[None]:
    """A second process ends everything, should this one be killed; it does the last cleaning anyhow."""
    folder = str(places.folder) if places.temporary else ""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, places.mark, folder], stdin=subprocess.PIPE
    )
    try:
        yield
    finally:
        process.communicate()
