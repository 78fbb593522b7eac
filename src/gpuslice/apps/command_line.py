"""What the command lines of all processes have in common: numbers one can count with, and proposals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import click

_MOST = 3


class FiniteRange(click.FloatRange):
    """click's range lets NaN through, for it is neither below nor above anything."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no number to count with.", param, ctx)
        return number


def nearest(name: str, names: Sequence[str]) -> str:
    """``did you mean a or b?``, "" when nothing is like it; the beginning of a name counts as like it."""
    from difflib import get_close_matches

    near = get_close_matches(name, names, _MOST) or [each for each in names if each.startswith(name)][:_MOST]
    return f"did you mean {' or '.join(near)}?" if near else ""
