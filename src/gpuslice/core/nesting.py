"""How deep a document is nested: parsers in C follow it with their stack, and end the process."""

from __future__ import annotations

from gpuslice.core.errors import GpusliceError

MOST_LEVELS = 400


class TooDeepError(GpusliceError, ValueError):
    """Nested deeper than anything that a person or a program of ours writes."""


def checked_depth(document: bytes) -> bytes:
    """The YAML or JSON document itself. Raises `TooDeepError` where it may have more than `MOST_LEVELS`.

    No less than there are is counted: brackets in texts too, and a level for each sign that begins a line.
    """
    open_brackets = deepest = 0
    for line in document.splitlines():
        deepest = max(deepest, len(line) - len(line.lstrip(b" \t-?:")))
        if b"[" in line or b"{" in line:
            for sign in line:
                if sign in b"[{":
                    open_brackets += 1
                    deepest = max(deepest, open_brackets)
                elif sign in b"]}":
                    open_brackets -= 1
        else:
            open_brackets -= line.count(b"]") + line.count(b"}")
        open_brackets = max(open_brackets, 0)
        if deepest > MOST_LEVELS:
            raise TooDeepError(f"it is nested in more than {MOST_LEVELS} levels")
    return document
