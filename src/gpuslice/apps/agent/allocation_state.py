"""What the agent knows of its node: who waits for devices, to whom some were granted, who has them. No I/O.

kubelet's calls are answered from this state, without a request to the API server or to kubelet. What is known
is updated separately, by `pod_changed` and `assignments_read`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import replace

from gpuslice.apps.agent.by_driver import ByDriver
from gpuslice.apps.agent.forgotten import ForgottenContainers, RunningContainer, no_room_beside
from gpuslice.apps.agent.owner import Owner
from gpuslice.apps.agent.pending import (
    GrantRecord,
    PendingContainer,
    Proposal,
    Recipient,
    TentativeGrant,
    pending_containers,
    propose,
    recipient_of,
)
from gpuslice.apps.agent.pods import Holder, NodePod
from gpuslice.apps.agent.repair import (
    ActualPlacement,
    Repair,
    actual_placements,
    exchanges,
    repairs,
    target_repairs,
)
from gpuslice.apps.agent.repair_order import RepairOrder, withdrawal
from gpuslice.apps.agent.set_aside import SetAside
from gpuslice.core.contract import ANN_ASSIGNED, ANN_ASSUME_TIME
from gpuslice.core.device_assignment import DeviceAssignment, holder_of, still_true
from gpuslice.core.grant import CardLimit, GrantError, grant_to, placement_of_devices
from gpuslice.core.mode import Rules
from gpuslice.core.model import Card, ContainerKind, Node, Placement, Pod, Refusal

LISTED_AFTER_S = 60.0
"""How long kubelet may take from Allocate to listing the devices; after that it has rejected the pod."""
UNLISTED_AFTER_S = 10.0
"""How long kubelet may list a pod that is gone from the API server; later another pod has its name."""


class AllocationState:
    """The agent's knowledge of one node. Changes happen between awaits, so every answer is consistent.

    `rules` are what the node's labels say, as far as it is in force. `assignments` are kubelet's, None until
    they were read. `tentative` are grants that kubelet does not list yet. `targets`, by pod uid, are cards
    where pods are meant to be instead of those that their annotations name.
    """

    def __init__(
        self,
        node: Node,
        *,
        place_unplaced: bool = False,
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.node = node
        self.rules = Rules()
        self.assignments: tuple[DeviceAssignment, ...] | None = None
        self.tentative: list[TentativeGrant] = []
        self.targets: dict[str, Placement] = {}
        self.orphans: tuple[RunningContainer, ...] = ()  # that kubelet does not list
        self.changed = asyncio.Event()
        self.by_driver = ByDriver()
        self._unanswered: dict[str, Repair] = {}  # by pod uid, writes that may still take effect
        self._place_unplaced = place_unplaced
        self._clock = clock
        self._now_ns = now_ns
        self._pods: dict[str, NodePod] = {}
        self._owners: dict[frozenset[str], str] = {}  # ids → uid of the pod that they were last seen with
        self._gone_s: dict[str, float] = {}  # uid → since when an owner is gone
        self._granted: dict[frozenset[str], GrantRecord] = {}
        self._forgotten = ForgottenContainers()
        self.aside = SetAside(self)

    # -- what becomes known ---------------------------------------------------------------------------

    def set_cards(self, cards: tuple[Card, ...], unhealthy: frozenset[int] = frozenset()) -> None:
        self.node = Node(self.node.name, cards, unhealthy, names=self.node.names)

    def pod_changed(self, pod: NodePod) -> None:
        """A pod as the API server showed it. The watch may lag behind the answers to our own writes."""
        known = self._pods.get(pod.view.uid)
        if known is not None and 0 < pod.view.version < known.view.version:
            return
        came = known.came if known is not None else pod.view.version
        lost = (known.lost | known.said.keys()) - pod.said.keys() if known is not None else frozenset()
        self._pods[pod.view.uid] = replace(pod, came=came, lost=lost)
        if known is not None and pod.view.version != known.view.version:
            self._unanswered.pop(pod.view.uid, None)  # what was sent was for the version before
        if self.targets.get(pod.view.uid) == pod.view.placement:
            self.targets.pop(pod.view.uid, None)  # the annotation says so now
        self.changed.set()

    def written(self, pod: NodePod) -> None:
        """A pod as the answer to our own write shows it, which may arrive after the news of its end."""
        if pod.view.uid in self._pods:
            self.pod_changed(pod)

    def sent(self, repair: Repair) -> bool:
        """Record a write that may take effect until it is answered; whether one was unanswered before."""
        uid = repair.pod.view.uid
        unanswered = uid in self._unanswered
        if repair.of_cards and uid in self._pods:
            self._unanswered[uid] = repair
        return unanswered

    def answered(self, repair: Repair) -> None:
        """It is known whether the repair was written."""
        self._unanswered.pop(repair.pod.view.uid, None)

    def pod_gone(self, uid: str) -> None:
        self._pods.pop(uid, None)
        self.targets.pop(uid, None)
        self._unanswered.pop(uid, None)
        self.tentative = [grant for grant in self.tentative if grant.uid != uid]
        if uid in self._owners.values():
            self._gone_s[uid] = self._clock()
        # news of its end was late: ids granted since then are those of the next pod of its name
        for ids, grant in self._granted.items():
            if uid in grant.had_theirs and self._owners.get(ids) == uid:
                del self._owners[ids]

    def kubelet_came(self, running: Iterable[RunningContainer], granted: Iterable[list[str]] = ()) -> None:
        """A kubelet connected. `running` may run, known to it or not; `granted`: the ids of each folder."""
        self._forgotten.kubelet_came(running, self._clock())
        for ids in granted:
            self._granted.setdefault(frozenset(ids), GrantRecord(self._clock(), None, frozenset()))

    def assignments_read(self, assignments: Iterable[DeviceAssignment], asked_at_s: float) -> None:
        """kubelet's device assignments as they were some time after `asked_at_s`."""
        since = {ids: grant.receiver for ids, grant in self._granted.items() if grant.at_s > asked_at_s}
        self.assignments = still_true(assignments, since)
        self._forgotten.assignments_read(self.assignments, asked_at_s, self._pod_of)
        listed = frozenset[str]().union(*(each.ids for each in self.assignments))

        def still_tentative(grant: TentativeGrant) -> bool:
            if grant.never_listed:
                return grant.uid in self._pods
            if grant.at_s > asked_at_s:
                return True
            return not grant.ids & listed and self._clock() - grant.at_s < LISTED_AFTER_S

        self.tentative = [grant for grant in self.tentative if still_tentative(grant)]
        long_gone = {uid for uid, at_s in self._gone_s.items() if at_s + UNLISTED_AFTER_S <= asked_at_s}
        self._owners = {
            ids: uid for ids, uid in self._owners.items() if ids & listed and uid not in long_gone
        }
        self._gone_s = {uid: at_s for uid, at_s in self._gone_s.items() if uid in {*self._owners.values()}}
        self._granted = {
            ids: grant
            for ids, grant in self._granted.items()
            if ids & listed or self._clock() - grant.at_s < LISTED_AFTER_S
        }
        for actual in self._actual_placements(self.assignments):
            for each in self._assignments_of(actual.pod):
                self._owners[each.ids] = actual.pod.view.uid
        self.changed.set()

    def granted(self, ids: frozenset[str], recipient: Recipient) -> None:
        """The ids have been given to this recipient and belong to nobody else from now on."""
        to = recipient.pending
        receiver = (to.pod.view.key, to.container.name) if to else None
        if self.assignments is not None:
            self.assignments = still_true(self.assignments, {ids: receiver})
        self._owners = {known: uid for known, uid in self._owners.items() if not known & ids}
        had_none = {recipient.uid, *(each.pod.view.uid for each in self.waiting())}
        self._granted.pop(ids, None)  # the latest is the last
        self._granted[ids] = GrantRecord(self._clock(), receiver, frozenset(self._pods.keys() - had_none))
        if to is None:
            return
        grant = TentativeGrant(recipient.uid, to.container.name, ids, self._clock(), to.never_listed)
        self.tentative.append(grant)
        got = placement_of_devices(ids, self.node)
        cards = {part.card for part in got.slices}
        if cards != set(to.cards) and len(cards) == to.request.card_count:
            self.targets[recipient.uid] = got  # so that the pod's other containers join this one

    # -- kubelet's questions --------------------------------------------------------------------------

    @property
    def places_unplaced(self) -> bool:
        """Whether a pod without a card gets one here. With one card there is no choice."""
        return self._place_unplaced or len(self.node.cards) == 1

    def waiting(self) -> list[PendingContainer]:
        """Containers without devices, the most probable first."""
        return pending_containers(self._pods.values(), self._served(), self.targets)

    def _served(self) -> set[tuple[str, str]]:
        """(pod uid, container) of those with devices. kubelet may list a name that was an earlier pod's."""
        served = {(grant.uid, grant.container) for grant in self.tentative}
        for each in self.assignments or ():
            named = self.pod_named(each.pod_key)
            uid = self._owners.get(each.ids) or (named.view.uid if named else "")
            served.add((uid, each.container))
        return served

    def acceptable(self) -> list[PendingContainer]:
        """Those who get what they ask for; a pod that was taken off its card gets another."""
        any_card = self.places_unplaced
        return [each for each in self.waiting() if each.cards or any_card or each.pod.taken_off]

    def propose(self, available: Iterable[str], must_include: Iterable[str], size: int) -> Proposal | Refusal:
        """Ids for the container that kubelet probably asks for; none that a forgotten one still uses."""
        unlisted = (*self.maybe_forgotten(), *self.orphans)
        in_use = {one: each.uid for each in unlisted for one in each.assignment.ids}
        in_use |= {one: uid for uid, own in self.aside.ids().items() for one in own}
        return propose(available, must_include, size, self.acceptable(), self.node, in_use=in_use)

    def recipient(self, ids: frozenset[str]) -> Recipient | Refusal:
        """For whom `ids` are. Raises `GrantError` for unknown ids. Nothing changes until `granted`."""
        waiting, listed, unplaced = self.acceptable(), self.assignments or (), self.places_unplaced
        recipient = recipient_of(ids, waiting, self.tentative, listed, self.node, unplaced=unplaced)
        if isinstance(recipient, Refusal):
            return recipient
        return self.crowded(ids, recipient.uid) or recipient

    def holder(self, ids: frozenset[str]) -> Holder | None:
        """The container that `ids` belong to, by kubelet's assignments, otherwise by what was granted."""
        if (match := holder_of(ids, self.assignments or ())) is not None:
            pod, name = self.pod_named(match.assignment.pod_key), match.assignment.container
        else:
            grant = next((each for each in reversed(self.tentative) if each.ids == ids), None)
            pod, name = (self._pods.get(grant.uid), grant.container) if grant else (None, "")
        if pod is None:
            return None
        if match is None or match.exact:
            container = pod.view.container(name)
        else:  # an init container, whose ids the app containers reuse: its amount identifies it
            containers = pod.view.request.containers if pod.view.request else ()
            inits = (each for each in containers if each.kind is ContainerKind.INIT)
            container = next((each for each in inits if each.devices == len(ids)), None)
        return Holder(pod, container, exact=match is not None and match.exact)

    def owner(self, ids: frozenset[str]) -> Owner:
        """The owner of the folder for `ids`; for an unknown pod, by the name that kubelet lists."""
        if (holder := self.holder(ids)) is not None:
            pod, container = holder.pod.view, holder.container
            return Owner(sorted(ids), pod.uid, pod.namespace, pod.name, container.name if container else "")
        if (match := holder_of(ids, self.assignments or ())) is None:
            return Owner(sorted(ids))
        listed = match.assignment
        return Owner(sorted(ids), "", listed.namespace, listed.pod, listed.container if match.exact else "")

    # -- whom kubelet forgot ----------------------------------------------------------------------------

    def maybe_forgotten(self) -> tuple[RunningContainer, ...]:
        """Containers that may be running without kubelet listing them."""
        ended = {(grant.uid, grant.container) for grant in self.tentative}  # since kubelet asked again
        ended |= {(uid, name) for uid, pod in self._pods.items() for name in pod.completed}
        pods = [(each, self._pod_of(each)) for each in self._forgotten.containers]
        # a container without a uid is one whose pod is not known yet
        found = [replace(each, uid=pod.uid) if pod else each for each, pod in pods if pod or not each.uid]
        return tuple(each for each in found if each.name not in ended)

    def _pod_of(self, container: RunningContainer) -> Pod | None:
        """By its uid, otherwise by its name, if it is alive."""
        named = None if container.uid else self.pod_named(container.assignment.pod_key)
        return self.living(named.view.uid if named else container.uid)

    def of_unknown_pods(self) -> list[RunningContainer]:
        """Containers that may be running without kubelet listing them, and whose pods are not known."""
        return [each for each in self._forgotten.containers if not each.uid and self._pod_of(each) is None]

    def pod_is_gone(self, of: RunningContainer) -> None:
        self._forgotten.pod_is_gone(of)
        self.changed.set()

    def forgotten(self) -> tuple[RunningContainer, ...]:
        """Those of which that is certain."""
        return self.maybe_forgotten() if self._forgotten.certain else ()

    def owner_is_gone(self, ids: frozenset[str]) -> bool:
        """Whether the pod to which kubelet gave these ids is gone, and kubelet still lists them."""
        return self._owners.get(ids) in self._gone_s

    def without_devices(self) -> dict[str, tuple[Pod, list[str]]]:
        """Pods with running containers that lack the devices that they ask for, by uid.

        kubelet started them when it did not know the resource: its checkpoint was lost and no agent was
        running. A pod that ever got its devices is annotated as assigned or has a folder.
        """
        if self.assignments is None or not self._forgotten.certain:
            return {}
        served = self._served() | {each.name for each in self.maybe_forgotten()}
        found = {}
        for uid, pod in self._pods.items():
            if pod.view.request is None or pod.view.assigned or pod.view.finished:
                continue
            asking = [each.name for each in pod.view.request.containers if each.name in pod.running]
            if without := [name for name in asking if (uid, name) not in served]:
                found[uid] = (pod.view, without)
        return found

    def crowded(self, ids: frozenset[str], uid: str) -> Refusal | None:
        """Why pod `uid` may not use `ids`: together with forgotten containers it is too much for a card."""
        others = [each for each in (*self.forgotten(), *self.orphans) if each.uid != uid]
        full = no_room_beside(others, ids, self.held_ids(), self.node)
        return full or self.aside.no_room_beside(ids, uid)

    def _may_not_start(self, pod: NodePod, settled: Set[str]) -> bool:
        """Whether the pod waits and its devices are on a card without room next to forgotten ones."""
        ids = frozenset[str]().union(*(each.ids for each in self._assignments_of(pod)))
        waits = not pod.running and pod.view.uid not in settled
        return waits and self.crowded(ids, pod.view.uid) is not None

    # -- what must be written ---------------------------------------------------------------------------

    def due_repairs(self, uid: str = "") -> list[Repair]:
        """What can be written next so that annotations say where pods are, or where one pod is."""
        if self.assignments is None:
            return []
        # forgotten ones first: they run, and a pod without room next to them does not start
        forgotten = self.forgotten()
        settled = {each.uid for each in forgotten}  # they wait for nothing
        placed = self._actual_placements((*(each.assignment for each in forgotten), *self.assignments))
        barred = [each for each in placed if forgotten and self._may_not_start(each.pod, settled)]
        actual = [each for each in placed if each not in barred]
        waiting = [each for each in self.waiting() if each.pod.view.uid not in settled]
        self.targets.update(exchanges(actual, waiting, self.targets, self.node))
        never_listed = {grant.uid: self._pods[grant.uid] for grant in self.tentative if grant.never_listed}
        now_ns = self._now_ns()
        assigned = {ANN_ASSIGNED: "true", ANN_ASSUME_TIME: str(now_ns)}
        due = [
            *repairs(actual, self.node, now_ns),
            *(withdrawal(each.pod, each.placement) for each in barred if each.pod.view.placement is not None),
            *target_repairs(self.targets, waiting, self.node),
            *(Repair(pod, assigned, "assigned") for pod in never_listed.values() if not pod.view.assigned),
        ]
        fresh = [each.pod for each in waiting if each.first]
        known = settled | never_listed.keys() | {each.pod.view.uid for each in placed}
        known |= {pod.view.uid for pod in fresh}
        # those to which something was granted or about to be, and which are not listed yet
        unlisted = [pod for pod in self._pods.values() if pod.holds_slices and pod.view.uid not in known]
        order = RepairOrder(
            due, self._pods.values(), self.node,
            waiting=fresh, granted=unlisted, unanswered=self._unanswered.values(),
        )  # fmt: skip
        return order.next_writes(uid)

    # -- what each pod holds ---------------------------------------------------------------------------

    def held_ids(self) -> frozenset[str]:
        """Every id that is held, by kubelet's assignments or by what was granted."""
        held = [each.ids for each in self.assignments or ()]
        return frozenset[str]().union(*held, *(grant.ids for grant in self.tentative))

    def ids_in_use(self) -> frozenset[str]:
        """Every id that somebody may have, listed or not."""
        unlisted = (each.assignment.ids for each in (*self.maybe_forgotten(), *self.orphans))
        return self.held_ids().union(*unlisted, *self._granted)

    def ids_of_living(self) -> frozenset[str]:
        """The ids that kubelet lists for pods that have not ended."""
        holders = set(self.holders())
        listed = [each.ids for each in self.assignments or () if each.pod_key in holders]
        return frozenset[str]().union(*listed)

    def listed_ids(self, uid: str, container: str) -> frozenset[str] | None:
        """The ids that kubelet lists for a container of a living pod; None if it lists none."""
        pod = self.living(uid)
        mine = (pod.key if pod else None, container)
        return next((one.ids for one in self.assignments or () if (one.pod_key, one.container) == mine), None)

    def limits(self, uid: str, container: str) -> dict[str, CardLimit] | None:
        """By card uuid, the limits by the ids that kubelet lists; None if it lists none, or not ours."""
        pod, ids = self.living(uid), self.listed_ids(uid, container)
        if pod is not None and ids is not None:
            with contextlib.suppress(GrantError):
                limits = grant_to(pod.container(container), ids, self.node).limits
                return {limit.card.uuid: limit for limit in limits}
        return None

    def holders(self) -> list[str]:
        """Pods of this node that hold slices of its cards."""
        return sorted(pod.view.key for pod in self._pods.values() if pod.holds_slices)

    def pod(self, uid: str) -> NodePod | None:
        return self._pods.get(uid)

    def pods(self) -> Iterable[NodePod]:
        return self._pods.values()

    def living(self, uid: str) -> Pod | None:
        """The pod if it exists and its containers may run."""
        pod = self._pods.get(uid)
        return pod.view if pod is not None and not pod.view.finished else None

    def _actual_placements(self, assignments: Iterable[DeviceAssignment]) -> list[ActualPlacement]:
        """Where pods are, except pods whose name kubelet still lists with the devices of an earlier pod."""
        ours = (*(each.assignment.ids for each in self._forgotten.containers), *self._granted)
        found = actual_placements(self._pods.values(), assignments, self.node, ours)
        return [
            each
            for each in found
            if self.aside.is_in_force(each.pod)
            and all(
                self._owners.get(one.ids, each.pod.view.uid) == each.pod.view.uid
                for one in self._assignments_of(each.pod)
            )
        ]

    def _assignments_of(self, pod: NodePod) -> list[DeviceAssignment]:
        return [each for each in self.assignments or () if each.pod_key == pod.view.key]

    def pod_named(self, key: str) -> NodePod | None:
        """If several pods have this name, the living one."""
        named = [pod for pod in self._pods.values() if pod.view.key == key]
        return max(named, key=lambda pod: (not pod.view.finished, not pod.view.terminating), default=None)
