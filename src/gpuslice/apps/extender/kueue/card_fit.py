"""Kueue's admission check ``gpuslice.io/card-fit``: it goes once cards for all its pods are held.

Kueue counts sums: it admits a workload whose pods no card can hold, and whose quota then blocks others.

    Kueue reserves quota for a workload ──► all other checks are Ready ──► the ledger has room for all pods
        ──► the cards are held, and the check is Ready ──► Kueue creates the pods, or removes their gates
        ──► each pod takes over one hold of its workload when it is seen ──► filter chooses for it as for any
        ──► one fits nowhere for `PATIENCE_S`: the check is Retry, and others come first for some seconds

Nothing of this is stored. A hold that no pod takes ends after `HELD_FOR_S`, and when its workload loses its
quota, ends or is gone. A new leader holds again for workloads that were let go less than that time ago.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import msgspec
import numpy as np

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.followed_pod import PodNews
from gpuslice.adapters.kube.kueue import (
    ADMISSION_CHECKS,
    API,
    RESOURCE_FLAVORS,
    WORKLOADS,
    AdmissionCheck,
    CheckState,
    PodSet,
    ResourceFlavor,
    Workload,
    slim,
)
from gpuslice.adapters.kube.slim import SlimNode
from gpuslice.adapters.kube.views import pod_view
from gpuslice.adapters.kube.watch import Change, Reflector
from gpuslice.apps.extender.placer import Placer
from gpuslice.apps.extender.subscriber import Subscriber
from gpuslice.core.contract import CARD_FIT
from gpuslice.core.hold import NOBODY, Hold, HoldKind
from gpuslice.core.model import Placement, Pod
from gpuslice.core.node_filters import NodeFilters, Place, Taint
from gpuslice.core.policy.fleet import Flags
from gpuslice.core.words import counted
from gpuslice.diagnosis.places import wish_of

_log = logging.getLogger(__name__)

HELD_FOR_S = 60.0
PATIENCE_S = 5.0  # what becomes free meanwhile is used at once, and the quota stays with the workload
FIRST_REST_S, LONGEST_REST_S = 1, 8  # after Retry; then Kueue reserves quota again, where there is some
CHECK_EVERY_S = 0.05  # a quota that waits for the answer is idle
HELD = "cards for all pods are held"
MOST_TERMS = 64  # that pods say about nodes


@dataclass(slots=True)
class _Room:
    """What is held for one workload's pods that are not there yet: uid that we made up → pod set."""

    uid: str
    until_s: float
    missing: dict[str, str] = field(default_factory=dict)


