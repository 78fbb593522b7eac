"""Everything the agent knows about who waits, who was granted what and who holds what; without I/O.

kubelet's calls are answered from here at once: no question to the API server or to kubelet's own book stands
between a call and its answer. What is known comes in beside them, by `pod_changed` and `book_read`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass

from gpuslice.apps.agent.forgotten import Forgotten, Kept, owners_by_id
from gpuslice.apps.agent.moves import Moves
from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.preference import Claim, Proposal, claim, propose
from gpuslice.apps.agent.repair import Repair, Truth, exchanges, repairs, truths, wish_repairs
from gpuslice.apps.agent.wants import Guess, Want, only_init_containers, outstanding
from gpuslice.core.contract import ANN_ASSIGNED, ANN_ASSUME_TIME, GPU_MEM, card_of_device_id
from gpuslice.core.device_assignment import DeviceAssignment, holder_of
from gpuslice.core.grant import placement_of_devices, units_per_card
from gpuslice.core.model import Card, ContainerKind, ContainerRequest, Node, Placement, Pod, Refusal

FORGET_S = 60.0
"""How long kubelet may take from Allocate to its book; after that the pod was rejected for another reason."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The container that device ids belong to. `exact`: kubelet's book names it with just these ids."""

    pod: NodePod
    container: ContainerRequest | None
    exact: bool


