"""Makes the pictures of docs/operate/console.md: `python -m tests.integration.console_pictures`.

With a folder and themes every view is taken, to be looked at: `... /tmp/pictures light dark`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from gpuslice.apps.console.cluster_state import now_s
from gpuslice.apps.console.usage_history import STEP_S, STEPS, Point, UsageHistory
from gpuslice.apps.diagnosis.prometheus import TeamHours
from gpuslice.core.units import MIB
from tests.integration.console_rig import Rig, sample
from tests.integration.test_console_browser import VIEWS, page

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
PICTURES = (
    ("cards", "light"),
    ("waiting", "light"),
    ("pod", "light"),
    ("teams", "dark"),
    ("health", "light"),
)
WAVES = (0.2, 0.9, 0.6, 1.0)  # of what was used of the peak, over an hour


def remember(rig: Rig) -> None:
    """An hour of what pods used before the console was started: it would take an hour to wait for it."""
    history, now = UsageHistory(), now_s()
    for step in range(STEPS):
        history.step(now - (STEPS - step) * STEP_S)
        for key, (container, *_) in rig.console.usage.containers.items():
            peak, now_used = container.peak_bytes or 0, container.used_bytes or 0
            share = WAVES[step * len(WAVES) // STEPS] if container.refused else now_used / max(peak, 1)
            percent = round(100 * (container.sm_ratio or 0) * (0.7 + 0.3 * (step % 7) / 7))
            refused = int(bool(container.refused) and share == 1.0 and step % 9 == 0)
            history.put(key, Point(round(peak * share / MIB), percent, refused))
        amounts = {"nlp": (43.0, 34.0, 1.98), "research": (34.0, 12.0, 2.7), "speech": (32.0, 30.0, 1.93)}
        amounts |= {"vision": (29.0, 18.0, 1.1), "notebooks": (28.0, 3.3, 0.02), "search": (9.5, 6.9, 0.5)}
        teams = {name: TeamHours(*each) for name, each in amounts.items()}
        history.put_teams(now - (STEPS - step) * STEP_S, teams)
    rig.console.usage.history = history


async def main(folder: Path, themes: Sequence[str]) -> None:
    """Of every view in `themes`; without them those that the documentation shows."""
    wanted = [(name, theme) for name in VIEWS for theme in themes] if themes else PICTURES
    folder.mkdir(exist_ok=True)
    async with sample(usage_interval_s=1.0) as rig:
        while rig.console.usage.read_at_s is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        remember(rig)
        for name, theme in wanted:
            async with page(color_scheme=theme, viewport={"width": 1200, "height": 800}) as seen:
                await seen.open(rig, *VIEWS[name])
                await seen.tab.wait_for_timeout(1000)
                await seen.tab.screenshot(path=folder / f"console-{name.replace(' ', '-')}-{theme}.png")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if sys.argv[1:] else FOLDER, sys.argv[2:]))