class CardFit(Subscriber):
    """The workloads of one cluster. `leaders` writes only as leader; `now_s` is the time since the epoch."""

    def __init__(
        self,
        client: KubeClient,
        leaders: KubeClient,
        placer: Placer,
        now_s: Callable[[], float],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._leaders = leaders
        self._placer = placer
        self._ledger = placer.ledger
        self._now_s = now_s
        self._sleep = sleep
        self._workloads: Reflector[Workload] = Reflector(client, WORKLOADS, self._workload_changed, each=slim)
        self._checks: Reflector[AdmissionCheck] = Reflector(client, ADMISSION_CHECKS, lambda _: None)
        self._flavors: Reflector[ResourceFlavor] = Reflector(client, RESOURCE_FLAVORS, lambda _: None)
        self._reserved: dict[str, Workload] = {}  # have quota, and are not known to have started long ago
        self._places: dict[str, Place] = {}
        self._places_changed = 0
        self._open: dict[bytes, tuple[object, Flags]] = {}  # by what pods say about nodes
        self._rooms: dict[str, _Room] = {}  # by namespace and name of the workload
        self._pods: defaultdict[str, dict[str, str]] = defaultdict(dict)  # the same → uid → pod set
        self._workload_of: dict[str, str] = {}  # by uid, of living pods
        self._taken: dict[str, float] = {}  # uid of a pod that took a hold over → until when it has it
        self._tried: dict[str, tuple[float, int]] = {}  # by uid: until when, and the fleet's clock then
        self._answered: set[str] = set()  # uids of workloads, until the answer is shown

    # -- what is heard -------------------------------------------------------------------------------------

    def node_changed(self, node: SlimNode) -> None:
        taints = tuple(Taint(each.key, each.value, each.effect) for each in node.spec.taints or ())
        place = Place(node.metadata.name, labels=dict(node.metadata.labels or {}), taints=taints)
        if self._places.get(place.name) != place:
            self._places[place.name] = place
            self._places_changed += 1

    def node_gone(self, name: str) -> None:
        self._places.pop(name, None)
        self._places_changed += 1

    def pod_changed(self, news: PodNews, before: Hold | None) -> None:
        """A pod of a workload that has room held takes over one hold of its pod set."""
        pod, (name, pod_set) = news.view, news.workload
        if not name or pod.finished or pod.gates or pod.uid in self._workload_of:
            return
        key = self._workload_of[pod.uid] = f"{pod.namespace}/{name}"
        self._pods[key][pod.uid] = pod_set
        room = self._rooms.get(key)
        if room is None:
            return
        own = next((uid for uid, each in room.missing.items() if each == pod_set), None)
        if own is None:
            return
        del room.missing[own]
        placement = self._ledger.holds.tentative(own)
        self._ledger.forget(own)
        if placement is None or not news.waits or pod.group is not None or pod.request is None:
            return  # it is bound; or it gets its cards with its group, as always
        if self._hold_one(pod, placement, room.until_s):
            self._taken[pod.uid] = room.until_s

    def pod_gone(self, uid: str, before: Hold | None) -> None:
        key = self._workload_of.pop(uid, "")
        self._taken.pop(uid, None)
        if key:
            del self._pods[key][uid]
            if not self._pods[key]:
                del self._pods[key]

    def stopped_leading(self) -> None:
        super().stopped_leading()
        for key in tuple(self._rooms):
            self._release(key)

    def started_leading(self) -> None:
        super().started_leading()
        self._hold_again()

    def _workload_changed(self, change: Change[Workload]) -> None:
        workload = change.object
        if workload is None:
            return
        room, states = self._rooms.get(workload.key), self._own_states(workload)
        self._answered.discard(workload.metadata.uid)
        gone = self._workloads.objects.get((workload.metadata.namespace, workload.metadata.name)) is None
        kept = {each.state for each in states} & {"Pending", "Ready"}
        lost = not kept or not workload.is_true("QuotaReserved")
        if gone or not workload.is_true("QuotaReserved") or workload.is_true("Evicted"):
            self._reserved.pop(workload.key, None)
        else:
            self._reserved[workload.key] = workload
        if room is not None and (gone or lost or room.uid != workload.metadata.uid):
            self._release(workload.key)

    # -- what is done --------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Answer Kueue for ever. Without Kueue its lists fail, and are tried again now and then."""
        async with asyncio.TaskGroup() as tasks:
            for reflector in (self._flavors, self._checks, self._workloads):
                tasks.create_task(reflector.run(), name="watch kueue")
            while True:
                await self._sleep(CHECK_EVERY_S)
                try:
                    await self.check()
                except KubeError as error:  # a workload that changed meanwhile is looked at again
                    _log.info("admission check not written", extra={"error": str(error)})

    async def check(self) -> None:
        """Answer all that wait for an answer, the most important and oldest first; end what is over."""
        if not self.leads:
            return
        now_s = self._now_s()
        for key in [key for key, room in self._rooms.items() if room.until_s <= now_s]:
            self._release(key)
        for uid in [uid for uid, until_s in self._taken.items() if until_s <= now_s]:
            del self._taken[uid]
            if self._ledger.holds.tentative(uid) is not None:
                self._ledger.forget(uid)
        self._hold_again()
        for check in self._own_checks():
            if not any(each.type == "Active" and each.status == "True" for each in check.status.conditions):
                await self._say_active(check)
        waiting = [each for each in self._reserved.values() if self._waits(each)]
        waiting.sort(key=lambda each: (-each.spec.priority, each.metadata.creation_timestamp or "", each.key))
        uids = {each.metadata.uid for each in waiting}
        self._tried = {uid: each for uid, each in self._tried.items() if uid in uids}
        for workload in waiting:
            if not self.leads:
                return
            uid, now_s = workload.metadata.uid, self._now_s()
            until_s, tried = self._tried.get(uid, (now_s + PATIENCE_S, -1))
            if now_s < until_s and tried == self._ledger.flush().clock:
                continue
            why_not = self._hold(workload, now_s + HELD_FOR_S)
            if why_not and now_s < until_s:
                self._tried[uid] = until_s, self._ledger.flush().clock
                continue
            try:
                await self._answer(workload, why_not)
            except KubeError:
                self._release(workload.key)
                raise
            self._answered.add(workload.metadata.uid)

    def _waits(self, workload: Workload) -> bool:
        """Whether our answer is the last that it needs: before that, cards would be held for longer."""
        own = self._own_states(workload)
        return (
            any(each.state == "Pending" for each in own)
            and workload.metadata.uid not in self._answered
            and all(each in own or each.state == "Ready" for each in workload.status.admission_checks)
        )

    def _own_checks(self) -> Iterator[AdmissionCheck]:
        return (each for each in self._checks.objects.values() if each.spec.controller_name == CARD_FIT)

    def _own_states(self, workload: Workload) -> list[CheckState]:
        names = {each.metadata.name for each in self._own_checks()}
        return [each for each in workload.status.admission_checks if each.name in names]

    def _hold_again(self) -> None:
        """For pods that are missing of what was let go by an earlier leader, or by an answer of ours that got
        no answer."""
        for workload in tuple(self._reserved.values()):
            states = self._own_states(workload)
            if workload.key in self._rooms or any(each.state != "Ready" for each in states):
                continue
            let_go_s = max((_seconds(each.last_transition_time) for each in states), default=0.0)
            if let_go_s + HELD_FOR_S > self._now_s():
                self._hold(workload, let_go_s + HELD_FOR_S, all_of_them=False)
            elif states:
                del self._reserved[workload.key]

    def _hold(self, workload: Workload, until_s: float, *, all_of_them: bool = True) -> str:
        """Hold cards for all pods of the workload that are not there yet; why not, or "".

        Without `all_of_them`, for as many as there is room for.
        """
        self._release(workload.key)
        room, there = _Room(workload.metadata.uid, until_s), self._pods.get(workload.key, {})
        pods: list[tuple[Pod, str, Flags]] = []
        for pod_set in workload.spec.pod_sets:
            view = pod_view(pod_set.template)
            if view.problem and view.request is None:
                return f"pod set {pod_set.name}: {view.problem}"
            if view.request is None:
                continue
            missing = _count(workload, pod_set) - list(there.values()).count(pod_set.name)
            open_rows = self._open_rows(workload, pod_set, view)
            for number in range(missing):
                uid = f"{workload.metadata.uid}/{pod_set.name}/{number}"
                name = f"{workload.metadata.name}/{pod_set.name}/{number}"  # no pod can have it
                pod = replace(
                    view, uid=uid, name=name, namespace=workload.metadata.namespace, group=None, gates=()
                )
                pods.append((replace(pod, priority=workload.spec.priority), pod_set.name, open_rows))
        pods.sort(key=lambda each: -each[0].request.units if each[0].request else 0)
        self._rooms[workload.key] = room
        for number, (pod, pod_set_name, open_rows) in enumerate(pods):
            placement = self._placer.choose_node(pod, open_rows, 1)
            placement = placement or self._placer.choose_node(pod, open_rows, 1, last_resort=True)
            if placement is not None and self._hold_one(pod, placement, until_s):
                room.missing[pod.uid] = pod_set_name
            elif all_of_them:
                self._release(workload.key)
                return self._why_not(pod, pod_set_name, open_rows, number, len(pods))
        return ""

    def _hold_one(self, pod: Pod, placement: Placement, until_s: float) -> bool:
        hold = Hold(pod, placement, HoldKind.ADMITTED, NOBODY, until_s)
        return self._ledger.hold_tentatively(hold) is None

    def _why_not(self, pod: Pod, pod_set: str, open_rows: Flags, placed: int, of: int) -> str:
        fleet, request = self._ledger.flush(), pod.request
        assert request is not None
        most = int(fleet.left[open_rows].max(initial=0)) if len(open_rows) == fleet.rows else 0
        cards = f"{request.units_per_card} units on {counted(request.card_count, 'card')}"
        room = f"room for {placed} of {counted(of, 'pod')}" if of > 1 else "no room"
        where = f"of {counted(int(np.count_nonzero(open_rows)), 'node')} that may run it"
        return f"{room}: pod set {pod_set} asks for {cards} of one node; the freest card {where} has {most}"

    def _open_rows(self, workload: Workload, pod_set: PodSet, view: Pod) -> Flags:
        """The nodes that kube-scheduler would let its pods run on, with what Kueue adds for its flavors."""
        assert view.request is not None
        spec, labels, tolerations = pod_set.template.spec, dict[str, str](), list[objects.Toleration]()
        assigned = workload.status.admission.pod_set_assignments if workload.status.admission else []
        for assignment in assigned:
            for flavor in set((assignment.flavors or {}).values()) if assignment.name == pod_set.name else ():
                if (found := self._flavors.objects.get(("", flavor))) is not None:
                    labels |= found.spec.node_labels or {}
                    tolerations += msgspec.convert(found.spec.tolerations or [], list[objects.Toleration])
        pod = objects.Pod(
            metadata=pod_set.template.metadata,
            spec=msgspec.structs.replace(
                spec,
                node_selector={**(spec.node_selector or {}), **labels},
                tolerations=[*(spec.tolerations or ()), *tolerations],
            ),
        )
        fleet = self._ledger.flush()
        terms = msgspec.json.encode((pod.spec.node_selector, pod.spec.affinity, pod.spec.tolerations))
        state = (self._places_changed, fleet.nodes_version, fleet.rows)
        known = self._open.get(terms)
        if known is not None and known[0] == state:
            return known[1]
        filters = NodeFilters((), wish_of(pod, view.request))
        rows = np.zeros(fleet.rows, dtype=np.bool_)
        for name, row in fleet.row_of.items():
            place = self._places.get(name)
            rows[row] = place is not None and not filters.obstacle(place)
        if len(self._open) >= MOST_TERMS:
            self._open.clear()
        self._open[terms] = (state, rows)
        return rows

    def _release(self, key: str) -> None:
        room = self._rooms.pop(key, None)
        for uid in room.missing if room is not None else ():
            self._ledger.forget(uid)

    async def _answer(self, workload: Workload, why_not: str) -> None:
        now, states = _date(self._now_s()), list[dict[str, object]]()
        for check in self._own_states(workload):
            found: dict[str, object] = {
                "name": check.name,
                "state": "Ready",
                "message": HELD,
                "lastTransitionTime": now,
            }
            rest_s = min(LONGEST_REST_S, FIRST_REST_S << min(check.retry_count, 8))
            retry = {"state": "Retry", "message": why_not, "requeueAfterSeconds": rest_s}
            states.append(found | retry if why_not else found)
        meta = workload.metadata
        about = {"name": meta.name, "namespace": meta.namespace, "resourceVersion": meta.resource_version}
        document = {
            "apiVersion": API,
            "kind": WORKLOADS.kind,
            "metadata": about,
            "status": {"admissionChecks": states},
        }
        await self._leaders.apply(WORKLOADS, document, force=True, subresource="status")

    async def _say_active(self, check: AdmissionCheck) -> None:
        """Kueue lets nothing into a queue with a check whose controller does not say that it is there."""
        condition = {
            "type": "Active",
            "status": "True",
            "reason": "Active",
            "message": "The extender answers",
            "lastTransitionTime": _date(self._now_s()),
        }
        document = {
            "apiVersion": API,
            "kind": ADMISSION_CHECKS.kind,
            "metadata": {"name": check.metadata.name},
            "status": {"conditions": [condition]},
        }
        await self._leaders.apply(ADMISSION_CHECKS, document, force=True, subresource="status")


def _count(workload: Workload, pod_set: PodSet) -> int:
    """Pods that are still to run: Kueue may admit fewer than asked for, and some may have succeeded."""
    status = workload.status
    assigned = status.admission.pod_set_assignments if status.admission else []
    counts = (each.count for each in assigned if each.name == pod_set.name and each.count is not None)
    done = sum(each.count for each in status.reclaimable_pods if each.name == pod_set.name)
    return next(counts, pod_set.count) - done


def _date(at_s: float) -> str:
    return datetime.fromtimestamp(int(at_s), UTC).isoformat().replace("+00:00", "Z")


def _seconds(date: str) -> float:
    with suppress(ValueError):
        return datetime.fromisoformat(date).timestamp()
    return 0.0
