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
from collections.abc import Sequence
from pathlib import Path

from .sequence_players import can_make_namespaces
from .sequences import STEPS, WEIGHTS, Story


def play(folder: Path, steps: int, seed: int, *, namespaces: bool = False) -> Story:
    """A random sequence of that many steps; a difference says how to play it again."""
    dice = random.Random(seed)
    story = Story(folder, namespaces=namespaces)
    names = list(STEPS)
    try:
        for _ in range(steps):
            (name,) = dice.choices(names, WEIGHTS)
            story.step(name, dice.randrange(256), dice.randrange(256), dice.randrange(256))
        story.close()
    except BaseException as error:
        error.add_note(f"seed {seed}, step {story.steps}:\n  " + "\n  ".join(story.told))
        story.abandon()
        raise
    return story


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--a-story", type=int, default=2000, help="steps on one machine before the next begins"
    )
    chosen = parser.parse_args(arguments)
    begun, total, failed = time.monotonic(), Counter[str](), 0
    largest = {"over": 0, "under": 0}
    for number in range((chosen.steps + chosen.a_story - 1) // chosen.a_story):
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR", "/tmp")) as folder:
            try:
                namespaces = number % 5 == 0 and can_make_namespaces()
                story = play(Path(folder), chosen.a_story, chosen.seed + number, namespaces=namespaces)
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
