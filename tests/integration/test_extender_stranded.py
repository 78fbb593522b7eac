"""Who was refused because our news was late is tried again, and nobody is woken in vain for long."""

from __future__ import annotations

from contextlib import closing

import msgspec

from gpuslice.adapters.wire.extender import FilterResult, Questions
from gpuslice.apps.extender.main import WEB_LIMITS
from gpuslice.apps.extender.node_query import NodeNames
from gpuslice.apps.extender.subscriber import FilterVerdict
from gpuslice.apps.extender.waker import REMEMBERED, StrandedPods
from tests.builders import make_pod
from tests.integration.preemption_rig import Story


def version(story: Story) -> str:
    """Of the node: a new one makes kube-scheduler try all waiting pods."""
    found: str = story.api.call("GET", "/api/v1/nodes/n1")["metadata"]["resourceVersion"]
    return found


def test_a_pod_refused_before_we_heard_of_the_room_is_woken() -> None:
    with closing(Story(cards=1)) as story:
        story.place("a", 15)
        story.add("b", 15)
        story.calm(3)
        before = version(story)
        story.api.delete_pod("a")  # kube-scheduler has heard of it, our watch has not
        assert story.schedule("b") == ""
        story.calm(3)
        assert version(story) != before
        assert story.schedule("b") == "n1"
        after = version(story)
        story.calm(300)
        assert version(story) == after


def test_a_pod_asked_about_before_the_watch_showed_it_is_woken() -> None:
    with closing(Story(cards=1)) as story:
        story.place("a", 15)
        story.api.delete_pod("a")
        story.add("b", 15)
        before = version(story)
        assert story.schedule("b") == ""
        story.calm(3)
        assert version(story) != before


def test_news_late_again_and_again_is_made_up_for_as_soon_each_time() -> None:
    """Only waking in vain makes it rarer: on a busy machine the watch is behind all the time."""
    with closing(Story(cards=1)) as story:
        story.place("p0", 15)
        for number in range(1, 10):
            story.add(f"p{number}", 15)
            story.calm()
            before = version(story)
            story.api.delete_pod(f"p{number - 1}")
            assert story.schedule(f"p{number}") == ""
            story.calm(4)
            assert version(story) != before, number
            assert story.schedule(f"p{number}") == "n1"


def test_waking_in_vain_for_one_does_not_delay_it_long_for_others() -> None:
    """kube-scheduler's own filters keep b from n1, which nobody tells us; for c news is late."""
    with closing(Story(cards=1, nodes=2)) as story:
        placed = [story.place(name, 15) and story.api.pod(name)["spec"]["nodeName"] for name in ("a1", "a2")]
        on_n1, elsewhere = ("a1", "a2") if placed == ["n1", "n2"] else ("a2", "a1")
        story.add("b", 15)
        story.calm()
        story.api.delete_pod(on_n1)
        assert story.schedule("b") == ""
        story.calm(140)  # now it is done every two minutes
        before = version(story)
        story.calm(20)
        assert version(story) == before

        story.add("c", 15)
        story.calm()
        assert story.ask(story.api.pod("c"), ["n2"]) == []
        story.api.delete_pod(elsewhere)
        story.calm(4)
        assert version(story) != before
        assert story.ask(story.api.pod("c"), ["n2"]) == ["n2"]


def test_no_more_of_them_are_remembered_than_a_bound() -> None:
    """kube-scheduler may ask about any number of pods, and of many nobody ever heard."""
    with closing(Story(cards=1)) as story:
        one = story.extender
        stranded = StrandedPods(one.placer, one.waker, clock=lambda: 0.0)
        rows = NodeNames(story.extender.ledger.fleet).query(b'["n1"]').rows
        for number in range(2 * REMEMBERED):
            pod = make_pod(uid=f"uid-{number}")
            stranded.decided(FilterVerdict(pod, rows, rows[:0], is_known=False))
        assert len(stranded._refused) == REMEMBERED


def test_before_kubernetes_1_29_who_was_asked_about_in_vain_is_woken_after_a_take_over() -> None:
    """kube-scheduler 1.27 found nobody to ask about b, and leaves it alone until a node's labels change.

    In an upgrade it may be 1.27 while the API server is 1.28.
    """
    with closing(Story(cards=1)) as story:  # whose extender has just taken over
        story.add("b", 15)
        story.extender.waker.kubernetes = 28
        before = version(story)
        story.calm(3)
        assert version(story) != before
        assert story.schedule("b") == "n1"
        after = version(story)
        story.calm(300)
        assert version(story) == after


def test_a_pod_that_nobody_will_ask_about_wakes_others_for_half_a_minute_at_most() -> None:
    with closing(Story(cards=1)) as story:
        story.extender.waker.kubernetes = 27
        story.add("gated", 4)
        story.calm(60)
        assert 2 <= story.extender.stranded.woken <= 6
        after = version(story)
        story.calm(300)
        assert version(story) == after


def test_since_kubernetes_1_29_nobody_is_woken_for_a_take_over() -> None:
    with closing(Story(cards=1)) as story:
        story.add("b", 15)
        story.calm()
        assert story.extender.waker.kubernetes >= 29
        before = version(story)
        story.calm(60)
        assert version(story) == before


def test_who_fits_nowhere_wakes_nobody() -> None:
    with closing(Story(cards=1)) as story:
        story.place("a", 15)
        story.add("b", 4)
        story.calm()
        before = version(story)
        assert story.schedule("b") == ""
        story.calm(60)
        assert version(story) == before


def test_many_that_would_fit_are_woken_together_and_ever_more_rarely() -> None:
    """A kube-scheduler that does not come, though a hundred pods would fit, is not stormed with changes."""
    with closing(Story(cards=1)) as story:
        story.place("a", 15)
        names = [f"b{number}" for number in range(100)]
        for name in names:
            story.add(name, 4)
        story.calm()
        story.api.delete_pod("a")
        for name in names:
            assert story.schedule(name) == ""
        story.calm(120)
        assert 3 <= story.extender.stranded.woken <= 7


def test_equal_pods_are_told_the_same_and_another_thing_as_soon_as_something_changes() -> None:
    """On a full cluster kube-scheduler asks about all waiting pods at each event: they are judged once."""
    with closing(Story(cards=1, nodes=2)) as story:
        for name in story.nodes:
            story.place(f"full-{name}", 15)
        for name in ("a", "b", "c"):
            story.add(name, 4)
        story.add("larger", 5)
        story.add("important", 4, priority=10)
        story.calm()
        first = told(story, "a", story.nodes)
        assert first.keys() == {"n1", "n2"}
        assert told(story, "b", story.nodes) == told(story, "important", story.nodes) == first
        assert told(story, "larger", story.nodes) == first, "the reasons name no amounts"
        assert told(story, "b", ["n2"]).keys() == {"n2"}, "another question"
        story.bury("full-n2")
        assert told(story, "a", story.nodes) == {}, "it fits"
        assert told(story, "b", story.nodes) == {}, "beside it"
        story.api.add_node("n3", 15, 1)
        story.calm()
        assert told(story, "c", [*story.nodes, "n3"]) == {}


def told(story: Story, name: str, nodes: list[str]) -> dict[str, str]:
    """Why each node refuses the pod; empty if one passes."""
    body = msgspec.json.encode({"Pod": story.api.pod(name), "Nodes": None, "NodeNames": nodes})

    async def answered() -> FilterResult:
        return story.extender.cycle.filter(Questions(WEB_LIMITS).decode(body))

    result = story.loop.run_until_complete(answered())
    found: dict[str, str] = msgspec.json.decode(b"".join(result.failed_nodes))
    return found
