"""The counter file in force, and its successor when the file changes.

A ConfigMap volume is changed by renaming a link two folders up, which watchers of the file miss; so the file
is looked at instead: what it resolves to, its time and its size. A file that cannot be read leaves the one
before in force.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from gpuslice.apps.exporter.counters import CounterFile, parse
from gpuslice.apps.exporter.fields import Field

_log = logging.getLogger(__name__)


class CounterConfig:
    """The built-in counters until `path` could be read; a text from elsewhere comes before both."""

    def __init__(self, path: str, catalogue: Mapping[str, Field]) -> None:
        self._path = Path(path) if path else None
        self._catalogue = catalogue
        self._stamp: tuple[str, int, int] | None = None
        self._text: str | None = None
        self._told: set[str] = set()
        self.ok = True
        self.version = 0
        self.file = CounterFile(())
        self._take(resources.files(__package__).joinpath("default-counters.csv").read_text(), "built-in")

    def look(self) -> None:
        """Read the file again if it is another one than last time."""
        if self._path is None:
            return
        try:
            stat = self._path.stat()
            stamp = (str(self._path.resolve()), stat.st_mtime_ns, stat.st_size)
            if stamp != self._stamp:
                self._take(self._path.read_text(errors="replace"), str(self._path))
                self._stamp = stamp
        except OSError as error:
            if self.ok:
                extra = {"file": str(self._path), "error": str(error), "instead": "those before stay"}
                _log.warning("counter file not read", extra=extra)
            self.ok = False
            self._stamp = None

    def asks(self, name: str) -> bool:
        """Whether the counters in force have one of this name."""
        return any(counter.name == name for counter in self.file.counters)

    def use(self, text: str, source: str) -> bool:
        """Counters of a ConfigMap read through the API; the file no longer counts. False if known already."""
        if text == self._text:
            return False
        self._path, self._text = None, text
        self._take(text, source)
        return True

    def _take(self, text: str, source: str) -> None:
        found = parse(text, self._catalogue)
        for problem in found.problems:
            if problem not in self._told:
                _log.warning("counter left out", extra={"source": source, "problem": problem})
        self._told = set(found.problems)
        self.ok = bool(found.counters) or not found.problems
        if self.ok:
            self.file = found
            self.version += 1
            _log.info("counters in force", extra={"source": source, "counters": len(found.counters)})
