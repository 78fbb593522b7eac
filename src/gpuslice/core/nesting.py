"""How deeply a document is nested: parsers in C recurse with it, and would end the process."""

from __future__ import annotations

from gpuslice.core.errors import GpusliceError

MOST_LEVELS = 400


class TooDeepError(GpusliceError, ValueError):
    """Nested more deeply than anything that a person or one of our programs writes."""


def checked_depth(document: bytes) -> bytes:
    """The YAML or JSON document itself. Raises `TooDeepError` if it may have more than `MOST_LEVELS`.

    The count is an upper bound: it includes brackets in strings, and a level for each indicator at the start
    of a line.
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
