"""Changes of pods that this process made itself: the watch shows them too, with nothing new in them."""

from __future__ import annotations


class OwnWrites:
    """Versions that our writes gave to pods, each made on the version that we knew."""

    def __init__(self) -> None:
        self._versions: dict[str, str] = {}  # by uid, of writes that the watch has not shown

    def note(self, uid: str, version: str) -> None:
        self._versions[uid] = version

    def shown(self, uid: str, version: str) -> bool:
        """Whether a pod is as we wrote it. To be asked once of everything that the watch shows."""
        return self._versions.pop(uid, None) == version
