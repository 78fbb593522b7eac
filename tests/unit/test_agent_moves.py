"""The order in which the agent changes what annotations say of cards: every moment of it must add up."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.apps.agent.allocation_state import AllocationState
from gpuslice.apps.agent.pending import Recipient
from gpuslice.apps.agent.pods import AgentPod, NodePod, node_pod
from gpuslice.apps.agent.repair import Repair
from gpuslice.core.annotations import placement_annotations
from gpuslice.core.contract import ANN_INDEX, ANN_MEANT, GPU_COUNT, device_id
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Node, Placement, Pod, Refusal
from gpuslice.core.placement import on_cards, place
from tests.builders import api_pod, make_node, make_request


@dataclass
class Play:
    """A node's pods as the API server has them, kubelet's assignments, and the agent's state between them."""

    node: Node
    units: list[int]  # by pod
    annotated: list[int | None]  # card by pod
    pods: list[dict[str, Any]] = field(default_factory=list)
    late: list[Repair] = field(default_factory=list)

    def __post_init__(self) -> None:
        for number, units in enumerate(self.units):
            self.pods.append(api_pod(f"p{number}", str(units), node=self.node.name, version="1"))
            self._annotate(number)
        self.another_agent()

    def another_agent(self) -> None:
        """It knows what is written and nothing else; by then nothing of the one before is on its way."""
        self.late.clear()
        self.state = AllocationState(self.node, clock=lambda: 0.0)
        for number in range(len(self.pods)):
            self.show(number)

    def _annotate(self, number: int) -> None:
        card, pod = self.annotated[number], self.pods[number]
        request = self.view(number).view.request
        assert request is not None
        if card is not None:
            placement = on_cards(self.node.name, [card], request)
            pod["metadata"]["annotations"] = placement_annotations(placement, request, self.node, number + 1)

    def add(self, units: int, placement: Placement) -> Pod:
        """One more that an extender has placed and bound. The agent has not heard of it."""
        self.units.append(units)
        self.annotated.append(placement.slices[0].card)
        number = len(self.pods)
        self.pods.append(api_pod(f"p{number}", str(units), node=self.node.name, version="1"))
        self._annotate(number)
        return self.view(number).view

    def view(self, number: int) -> NodePod:
        return node_pod(msgspec.convert(self.pods[number], AgentPod))

    def show(self, number: int) -> None:
        self.state.pod_changed(self.view(number))

    def ids_of(self, true: dict[int, int]) -> dict[int, frozenset[str]]:
        """`true`: the card of each pod, in the order in which kubelet gives."""
        units: Counter[int] = Counter()
        ids = {}
        for number, card in true.items():
            first, units[card] = units[card], units[card] + self.units[number]
            uuid = self.node.cards[card].uuid
            ids[number] = frozenset(device_id(uuid, unit) for unit in range(first, units[card]))
        return ids

    def kubelet_gave(self, true: dict[int, int]) -> None:
        ids = self.ids_of(true).items()
        self.state.assignments_read(
            [DeviceAssignment("default", f"p{number}", "main", each) for number, each in ids], 1.0
        )

    def granted(self, ids: frozenset[str]) -> None:
        """kubelet asks, and does not say for whom."""
        recipient = self.state.recipient(ids)
        assert isinstance(recipient, Recipient)
        self.state.granted(ids, recipient)

    def write(self, step: Repair) -> None:
        """What the API server does with it: nothing, where the pod has changed since."""
        number = int(step.pod.view.name[1:])
        metadata = self.pods[number]["metadata"]
        if step.of_cards and str(step.pod.view.version) != metadata["resourceVersion"]:
            return
        before = metadata.get("annotations", {})
        merged = {**before, **step.annotations}
        after = {name: text for name, text in merged.items() if text is not None}
        metadata["annotations"] = after
        metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + (after != before))

    def send(self, step: Repair, dice: random.Random | None = None) -> None:
        """As the reconciler does. `dice`: whether it arrives, is answered, and when given up arrives late."""
        if dice is not None and self.late and dice.random() < 0.3:
            self.write(self.late.pop())
        in_doubt = self.state.sent(step)
        fate = dice.choice(["", "", "", "unanswered", "lost", "late", "refused"]) if dice is not None else ""
        if fate in {"", "unanswered"}:
            self.write(step)
        if fate == "late":
            self.late.append(step)
        if fate == "" or (fate == "refused" and not in_doubt):
            self.state.answered(step)
        if fate == "":
            self.show(int(step.pod.view.name[1:]))

    def promised(self) -> Counter[int]:
        """Units by card, as anybody would add them up who reads annotations."""
        sums: Counter[int] = Counter()
        for number, units in enumerate(self.units):
            index = self.pods[number]["metadata"].get("annotations", {}).get(ANN_INDEX)
            if index is not None:
                sums[int(index)] += units
        return sums

    def adds_up(self) -> bool:
        sums = self.promised()
        return all(sums[card.index] <= card.units for card in self.node.cards)

    def said(self, number: int) -> str:
        said: str = self.pods[number]["metadata"].get("annotations", {}).get(ANN_INDEX, "")
        return said


