"""What kubelet knows about a container, and how the API shows it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gpuslice.core.model import ContainerKind


@dataclass(frozen=True, slots=True)
class WaitingState:
    reason: str
    message: str = ""

    def as_json(self) -> dict[str, Any]:
        shown = {"reason": self.reason, **({"message": self.message} if self.message else {})}
        return {"waiting": shown}


@dataclass(frozen=True, slots=True)
class RunningState:
    started_at: datetime

    def as_json(self) -> dict[str, Any]:
        return {"running": {"startedAt": timestamp(self.started_at)}}


@dataclass(frozen=True, slots=True)
class TerminatedState:
    exit_code: int
    started_at: datetime
    finished_at: datetime
    container_id: str = ""
    reason: str = ""
    message: str = ""

    def as_json(self) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "exitCode": self.exit_code,
            "reason": self.reason or ("Completed" if self.exit_code == 0 else "Error"),
            "startedAt": timestamp(self.started_at),
            "finishedAt": timestamp(self.finished_at),
        }
        if self.message:
            shown["message"] = self.message
        if self.container_id:
            shown["containerID"] = self.container_id
        return {"terminated": shown}


State = WaitingState | RunningState | TerminatedState


@dataclass(slots=True)
class ContainerRecord:
    """One container of a pod. `last` is how its attempt before this one ended.

    `probed_ready` and `probed_started` are what its probes say; true where it has none.
    """

    name: str
    image: str
    kind: ContainerKind
    state: State
    last: TerminatedState | None = None
    restart_count: int = 0
    container_id: str = ""
    probed_ready: bool = True
    probed_started: bool = True

    @property
    def ready(self) -> bool:
        if self.kind is ContainerKind.INIT:
            return isinstance(self.state, TerminatedState) and self.state.exit_code == 0
        return self.started and self.probed_ready

    @property
    def started(self) -> bool:
        return isinstance(self.state, RunningState) and self.probed_started

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "image": self.image,
            "imageID": f"sim://{self.image}",
            "containerID": self.container_id,
            "ready": self.ready,
            "started": self.started,
            "restartCount": self.restart_count,
            "state": self.state.as_json(),
            "lastState": self.last.as_json() if self.last else {},
        }


def timestamp(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
