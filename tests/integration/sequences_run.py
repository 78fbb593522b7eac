"""Very long sequences (see `sequences`), made by a random number generator.

python -m tests.integration.sequences_run --steps 1000000 --seed 7
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from .sequence_players import KINDS, can_make_namespaces
from .sequences import STEPS, WEIGHTS, Story

MIX: Final = {**dict(zip(STEPS, WEIGHTS, strict=True)), **Counter(KINDS)}
"""How often each step is taken and each kind of memory asked for."""


def play(
    folder: Path, steps: int, seed: int, *, namespaces: bool = False, mix: Mapping[str, int] = MIX
) -> Story:
    """A random sequence of that many steps; a difference says how to play it again."""
    dice = random.Random(seed)
    kinds = [kind for kind in dict.fromkeys(KINDS) for _ in range(mix[kind])]
    story = Story(folder, namespaces=namespaces, kinds=kinds)
    names, weights = list(STEPS), [mix[name] for name in STEPS]
    try:
        for _ in range(steps):
            (name,) = dice.choices(names, weights)
            story.step(name, dice.randrange(256), dice.randrange(256), dice.randrange(256))
        story.close()
    except BaseException as error:
        error.add_note(f"seed {seed}, step {story.steps}:\n  " + "\n  ".join(story.told))
        story.abandon()
        raise
    return story


def mix_of(text: str) -> dict[str, int]:
    """The weights that a command line names."""
    pairs = (each.split("=", 1) for each in text.split(",") if each)
    mix = {name.strip(): int(weight) for name, weight in pairs}
    if unknown := sorted(mix.keys() - MIX.keys()):
        raise SystemExit(f"--mix: no {', '.join(unknown)}; there are {', '.join(MIX)}")
    return mix


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--a-story", type=int, default=2000, help="steps on one machine before the next begins"
    )
    parser.add_argument(
        "--mix",
        default="",
        help="weights of steps and of kinds of memory: threads=20,pool=6; the rest as ever",
    )
    chosen = parser.parse_args(arguments)
    mix = {**MIX, **mix_of(chosen.mix)}
    begun, total, failed = time.monotonic(), Counter[str](), 0
    largest = {"over": 0, "under": 0}
    for number in range((chosen.steps + chosen.a_story - 1) // chosen.a_story):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/tmp")) as folder:
            try:
                namespaces = number % 5 == 0 and can_make_namespaces()
                story = play(
                    Path(folder), chosen.a_story, chosen.seed + number, namespaces=namespaces, mix=mix
                )
            except Exception as error:
                failed += 1
                print(f"{error}\n{error.__notes__[0]}", flush=True)
                continue
        total += story.counts
        total["steps"] += chosen.a_story
        largest = {side: max(largest[side], story.largest_provisional[side]) for side in largest}
        if number % 20 == 19:
            print(
                f"{total['steps']} steps in {time.monotonic() - begun:.0f} s, {failed} stories differ",
                flush=True,
            )
    print(f"{total['steps']} steps in {time.monotonic() - begun:.0f} s; {failed} stories with a difference")
    print(f"largest provisional difference: {largest['over']} bytes over, {largest['under']} under")
    for name, count in sorted(total.items()):
        print(f"{name}: {count}")


if __name__ == "__main__":
    main()
