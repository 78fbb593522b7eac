"""Back-off of one container, for crashes and for images: 10 s, doubling, at most 5 minutes (kubelet 1.36)."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S = 10.0
LONGEST_S = 300.0
FORGIVEN_AFTER_S = 600.0  # a container that ran this long starts over


@dataclass(slots=True)
class BackOff:
    """The first failure is retried immediately; each further one waits for the current delay."""

    delay_s: float = 0.0

    def after_failure(self, ran_s: float = 0.0) -> float:
        """Seconds to wait before the next attempt."""
        if ran_s > FORGIVEN_AFTER_S:
            self.delay_s = 0.0
        wait_s = self.delay_s
        self.delay_s = min(LONGEST_S, self.delay_s * 2 or FIRST_S)
        return wait_s


def shown(seconds: float) -> str:
    """As Go prints a duration: 10s, 1m20s, 5m0s."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
