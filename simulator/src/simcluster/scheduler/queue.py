"""The scheduling queue: pods ready to be tried, pods in back-off, and pods that nothing can help yet.

Pure: time is a parameter. A pod that did not fit waits for an event that could help; if one arrived while it
was being tried, it goes to back-off instead, so that nothing is missed.
"""

from __future__ import annotations

from dataclasses import dataclass

from simcluster.cluster.amounts import Object

UNSCHEDULABLE_LIMIT_S = 300.0  # after this time a pod is tried again in any case


@dataclass(slots=True)
class Waiting:
    """One pod in the queue. `attempts`: how many were made; `since`: when it entered its present place.

    `any_event` wakes it, because an extender rejected it and only the extender knows what would help.
    """

    pod: Object
    added_at: float
    since: float
    attempts: int = 0
    round_started: int = 0
    any_event: bool = False

    @property
    def uid(self) -> str:
        return str(self.pod["metadata"]["uid"])

    @property
    def order(self) -> tuple[int, float]:
        return (-(self.pod["spec"].get("priority") or 0), self.added_at)


class SchedulingQueue:
    """Three places; a pod is in exactly one of them, or in flight."""

    def __init__(self, initial_backoff_s: float = 1.0, max_backoff_s: float = 10.0) -> None:
        self._initial_backoff_s = initial_backoff_s
        self._max_backoff_s = max_backoff_s
        self.active: dict[str, Waiting] = {}
        self.backoff: dict[str, Waiting] = {}
        self.unschedulable: dict[str, Waiting] = {}
        self.in_flight: dict[str, Waiting] = {}
        self._events = 0

    def __contains__(self, uid: str) -> bool:
        return any(uid in place for place in self._places())

    def add(self, pod: Object, now: float) -> None:
        """A pod without a node appeared; a known one is updated."""
        uid = pod["metadata"]["uid"]
        if uid in self:
            self.update(pod, now)
        else:
            self.active[uid] = Waiting(pod, added_at=now, since=now)

    def update(self, pod: Object, now: float) -> None:
        """The pod changed: a change of its spec may make it fit."""
        uid = pod["metadata"]["uid"]
        for place in self._places():
            waiting = place.get(uid)
            if waiting is None:
                continue
            spec_changed = waiting.pod["spec"] != pod["spec"]
            waiting.pod = pod
            if place is self.unschedulable and spec_changed:
                self._release(uid, now)

    def remove(self, uid: str) -> None:
        for place in self._places():
            place.pop(uid, None)

    def pop(self, now: float) -> Waiting | None:
        """The next pod to try, highest priority and longest waiting first; None if there is none now."""
        for uid, backing_off in list(self.backoff.items()):
            if self._backoff_end(backing_off) <= now:
                self.active[uid] = self.backoff.pop(uid)
        for uid, refused in list(self.unschedulable.items()):
            if refused.since + UNSCHEDULABLE_LIMIT_S <= now:
                self._release(uid, now)
        if not self.active:
            return None
        waiting = min(self.active.values(), key=lambda one: one.order)
        del self.active[waiting.uid]
        waiting.attempts += 1
        waiting.round_started = self._events
        self.in_flight[waiting.uid] = waiting
        return waiting

    def done(self, uid: str) -> None:
        """The attempt succeeded."""
        self.in_flight.pop(uid, None)

    def requeue(self, waiting: Waiting, now: float, *, unschedulable: bool) -> None:
        """The attempt failed: for lack of room (`unschedulable`), or with an error, which is retried."""
        if self.in_flight.pop(waiting.uid, None) is None:
            return  # deleted in the meantime
        waiting.since = now
        missed = waiting.round_started != self._events
        place = self.unschedulable if unschedulable and not missed else self.backoff
        place[waiting.uid] = waiting

    def wake(self, now: float, *, makes_room: bool = True) -> None:
        """Something happened in the cluster; if it cannot make room, it wakes only pods that extenders
        rejected.
        """
        self._events += makes_room
        for uid, waiting in list(self.unschedulable.items()):
            if makes_room or waiting.any_event:
                self._release(uid, now)

    def next_due(self, now: float) -> float | None:
        """When `pop` may return a pod without any further event; None if never."""
        if self.active:
            return now
        times = [self._backoff_end(one) for one in self.backoff.values()]
        times += [one.since + UNSCHEDULABLE_LIMIT_S for one in self.unschedulable.values()]
        return min(times, default=None)

    def _places(self) -> tuple[dict[str, Waiting], ...]:
        return (self.active, self.backoff, self.unschedulable, self.in_flight)

    def _release(self, uid: str, now: float) -> None:
        waiting = self.unschedulable.pop(uid)
        place = self.backoff if self._backoff_end(waiting) > now else self.active
        place[uid] = waiting

    def _backoff_end(self, waiting: Waiting) -> float:
        doubled = self._initial_backoff_s * 2.0 ** (waiting.attempts - 1)
        return waiting.since + min(doubled, self._max_backoff_s)
