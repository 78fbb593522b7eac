"""What counts against a card: bound, assumed, on its way out, or nobody knows where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpuslice.core.contract import GPU_CORE
from gpuslice.core.host_resources import HostResources
from gpuslice.core.ledger import REMEMBERED_GONE, Ledger
from gpuslice.core.model import Node, Pod, Refusal
from gpuslice.core.placement import NO_CORE, NO_ROOM, NodeState, place
from gpuslice.core.policy.fleet import Shape
from tests.builders import make_card, make_node, make_placement, make_pod, make_request


def ledger_of(*pods: Pod, cards: tuple[int, ...] = (15, 15)) -> Ledger:
    ledger = Ledger()
    ledger.apply_node(make_node(cards=cards))
    for pod in pods:
        ledger.apply_pod(pod)
    return ledger


def left(ledger: Ledger, node: str = "n1") -> tuple[int, ...]:
    state = ledger.state(node)
    assert state is not None
    return state.left


def test_a_bound_pod_holds_what_its_annotations_say() -> None:
    assert left(ledger_of(make_pod(node="n1", card=1, memory=4))) == (15, 11)


def test_an_annotated_pod_that_is_not_bound_holds_nothing() -> None:
    assert left(ledger_of(make_pod(), make_pod("q", card=1))) == (15, 15)


def test_a_terminating_pod_holds_its_cards_and_a_finished_one_does_not() -> None:
    pod = make_pod(node="n1", card=0, terminating=True)
    ledger = ledger_of(pod)
    assert left(ledger) == (11, 15)
    ledger.apply_pod(replace(pod, finished=True))
    assert left(ledger) == (15, 15)


def test_a_late_event_does_not_bring_a_pod_back() -> None:
    pod = make_pod(node="n1", card=0)
    ledger = ledger_of(pod)
    ledger.remove_pod(pod.uid)
    ledger.apply_pod(pod)
    assert left(ledger) == (15, 15)
    assert ledger.pods == {}


def test_older_news_of_a_pod_change_nothing() -> None:
    old = make_pod(node="n1", card=0, version=5)
    new = replace(old, placement=make_placement("n1", 4, 1), version=9)
    assert left(ledger_of(new, old)) == (15, 11)


def test_a_new_pod_under_an_old_name_ends_the_old_one() -> None:
    old = make_pod("app-0", node="n1", card=0, uid="old", version=5)
    new = make_pod("app-0", node="n1", card=1, uid="new", version=9)
    ledger = ledger_of(old, new, old)
    assert left(ledger) == (15, 11)
    assert set(ledger.pods) == {"new"}


def test_a_pod_may_be_seen_before_its_node() -> None:
    ledger = Ledger()
    ledger.apply_pod(make_pod(node="n1", card=0))
    assert ledger.state("n1") is None
    ledger.apply_node(make_node())
    assert left(ledger) == (11,)


def test_a_pod_that_nobody_placed_counts_against_every_card() -> None:
    ledger = ledger_of(make_pod(node="n1", memory=10), make_pod("q", node="n1", card=0, memory=3))
    assert left(ledger) == (2, 5)


def test_more_used_than_there_is_leaves_nothing_and_never_less() -> None:
    ledger = ledger_of(make_pod(node="n1", card=0, memory=10))
    ledger.apply_node(make_node(cards=(8, 15)))
    assert left(ledger) == (0, 15)
    assert list(ledger.overcommitted()) == [("n1", 0, 10, 8)]
    ledger.apply_node(make_node(cards=(15, 15)))
    assert left(ledger) == (5, 15)


def test_a_vanished_card_takes_its_pods_share_with_it_and_brings_it_back() -> None:
    ledger = ledger_of(make_pod(node="n1", card=1, memory=10))
    ledger.apply_node(make_node(cards=(15,)))
    assert left(ledger) == (15,)
    ledger.apply_node(make_node(cards=(15, 15)))
    assert left(ledger) == (15, 5)


def test_an_unhealthy_card_has_nothing_free() -> None:
    ledger = ledger_of()
    ledger.apply_node(make_node(cards=(15, 15), unhealthy=frozenset({0})))
    assert left(ledger) == (0, 15)
    assert ledger.flush().size[ledger.fleet.row_of["n1"]].tolist() == [0, 15]


def test_an_assumed_placement_holds_until_it_is_forgotten() -> None:
    ledger = ledger_of()
    pod = make_pod()
    assert ledger.assume(pod, make_placement("n1", 4, 0)) is None
    ledger.apply_pod(pod)  # the watch shows it, still unbound
    assert left(ledger) == (11, 15)
    ledger.forget(pod.uid)
    assert left(ledger) == (15, 15)


def test_an_assumed_placement_becomes_the_pods_own_when_it_is_seen_bound() -> None:
    ledger = ledger_of()
    pod = make_pod()
    ledger.assume(pod, make_placement("n1", 4, 0))
    ledger.apply_pod(replace(pod, node="n1", placement=make_placement("n1", 4, 0)))
    ledger.forget(pod.uid)
    assert left(ledger) == (11, 15)
    assert ledger.assumed() == []


def test_bound_elsewhere_wins_over_what_was_assumed() -> None:
    ledger = ledger_of()
    ledger.apply_node(make_node("n2"))
    pod = make_pod()
    ledger.assume(pod, make_placement("n1", 4, 0))
    ledger.apply_pod(replace(pod, node="n2", placement=make_placement("n2", 4, 0)))
    assert left(ledger) == (15, 15)
    assert left(ledger, "n2") == (11,)


def test_a_bound_pod_without_annotations_is_not_where_it_was_assumed() -> None:
    """They are written before it is bound, so its agent has taken it off its card since."""
    ledger = ledger_of()
    pod = make_pod()
    ledger.assume(pod, make_placement("n1", 4, 1))
    ledger.apply_pod(replace(pod, node="n1"))
    assert left(ledger) == (11, 11)
    ledger.apply_pod(replace(pod, node="n1", placement=make_placement("n1", 4, 0)))
    assert (left(ledger), ledger.assumed()) == ((11, 15), [])


def test_bound_elsewhere_and_not_annotated_counts_against_every_card_there() -> None:
    ledger = ledger_of()
    ledger.apply_node(make_node("n2", cards=(8, 15)))
    pod = make_pod()
    ledger.assume(pod, make_placement("n1", 4, 0))
    ledger.apply_pod(replace(pod, node="n2"))
    assert (left(ledger), left(ledger, "n2")) == ((15, 15), (4, 11))


def test_annotations_that_are_taken_off_a_running_pod_leave_it_on_every_card() -> None:
    """What it held by its own words is no assumption of ours."""
    pod = make_pod(node="n1", card=1)
    ledger = ledger_of(pod)
    ledger.apply_pod(replace(pod, placement=None))
    assert left(ledger) == (11, 11)


def test_a_pod_that_is_shown_unbound_again_holds_nothing() -> None:
    pod = make_pod(node="n1", card=1)
    ledger = ledger_of(pod)
    ledger.apply_pod(replace(pod, node=""))
    assert left(ledger) == (15, 15)


def test_annotations_count_also_where_no_container_asks() -> None:
    """Another extender's pod with another resource name sits on the card all the same."""
    pod = make_pod(node="n1", card=1, request=None)
    assert left(ledger_of(pod)) == (15, 11)


