"""Which jobs of a batch scheduler are on which card: files that its prologue writes, one per card.

A file ``<card>``, or ``<card>.<gpu instance>`` on a divided card, has one job id per line. A missing folder
or an unreadable file does not affect the page: it is logged once, and the rest counts. The prologue may run
as the job's user, so a file may contain anything.
"""

from __future__ import annotations

import logging
import os
import re

from gpuslice.adapters.region.plain import read_plain

_log = logging.getLogger(__name__)
LARGEST_FILE_BYTES = 1 << 16
MOST_JOBS = 100
"""Of one card: each of its series appears once for each job."""
_NAME = re.compile(r"\d+(\.\d+)?")


class Jobs:
    """Reads `folder`; "" for none."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._failed: set[str] = set()

    def read(self) -> dict[str, tuple[str, ...]]:
        """Name of the file → job ids."""
        if not self._folder:
            return {}
        try:
            names = [entry.name for entry in os.scandir(self._folder) if _NAME.fullmatch(entry.name)]
        except OSError as error:
            self._log_once(self._folder, error)
            return {}
        self._failed.discard(self._folder)
        found = {}
        for name in sorted(names):
            path = os.path.join(self._folder, name)
            try:
                text = read_plain(path, LARGEST_FILE_BYTES).decode(errors="replace")
            except OSError as error:
                self._log_once(path, error)
                continue
            self._failed.discard(path)
            jobs = tuple(dict.fromkeys(line.strip() for line in text.split("\n") if line.strip()))
            if jobs:
                found[name] = jobs[:MOST_JOBS]
        return found

    def _log_once(self, path: str, error: OSError) -> None:
        if path not in self._failed:
            self._failed.add(path)
            _log.warning("jobs of cards not read", extra={"path": path, "error": str(error)})
