"""Times as the API writes them, and ages as kubectl prints them."""

from __future__ import annotations

from datetime import UTC, datetime


def format_time(epoch_s: float) -> str:
    """RFC 3339 in whole seconds, as metav1.Time."""
    return datetime.fromtimestamp(int(epoch_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> float:
    """Seconds since the epoch; ValueError if it is no RFC 3339 time."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def age(timestamp: str | None, now_s: float) -> str:
    """How long ago, or ``<unknown>`` when nobody said."""
    return human_duration(now_s - parse_time(timestamp)) if timestamp else "<unknown>"


def human_duration(duration_s: float) -> str:  # noqa: PLR0911 - one line a range
    """Kubernetes' short form: two units while the second one matters (``3m10s``, ``7h35m``, ``11d``)."""
    seconds = int(duration_s)
    if duration_s < 0:
        return "0s" if duration_s > -1 else "<invalid>"
    minutes, hours, days, years = seconds // 60, seconds // 3600, seconds // 86400, seconds // (86400 * 365)
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10:
        return _two(minutes, "m", seconds % 60, "s")
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return _two(hours, "h", minutes % 60, "m")
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return _two(days, "d", hours % 24, "h")
    if years < 2:
        return f"{days}d"
    return _two(years, "y", days % 365, "d") if years < 8 else f"{years}y"


def _two(first: int, first_unit: str, second: int, second_unit: str) -> str:
    return f"{first}{first_unit}{second}{second_unit}" if second else f"{first}{first_unit}"
