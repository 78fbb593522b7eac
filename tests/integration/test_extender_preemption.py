"""Room is made on a card for an important pod, and nobody leaves in vain, whatever comes in what order."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from gpuslice.adapters.web.exposition import Family, render
from gpuslice.apps.extender.preemption.evictor import named_in
from gpuslice.core.contract import ANN_INDEX
from gpuslice.core.model import Pod
from tests.integration.preemption_rig import PODS, PREEMPTION, Object, Story


@pytest.fixture
def story() -> Iterator[Story]:
    played = Story()
    yield played
    played.close()


def full(story: Story) -> dict[str, str]:
    """One low pod of 8 on each card of 15."""
    return {name: story.place(name, 8) for name in ("a", "b")}


def test_one_pod_leaves_one_card_and_the_important_one_gets_it(story: Story) -> None:
    cards = full(story)
    story.add("high", 10, 100)
    story.schedule("high")
    story.calm(2)
    (victim,) = story.leaving()
    assert story.nominated("high") == "n1"
    condition = story.api.pod(victim)["status"]["conditions"][-1]
    assert (condition["type"], condition["status"], condition["reason"]) == (
        "DisruptionTarget",
        "True",
        PREEMPTION,
    )
    story.schedule("high")  # tried while the victim still leaves: nothing is undone, nobody else goes
    story.calm(5)
    assert story.leaving() == {victim}
    assert story.nominated("high") == "n1"
    story.bury()
    story.schedule("high")
    assert story.api.card("high") == cards[victim]
    told = {each["involvedObject"]["name"]: each["message"] for each in story.api.events("Preempting")}
    assert told == {
        "high": f"default/{victim} must leave card {cards[victim]} of n1, which is kept for this pod"
    }
    assert [each["involvedObject"]["name"] for each in story.api.events("Preempted")] == [victim]


def test_nobody_reads_of_pods_of_other_namespaces() -> None:
    ours, theirs, further = (Pod(name, space, name) for name, space in (("a", "x"), ("b", "y"), ("c", "z")))
    assert named_in("x", [ours]) == "x/a"
    assert named_in("x", [theirs]) == "a pod of another namespace"
    assert named_in("x", [ours, theirs, further]) == "x/a, 2 pods of other namespaces"


def test_the_freed_card_is_not_for_lesser_pods_but_for_more_important_ones(story: Story) -> None:
    full(story)
    story.add("high", 10, 100)
    story.schedule("high")
    story.calm(2)
    story.bury()
    story.add("equal", 10, 100)
    story.add("low", 9)
    story.add("small", 7)
    story.calm()
    assert story.schedule("low") == ""
    assert story.schedule("equal") == ""
    assert story.schedule("small") == "n1"  # the other card has 7 left
    story.add("higher", 10, 200)
    story.calm()
    assert story.schedule("higher") == "n1"


@pytest.mark.parametrize(
    "fields",
    [{"preemptionPolicy": "Never"}, {"schedulingGates": [{"name": "example.com/wait"}]}],
    ids=["policy never", "gated"],
)
def test_who_may_not_preempt_does_not(story: Story, fields: Object) -> None:
    full(story)
    story.add("high", 10, 100, **fields)
    story.schedule("high")
    story.calm(5)
    assert not story.leaving()
    assert not story.nominated("high")


def test_equals_stay(story: Story) -> None:
    full(story)
    story.add("equal", 10)
    story.schedule("equal")
    story.calm(5)
    assert not story.leaving()


def test_while_kube_schedulers_own_victims_leave_nobody_else_has_to(story: Story) -> None:
    full(story)
    story.place("its-victim", 4)
    story.add("high", 10, 100)
    story.api.patch(f"{PODS}/high/status", {"status": {"nominatedNodeName": "n1"}})
    story.api.delete_pod("its-victim", grace_s=30)
    story.ask(story.api.pod("high"), story.nodes)
    story.calm(5)
    assert story.leaving() == {"its-victim"}


@pytest.mark.parametrize("gone", [False, True], ids=["leaving", "gone"])
def test_nobody_leaves_where_the_news_of_kube_schedulers_own_victims_is_late(
    story: Story, gone: bool
) -> None:
    """A busy machine: filter refuses by what we know, and seconds later we still know no more."""
    for name in ("a", "b", "c", "d"):
        story.place(name, 7)
    story.add("high", 14, 100)
    story.schedule("high")
    story.calm()
    own = story.propose("high", "a", "b")
    assert own == {"a", "b"}
    story.api.patch(f"{PODS}/high/status", {"status": {"nominatedNodeName": "n1"}})
    for victim in own:
        story.api.delete_pod(victim, **({} if gone else {"grace_s": 30}))
    for _ in range(40):
        story.ask(story.api.pod("high"), story.nodes)
        story.loop.advance(0.25)
        for message in list(story.network.messages):  # what it asks is answered, the watch is late
            story.network.deliver(message)
    assert story.leaving() == (set() if gone else own)
    story.bury()
    assert story.schedule("high") == "n1"


def test_a_nomination_that_leads_to_nothing_does_not_make_a_pod_wait_for_ever(story: Story) -> None:
    """kube-scheduler lets it stand where by the sum nobody need leave for the pod."""
    full(story)
    story.add("high", 10, 100)
    story.api.patch(f"{PODS}/high/status", {"status": {"nominatedNodeName": "n1"}})
    story.ask(story.api.pod("high"), story.nodes)
    story.calm(5)
    assert len(story.leaving()) == 1
    story.bury()
    assert story.schedule("high") == "n1"


def test_who_asks_whom_to_evict_is_given_time_to_do_it(story: Story) -> None:
    full(story)
    story.add("high", 10, 100)
    story.schedule("high")
    story.calm()
    assert story.propose("high", "a") == {"a"}
    story.schedule("high")
    story.calm(4)  # kube-scheduler's eviction and nomination are slow to come
    assert not story.leaving()
    story.schedule("high")  # it did neither
    story.calm(4)
    assert len(story.leaving()) == 1


def test_kube_scheduler_may_begin_itself_while_the_pod_is_read(story: Story) -> None:
    full(story)
    story.add("high", 10, 100)
    story.network.calm()
    story.schedule("high")
    while not any(message.request.path == f"{PODS}/high" for message in story.network.messages):
        story.loop.advance(0.25)
    assert story.propose("high", "a") == {"a"}
    story.calm(2)
    assert not story.leaving()


def test_switched_off_it_evicts_nobody() -> None:
    story = Story(preemption=False)
    full(story)
    story.add("high", 10, 100)
    story.schedule("high")
    story.calm(5)
    assert not story.leaving()
    story.close()


def test_a_budget_is_violated_only_when_nothing_else_helps(story: Story) -> None:
    cards = {
        name: story.place(name, 8, priority, labels={"app": name}) for name, priority in (("a", 5), ("b", 0))
    }
    story.protect("b")
    story.add("high", 10, 100)
    story.schedule("high")
    story.calm(2)
    assert story.leaving() == {"a"}  # of higher priority than b, which its budget protects
    story.bury()
    assert story.schedule("high") == "n1"
    assert story.api.card("high") == cards["a"]
    story.add("higher", 10, 200)
    story.schedule("higher")
    story.calm(2)
    assert story.leaving() == {"high"}  # the budget weighs more than any priority


def test_the_pods_of_a_whole_node_make_room_for_a_pod_on_two_cards(story: Story) -> None:
    full(story)
    story.add("wide", 20, 100, labels={"aliyun.com/gpu-count": "2"})
    story.schedule("wide")
    story.calm(2)
    assert story.leaving() == {"a", "b"}
    story.bury()
    assert story.schedule("wide") == "n1"


def test_who_leaves_already_is_waited_for(story: Story) -> None:
    full(story)
    story.api.delete_pod("a", 30)
    story.add("high", 10, 100)
    story.schedule("high")
    story.calm(2)
    assert story.leaving() == {"a"}
    assert story.nominated("high") == "n1"


def test_a_pod_that_vanishes_evicts_no_more_and_keeps_nothing(story: Story) -> None:
    full(story)
    story.add("wide", 20, 100, labels={"aliyun.com/gpu-count": "2"})
    story.schedule("wide")
    story.network.calm()
    while not story.leaving():  # one write after the other, until the first victim leaves
        if story.network.messages:
            story.network.deliver(story.network.messages[0])
        else:
            story.loop.advance(0.25)
    story.api.delete_pod("wide")
    for stream in list(story.network.streams):  # the extender hears of it before its next request
        while stream.pending:
            story.network.deliver_line(stream)
    story.calm(5)
    assert len(story.leaving()) == 1
    assert not len(story.extender.ledger.holds.reserved)


def test_a_nomination_that_nobody_takes_up_ends(story: Story) -> None:
    full(story)
    story.add("high", 10, 100)
    story.schedule("high")
    story.calm(2)
    story.bury()
    story.add("low", 9)
    story.calm(30)
    assert story.schedule("low") == ""
    before = story.api.call("GET", "/api/v1/nodes/n1")["metadata"]
    story.calm(40)
    after = story.api.call("GET", "/api/v1/nodes/n1")["metadata"]
    assert after["resourceVersion"] != before["resourceVersion"], "kube-scheduler hears of nothing else"
    assert after.get("annotations") == before.get("annotations")
    assert story.schedule("low") == "n1"


@pytest.mark.parametrize("fate", ["lost", "done"])
@pytest.mark.parametrize("number", range(8))
def test_killed_at_any_write_the_next_one_goes_on(story: Story, number: int, fate: str) -> None:
    full(story)
    story.add("high", 10, 100)
    story.schedule("high")
    for _ in range(40):  # let `number` writes pass, and die with the next
        writes = [each for each in story.network.messages if each.request.method != "GET"]
        if writes and number == 0:
            break
        if writes:
            number -= 1
            story.network.deliver(writes[0])
        elif story.network.messages:
            story.network.deliver(story.network.messages[0])
        else:
            story.loop.advance(0.25)
            for stream in [each for each in story.network.streams if each.pending]:
                story.network.deliver_line(stream)
    if fate == "done":
        for message in [each for each in story.network.messages if each.request.method != "GET"]:
            story.network.deliver(message)
    story.kill()
    story.network.messages.clear()
    story.start()
    story.calm(1)
    story.add("low", 9)
    for _ in range(4):
        for name in ("low", "high"):
            if not story.api.bound_to(name):
                story.schedule(name)
        story.calm(2)
        if story.leaving():
            story.bury()
    assert story.api.bound_to("high") == "n1"
    assert not story.api.bound_to("low")  # the card that was freed for "high" was kept from it
    assert len(story.names()) == 3  # one of a and b went, and one only
    assert all(units <= 15 for units in story.held().values())


@pytest.mark.parametrize("seed", range(25))
def test_no_card_is_over_committed_and_nobody_leaves_in_vain(seed: int) -> None:
    chance = random.Random(seed)
    story = Story(cards=2, nodes=2)
    evicted: dict[str, Evicted] = {}
    created = 0
    for _ in range(60):
        waiting = [pod["metadata"]["name"] for pod in story.api.pods() if not pod["spec"].get("nodeName")]
        step = chance.random()
        if step < 0.3 and created < 22:
            created += 1
            story.add(f"p{created}", chance.randint(3, 14), chance.choice((0, 0, 10, 20, 30)))
        elif step < 0.7 and waiting:
            story.schedule(chance.choice(waiting))
        elif step < 0.8 and story.leaving():
            story.bury(chance.choice(sorted(story.leaving())))
        else:
            story.loop.advance(chance.choice((0.25, 1.0, 3.0)))
        for _ in range(chance.randint(0, 12)):
            if story.network.messages:
                story.network.deliver(chance.choice(story.network.messages))
            for stream in [each for each in story.network.streams if each.pending][:1]:
                story.network.deliver_line(stream)
        note_evicted(story, evicted)
        assert all(units <= 15 for units in story.held().values())
    for _ in range(12):  # no more come: who can be placed, is
        story.calm(6)
        note_evicted(story, evicted)
        if story.leaving():
            story.bury()
        pending = [pod for pod in story.api.pods() if not pod["spec"].get("nodeName")]
        for pod in sorted(pending, key=lambda each: -each["spec"]["priority"]):
            story.schedule(pod["metadata"]["name"])
        assert all(units <= 15 for units in story.held().values())
    for name, (card, priority, beside) in evicted.items():
        newcomers = story.on_card(card).items()
        better = [other for other, theirs in newcomers if other not in beside and theirs > priority]
        assert better, f"{name} left {card} for nobody"
    story.process.check()
    story.close()


Evicted = tuple[tuple[str, str], int, set[str]]
"""The card, the priority, and who was on the card at that time."""


def note_evicted(story: Story, evicted: dict[str, Evicted]) -> None:
    for name in story.leaving() - evicted.keys():
        pod = story.api.pod(name)
        card = (pod["spec"]["nodeName"], pod["metadata"]["annotations"][ANN_INDEX])
        evicted[name] = (card, pod["spec"]["priority"], set(story.on_card(card)))


def test_the_metrics_count_what_came_of_it(story: Story) -> None:
    full(story)
    story.add("high", 10, 100)
    story.schedule("high")
    story.add("huge", 15, 0)
    story.schedule("huge")
    story.calm(3)

    async def families() -> list[Family]:  # watches read the loop's clock
        return story.extender._families()

    page = render(story.loop.run_until_complete(families())).decode()
    assert 'gpuslice_extender_preemptions_total{result="evicted"} 1\n' in page
    assert "gpuslice_extender_preempted_pods_total 1\n" in page
    assert "gpuslice_extender_nominated_pods 1\n" in page
