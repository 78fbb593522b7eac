"""Container logs in the format of the container runtime interface: ``<time> stdout F <line>``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

_LONGEST_LINE_BYTES = 16 * 1024  # longer ones are cut into partial entries, tag P
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Options of `kubectl logs`; None and False mean not given."""

    follow: bool = False
    tail_lines: int | None = None
    limit_bytes: int | None = None
    since_s: int | None = None
    since_time: str = ""
    timestamps: bool = False


class LogWriter:
    """Appends a container's output; both of its streams go through the same writer."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    async def copy(self, stream: asyncio.StreamReader, name: str) -> None:
        """Write `stream` ("stdout" or "stderr") line by line until it ends."""
        rest = b""
        while chunk := await stream.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                whole = max(len(line) - 1, 0) // _LONGEST_LINE_BYTES * _LONGEST_LINE_BYTES
                for start in range(0, whole, _LONGEST_LINE_BYTES):
                    self._entry(line[start : start + _LONGEST_LINE_BYTES], name, b"P")
                self._entry(line[whole:], name, b"F")
            while len(rest) >= _LONGEST_LINE_BYTES:
                self._entry(rest[:_LONGEST_LINE_BYTES], name, b"P")
                rest = rest[_LONGEST_LINE_BYTES:]
        if rest:
            self._entry(rest, name, b"P")

    def close(self) -> None:
        self._file.close()

    def _entry(self, text: bytes, name: str, tag: bytes) -> None:
        moment = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z").encode()
        self._file.write(b" ".join((moment, name.encode(), tag, text)) + b"\n")


async def read(path: Path, query: LogQuery, alive: Callable[[], bool]) -> AsyncIterator[bytes]:
    """The requested lines of the log; with `follow` until the container is gone (`alive` returns false)."""
    shown = _Shown(query)
    with path.open("rb") as file:
        entries = file.readlines()
        oldest = query.since_time
        if query.since_s is not None:
            oldest = (datetime.now(UTC) - timedelta(seconds=query.since_s)).strftime(
                "%Y-%m-%dT%H:%M:%S.%f000Z"
            )
        if oldest:
            entries = [one for one in entries if one.partition(b" ")[0].decode() >= oldest]
        if query.tail_lines is not None:
            entries = entries[len(entries) - query.tail_lines :] if query.tail_lines else []
        yield shown.cut(entries)
        while query.follow and not shown.full:
            running = alive()
            yield shown.cut(file.readlines())
            if not running:
                return
            await asyncio.sleep(_POLL_S)


@dataclass(slots=True)
class _Shown:
    """Counts what was shown, for ``--limit-bytes``."""

    query: LogQuery
    count: int = 0

    @property
    def full(self) -> bool:
        return self.query.limit_bytes is not None and self.count >= self.query.limit_bytes

    def cut(self, entries: Iterable[bytes]) -> bytes:
        text = b"".join(_text(entry, self.query.timestamps) for entry in entries)
        if self.query.limit_bytes is not None:
            text = text[: self.query.limit_bytes - self.count]
        self.count += len(text)
        return text


def _text(entry: bytes, timestamps: bool) -> bytes:
    """One entry as shown: a partial one without its line end, so that the next one continues it."""
    moment, _, rest = entry.partition(b" ")
    _, _, rest = rest.partition(b" ")
    tag, _, text = rest.partition(b" ")
    shown = text if tag == b"F" else text.removesuffix(b"\n")
    return moment + b" " + shown if timestamps else shown