Case = tuple[list[int], list[int], list[int | None], dict[int, int]]
"""Units of each card; units of each pod; the card that it was placed on; and that which kubelet gave it."""


@st.composite
def mixed_up(draw: st.DrawFn) -> Case:
    """Pods that were all placed with room for each, and the cards that kubelet gave to some of them."""
    cards = draw(st.lists(st.integers(2, 6), min_size=1, max_size=4))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))

    def put(units: int, left: list[int]) -> int | None:
        roomy = [card for card, free in enumerate(left) if free >= units]
        card = draw(st.sampled_from(roomy)) if roomy else None
        if card is not None:
            left[card] -= units
        return card

    left = list(cards)
    annotated = [put(units, left) for units in sizes]
    left, true = list(cards), {}
    for number in draw(st.permutations(range(len(sizes)))):
        if annotated[number] is not None and draw(st.booleans()):
            card = put(sizes[number], left)
            if card is not None:
                true[number] = card
    return cards, sizes, annotated, true


@given(mixed_up(), st.integers(0, 1 << 20))
def test_every_moment_adds_up_whatever_is_lost_and_the_truth_is_told_in_the_end(
    case: Case, seed: int
) -> None:
    """Any of the steps may come first; each may be lost, answered late, or arrive when it was given up."""
    cards, units, annotated, true = case
    play = Play(make_node(cards=cards), units, annotated)
    dice = random.Random(seed)
    play.kubelet_gave(true)
    for round_ in range(400):
        steps = play.state.due_repairs()
        if not steps:
            break
        play.send(dice.choice(steps), dice if round_ < 200 else None)
        assert play.adds_up()
        if dice.random() < 0.1:
            play.another_agent()
            play.kubelet_gave(true)
    else:
        raise AssertionError(f"never ends: {play.state.due_repairs()}")
    assert {number: play.said(number) for number in true} == {n: str(card) for n, card in true.items()}


@st.composite
def exchanged(draw: st.DrawFn) -> Case:
    """Equal pods, all placed, of which some were given one another's cards."""
    units, slots = draw(st.integers(1, 3)), draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    spare = draw(st.lists(st.integers(0, 2), min_size=len(slots), max_size=len(slots)))
    annotated = draw(st.permutations([card for card, count in enumerate(slots) for _ in range(count)]))
    given_cards = draw(st.permutations(annotated))
    pods = draw(st.lists(st.sampled_from(range(len(annotated))), unique=True, max_size=len(annotated)))
    cards = [count * units + more for count, more in zip(slots, spare, strict=True)]
    return cards, [units] * len(annotated), list(annotated), dict(zip(pods, given_cards, strict=False))


