"""Words of sentences for people."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number of things: 1 node, 2 nodes."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
