"""Logs as one JSON object a line: an event with its fields, for a collector.

What goes wrong again and again is written again now and then, not each time: in an outage every loop of a
process fails every few seconds, and who reads its log looks for what else has happened.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import IO, Any

import msgspec

_log = logging.getLogger(__name__)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

REPEAT_AFTER_S = 300.0
REMEMBERED = 1000


class JsonFormatter(logging.Formatter):
    """`extra` fields of a record become fields of the line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


@dataclass(slots=True)
class _Written:
    at_s: float
    repeated: int = 0


class RepeatFilter(logging.Filter):
    """Lets a warning or error with the same words pass once in five minutes, with how often it came since.

    What was measured (a number with a fraction) does not make it another; which card or process does. What is
    only information always passes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._written: OrderedDict[tuple[object, ...], _Written] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        fields = (
            (name, str(value))
            for name, value in vars(record).items()
            if name not in _STANDARD and not isinstance(value, float)
        )
        error = str(record.exc_info[1]) if record.exc_info else ""
        key = (record.name, record.getMessage(), error, *fields)
        before = self._written.get(key)
        if before is not None and record.created - before.at_s < REPEAT_AFTER_S:
            before.repeated += 1
            return False
        if before is not None and before.repeated:
            record.repeated = before.repeated
        self._written[key] = _Written(record.created)
        self._written.move_to_end(key)
        if len(self._written) > REMEMBERED:
            self._written.popitem(last=False)
        return True


def configure_logs(level: str = "info", stream: IO[str] | None = None) -> None:
    """Send all logs of the process to `stream` (standard error) as JSON lines.

    An unknown level means info, and is said: $LOG_LEVEL may be meant for another program.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(RepeatFilter())
    known = {"debug", "info", "warn", "warning", "error", "critical"}
    logging.basicConfig(
        level=(level if level.lower() in known else "info").upper(), handlers=[handler], force=True
    )
    if level.lower() not in known:
        _log.warning("log level is not known, info is used", extra={"given": level, "known": sorted(known)})
