"""The verb preempt: of kube-scheduler's victims on each node, those whose leaving makes room on a card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpuslice.adapters.wire.extender import MetaVictims, Pod, PodIdentifier
from gpuslice.apps.extender.keeping import placement_of
from gpuslice.apps.extender.promises import Promises
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Request
from gpuslice.core.nomination import Nomination, taken_by
from gpuslice.core.preemption import Eviction, Victims, victims


class VictimsByCard:
    """Answers for a ledger, and keeps in mind what it answered."""

    def __init__(self, ledger: Ledger, promises: Promises) -> None:
        self._ledger = ledger
        self._promises = promises

    def of(self, pod: Pod, request: Request, proposed: Mapping[str, MetaVictims]) -> dict[str, MetaVictims]:
        """Nodes with whom to evict there; those where nobody's leaving helps are left out."""
        every = {name: self._on(name, pod, request, each) for name, each in proposed.items()}
        found = {name: each for name, each in every.items() if each is not None}
        ways = [placement_of(Eviction(name, each.cards, ()), request) for name, each in found.items()]
        self._promises.note(pod.metadata.uid, pod.spec.priority or 0, ways)
        return {
            name: MetaVictims(
                [PodIdentifier(uid) for uid in sorted(each.uids)], proposed[name].num_pdb_violations
            )
            for name, each in found.items()
        }

    def _on(self, name: str, pod: Pod, request: Request, proposed: MetaVictims) -> Victims | None:
        allocations = self._ledger.allocations(name)
        if allocations is None:
            return None
        uid, priority = pod.metadata.uid, pod.spec.priority or 0
        before_it = self._promises.on(name, uid, priority)
        found = victims(
            allocations,
            request,
            priority,
            {each.uid for each in proposed.pods or ()},
            taken=taken_by(before_it, name, uid, priority),
            suffices=lambda gone: self._host_resources(name, request, gone, before_it),
        )
        return found if found is not None and found.uids else None

    def _host_resources(
        self, name: str, request: Request, gone: Iterable[str], before_it: Iterable[Nomination]
    ) -> bool:
        """Whether CPU and memory of the node are enough without these pods, and with those before it."""
        state, pods = self._ledger.state(name), self._ledger.pods
        if state is None:
            return False
        coming = [pods[each.uid].host for each in before_it if each.uid in pods]
        going = [pods[uid].host for uid in gone if uid in pods]
        return state.node.host.holds(self._ledger.host_used(name), [request.host, *coming], going)
