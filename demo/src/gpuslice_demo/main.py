"""``gpuslice demo``: the stories of the published documents, played on this machine without a GPU."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

import click

from gpuslice_demo import guard
from gpuslice_demo.places import Places, find_places
from gpuslice_demo.steps import Story
from gpuslice_demo.stories import STORIES


@click.command("demo")
@click.option(
    "--story",
    type=click.Choice([*STORIES, "all"]),
    help="Which story to play; all of them by default.",
)
@click.option(
    "--dra",
    "story",
    flag_value="claims",
    help="The first story on a node with claims; short for --story claims.",
)
@click.option(
    "--keep",
    is_flag=True,
    help="Leave the cluster running afterwards, until Ctrl-C. Without --story it is one to try things out, "
    "in the afternoon of a working day of four teams.",
)
@click.option(
    "--empty",
    is_flag=True,
    help="Leave a cluster running on which nothing is installed, for helm and kubectl of another shell.",
)
@click.option("--nodes", type=click.IntRange(1, 50), help="Nodes of the cluster to keep.  [default: 2]")
@click.option("--cards", type=click.IntRange(1, 16), help="Cards of each of its nodes.  [default: 2]")
@click.option("--dir", "folder", default="", help="Keep files in this folder; a temporary one by default.")
def command(
    *, story: str | None, keep: bool, empty: bool, nodes: int | None, cards: int | None, folder: str
) -> None:
    """Play the whole story on this machine: no GPU, cluster, root or container engine is needed.

    The chart is installed by helm, and its programs are the same as in a cluster. API server, kube-scheduler,
    kubelet and driver are simulated; kubectl and helm are the real ones. Exits with 1 if an output is not
    what the documentation shows.

    \b
    Examples:
      gpuslice demo                  all stories, in about half a minute
      gpuslice demo --story pools    one of them
      gpuslice demo --dra            unchanged manifests as claims (dynamic resource allocation)
      gpuslice demo --keep --nodes 3 --cards 4
                                     a cluster to try things out from another shell
      gpuslice demo --empty          one to install gpuslice on, as on your own
    """
    if empty and story:
        raise click.UsageError("--empty plays no story: leave out --story or --dra")
    if (nodes or cards) and (story or not (keep or empty)):
        raise click.UsageError(
            "--nodes and --cards are for --keep without --story or --dra and for --empty: "
            "the stories have their own"
        )
    places = find_places(folder)
    with _guarded(places):  # first: a Ctrl-C while the rest is loaded would leave the folder behind
        import asyncio  # this and all simulation code are not needed for the help

        from gpuslice_demo.playing import play
        from gpuslice_demo.stories.playground import empty as without_gpuslice
        from gpuslice_demo.stories.playground import playground

        if empty:
            stories: tuple[Story, ...] = (without_gpuslice(nodes or 2, cards or 2),)
        elif keep and story is None:
            stories = (playground(nodes or 2, cards or 2),)
        else:
            stories = tuple(STORIES.values()) if story in (None, "all") else (STORIES[story],)
        sys.exit(asyncio.run(play(places, stories, keep=keep or empty)))


@contextlib.contextmanager
def _guarded(places: Places) -> Iterator[None]:
    """A second process ends everything if this one is killed; it also does the last cleaning."""
    folder = str(places.folder) if places.temporary else ""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, places.mark, folder],
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C does not reach it, not even before it ignores the signal
    )
    try:
        yield
    finally:
        process.communicate()
