"""What holds of every choice of victims, on any node."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gpuslice.core.holds import NodeHolds
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod, Request
from gpuslice.core.preemption import Budget, eviction, victims
from tests.builders import make_node, make_pod, make_request

CARD_UNITS = 8


@dataclass(frozen=True, slots=True)
class Scene:
    """A node with pods, and a pod that wants room there."""

    allocations: NodeHolds
    pods: tuple[Pod, ...]
    request: Request
    priority: int
    budgets: tuple[Budget, ...]

    def may_go(self, pod: Pod) -> bool:
        return pod.priority < self.priority and not pod.terminating

    def roomy(self, gone: Collection[str], staying: Collection[str] = ()) -> set[int]:
        """The cards on which the request fits once these and those leaving are gone, but `staying`."""
        left = {gpu.index: gpu.units for gpu in self.allocations.node.cards} if self.allocations.node else {}
        for pod in self.pods:
            there = pod.uid not in gone and (not pod.terminating or pod.uid in staying)
            if pod.placement and there:
                for part in pod.placement.slices:
                    left[part.card] -= part.units
        return {card for card, units in left.items() if units >= self.request.units_per_card}


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    count = draw(st.integers(1, 3))
    ledger, left, pods = Ledger(), [CARD_UNITS] * count, []
    ledger.apply_node(make_node(cards=[CARD_UNITS] * count))
    for number in range(draw(st.integers(0, 8))):
        cards = draw(st.sets(st.integers(0, count - 1), min_size=1, max_size=2))
        units = draw(st.integers(1, CARD_UNITS))
        if any(left[card] < units for card in cards):
            continue
        for card in cards:
            left[card] -= units
        pod = make_pod(
            f"p{number}",
            units * len(cards),
            uid=f"p{number}",
            node="n1",
            cards=sorted(cards),
            priority=draw(st.integers(0, 4)),
            terminating=draw(st.integers(0, 5)) == 0,
            assume_time_ns=draw(st.integers(1, 5)),
        )
        ledger.apply_pod(pod)
        pods.append(pod)
    allocations = ledger.holds.on("n1")
    assert allocations is not None
    cards_wanted = draw(st.integers(1, 2))
    request = make_request(draw(st.integers(1, CARD_UNITS)) * cards_wanted, cards=cards_wanted)
    uids = [pod.uid for pod in pods]
    budget = st.builds(
        Budget, st.integers(0, 2), st.frozensets(st.sampled_from(uids)) if uids else st.just(frozenset())
    )
    return Scene(
        allocations, tuple(pods), request, draw(st.integers(0, 5)), tuple(draw(st.lists(budget, max_size=2)))
    )


def possible(scene: Scene) -> bool:
    """Whether evicting everybody who may go would do."""
    everybody = {pod.uid for pod in scene.pods if scene.may_go(pod)}
    return len(scene.roomy(everybody)) >= scene.request.card_count


@given(scenes())
def test_a_pod_that_is_evicted_is_less_important_needed_and_enough(scene: Scene) -> None:
    way = eviction(scene.allocations, scene.request, scene.priority, scene.budgets)
    assert (way is not None) == possible(scene)
    if way is None:
        return
    gone = {allocation.pod.uid for allocation in way.victims}
    assert all(scene.may_go(allocation.pod) for allocation in way.victims)
    assert len(way.cards) == scene.request.card_count
    assert set(way.cards) <= scene.roomy(gone)
    for uid in gone:
        assert not set(way.cards) <= scene.roomy(gone - {uid}), f"{uid} could have stayed"


@given(scenes())
def test_a_budget_is_kept_wherever_no_violation_is_counted(scene: Scene) -> None:
    way = eviction(scene.allocations, scene.request, scene.priority, scene.budgets)
    if way is not None and not way.violations:
        gone = {allocation.pod.uid for allocation in way.victims}
        assert all(
            len(gone & budget.uids) <= budget.allowed for budget in scene.budgets if gone & budget.uids
        )


@given(scenes(), st.data())
def test_the_answer_to_kube_scheduler_makes_room_and_keeps_what_it_chose_for_other_reasons(
    scene: Scene, data: st.DataObject
) -> None:
    lower = {pod.uid for pod in scene.pods if pod.priority < scene.priority}
    strangers = {"web"} if data.draw(st.booleans()) else set()
    proposed = strangers | {uid for uid in sorted(lower) if data.draw(st.booleans())}
    found = victims(scene.allocations, scene.request, scene.priority, proposed)
    chosen = None if found is None else found.uids
    staying = {pod.uid for pod in scene.pods if pod.terminating} - proposed
    wanted = scene.request.card_count
    assert (chosen is not None) == (len(scene.roomy(lower - staying, staying)) >= wanted)
    if chosen is None:
        return
    assert len(scene.roomy(chosen, staying)) >= wanted
    assert chosen <= lower | strangers
    assert proposed <= chosen or not strangers
    if len(scene.roomy(proposed, staying)) >= wanted:
        assert chosen == proposed
