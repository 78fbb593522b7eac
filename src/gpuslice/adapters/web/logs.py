"""Logs as one JSON object a line: an event with its fields, for a collector."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import IO, Any

import msgspec

_log = logging.getLogger(__name__)
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


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


def configure_logs(level: str = "info", stream: IO[str] | None = None) -> None:
    """Send all logs of the process to `stream` (standard error) as JSON lines.

    An unknown level means info, and is said: $LOG_LEVEL may be meant for another program.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    known = {"debug", "info", "warn", "warning", "error", "critical"}
    logging.basicConfig(
        level=(level if level.lower() in known else "info").upper(), handlers=[handler], force=True
    )
    if level.lower() not in known:
        _log.warning("log level is not known, info is used", extra={"given": level, "known": sorted(known)})
