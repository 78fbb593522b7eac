"""Times of any format in sentences, told as how long ago they are."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from gpuslice.core.words import lasting

_TIME = re.compile(
    r"(?:\bat |\bsince )?(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d))"
)


def aged(text: str) -> str:
    """`text` with how long ago its times are, whatever format a component writes them in."""

    def ago(found: re.Match[str]) -> str:
        passed_s = (datetime.now(UTC) - datetime.fromisoformat(found["time"])).total_seconds()
        return f"for {lasting(passed_s)}" if found[0].startswith("since") else f"{lasting(passed_s)} ago"

    return _TIME.sub(ago, text)
