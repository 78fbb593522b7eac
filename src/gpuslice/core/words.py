"""Words of sentences for people."""

from __future__ import annotations


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
