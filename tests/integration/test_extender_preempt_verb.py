"""The verb preempt: whom kube-scheduler is told to evict, on which node, for one pod after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.preemption_rig import PODS, Story


@pytest.fixture
def story() -> Iterator[Story]:
    played = Story()
    yield played
    played.close()


def on_each_node(*priorities: int) -> tuple[Story, dict[str, tuple[str, ...]]]:
    """A pod on the only card of each node, which kube-scheduler would evict."""
    story, on = Story(nodes=len(priorities), cards=1), dict[str, tuple[str, ...]]()
    for priority in priorities:
        story.place(f"of-{priority}", 8, priority)
        on[story.api.bound_to(f"of-{priority}")] = (f"of-{priority}",)
    story.add("high", 10, 100)
    story.calm()
    return story, on


def test_of_many_nodes_the_one_where_it_costs_least_is_answered() -> None:
    """So the next pod is told of another at once, and no more nodes are looked at than it takes."""
    story, on = on_each_node(5, 10, 0)
    story.add("also-high", 9, 100)
    story.calm()
    assert list(story.propose_on("high", on).values()) == [{"of-0"}]
    assert list(story.propose_on("also-high", on).values()) == [{"of-5"}]
    story.close()


def test_where_the_cheapest_eviction_makes_no_room_on_a_card_the_next_cheapest_is_answered() -> None:
    story, on = on_each_node(10, 0, 5)
    (node,) = [node for node, victims in on.items() if victims == ("of-0",)]
    story.add("stays", 6, 200, nodeName=node)  # bound by somebody else: it may sit on any card
    story.calm()
    assert list(story.propose_on("high", on).values()) == [{"of-5"}]
    story.close()


def test_what_a_victim_without_cards_costs_is_for_kube_scheduler_to_weigh() -> None:
    story, on = on_each_node(10, 0, 5)
    spec = {"nodeName": "n1", "containers": [{"name": "main", "image": "image"}]}
    story.api.call(
        "POST", PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "plain"}, "spec": spec}
    )
    story.calm()
    on["n1"] += ("plain",)
    assert story.propose_on("high", on) == {node: set(victims) for node, victims in on.items()}
    story.close()


def test_pods_that_ask_one_after_another_are_given_a_card_each(story: Story) -> None:
    """kube-scheduler evicts and nominates later than it asks for the next pod."""
    cards: dict[str, set[str]] = {}
    for number in range(6):
        cards.setdefault(story.place(f"low{number}", 5), set()).add(f"low{number}")
    every = sorted(set().union(*cards.values()))
    for name in ("first", "second"):
        story.add(name, 15, 100)
    story.calm()
    first = story.propose("first", every[0], every[3], every[4])
    second = story.propose(
        "second", *every
    )  # room for both: of those who leave for the first it knows nothing
    assert first in cards.values()
    assert second in cards.values()
    assert first != second


@pytest.mark.parametrize("news", ["late", "between filter and preempt", "of the nomination alone"])
def test_nobody_else_leaves_where_only_the_news_of_the_room_is_late(news: str) -> None:
    """Seen on a real control plane under load: two pods more than needed lost their places."""
    story = Story(nodes=2, cards=1)
    on = {story.api.bound_to(name) or "": name for name in ("a", "b") if story.place(name, 8)}
    story.add("high", 10, 100)
    story.calm()
    assert story.propose("high", on["n1"], node="n1") == {on["n1"]}  # it evicts and nominates
    story.api.patch(f"{PODS}/high/status", {"status": {"nominatedNodeName": "n1"}})
    story.api.delete_pod(on["n1"], grace_s=30)
    if news == "of the nomination alone":
        for stream in [each for each in story.network.streams if each.pending]:
            story.network.deliver_line(stream)
    else:
        story.calm(1)
    story.api.delete_pod(on["n1"])  # it is gone, and kube-scheduler knows that alone
    high = story.api.pod("high")
    assert story.ask(high, ["n1"]) == []
    if news == "between filter and preempt":
        story.network.calm()
    assert story.propose("high", on["n2"], node="n2") == set()
    story.calm(1)
    assert story.leaving() == set()
    assert story.schedule("high") == "n1"
    story.close()


def test_whom_to_evict_is_answered_for_a_pod_that_no_watch_has_shown_yet(story: Story) -> None:
    """kube-scheduler asks once. Were it told that nobody helps, the pod would wait for some event."""
    for name in ("a", "b"):
        story.place(name, 8)
    story.add("high", 15, 100)  # and news of it does not arrive
    uid = story.api.pod("high")["metadata"]["uid"]
    assert uid not in story.extender.ledger.pods
    assert story.propose("high", *story.names() - {"high"})


def two_on_each_card(story: Story) -> dict[str, set[str]]:
    """Card → its two pods, of priority 0 and of priority 5. Room for 15 takes both."""
    on: dict[str, set[str]] = {}
    for name, priority in (("a1", 0), ("a2", 0), ("b1", 5), ("b2", 5)):
        on.setdefault(story.place(name, 7, priority, labels={"app": name}), set()).add(name)
    assert sorted(map(sorted, on.values())) == [["a1", "a2"], ["b1", "b2"]]
    return on


def test_a_budget_weighs_more_than_priority_where_kube_schedulers_choice_makes_no_room(story: Story) -> None:
    """It spares the pod of the budget and takes one of each card, which is enough by the node's sum."""
    two_on_each_card(story)
    story.protect("a2")
    story.add("high", 15, 100)
    story.calm()
    assert story.propose("high", "a1", "b2") == {"b1", "b2"}


def test_violated_budgets_are_counted_where_kube_schedulers_choice_makes_no_room(story: Story) -> None:
    two_on_each_card(story)
    for name in ("a1", "a2", "b1", "b2"):
        story.protect(name)
    story.add("high", 15, 100)
    story.calm()
    answer = story.answer("high", {"n1": ("a1", "b2")})
    assert {len(each.pods or ()) for each in answer.values()} == {2}
    assert [each.num_pdb_violations for each in answer.values()] == [2]


def test_while_budgets_cannot_be_read_nobody_else_is_named_than_kube_scheduler_chose(story: Story) -> None:
    """Whoever waits then is looked at once more by the extender itself."""
    two_on_each_card(story)
    story.add("high", 15, 100)
    story.calm()
    assert story.answer("high", {"n1": ("a1", "b2")}, lost="/poddisruptionbudgets") == {}
    story.schedule("high")
    story.calm(2)
    assert story.leaving() == {"a1", "a2"}
