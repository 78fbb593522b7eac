"""Device ids that stand for what pods were granted beyond their own: kubelet may give them to nobody.

kubelet never changes a container's ids. So ids that nobody has are set aside for what was added to a pod
while it runs, and offered as unhealthy: what kubelet and kube-scheduler count as free is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from gpuslice.apps.agent.pods import NodePod
from gpuslice.core.contract import card_of_device_id, device_id
from gpuslice.core.grant import units_per_card
from gpuslice.core.model import Card, Refusal
from gpuslice.core.request import peak

if TYPE_CHECKING:
    from gpuslice.apps.agent.allocation_state import AllocationState


class SetAside:
    """Chosen from the state whenever they are asked for: the same as before while nobody has them."""

    def __init__(self, state: AllocationState) -> None:
        self._state = state
        self._ids: Mapping[str, frozenset[str]] = {}

    def ids(self) -> Mapping[str, frozenset[str]]:
        """By pod uid. A pod for which there are too few has none: what it was granted is not in force."""
        added, found = added_by_card(self._state.pods()), dict[str, frozenset[str]]()
        cards = {card.index: card for card in self._state.node.cards}
        taken = set(self._state.ids_in_use()) if added else set()
        for uid in sorted(added, key=lambda uid: (uid not in self._ids, uid)):
            mine: set[str] = set()
            for index, units in added[uid].items():
                mine |= set(self._free(uid, cards[index], taken)[:units] if index in cards else ())
            if len(mine) == sum(added[uid].values()):
                found[uid] = frozenset(mine)
                taken |= mine
        self._ids = found
        return found

    def _free(self, uid: str, card: Card, taken: set[str]) -> list[str]:
        """Those of the card that the pod had before, then the last ones: kubelet gives away the first."""
        before = sorted(one for one in self._ids.get(uid, ()) if card_of_device_id(one) == card.uuid)
        last_first = (device_id(card.uuid, unit) for unit in reversed(range(card.units)))
        return [one for one in dict.fromkeys((*before, *last_first)) if one not in taken]

    def is_in_force(self, pod: NodePod) -> bool:
        """Whether kubelet is kept from giving away all that the pod holds."""
        return not added_by_card([pod]) or pod.view.uid in self.ids()

    def no_room_beside(self, ids: frozenset[str], uid: str) -> Refusal | None:
        """Why pod `uid` may not use `ids`: with what was added to others it is too much for a card."""
        beyond = Counter[int]()
        for of_pod in added_by_card(pod for pod in self._state.pods() if pod.view.uid != uid).values():
            beyond.update(of_pod)
        asked, node = units_per_card(ids), self._state.node
        known = units_per_card(ids | self._state.held_ids()) if beyond else {}
        for card in node.cards if beyond else ():
            if card.uuid in asked and known[card.uuid] + beyond[card.index] > card.units:
                return Refusal(
                    f"card {card.index} of node {node.name} has no room left beside {beyond[card.index]} "
                    f"units that pods there were granted while they run"
                )
        return None


def added_by_card(pods: Iterable[NodePod]) -> dict[str, dict[int, int]]:
    """By pod uid, the units by card index that living pods hold beyond what kubelet counts for them."""
    found = {}
    for pod in pods:
        view = pod.view
        if view.request is None or view.finished or view.placement is None:
            continue
        added = view.request.units - peak(view.request.containers, lambda one: one.devices)
        if added > 0:
            cards = [part.card for part in view.placement.slices]
            found[view.uid] = dict.fromkeys(cards, added // len(cards))
    return found