def test_a_pod_with_a_problem_is_known_and_holds_nothing_that_nobody_can_tell() -> None:
    pod = make_pod(node="n1", request=None, problem="annotation cannot be read")
    ledger = ledger_of(pod)
    assert (left(ledger), list(ledger.pods)) == ((15, 15), [pod.uid])
    ledger.apply_pod(replace(pod, problem=""))
    assert list(ledger.pods) == []


def test_a_card_that_was_taken_meanwhile_is_told_with_those_that_would_do() -> None:
    ledger = ledger_of(make_pod("a", node="n1", card=0, memory=12))
    refusal = ledger.assume(make_pod(), make_placement("n1", 4, 0))
    assert str(refusal) == "The chosen card was taken meanwhile: card 1 would still fit"
    full = ledger.assume(make_pod(memory=20), make_placement("n1", 20, 0))
    assert full is not None
    assert full.reason == NO_ROOM


def test_only_so_many_of_the_dead_are_remembered() -> None:
    ledger = ledger_of()
    for number in range(REMEMBERED_GONE + 1):
        ledger.remove_pod(f"uid-{number}")
    ledger.apply_pod(make_pod("first", uid="uid-0", node="n1", card=0))
    ledger.apply_pod(make_pod("second", uid="uid-1", node="n1", card=1))
    assert left(ledger) == (11, 15)