@dataclass
class Placing:
    """An extender, which knows what it decided itself and else what was true some time ago."""

    play: Play
    seen: int = 0  # of the past moments the one that its watch has shown
    past: list[list[NodePod]] = field(default_factory=list)
    mine: list[Pod] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.at_rest = self.play.promised()
        self.remember()

    def remember(self) -> None:
        self.past.append([self.play.view(number) for number in range(len(self.play.pods))])

    def place(self, units: int, dice: random.Random) -> Placement | None:
        self.seen = dice.randint(self.seen, len(self.past) - 1)
        ledger = Ledger()
        ledger.apply_node(self.play.node)
        for pod in self.mine:
            assert pod.placement is not None
            assert ledger.assume(replace(pod, placement=None, node=""), pod.placement) is None
        for seen in self.past[self.seen]:
            ledger.apply_pod(seen.view)
        state = ledger.state(self.play.node.name)
        assert state is not None
        for card, left in zip(state.node.cards, state.left, strict=True):
            assert left <= card.units - self.at_rest[card.index]  # else kubelet might have to refuse the pod
        found = place(state, make_request(units))
        return None if isinstance(found, Refusal) else found


@given(exchanged(), st.integers(0, 1 << 20))
def test_an_extender_that_is_behind_never_places_too_much_while_equal_pods_exchange(
    case: Case, seed: int
) -> None:
    cards, units, annotated, true = case
    play = Play(make_node(cards=cards), units, annotated)
    dice = random.Random(seed)
    extender = Placing(play)
    ids, asked = play.ids_of(true), list(true)
    granted = 0
    for _ in range(60):
        if dice.random() < 0.3 and granted < len(asked):
            play.granted(ids[asked[granted]])
            granted += 1
        if dice.random() < 0.2:
            play.kubelet_gave({number: true[number] for number in asked[:granted]})
        if steps := play.state.due_repairs():
            play.send(dice.choice(steps), dice)
            extender.remember()
        more = dice.randint(1, 3)
        if dice.random() < 0.3 and (found := extender.place(more, dice)) is not None:
            extender.mine.append(play.add(more, found))
            extender.at_rest[found.slices[0].card] += more
            extender.remember()
        for number in range(len(play.pods)):
            if dice.random() < 0.2:
                play.show(number)
        assert play.adds_up()


def steps_of(play: Play) -> list[tuple[str, str]]:
    """Pod and new card ("" for none) of each write, always the first that may be done."""
    done: list[tuple[str, str]] = []
    while steps := [step for step in play.state.due_repairs() if step.of_cards]:
        done.append((steps[0].pod.view.name, steps[0].annotations[ANN_INDEX] or ""))
        play.write(steps[0])
        play.show(int(steps[0].pod.view.name[1:]))
    return done


def test_who_waits_leaves_its_card_before_another_comes_and_goes_where_there_is_room_then() -> None:
    play = Play(make_node(cards=(4, 3)), [2, 2, 2], [1, 0, 0])
    play.kubelet_gave({2: 1})
    (first,) = [step for step in play.state.due_repairs() if step.pod.view.name == "p0"]
    assert first.annotations[ANN_MEANT] == "0"
    assert steps_of(play) == [("p0", ""), ("p2", "1"), ("p0", "0")]
    assert ANN_MEANT not in play.view(0).said


def test_two_that_run_on_one_anothers_cards_change_places_by_way_of_none() -> None:
    play = Play(make_node(cards=(3, 3)), [2, 2], [0, 1])
    play.kubelet_gave({0: 1, 1: 0})
    assert steps_of(play) == [("p1", ""), ("p0", "1"), ("p1", "0")]


def test_a_chain_is_written_from_its_end_and_nobody_is_taken_off() -> None:
    play = Play(make_node(cards=(2, 2, 2)), [2, 2], [0, 1])
    play.kubelet_gave({0: 1, 1: 2})
    assert steps_of(play) == [("p1", "2"), ("p0", "1")]


def test_a_smaller_pod_whose_room_was_taken_waits_for_its_card_without_a_promise() -> None:
    """Of another amount, so it takes over nobody's card: kubelet's device assignments will tell."""
    play = Play(make_node(cards=(3, 2)), [2, 1], [0, 1])
    play.kubelet_gave({0: 1})
    assert steps_of(play) == [("p1", ""), ("p0", "1")]
    (want,) = play.state.acceptable()
    assert (want.pod.view.name, want.cards) == ("p1", (1,))
    play.kubelet_gave({0: 1, 1: 0})
    assert steps_of(play) == [("p1", "0")]


