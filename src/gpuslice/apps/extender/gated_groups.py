"""Pod groups by labels, for a kube-scheduler that does not know pod groups: all members start, or none.

    a member is created ──► the webhook gives it a gate: kube-scheduler ignores it
        ──► enough members exist, and cards for all: the cards are held, and the gates are removed
        ──► filter lets a member pass for the node that is held for it, otherwise for another with room
        ──► bind waits until kube-scheduler has let as many pass as the group needs, then binds each
        ──► one fits nowhere, or no further one passes for `LASTS_S`: all is released, and the group rests

A hold gives way to nobody, since taking its cards would break up a group. So it is short: other pods wait at
most some seconds, and ever more rarely, behind a group that kube-scheduler then does not start.

Nothing of this is stored. A new leader sees by labels, gates and nodes how far a group has come, and before
it answers any question it holds cards for the rest of groups that run in part. A member that never had a
gate, because nobody gave it one, is held back by filter alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import numpy as np

from gpuslice.adapters.clock import loop_time
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.events import EventRecorder, pod_reference
from gpuslice.adapters.kube.followed_pod import PodNews
from gpuslice.adapters.kube.slim import SLIM_PODS
from gpuslice.adapters.kube.views import pod_view
from gpuslice.apps.extender.placer import Placer
from gpuslice.apps.extender.subscriber import Subscriber
from gpuslice.apps.extender.waker import Waker
from gpuslice.core.group_progress import Member, Progress, progress_of
from gpuslice.core.hold import Hold
from gpuslice.core.model import Pod
from gpuslice.core.words import counted

_log = logging.getLogger(__name__)

LASTS_S = 10.0  # without progress: the longest time that a kube-scheduler gets stuck
STARTED_LASTS_S = 300.0  # for a group that runs in part: as long as kube-scheduler leaves a pod alone
FIRST_REST_S, LONGEST_REST_S = 3.0, 60.0
GATHER_S = 1.0  # how long a bind waits for other members, well below kube-scheduler's httpTimeout
MOST_GATHERING = 48  # binds that wait for others: kube-scheduler has some 100 requests in flight
SHUT_FOR_S = 30.0  # without room gates stay so long; then kube-scheduler and an autoscaler see the pods
TELL_AFTER_S = 5.0  # of the same reason: members arrive one after the other
AT_ONCE = 8  # requests
MOST_TRIES = 64  # nodes chosen in one check, each taking some tenths of a millisecond; the rest come next

RESTS = "The pod group has not fitted a moment ago; others come first for some seconds"
ALONE = "the other members of its pod group have not found their nodes yet; ask again"


@dataclass(slots=True)
class GatedGroup:
    """One group: its pods, those for which cards are held, and those of them that filter has let pass."""

    name: str
    members: dict[str, Member] = field(default_factory=dict)  # by uid
    held: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)  # uids that kube-scheduler was told do not fit
    progress_s: float = 0.0  # when cards were held, or when the last member passed
    rests_until_s: float = 0.0
    rest_s: float = FIRST_REST_S
    shut_until_s: float = inf
    tried: int = -1  # the state of the fleet at the last failed attempt
    why_not: str = ""
    why_since_s: float = 0.0
    said: str = ""  # the last reason that owners were told
    news: asyncio.Event = field(default_factory=asyncio.Event)
    _progress: Progress | None = None

    @property
    def progress(self) -> Progress:
        if self._progress is None:
            self._progress = progress_of(self.members.values())
        return self._progress

    def is_whole(self) -> bool:
        """Whether enough members are on a node, or about to be, for the group to start."""
        return self.progress.started + len(self.passed & self.held) >= self.progress.least

    def changed(self) -> None:
        self._progress = None
        self.tried = -1
        self.tell()

    def tell(self) -> None:
        """Wake the binds that wait for other members."""
        self.news.set()
        self.news = asyncio.Event()


class GatedGroups(Subscriber):
    """The pod groups of one cluster, by namespace and name. `client` writes only as leader."""

    def __init__(
        self,
        client: KubeClient,
        placer: Placer,
        waker: Waker,
        events: EventRecorder,
        *,
        clock: Callable[[], float] = loop_time,
    ) -> None:
        self._client = client
        self._placer = placer
        self._ledger = placer.ledger
        self._waker = waker
        self._events = events
        self._clock = clock
        self._groups: dict[str, GatedGroup] = {}
        self._key_of: dict[str, str] = {}  # by uid, of the members
        self._fleet_clock, self._fleet_state = -1, 0  # incremented when others than we changed the fleet
        self._gathering = 0
        self._tries = 0  # in this check
        self._from: tuple[bool, int, int] | None = None  # rank of the first group left out by the last check
        self._opening: set[str] = set()  # uids of pods whose gate is being removed
        self._free = asyncio.Semaphore(AT_ONCE)

    # -- what is heard -------------------------------------------------------------------------------------

    def pod_changed(self, news: PodNews, before: Hold | None) -> None:
        self._note(news.view, news.owner, succeeded=news.succeeded)

    def _note(self, pod: Pod, owner: str, *, succeeded: bool) -> None:
        key = f"{pod.namespace}/{pod.group.name}" if pod.group is not None else ""
        failed = pod.finished and not succeeded
        if failed or self._key_of.get(pod.uid, key) != key:
            self.pod_gone(pod.uid, None)
        if failed or pod.group is None:
            return
        self._key_of[pod.uid] = key
        group = self._groups.setdefault(key, GatedGroup(pod.group.name))
        known = group.members.get(pod.uid)
        if known is None or known.pod.version <= pod.version:
            group.members[pod.uid] = Member(pod, owner, succeeded)
            group.changed()

    def pod_gone(self, uid: str, before: Hold | None) -> None:
        key = self._key_of.pop(uid, "")
        group = self._groups.get(key)
        if group is None:
            return
        del group.members[uid]
        group.changed()
        self._settle(group)
        if not group.members:
            del self._groups[key]

    # -- what is asked -------------------------------------------------------------------------------------

    def asked(self, pod: Pod) -> str:
        """kube-scheduler asks about a member: why no cards can be held for it now, or "" if they are."""
        group = self._groups.get(self._key_of.get(pod.uid, ""))
        if group is None:
            return RESTS
        self._settle(group)
        if pod.uid not in group.held and self._clock() < group.rests_until_s:
            group.refused.add(pod.uid)
            return RESTS
        if pod.uid not in group.held:
            self._hold(group)
        if pod.uid in group.held:
            group.refused.discard(pod.uid)
            return ""
        group.refused.add(pod.uid)
        return group.why_not or RESTS

    def decided_for(self, uid: str, *, fits: bool) -> None:
        """filter lets the member pass for the one node that is held for it, or finds no feasible one.

        Then the group gives up, or waits for the member if it has begun.
        """
        group = self._groups.get(self._key_of.get(uid, ""))
        if group is None or (fits and uid in group.passed):
            return
        if fits:
            group.passed.add(uid)
            group.progress_s = self._clock()
            group.tell()
            return
        group.held.discard(uid)
        group.refused.add(uid)
        why_not = f"Pod group {group.name} waits for room on nodes that all of its members may use"
        if self._has_begun(group):
            self._rest(group, why_not)
        else:
            self._give_up(group, why_not)

    async def gathered(self, uid: str) -> str:
        """Wait until enough members have passed for the group to start; why it cannot be bound, or ""."""
        group = self._groups.get(self._key_of.get(uid, ""))
        if group is None or group.is_whole():
            return ""
        if self._gathering >= MOST_GATHERING:
            return ALONE
        self._gathering += 1
        try:
            async with asyncio.timeout(GATHER_S):
                while uid in group.held and not group.is_whole():
                    await group.news.wait()
        except TimeoutError:
            return ALONE
        finally:
            self._gathering -= 1
        return "" if group.is_whole() else RESTS

    # -- what is done --------------------------------------------------------------------------------------

    def check(self) -> list[Pod]:
        """The pods whose gate must be removed now."""
        if not self.leads:
            return []
        found = []
        order, first = sorted(self._groups.values(), key=lambda each: each.progress.rank), self._from
        if first is not None:  # groups that run in part come first, then the one where the last check stopped
            order.sort(key=lambda each: not each.progress.in_part and each.progress.rank < first)
        self._tries, self._from = 0, None
        for group in order:
            if self._tries >= MOST_TRIES:
                self._from = group.progress.rank
                break
            waiting = group.progress.waiting
            if not waiting and not group.held:
                continue
            self._settle(group)
            now, lasts_s = self._clock(), STARTED_LASTS_S if self._has_begun(group) else LASTS_S
            if group.held and now >= group.progress_s + lasts_s:
                self._give_up(group, RESTS)
            gated = any(pod.gates for pod in waiting.values())
            awake = gated or group.held or group.refused or group.progress.in_part
            if awake and now >= group.rests_until_s and self._hold(group):
                held = [self._ledger.holds.tentative(uid) for uid in group.refused & group.held]
                if nodes := {each.node: each for each in held if each is not None}:
                    self._waker.free_again(*nodes.values())  # kube-scheduler asks again about its members
                    group.refused.clear()
            self._tell_owners(group)
            may_open = group.held if now < group.shut_until_s else waiting.keys()
            found += [pod for uid, pod in waiting.items() if pod.gates and uid in may_open - self._opening]
        return found

    def started_leading(self) -> None:
        """Before any decision, hold cards for the rest of groups that run in part."""
        super().started_leading()
        for group in sorted(self._groups.values(), key=lambda each: each.progress.rank):
            if group.progress.in_part:
                self._hold(group)

    def stopped_leading(self) -> None:
        super().stopped_leading()
        for group in self._groups.values():
            self._release(group)

    # -- one group -----------------------------------------------------------------------------------------

    def _hold(self, group: GatedGroup) -> bool:
        """Hold cards for all waiting members, or for as many as fit if the group can start with those."""
        progress, now = group.progress, self._clock()
        missing = [pod for uid, pod in progress.waiting.items() if uid not in group.held]
        needed = progress.least - progress.started - len(group.held)
        if not missing:
            return bool(group.held)
        if len(missing) < needed:
            there = progress.started + len(progress.waiting)
            self._explain(
                group, f"Pod group {group.name} waits: {there} of {progress.least} members are there"
            )
            return False
        group.shut_until_s = min(group.shut_until_s, now + SHUT_FOR_S)
        fleet = self._ledger.flush()
        if fleet.clock != self._fleet_clock:
            self._fleet_clock, self._fleet_state = fleet.clock, self._fleet_state + 1
        if group.tried == self._fleet_state:
            return False
        chosen: list[str] = []
        everywhere = np.ones(fleet.rows, dtype=np.bool_)
        missing.sort(key=lambda pod: (-pod.priority, -pod.request.units if pod.request else 0, pod.version))
        for number, pod in enumerate(missing, 1):
            placement = self._placer.choose_node(pod, everywhere, 1)
            placement = placement or self._placer.choose_node(pod, everywhere, 1, last_resort=True)
            self._tries += 1
            if placement is not None and self._ledger.hold_for_group(pod, placement) is None:
                chosen.append(pod.uid)
            elif len(chosen) + len(missing) - number < needed:
                break
        if not chosen or len(chosen) < needed:
            for uid in chosen:
                self._ledger.forget(uid)
            group.tried, self._fleet_clock = self._fleet_state, self._ledger.flush().clock  # as before
            self._explain(
                group, f"Pod group {group.name} waits for room for {counted(max(1, needed), 'pod')} at once"
            )
            return False
        group.held.update(chosen)
        group.progress_s, group.shut_until_s, group.why_not = now, inf, ""
        return True

    def _settle(self, group: GatedGroup) -> None:
        """Drop from the holds members that are on a node by now, are gone, or have lost their cards."""
        progress = group.progress
        group.held = {
            uid for uid in group.held if uid in progress.waiting and self._ledger.holds.of(uid) is not None
        }
        group.passed &= group.held
        group.refused &= progress.waiting.keys()
        if progress.started >= progress.least:
            group.rest_s = FIRST_REST_S
        elif group.held and progress.started + len(progress.waiting) < progress.least:
            self._release(group)  # members are gone, and the others cannot start without them

    def _give_up(self, group: GatedGroup, why_not: str) -> None:
        """Release all holds; if kube-scheduler had begun with the group, others come first for a while."""
        taken_up = bool(group.passed or group.refused)
        self._release(group)
        if taken_up:
            self._rest(group, why_not)
        else:
            self._explain(group, why_not)

    def _rest(self, group: GatedGroup, why_not: str) -> None:
        self._explain(group, why_not)
        group.rests_until_s = self._clock() + group.rest_s
        group.rest_s = min(LONGEST_REST_S, 2 * group.rest_s)

    def _has_begun(self, group: GatedGroup) -> bool:
        """Whether some members have cards or are getting them, so that the others are entitled to theirs."""
        bound_now = any(self._ledger.holds.tentative(uid) is None for uid in group.held)
        return group.progress.in_part or bound_now

    def _release(self, group: GatedGroup) -> None:
        for uid in group.held:
            if self._ledger.holds.tentative(uid) is not None:  # it is not being bound
                self._ledger.forget(uid)
        group.held.clear()
        group.passed.clear()
        group.tell()

    def _explain(self, group: GatedGroup, why_not: str) -> None:
        if group.why_not != why_not:
            group.why_not, group.why_since_s = why_not, self._clock()

    def _tell_owners(self, group: GatedGroup) -> None:
        """Once for each reason, and only if it lasts: members arrive one after the other."""
        if group.why_not in ("", group.said) or self._clock() < group.why_since_s + TELL_AFTER_S:
            return
        group.said = group.why_not
        for uid, pod in group.progress.waiting.items():
            if uid not in group.held:
                about = pod_reference(pod.namespace, pod.name, uid)
                self._events.add(about, "PodGroupWaits", group.why_not)

    async def take_gate_off(self, pod: Pod) -> None:
        """Remove all gates, which are ours: a pod with others' gates is not handled here."""
        self._opening.add(pod.uid)
        try:
            async with self._free:
                seen = await self._client.merge_patch(
                    SLIM_PODS,
                    pod.name,
                    {"spec": {"schedulingGates": None}},
                    pod.namespace,
                    uid=pod.uid,
                    resource_version=pod.resource_version,
                )
        except KubeError as error:
            _log.info("scheduling gate not taken off", extra={"pod": pod.key, "error": str(error)})
        else:
            known = self._groups.get(self._key_of.get(pod.uid, ""))
            if known is not None and (member := known.members.get(pod.uid)) is not None:
                self._ledger.apply_pod(pod_view(seen))
                self._note(pod_view(seen), member.owner, succeeded=False)
        finally:
            self._opening.discard(pod.uid)
