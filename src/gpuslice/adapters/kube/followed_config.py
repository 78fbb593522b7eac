"""How to reach the API server, as a kubeconfig or the pod's own account says now."""

from __future__ import annotations

import contextlib
import logging

from gpuslice.adapters.files import SETTLED_S, FollowedFile
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.credentials import Secret, tls_context
from gpuslice.adapters.kube.errors import ConfigError

_log = logging.getLogger(__name__)


class FollowedConfig:
    """`current` is what the files say, or the last that could be used."""

    def __init__(self, connection: Connection, settled_s: float = SETTLED_S) -> None:
        self._settled_s = settled_s
        self._files: dict[str, FollowedFile] = {}
        self._problem = ""
        self._adopt(connection)

    def _adopt(self, connection: Connection) -> None:
        self.current, before = connection, self._files
        self._files = {
            path: before.get(path) or FollowedFile(path, self._settled_s) for path in connection.files
        }
        self._contents = self._read()

    def _read(self) -> tuple[bytes, ...] | None:
        with contextlib.suppress(OSError):  # in the middle of a rotation
            return tuple(file.read() for file in self._files.values())
        return None

    @property
    def may_change(self) -> bool:
        return bool(self._files) and self.current.reread is not None

    def refresh(self, *, at_once: bool = False) -> bool:
        """Whether the files say something else now. `at_once`: even if somebody may still be writing them."""
        contents = self._read()
        unchanged = contents is None or contents == self._contents
        if self.current.reread is None or (unchanged and not at_once):
            return False
        try:
            renewed = self.current.reread()
            who = renewed.credentials
            tls_context(renewed.tls, Secret() if who.blocks() else who.current())
        except ConfigError as error:
            if str(error) != self._problem:
                extra = {"source": self.current.source, "error": str(error)}
                _log.warning("the way to the API server not reloaded, the last one stays", extra=extra)
            self._problem, self._contents = str(error), None
            return False
        self._problem, self._contents = "", contents
        if renewed == self.current:
            return False
        _log.info("the way to the API server reloaded", extra={"source": renewed.source})
        self._adopt(renewed)
        return True
