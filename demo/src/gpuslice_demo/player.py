"""Plays a story: prints each command and what it prints, and checks it against what is documented."""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from gpuslice_demo import shell
from gpuslice_demo.places import Places
from gpuslice_demo.steps import Step, Story
from gpuslice_demo.world import World

_AGAIN_S = 0.15
_QUESTIONS = (
    "kubectl get events -A --field-selector=type=Warning",
    "for pod in $(kubectl get pod -o name); do kubectl logs --tail=3 $pod; done",
    "kubectl logs -n kube-system -l app=gpushare --tail=8 --prefix",
)


@dataclass(slots=True)
class Score:
    """How many outputs were as documented."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.right + len(self.wrong)


class Player:
    """Prints to `sys.stdout`; `colour` on a terminal."""

    def __init__(self, places: Places, score: Score, *, colour: bool) -> None:
        self._places = places
        self._score = score
        self._colour = colour
        self._began = time.monotonic()

    async def play(self, story: Story, world: World) -> None:
        """Play the steps of the story in the cluster `world`, up to the first that fails."""
        # the user's folder
        for name, text in story.files.items():
            (self._folder / name).write_text(text)
        for folder in (self._places.examples, self._places.charts):
            link = self._folder / folder.name
            if not link.is_symlink():
                link.symlink_to(folder)
        for step in story.steps:
            if not await self._play(story, step, world):
                return

    def title(self, story: Story) -> None:
        self._print()
        self._print(f"━━ {story.title}", style="1")

    @property
    def _folder(self) -> Path:
        return self._places.folder / "home"

    async def _play(self, story: Story, step: Step, world: World) -> bool:
        if step.before is not None:
            await step.before(world)
        self._print()
        if step.say:
            seconds = time.monotonic() - self._began
            self._print(f"# {step.say}  ({seconds:.0f} s)", style="2")
        prompt = f"[{step.on_node}]# " if step.on_node else "$ "
        self._print(prompt + step.command, style="36")
        output = await self._run_until_right(step, world)
        self._print(output.rstrip("\n"))
        if step.expected.fits(output):
            self._score.right += 1
            return True
        self._score.wrong.append(f"{story.name}: {step.command}")
        self._print(f"✗ this is not what is documented:\n{step.expected.difference(output)}", style="31")
        # what the cluster itself reports as wrong
        for command in _QUESTIONS:
            output = await shell.run(command, self._places.environment(), self._folder)
            self._print(f"$ {command}\n{output}", style="2")
        return False

    async def _run_until_right(self, step: Step, world: World) -> str:
        deadline = time.monotonic() + step.within_s
        while True:
            environ = world.node_environment(step.on_node) if step.on_node else self._places.environment()
            if step.terminal:
                output = await shell.run_in_terminal(step.command, environ, self._folder, step.typed)
            else:
                output = await shell.run(step.command, environ, self._folder)
            if step.expected.fits(output) or not _may_repeat(step) or time.monotonic() > deadline:
                return output
            await asyncio.sleep(_AGAIN_S)

    def _print(self, text: str = "", style: str = "") -> None:
        print(f"\033[{style}m{text}\033[0m" if style and self._colour else text, flush=True, file=sys.stdout)


def _may_repeat(step: Step) -> bool:
    """A command that changes something is typed only once."""
    changing = ("apply", "create", "delete", "label", "scale", "helm")
    return not any(f" {word} " in f" {step.command}" for word in changing)