class Desk:
    """The agent's knowledge of one node. Changes happen between awaits, so every answer is consistent."""

    def __init__(
        self,
        node: Node,
        *,
        place_unplaced: bool = False,
        clock: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.node = node
        self.book: tuple[DeviceAssignment, ...] | None = None  # None: kubelet's book has not been read yet
        self.changed = asyncio.Event()
        self.guesses: list[Guess] = []
        self.wishes: dict[str, Placement] = {}
        self._unsure: dict[str, Repair] = {}  # by pod uid, writes that were not answered (yet)
        self._place_unplaced = place_unplaced
        self._clock = clock
        self._now_ns = now_ns
        self._pods: dict[str, NodePod] = {}
        self._owners: dict[frozenset[str], str] = {}  # ids → uid of the pod they were last seen with
        self._forgotten = Forgotten()

    # -- what becomes known ---------------------------------------------------------------------------

    def set_cards(self, cards: tuple[Card, ...], unhealthy: frozenset[int] = frozenset()) -> None:
        self.node = Node(self.node.name, cards, unhealthy)

    def pod_changed(self, pod: NodePod) -> None:
        """A pod as the API server showed it. The watch may be behind the answers to our own writes."""
        known = self._pods.get(pod.view.uid)
        if known is not None and 0 < pod.view.version < known.view.version:
            return
        self._pods[pod.view.uid] = pod
        if known is not None and pod.view.version != known.view.version:
            self._unsure.pop(pod.view.uid, None)  # what was sent was for the version before
        if self.wishes.get(pod.view.uid) == pod.view.placement:
            self.wishes.pop(pod.view.uid, None)  # the annotation says so now
        self.changed.set()

    def written(self, pod: NodePod) -> None:
        """A pod as the answer to our own write shows it, which may come after the news of its end."""
        if pod.view.uid in self._pods:
            self.pod_changed(pod)

    def sent(self, repair: Repair) -> bool:
        """Until it is answered it may be written any time. Answers whether one was in doubt before."""
        uid = repair.pod.view.uid
        in_doubt = uid in self._unsure
        if repair.of_cards and uid in self._pods:
            self._unsure[uid] = repair
        return in_doubt

    def answered(self, repair: Repair) -> None:
        """It is known whether the repair was written."""
        self._unsure.pop(repair.pod.view.uid, None)

    def pod_gone(self, uid: str) -> None:
        self._pods.pop(uid, None)
        self.wishes.pop(uid, None)
        self._unsure.pop(uid, None)
        self.guesses = [guess for guess in self.guesses if guess.uid != uid]

    def kubelet_came(self, kept: Iterable[Kept]) -> None:
        """A kubelet follows our list from now on. `kept`: whoever may run, known to it or not."""
        self._forgotten.kubelet_came(kept, self._clock())

    def book_read(self, assignments: Iterable[DeviceAssignment], asked_at_s: float) -> None:
        """kubelet's book as it was some time after `asked_at_s`: what it shows is no guess any more."""
        self.book = tuple(assignments)
        self._forgotten.book_read(self.book, asked_at_s, self._living)
        shown = frozenset[str]().union(*(assignment.ids for assignment in self.book))
        self.guesses = [guess for guess in self.guesses if self._still_a_guess(guess, shown, asked_at_s)]
        self._owners = {ids: uid for ids, uid in self._owners.items() if ids & shown}
        for truth in self._truths():
            for assignment in self._assignments_of(truth.pod):
                self._owners[assignment.ids] = truth.pod.view.uid
        self.changed.set()

    def _still_a_guess(self, guess: Guess, shown: frozenset[str], asked_at_s: float) -> bool:
        if guess.lasting:
            return guess.uid in self._pods
        if guess.at_s > asked_at_s:
            return True
        return not guess.ids & shown and self._clock() - guess.at_s < FORGET_S

    # -- kubelet's questions --------------------------------------------------------------------------

    @property
    def places_unplaced(self) -> bool:
        """Whether a pod without a card gets one here. With one card there is nothing to choose."""
        return self._place_unplaced or len(self.node.cards) == 1

    def waiting(self) -> list[Want]:
        """Containers without devices, most probable first."""
        return outstanding(self._pods.values(), set(self._served()), self.wishes)

    def _served(self) -> Iterator[tuple[str, str]]:
        """(pod uid, container) of whoever has devices. A name in kubelet's book may be an earlier pod's."""
        for guess in self.guesses:
            yield guess.uid, guess.container
        for assignment in self.book or ():
            uid = self._owners.get(assignment.ids)
            pod = None if uid else self._pod_named(assignment.pod_key)
            yield uid or (pod.view.uid if pod else ""), assignment.container

    def acceptable(self) -> list[Want]:
        """Those who get what they ask for; whoever was taken off its card gets another one."""
        any_card = self.places_unplaced
        return [want for want in self.waiting() if want.cards or any_card or want.pod.taken_off]

    def propose(self, available: Iterable[str], must_include: Iterable[str], size: int) -> Proposal | Refusal:
        kept = owners_by_id(self.inhabited())
        return propose(available, must_include, size, self.acceptable(), self.node, kept=kept)

    def claim(self, ids: frozenset[str]) -> Claim | Refusal:
        """For whom `ids` are. Raises `GrantError` for foreign ids. Nothing is remembered until `granted`."""
        claimed = claim(
            ids,
            self.acceptable(),
            self.guesses,
            self.book or (),
            self.node,
            unplaced=self.places_unplaced,
        )
        if isinstance(claimed, Claim):
            uid = claimed.want.pod.view.uid if claimed.want else claimed.again.uid if claimed.again else ""
            return self.crowded(ids, uid) or claimed
        return claimed

    # -- whom kubelet forgot ----------------------------------------------------------------------------

    def inhabited(self) -> tuple[Kept, ...]:
        """Containers that may be running without kubelet's book showing them."""
        again = {(guess.uid, guess.container) for guess in self.guesses}  # kubelet asked: it had ended
        living = self._forgotten.living(self.alive)
        return tuple(each for each in living if (each.uid, each.container) not in again)

    def forgotten(self) -> tuple[Kept, ...]:
        """Those of whom that is certain."""
        return self.inhabited() if self._forgotten.certain else ()

    def bare(self) -> dict[str, tuple[Pod, list[str]]]:
        """Pods with containers that run without the devices that they ask for, by uid.

        kubelet started them when it knew nothing of the resource: its checkpoint was lost, and we were away.
        A pod that ever got its devices is annotated as assigned, or has a folder.
        """
        if self.book is None or not self._forgotten.certain:
            return {}
        served = {*self._served(), *((each.uid, each.container) for each in self.inhabited())}
        found = {}
        for uid, pod in self._pods.items():
            if pod.view.request is None or pod.view.assigned or pod.view.finished:
                continue
            asking = [each.name for each in pod.view.request.containers if each.name in pod.running]
            if without := [name for name in asking if (uid, name) not in served]:
                found[uid] = (pod.view, without)
        return found

    def crowded(self, ids: frozenset[str], uid: str) -> Refusal | None:
        """Why pod `uid` may not use `ids`: with those whom kubelet forgot it is too much for a card."""
        others = [each for each in self.forgotten() if each.uid != uid]
        known = units_per_card(ids | self.held_ids())
        unknown = Counter(card_of_device_id(each) for other in others for each in other.ids)
        for card in self.node.cards:
            if card.uuid in units_per_card(ids) and known[card.uuid] + unknown[card.uuid] > card.units:
                return Refusal(self._too_much(card, others, unknown[card.uuid]))
        return None

    def _too_much(self, card: Card, others: Iterable[Kept], units: int) -> str:
        uids = dict.fromkeys(each.uid for each in others)
        names = ", ".join(sorted(key for uid in uids if (key := self._key_of(uid))))
        return (
            f"card {card.index} of node {self.node.name} has no room left beside {units} of its {card.units} "
            f"units of {GPU_MEM} in running containers that kubelet has forgotten ({names}); "
            f"delete those pods, so that they are made anew, or this one"
        )

    def _living(self, uid: str) -> Pod | None:
        return self._pods[uid].view if self.alive(uid) else None

    def _key_of(self, uid: str) -> str | None:
        pod = self._living(uid)
        return pod.key if pod else None

    def pod_units(self, claimed: Claim) -> int | None:
        """What the whole pod holds, None when the pod is not known."""
        uid = claimed.again.uid if claimed.again else ""
        pod = claimed.want.pod if claimed.want else self._pods.get(uid)
        return pod.view.request.units if pod and pod.view.request else None

    def granted(self, ids: frozenset[str], claimed: Claim) -> None:
        """The ids are given away; they are nobody else's from now on."""
        self._owners = {known: uid for known, uid in self._owners.items() if not known & ids}
        if claimed.want is None:
            return
        pod = claimed.want.pod.view
        lasting = only_init_containers(claimed.want.request)
        guess = Guess(pod.uid, claimed.want.container.name, ids, self._clock(), lasting)
        self.guesses.append(guess)
        got = placement_of_devices(ids, self.node)
        cards = {part.card for part in got.slices}
        if cards != set(claimed.want.cards) and len(cards) == claimed.want.request.card_count:
            self.wishes[pod.uid] = got  # so that the pod's other containers join this one

    # -- whose are they, and what must be written -------------------------------------------------------

    def holder(self, ids: frozenset[str]) -> Holder | None:
        """The container that `ids` belong to, by kubelet's book, or else by what was granted."""
        match = holder_of(ids, self.book or ())
        if match is not None:
            pod = self._pod_named(match.assignment.pod_key)
            if pod is None:
                return None
            exact = match.exact
            name = match.assignment.container
            return Holder(pod, _container(pod, name) if exact else _init_container(pod, len(ids)), exact)
        guess = next((guess for guess in reversed(self.guesses) if guess.ids == ids), None)
        pod = self._pods.get(guess.uid) if guess else None
        return Holder(pod, _container(pod, guess.container), False) if pod and guess else None

    def steps(self, uid: str = "") -> list[Repair]:
        """What may be written next so that the annotations say the truth, or that which leads to one pod's.

        Each is for now: once one was written, ask again. Exchanges wishes on the way.
        """
        if self.book is None:
            return []
        found = self._truths()
        settled = {each.uid for each in self.forgotten()}  # their cards are what they are
        waiting = [want for want in self.waiting() if want.pod.view.uid not in settled]
        self.wishes.update(exchanges(found, waiting, self.wishes, self.node))
        made = [*repairs(found, self.node, self._now_ns()), *wish_repairs(self.wishes, waiting, self.node)]
        fresh = [want.pod for want in waiting if want.first]
        sure = settled.union((truth.pod.view.uid for truth in found), (pod.view.uid for pod in fresh))
        pods = self._pods.values()
        wanted, unseen = [*made, *self._assigned_inits()], self._unseen(sure)
        return Moves(
            wanted, pods, self.node, waiting=fresh, granted=unseen, unsure=self._unsure.values()
        ).steps(uid)

    def _unseen(self, others: Set[str]) -> list[NodePod]:
        """Whoever was granted something, or was about to be, and is not in kubelet's book (yet)."""
        known = others | {guess.uid for guess in self.guesses if guess.lasting}
        return [pod for pod in self._pods.values() if _asks(pod.view) and pod.view.uid not in known]

    def held_ids(self) -> frozenset[str]:
        """Every id that somebody has, by kubelet's book or by what was granted."""
        held = [assignment.ids for assignment in self.book or ()]
        return frozenset[str]().union(*held, *(guess.ids for guess in self.guesses))

    def held_by(self, uid: str, container: str) -> frozenset[str] | None:
        """What kubelet's book shows for a container of a living pod; None when it does not show it."""
        mine = (self._key_of(uid), container)
        return next((each.ids for each in self.book or () if (each.pod_key, each.container) == mine), None)

    def holders(self) -> list[str]:
        """Pods of this node that hold parts of its cards."""
        return sorted(pod.view.key for pod in self._pods.values() if _asks(pod.view))

    def holders_of_whole_cards(self) -> list[str]:
        return sorted(pod.view.key for pod in self._pods.values() if pod.whole and not pod.view.finished)

    def alive(self, uid: str) -> bool:
        """Whether the pod is still there and its containers may run."""
        pod = self._pods.get(uid)
        return pod is not None and not pod.view.finished

    def _truths(self) -> list[Truth]:
        found = truths(self._pods.values(), self.book or (), self.node)
        return [truth for truth in found if not self._stale(truth)]

    def _stale(self, truth: Truth) -> bool:
        """kubelet's book still shows the devices of an earlier pod of the same name."""
        uid = truth.pod.view.uid
        return any(self._owners.get(each.ids, uid) != uid for each in self._assignments_of(truth.pod))

    def _assignments_of(self, pod: NodePod) -> list[DeviceAssignment]:
        return [assignment for assignment in self.book or () if assignment.pod_key == pod.view.key]

    def _assigned_inits(self) -> list[Repair]:
        """Pods that kubelet's book never shows are assigned once they were granted their devices."""
        pods = {guess.uid: self._pods[guess.uid] for guess in self.guesses if guess.lasting}
        written = {ANN_ASSIGNED: "true", ANN_ASSUME_TIME: str(self._now_ns())}
        return [Repair(pod, written, "assigned") for pod in pods.values() if not pod.view.assigned]

    def _pod_named(self, key: str) -> NodePod | None:
        """Of several pods of one name the one that lives."""
        named = [pod for pod in self._pods.values() if pod.view.key == key]
        return max(named, key=lambda pod: (not pod.view.finished, not pod.view.terminating), default=None)


def _asks(pod: Pod) -> bool:
    return pod.request is not None and not pod.finished


def _init_container(pod: NodePod, units: int) -> ContainerRequest | None:
    """Whose ids the app containers use again: kubelet's book does not name it, but its amount does."""
    containers = pod.view.request.containers if pod.view.request else ()
    inits = (each for each in containers if each.kind is ContainerKind.INIT)
    return next((each for each in inits if each.units == units), None)


def _container(pod: NodePod, name: str) -> ContainerRequest | None:
    request = pod.view.request
    return next((each for each in request.containers if each.name == name), None) if request else None
