"""Makes the pictures of docs/operate/console.md: `python -m tests.integration.console_pictures`.

With a folder every view is taken in each theme and language, empty and huge: `... /tmp/pictures`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from gpuslice.apps.console.usage_history import STEP_S, STEPS, Point, UsageHistory
from gpuslice.core.units import MIB
from gpuslice.diagnosis.prometheus import TeamHours
from tests.integration.console_rig import V100, Rig, console, node, sample
from tests.integration.test_console_browser import VIEWS, fill, page, put_enemies

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
PICTURES = (
    ("cards", "light"),
    ("waiting", "light"),
    ("pod", "light"),
    ("teams", "dark"),
    ("health", "light"),
)
MORE = {
    "card": ("#/cards/gpu-a3/0", "text=over-its-limit"),
    "node": ("#/cards/gpu-b1", "canvas"),
}
EMPTY = ("cards", "waiting", "teams", "waste", "health")
THEMES = ("light", "dark")
SETTLES_MS = 700
Shot = tuple[str, str, tuple[str, str]]
"""Name, theme, and the view: its path, and what is there when it is drawn."""
WAVES = (0.2, 0.9, 0.6, 1.0)  # of what was used of the peak, over an hour


def remember(rig: Rig) -> None:
    """An hour of what pods used before the console was started: it would take an hour to wait for it."""
    history, now = UsageHistory(), time.time()
    for step in range(STEPS):
        history.step(now - (STEPS - step) * STEP_S)
        for key, (container, *_) in rig.console.usage.containers.items():
            peak, now_used = container.peak_bytes or 0, container.used_bytes or 0
            share = WAVES[step * len(WAVES) // STEPS] if container.refused else now_used / max(peak, 1)
            percent = round(100 * (container.sm_ratio or 0) * (0.7 + 0.3 * (step % 7) / 7))
            refused = int(bool(container.refused) and share == 1.0 and step % 9 == 0)
            history.put(key, Point(round(peak * share / MIB), percent, refused))
            if not percent:
                rig.console.usage.idle_at_s[key] = now - STEPS * STEP_S
        amounts = {"nlp": (43.0, 34.0, 1.98), "research": (34.0, 12.0, 2.7), "speech": (32.0, 30.0, 1.93)}
        amounts |= {"vision": (29.0, 18.0, 1.1), "notebooks": (28.0, 3.3, 0.02), "search": (9.5, 6.9, 0.5)}
        teams = {name: TeamHours(*each) for name, each in amounts.items()}
        history.put_teams(now - (STEPS - step) * STEP_S, teams)
    rig.console.usage.history = history


async def shots(rig: Rig, folder: Path, wanted: Iterable[Shot], suffix: str = "", **context: Any) -> None:
    """Each view as somebody sees it who just opened it."""
    for theme, shown in groupby(wanted, key=lambda each: each[1]):
        async with page(color_scheme=theme, **context) as seen:
            for name, _, at in shown:
                await seen.open(rig, *at)
                await seen.tab.wait_for_timeout(SETTLES_MS)
                await seen.tab.screenshot(
                    path=folder / f"console-{name.replace(' ', '-')}-{theme}{suffix}.png"
                )


async def everything(rig: Rig, folder: Path) -> None:
    """All views in both themes and languages on a tall page, and what a phone shows."""
    views = [(name, theme, at) for theme in THEMES for name, at in (VIEWS | MORE).items()]
    tall: dict[str, Any] = {"viewport": {"width": 1280, "height": 1250}}
    await shots(rig, folder, views, **tall)
    chinese = [(name, "dark", (path, "h1")) for name, (path, _) in VIEWS.items()]
    await shots(rig, folder, chinese, "-zh", locale="zh-CN", **tall)
    await shots(rig, folder, views[: len(VIEWS)], "-narrow", viewport={"width": 360, "height": 900})


async def enemies(folder: Path) -> None:
    """Names and messages of enemies, and then no API server any more."""
    async with console([node("n1", 4, V100), node("n" * 63, 4, V100)]) as rig:
        put_enemies(rig.console.rows)
        wanted = [(name, theme, (f"#/{name}", "main h1")) for theme in THEMES for name in EMPTY]
        await shots(rig, folder, wanted, "-hostile")
        phone = {"viewport": {"width": 390, "height": 844}}
        await shots(rig, folder, wanted[: len(EMPTY)], "-hostile-narrow", **phone)
        await rig.server.__aexit__(None, None, None)
        lost = [(name, theme, (path, "#banner:not(:empty)")) for name, theme, (path, _) in wanted]
        await shots(rig, folder, lost, "-lost")


async def extremes(folder: Path) -> None:
    """A cluster without anything, and one of 40,000 cards."""
    async with console() as rig:
        nothing = [(name, "light", (f"#/{name}", "main h1, main h2")) for name in EMPTY]
        await shots(rig, folder, nothing, "-empty")
        fill(rig.console.rows, 5000, 8, 20_000)
        for number in range(2000):
            key, namespace = f"late-{number}", f"team-{number % 12}"
            pod = {"namespace": namespace, "name": key, "units": 16, "phase": "Pending"}
            created = {"created": f"2026-01-01T00:{number % 60:02}:00Z"}
            rig.console.rows.put("pods", f"{namespace}/{key}", pod | created, namespace)
            asks = f"it asks for {16 + number % 3} units"
            why = f"It will never fit here: {asks}, and the largest shared card has 15."
            row = {"namespace": namespace, "name": key, "why": why, "help": [], "never": True}
            rig.console.rows.put("waiting", f"{namespace}/{key}", row, namespace)
        huge = [(name, theme, (f"#/{name}", "main h1")) for theme in THEMES for name in EMPTY]
        await shots(rig, folder, huge, "-huge")


async def main(folder: Path, *, all_of_them: bool) -> None:
    folder.mkdir(exist_ok=True)
    async with sample(usage_interval_s=1.0) as rig:
        while rig.console.usage.read_at_s is None:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        remember(rig)
        if all_of_them:
            await everything(rig, folder)
        else:
            badge = "#nav a[href='#/health'] >> text=2"  # what is worked out a while later
            complete = VIEWS | {"waiting": ("#/waiting", ".whatif"), "cards": ("#/cards", badge)}
            documented = [(name, theme, complete[name]) for name, theme in PICTURES]
            await shots(rig, folder, documented, viewport={"width": 1280, "height": 800})
    if all_of_them:
        await enemies(folder)
        await extremes(folder)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]) if sys.argv[1:] else FOLDER, all_of_them=bool(sys.argv[1:])))
