"""What a controller has done but not observed yet: until then it must not decide again."""

from __future__ import annotations

from collections.abc import Callable

_PATIENCE_S = 5.0


class Expectations:
    """Creations and deletions by the uid of the owner they were done for; expire after some seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._now_s = clock
        self._created: dict[str, dict[str, float]] = {}
        self._deleted: dict[str, dict[str, float]] = {}

    def creation(self, owner: str, uid: str) -> None:
        self._created.setdefault(owner, {})[uid] = self._now_s()

    def deletion(self, owner: str, uid: str) -> None:
        self._deleted.setdefault(owner, {})[uid] = self._now_s()

    def seen(self, uid: str, going: bool) -> None:
        """An object was observed; ``going`` if it is gone or marked for deletion."""
        for waiting in self._created.values():
            waiting.pop(uid, None)
        if going:
            for waiting in self._deleted.values():
                waiting.pop(uid, None)

    def wait_s(self, owner: str) -> float:
        """How long to wait at most for what has not been observed; 0 if nothing is outstanding."""
        now_s = self._now_s()
        times: list[float] = []
        for expected in (self._created, self._deleted):
            held = {uid: at for uid, at in expected.pop(owner, {}).items() if now_s - at < _PATIENCE_S}
            if held:
                expected[owner] = held
                times += held.values()
        return max(times) + _PATIENCE_S - now_s if times else 0.0
