"""Words of sentences for people."""

from __future__ import annotations

from collections.abc import Sequence

MOST_MEANT = 3


def counted(number: int, noun: str) -> str:
    """A number of things: 1 node, 2 nodes."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def lasting(seconds: float) -> str:
    """A time span in its two largest units: 45 s, 12 min, 3 h 5 min, 2 d 4 h."""
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if minutes < 1:
        return f"{max(0, int(seconds))} s"
    if hours < 1:
        return f"{minutes} min"
    if days < 1:
        return f"{hours} h {minutes % 60} min" if minutes % 60 else f"{hours} h"
    return f"{days} d {hours % 24} h" if hours % 24 else f"{days} d"


def nearest(name: str, names: Sequence[str]) -> str:
    """``did you mean a or b?``, "" when nothing is like it; the beginning of a name counts as like it."""
    from difflib import get_close_matches  # not for who makes no mistake

    near = get_close_matches(name, names, MOST_MEANT)
    near = near or [each for each in names if each.startswith(name)][:MOST_MEANT]
    return f"did you mean {' or '.join(near)}?" if near else ""