def test_a_node_is_of_a_model_only_where_all_its_cards_are() -> None:
    ledger = Ledger()
    ledger.apply_node(Node("same", (make_card(0, model="T4"), make_card(1, model="T4"))))
    ledger.apply_node(Node("mixed", (make_card(0, model="T4"), make_card(1, model="V100"))))
    fleet = ledger.flush()
    assert {name: fleet.models[fleet.model[row]] for name, row in fleet.row_of.items()} == {
        "same": "T4",
        "mixed": "",
    }


def test_what_does_not_fit_is_not_assumed() -> None:
    ledger = ledger_of(make_pod("a", node="n1", card=0, memory=12))
    refusal = ledger.assume(make_pod(), make_placement("n1", 4, 0))
    assert isinstance(refusal, Refusal)
    assert isinstance(ledger.assume(make_pod(), make_placement("ghost", 4, 0)), Refusal)
    assert left(ledger) == (3, 15)


def test_a_card_that_the_node_does_not_have_has_no_room() -> None:
    ledger = ledger_of()
    assert isinstance(ledger.assume(make_pod(), make_placement("n1", 4, 7)), Refusal)
    assert left(ledger) == (15, 15)


def test_a_share_of_compute_is_held_beside_the_memory() -> None:
    ledger = Ledger()
    ledger.apply_node(make_node(compute_percent=100))
    assert ledger.assume(make_pod("a", core=60), make_placement("n1", 4, 0, core=60)) is None
    refusal = ledger.assume(make_pod("b", core=60), make_placement("n1", 4, 0, core=60))
    assert refusal is not None
    assert refusal.reason == NO_CORE.format(name=GPU_CORE)
    assert ledger.assume(make_pod("c", core=40), make_placement("n1", 4, 0, core=40)) is None


def test_the_name_is_the_newest_pods_though_the_end_of_the_one_before_is_seen_later() -> None:
    old, new = make_pod(uid="old", node="n1", card=0), make_pod(uid="new")
    ledger = ledger_of(old)
    ledger.assume(new, make_placement("n1", 4, 1))
    ledger.remove_pod("old")
    assert ledger.pod_named("default", "p") == new
    assert left(ledger) == (15, 11)


def test_a_node_of_which_only_pods_are_known_is_not_counted() -> None:
    ledger = ledger_of(make_pod(node="elsewhere", card=0))
    assert (ledger.node_names(), ledger.node_count(), ledger.state("elsewhere")) == (["n1"], 1, None)
    assert "elsewhere" not in ledger.flush().row_of


def test_nothing_is_assumed_for_a_pod_that_is_gone() -> None:
    ledger = ledger_of()
    ledger.remove_pod(make_pod().uid)
    refusal = ledger.assume(make_pod(), make_placement("n1", 4, 0))
    assert refusal is not None
    assert refusal.never
    assert left(ledger) == (15, 15)


def test_who_is_assumed_before_any_news_of_it_is_known_by_name() -> None:
    """kube-scheduler may ask before the watch has shown the pod."""
    ledger, pod = ledger_of(), make_pod()
    assert ledger.pod_named("default", "p") is None
    ledger.assume(pod, make_placement("n1", 4, 0))
    assert ledger.pod_named("default", "p") == pod
    ledger.remove_pod(pod.uid)
    assert ledger.pod_named("default", "p") is None


def test_a_pod_makes_way_for_itself() -> None:
    ledger = ledger_of()
    ledger.apply_node(make_node("n2"))
    pod = make_pod(memory=12)
    ledger.assume(pod, make_placement("n1", 12, 0))
    assert ledger.assume(pod, make_placement("n1", 12, 0)) is None
    assert left(ledger) == (3, 15)
    assert ledger.assume(pod, make_placement("n2", 12, 0)) is None
    assert (left(ledger), left(ledger, "n2")) == ((15, 15), (3,))


def test_forgetting_touches_nothing_but_assumptions() -> None:
    bound = make_pod("bound", node="n1", card=0)
    ledger = ledger_of(bound)
    ledger.forget(bound.uid)
    ledger.forget("nobody")
    assert left(ledger) == (11, 15)


def test_nodes_that_want_compute_are_known_as_long_as_they_are_there() -> None:
    ledger = Ledger()
    for required in (True, False, True):
        ledger.apply_node(make_node(compute_required=required))
        fleet = ledger.flush()
        assert fleet.terms["compute_required"][fleet.row_of["n1"]] == required
    ledger.remove_node("n1")
    assert "n1" not in ledger.flush().row_of


