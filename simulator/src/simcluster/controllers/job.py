"""Jobs: pods run until enough of them succeeded, or too many failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simcluster.cluster.moment import format_time, parse_time
from simcluster.controllers.actions import Action, Again, Create, Delete, Tell, delete, patch_status
from simcluster.controllers.ownership import controller_reference, is_going
from simcluster.controllers.pods import condition, deletion_rank, is_active, is_ready, new_pod, phase

Object = Mapping[str, Any]

_INDEX = "batch.kubernetes.io/job-completion-index"


def reconcile(job: Object, pods: Sequence[Object], now_s: float) -> list[Action]:
    """The next actions for a job that controls these pods."""
    if is_going(job):
        return []
    if is_over(job):
        # deletes a finished job ``ttlSecondsAfterFinished`` after its end
        lifetime_s = job["spec"].get("ttlSecondsAfterFinished")
        if lifetime_s is None:
            return []
        ended = condition(job, "Complete") or condition(job, "Failed")
        left_s = parse_time(ended["lastTransitionTime"]) + lifetime_s - now_s
        if left_s > 0:
            return [Again(left_s)]
        metadata = job["metadata"]
        return [Delete("Job", metadata["namespace"], metadata["name"], metadata["uid"], "Foreground")]
    look = _Look(job, pods, now_s)
    return look.steps()


def is_over(job: Object) -> bool:
    return any(condition(job, kind).get("status") == "True" for kind in ("Complete", "Failed"))


class _Look:
    """One look at a job and its pods. Counts never decrease, even if finished pods are deleted."""

    def __init__(self, job: Object, pods: Sequence[Object], now_s: float) -> None:
        self.job = job
        self.spec: Object = job["spec"]
        self.status: Object = job.get("status") or {}
        self.now_s = now_s
        self.indexed = self.spec.get("completionMode") == "Indexed"
        self.active = [pod for pod in pods if is_active(pod)]
        self.pods = pods
        self.done = self._done_indexes() if self.indexed else set()
        succeeded = len(self.done) if self.indexed else self._count("Succeeded")
        self.succeeded = max(succeeded, self.status.get("succeeded", 0))
        self.failed = max(self._count("Failed"), self.status.get("failed", 0))

    def _count(self, wanted: str) -> int:
        return sum(phase(pod) == wanted for pod in self.pods)

    def _done_indexes(self) -> set[int]:
        finished = (_index(pod) for pod in self.pods if phase(pod) == "Succeeded")
        # ``0-2,5`` as a set
        text = self.status.get("completedIndexes", "")
        found: set[int] = set()
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            found |= set(range(int(first), int(last or first) + 1))
        return {number for number in finished if number is not None} | found

    def steps(self) -> list[Action]:
        if why := self._failure():
            return [*self._delete(self.active), *self._end("Failed", *why)]
        if self._is_complete():
            return [*self._delete(self.active), *self._end("Complete", "CompletionsReached", _REACHED)]
        if self.spec.get("suspend"):
            wanted = 0
        else:
            parallelism, completions = self.spec.get("parallelism", 1), self.spec.get("completions")
            if completions is None:
                wanted = len(self.active) if self.succeeded else int(parallelism)
            else:
                wanted = int(min(parallelism, completions - self.succeeded))
        missing = wanted - len(self.active)
        if missing < 0:
            actions = self._delete(sorted(self.active, key=deletion_rank)[:-missing])
        elif self._backs_off():
            actions = [Again(self._backs_off())]
        else:
            actions = [
                Create("Pod", self._pod(n), self.job["metadata"]["namespace"]) for n in self._indexes(missing)
            ]
        limit_s, started = self.spec.get("activeDeadlineSeconds"), self.status.get("startTime")
        if limit_s is None or not started:
            deadline = []
        else:
            deadline = [Again(max(parse_time(started) + limit_s - self.now_s, 0) + 0.1)]
        return [*actions, *self._write_status({}), *deadline]

    def _failure(self) -> tuple[str, str] | None:
        limit_s = self.spec.get("activeDeadlineSeconds")
        started = self.status.get("startTime")
        if self.failed > self.spec.get("backoffLimit", 6):
            return "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        if limit_s is not None and started and self.now_s - parse_time(started) >= limit_s:
            return "DeadlineExceeded", "Job was active longer than specified deadline"
        return None

    def _is_complete(self) -> bool:
        """Without completions, one success means that the work is done; the other pods may finish."""
        completions = self.spec.get("completions")
        if completions is None:
            return self.succeeded > 0 and not self.active
        return bool(self.succeeded >= completions)

    def _backs_off(self) -> float:
        """After failures new pods wait: 10 s, doubled each time, at most 10 minutes."""
        failed = [pod for pod in self.pods if phase(pod) == "Failed"]
        if not failed:
            return 0.0
        last_s = max(_ended_s(pod) for pod in failed)
        return max(last_s + min(10.0 * 2.0 ** (len(failed) - 1), 600.0) - self.now_s, 0.0)

    def _indexes(self, count: int) -> list[int | None]:
        if not self.indexed:
            return [None] * count
        taken = self.done | {_index(pod) for pod in self.active}
        open_indexes: list[int | None] = [n for n in range(self.spec["completions"]) if n not in taken]
        return open_indexes[:count]

    def _pod(self, index: int | None) -> dict[str, Any]:
        name = self.job["metadata"]["name"]
        reference = controller_reference(self.job, "batch/v1", "Job")
        if index is None:
            return new_pod(self.spec["template"], reference, {}, generateName=f"{name}-")
        pod = new_pod(self.spec["template"], reference, {_INDEX: str(index)}, generateName=f"{name}-{index}-")
        pod["metadata"].setdefault("annotations", {})[_INDEX] = str(index)
        pod["spec"].setdefault("hostname", f"{name}-{index}")
        for container in pod["spec"]["containers"]:
            container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
        return pod

    def _delete(self, pods: Sequence[Object]) -> list[Action]:
        actions: list[Action] = []
        for pod in pods:
            actions += [
                Tell("SuccessfulDelete", f"Deleted pod: {pod['metadata']['name']}"),
                delete("Pod", pod),
            ]
        return actions

    def _end(self, kind: str, reason: str, message: str) -> list[Action]:
        criteria = "SuccessCriteriaMet" if kind == "Complete" else "FailureTarget"
        now = format_time(self.now_s)
        about = {"status": "True", "lastProbeTime": now, "lastTransitionTime": now}
        conditions = [
            {"type": item, **about, "reason": reason, "message": message} for item in (criteria, kind)
        ]
        self.active = []
        ended: dict[str, Any] = {"conditions": conditions}
        if kind == "Complete":
            ended["completionTime"] = format_time(self.now_s)
            event = Tell("Completed", "Job completed")
        else:
            event = Tell(reason, message, "Warning")
        return [*self._write_status(ended), event]

    def _write_status(self, more: Mapping[str, Any]) -> list[Action]:
        status: dict[str, Any] = {
            "active": len(self.active) or None,
            "ready": sum(is_ready(pod) for pod in self.active),
            "terminating": sum(is_going(pod) for pod in self.pods),
            "succeeded": self.succeeded or None,
            "failed": self.failed or None,
        }
        if not self.status.get("startTime") and not self.spec.get("suspend"):
            status["startTime"] = format_time(self.now_s)
        if self.indexed:
            # A set as ``0-2,5``
            numbers = self.done
            parts: list[list[int]] = []
            for number in sorted(numbers):
                if parts and number == parts[-1][-1] + 1:
                    parts[-1].append(number)
                else:
                    parts.append([number])
            status["completedIndexes"] = (
                ",".join(
                    f"{part[0]}-{part[-1]}" if len(part) > 2 else ",".join(map(str, part)) for part in parts
                )
                or None
            )
        return patch_status("Job", self.job, {**status, **more})


_REACHED = "Reached expected number of succeeded pods"


def _index(pod: Object) -> int | None:
    text = (pod["metadata"].get("annotations") or {}).get(_INDEX)
    return int(text) if text is not None else None


def _ended_s(pod: Object) -> float:
    states = [c.get("state") or {} for c in (pod.get("status") or {}).get("containerStatuses") or []]
    times = [t for state in states if (t := (state.get("terminated") or {}).get("finishedAt"))]
    return max((parse_time(t) for t in times), default=parse_time(pod["metadata"]["creationTimestamp"]))