def test_of_pods_with_other_shares_of_compute_the_memory_alone_decides_who_takes_over() -> None:
    play = Play(make_node(cards=(2, 2)), [2, 2], [0, 1])
    limits = play.pods[1]["spec"]["containers"][0]["resources"]["limits"]
    limits["aliyun.com/gpu-core.percentage"] = "30"
    play.pods[1]["metadata"]["resourceVersion"] = "2"
    play.show(1)
    play.kubelet_gave({0: 1})
    assert steps_of(play) == [("p1", ""), ("p0", "1"), ("p1", "0")]
    meant = play.view(1).meant
    assert meant is not None
    assert [part.compute_percent for part in meant.slices] == [30]


def test_the_card_that_a_pod_moves_to_is_known_to_the_next_agent() -> None:
    play = Play(make_node(cards=(4, 3)), [2, 2, 2], [1, 0, 0])
    play.kubelet_gave({2: 1})
    play.write(next(step for step in play.state.due_repairs() if step.pod.view.name == "p0"))
    play.another_agent()
    play.kubelet_gave({2: 1})
    (want,) = [want for want in play.state.acceptable() if want.pod.view.name == "p0"]
    assert want.cards == (0,)
    assert steps_of(play) == [("p2", "1"), ("p0", "0")]


def test_news_that_are_older_than_the_answer_to_a_write_change_nothing() -> None:
    play = Play(make_node(cards=(3,)), [2], [0])
    old = play.view(0)
    play.pods[0]["metadata"]["resourceVersion"] = "5"
    play.state.written(play.view(0))
    play.state.pod_changed(old)
    assert [pod.view.version for pod in play.state._pods.values()] == [5]


def test_the_answer_to_a_write_brings_no_pod_back_that_is_gone() -> None:
    play = Play(make_node(cards=(3,)), [2], [0])
    play.state.pod_gone("uid-p0")
    play.state.written(play.view(0))
    assert play.state.waiting() == []


@pytest.mark.parametrize("label", [None, "1", "many"])
def test_a_label_that_was_changed_later_leaves_no_pod_unplaced(label: str | None) -> None:
    """Without a webhook whoever may change their pod may say that it is on fewer cards than it is."""
    play = Play(make_node(cards=(3, 3)), [4], [None])
    play.pods[0]["metadata"]["labels"] = {GPU_COUNT: label} if label else {}
    play.show(0)
    ids = frozenset(device_id(card.uuid, unit) for card in play.node.cards for unit in range(2))
    play.state.assignments_read([DeviceAssignment("default", "p0", "main", ids)], 1.0)
    assert steps_of(play) == [], "another plugin's ids say nothing of cards"
    play.state.kubelet_came([], granted=[sorted(ids)])
    assert steps_of(play) == [("p0", "0,1")]


def test_who_was_bound_first_is_served_first_whenever_that_was_decided() -> None:
    """Two Bindings overtake each other on their way; kubelet asks for pods as the API server shows them."""
    play = Play(make_node(cards=(4, 4)), [4, 4], [0, 1])  # decided in this order
    for number, version in ((0, "9"), (1, "8")):
        play.pods[number]["metadata"]["resourceVersion"] = version
    play.another_agent()
    play.pods[1]["metadata"]["resourceVersion"] = "10"  # changed since by whomever
    play.show(1)
    assert [each.pod.view.name for each in play.state.waiting()] == ["p1", "p0"]


def test_who_was_bound_to_a_card_that_kubelet_gave_to_others_leaves_it_until_there_is_room() -> None:
    """The extender bound it in the moment in which kubelet chose: nothing fences the one from the other."""
    play = Play(make_node(cards=(4, 3)), [2, 3], [0, 0])
    play.kubelet_gave({0: 0})
    assert steps_of(play) == [("p1", "")]
    (waits,) = play.state.acceptable()
    assert waits.cards == (0,)