def test_a_second_assumption_replaces_the_first_and_a_failed_one_leaves_it() -> None:
    ledger = ledger_of()
    pod = make_pod()
    ledger.assume(pod, make_placement("n1", 4, 0))
    assert ledger.assume(pod, make_placement("n1", 4, 1)) is None
    assert left(ledger) == (15, 11)
    assert isinstance(ledger.assume(pod, make_placement("n1", 16, 0)), Refusal)
    assert left(ledger) == (15, 11)


def test_news_that_change_no_amount_are_written_down_all_the_same() -> None:
    ledger = ledger_of(make_pod(node="n1", card=1, memory=4, version=1))
    clock = ledger.flush().clock
    ledger.apply_pod(make_pod(node="n1", card=1, memory=4, version=2, assigned=True))
    allocation = ledger.holds.of("uid-p")
    assert allocation is not None
    assert (allocation.pod.version, allocation.pod.assigned, ledger.flush().clock) == (2, True, clock)


def test_what_is_assumed_is_known_until_it_is_seen_bound_or_forgotten() -> None:
    ledger = ledger_of(make_pod("a", memory=4), make_pod("b", memory=4))
    for name in "ab":
        assert ledger.assume(ledger.pods[f"uid-{name}"], make_placement("n1", 4, 0)) is None
    ledger.apply_pod(make_pod("b", memory=4, card=0, version=9))  # the annotations are seen, not the binding
    assert [allocation.pod.name for allocation in ledger.assumed()] == ["a", "b"]
    ledger.apply_pod(make_pod("b", memory=4, card=0, node="n1", version=10))
    ledger.forget("uid-a")
    assert ledger.assumed() == []


class Diary:
    """Hears what a policy hears."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Shape]] = []

    def arrived(self, shape: Shape) -> None:
        self.told.append(("arrived", shape))

    def placed(self, shape: Shape) -> None:
        self.told.append(("placed", shape))

    def departed(self, shape: Shape) -> None:
        self.told.append(("departed", shape))


def test_a_policy_hears_of_each_pod_once() -> None:
    diary = Diary()
    ledger = Ledger(diary)
    ledger.apply_node(make_node())
    pod = make_pod()
    for _ in range(2):
        ledger.apply_pod(pod)
    for _ in range(2):
        ledger.assume(pod, make_placement("n1", 4, 0))
    for _ in range(2):
        ledger.apply_pod(replace(pod, node="n1", placement=make_placement("n1", 4, 0)))
    ledger.remove_pod(pod.uid)
    assert [what for what, _ in diary.told] == ["arrived", "placed", "departed"]


def test_a_policy_hears_of_pods_without_cards_that_come_to_nodes_with_cards() -> None:
    """They take cores and memory there: it may learn to expect more of them. Not those of a DaemonSet."""
    diary = Diary()
    ledger = Ledger(diary)
    ledger.apply_node(make_node())
    ledger.apply_node(make_node("without", cards=()))
    host = HostResources(2_000, 512)
    web = Pod("web", "default", "web", "n1", host=host)
    for pod in (web, web, replace(web, terminating=True), Pod("waits", "default", "waits", host=host)):
        ledger.apply_pod(pod)
    ledger.apply_pod(Pod("log", "default", "log", "n1", host=host, comes_with_node=True))
    ledger.apply_pod(Pod("api", "default", "api", "without", host=host))
    for uid in ("web", "web", "log", "api", "waits"):
        ledger.remove_pod(uid)
    asked = Shape(0, 0, 2_000, 512)
    assert diary.told == [("arrived", asked), ("placed", asked), ("departed", asked)]


@pytest.mark.parametrize(
    ("cards", "units", "gpus", "chosen"),
    [
        ((12207, 8138, 4069, 16276), 8138, 1, (1,)),
        ((4069, 4069), 8138, 1, None),
        ((8138, 0), 8138, 1, (0,)),
        ((5, 5, 5), 5, 1, (0,)),
        ((5, 9, 5, 7), 10, 2, (0, 2)),
        ((5, 4, 4), 10, 2, None),
    ],
)
def test_cards_of_one_node(
    cards: tuple[int, ...], units: int, gpus: int, chosen: tuple[int, ...] | None
) -> None:
    state = NodeState(make_node(cards=[16276] * len(cards)), cards, (0,) * len(cards))
    answer = place(state, make_request(units, cards=gpus))
    if chosen is None:
        assert isinstance(answer, Refusal)
    else:
        assert not isinstance(answer, Refusal)
        assert tuple(part.card for part in answer.slices) == chosen
