"""What somebody may have meant by a name that does not exist."""

from __future__ import annotations

from collections.abc import Sequence

_MOST = 3


def nearest(name: str, names: Sequence[str]) -> str:
    """``did you mean a or b?``, "" when nothing is like it; the beginning of a name counts as like it."""
    from difflib import get_close_matches

    near = get_close_matches(name, names, _MOST) or [each for each in names if each.startswith(name)][:_MOST]
    return f"did you mean {' or '.join(near)}?" if near else ""
