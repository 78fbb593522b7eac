"""What pods, nodes and health do over time: the ledger follows, and promises nothing twice."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace

from gpuslice.core.contract import ANN_INDEX, ANN_POD_UNITS, GPU_COUNT, GPU_MEM, NODE_OUT_OF_USE
from tests.builders import api_pod, make_placement, make_pod
from tests.integration.extender_rig import Rig, cluster, rig, until
from tests.integration.preemption_rig import Story

PODS = "/api/v1/namespaces/default/pods"


async def test_a_hundred_pods_at_once_on_eight_cards() -> None:
    async with rig(cluster(n1=(120, 8))) as extender:
        pods = [extender.api.add_pod(f"p{n}", str(1 + n % 4)) for n in range(100)]
        errors = await asyncio.gather(*(extender.bind(pod) for pod in pods))
        bound = [pod for pod in extender.api.pods() if pod["spec"].get("nodeName")]
        assert len(bound) == errors.count("")
        used: dict[str, int] = {}
        for pod in bound:
            annotations = pod["metadata"]["annotations"]
            used[annotations[ANN_INDEX]] = used.get(annotations[ANN_INDEX], 0) + int(
                annotations[ANN_POD_UNITS]
            )
        assert all(units <= 15 for units in used.values())
        assert sum(used.values()) >= 117  # no card keeps 4 free, and every refused pod asked for 4 at most
        await extender.caught_up()
        assert {str(card): units for card, units in (await extender.used()).items()} == used
        assert not [
            pod for pod in extender.api.pods() if not pod["spec"].get("nodeName") and has_annotations(pod)
        ]


async def test_a_finished_pod_makes_room_and_a_terminating_one_does_not() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        await extender.add_and_bind("a", "10")
        extender.api.delete_pod("a", grace_s=30)
        await extender.caught_up()
        assert (await extender.filter(api_pod(memory="8"), "n1"))["NodeNames"] == []
        extender.api.finish_pod("a")
        await extender.caught_up()
        assert (await extender.filter(api_pod(memory="8"), "n1"))["NodeNames"] == ["n1"]


async def test_the_same_name_hundreds_of_times_leaks_nothing() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        for _ in range(300):
            pod = extender.api.add_pod("app-0", "15")
            assert await extender.bind(pod) == ""
            extender.api.delete_pod("app-0")
            await until(lambda uid=pod["metadata"]["uid"]: extender.extender.ledger.holds.of(uid) is None)  # type: ignore[misc]
        await extender.caught_up()
        assert await extender.used() == {0: 0}
        assert extender.extender.ledger.pods == {}


async def test_a_card_that_the_config_map_names_is_left_alone() -> None:
    async with rig(cluster(n1=(30, 2))) as extender:
        extender.api.set_unhealthy("n1", "0")
        await left(extender, 0, 15)
        assert await extender.add_and_bind("a", "4") == "1"
        for text in ("", "garbage"):
            extender.api.set_unhealthy("n1", text)
            await left(extender, 15, 11)
        extender.api.set_unhealthy("n1", "0,1")
        await left(extender, 0, 0)
        assert (await extender.filter(api_pod(), "n1"))["NodeNames"] == []


async def shows(extender: Rig, node: str, cards: str | None) -> None:
    """Until the node's annotation says so."""

    def shown() -> bool:
        found = extender.api.call("GET", f"/api/v1/nodes/{node}")["metadata"].get("annotations") or {}
        return found.get(NODE_OUT_OF_USE) == cards

    await until(shown)


async def test_the_node_shows_its_cards_out_of_use_which_wakes_kube_scheduler() -> None:
    api = cluster(n1=(30, 2))
    api.patch("/api/v1/nodes/n1", {"metadata": {"annotations": {NODE_OUT_OF_USE: "1", "other": "stays"}}})
    async with rig(api) as extender:
        await shows(extender, "n1", None)  # left behind by a leader that ended before it could
        for text, cards in (("1,0", "0,1"), ("0", "0"), ("", None)):
            extender.api.set_unhealthy("n1", text)
            await shows(extender, "n1", cards)
            assert (await extender.filter(api_pod(), "n1"))["NodeNames"] == ([] if cards == "0,1" else ["n1"])
        assert extender.api.call("GET", "/api/v1/nodes/n1")["metadata"]["annotations"] == {"other": "stays"}


async def test_a_config_map_of_no_node_waits_for_the_node() -> None:
    async with rig(cluster(n1=(30, 2))) as extender:
        extender.api.set_unhealthy("n2", "0")
        extender.api.set_unhealthy("n1", "1")
        await shows(extender, "n1", "1")
        extender.api.add_node("n2", 30, 2)
        await shows(extender, "n2", "0")
        extender.api.call("DELETE", "/api/v1/nodes/n2")
        extender.api.set_unhealthy("n1", "0")
        await shows(extender, "n1", "0")


async def test_a_node_that_shrinks_has_nothing_free_and_one_that_grows_has_more() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        await extender.add_and_bind("a", "10")
        extender.api.set_node("n1", {"capacity": {GPU_MEM: "8"}})
        await left(extender, 0)
        assert (await extender.filter(api_pod(memory="1"), "n1"))["NodeNames"] == []
        assert await extender.used() == {0: 10}
        extender.api.set_node("n1", {"capacity": {GPU_MEM: "46", GPU_COUNT: "2"}})
        await left(extender, 13, 23)


async def test_a_pod_that_nobody_placed_is_counted_against_every_card() -> None:
    """nodeName set by hand: it may sit on either card, so neither is promised to another."""
    async with rig(cluster(n1=(30, 2))) as extender:
        extender.api.add_pod("stranger", "10", node="n1")
        await extender.caught_up()
        await left(extender, 5, 5)
        annotations = {ANN_INDEX: "1", ANN_POD_UNITS: "10"}
        path = "/api/v1/namespaces/default/pods/stranger"
        extender.api.patch(path, {"metadata": {"annotations": annotations}})
        await left(extender, 15, 5)


async def test_a_corrupt_annotation_is_told_and_counted_against_every_card() -> None:
    async with rig(cluster(n1=(30, 2))) as extender:
        annotations = {ANN_INDEX: "first", ANN_POD_UNITS: "10"}
        extender.api.add_pod("bad", "10", node="n1", annotations=annotations)
        await left(extender, 5, 5)
        await until(lambda: bool(extender.api.events("GPURequestUnreadable")))
        (event,) = extender.api.events("GPURequestUnreadable")
        assert event["message"].startswith('annotation "ALIYUN_COM_GPU_MEM_IDX" is "first"')


async def test_a_pod_whose_annotations_leave_no_room_is_not_bound_until_they_do() -> None:
    """Bound, it would be past the API server's limit: no kubelet could write its status."""
    async with rig(cluster(n1=(15, 1))) as extender:
        pod = extender.api.add_pod("p", "10", annotations={"theirs": "x" * 262_114})
        await extender.caught_up()
        refused = await extender.filter(pod, "n1")
        assert "metadata.annotations: size in bytes" in refused["FailedNodes"]["n1"]
        assert await extender.bind(pod) != ""
        assert extender.api.bound_to("p") == ""
        extender.api.patch(f"{PODS}/p", {"metadata": {"annotations": {"theirs": None}}})
        await extender.caught_up()
        assert (await extender.filter(extender.api.pod("p"), "n1"))["NodeNames"] == ["n1"]
        assert await extender.bind(extender.api.pod("p")) == ""
        full = "x" * (262_144 - 1024 - 96 - 228 - len("theirs"))
        last = extender.api.add_pod("q", "5", annotations={"theirs": full})
        await extender.caught_up()
        assert await extender.bind(last) == ""
        for name in ("p", "q"):
            extender.api.patch(f"{PODS}/{name}/status", {"status": {"phase": "Running"}})
            assert extender.api.pod(name)["status"]["phase"] == "Running"


async def test_a_repaired_annotation_is_followed() -> None:
    async with rig(cluster(n1=(30, 2))) as extender:
        await extender.add_and_bind("a", "10")
        path = "/api/v1/namespaces/default/pods/a"
        extender.api.patch(path, {"metadata": {"annotations": {ANN_INDEX: "1"}}})
        extender.api.patch(
            path,
            {"metadata": {"annotations": {"scheduler.framework.gpushare.allocation": '{"0":{"1":10}}'}}},
        )
        await left(extender, 15, 5)


async def test_a_deleted_node_is_not_offered_and_its_pods_are_remembered() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        await extender.add_and_bind("a", "10")
        extender.api.call("DELETE", "/api/v1/nodes/n1")
        await until(lambda: extender.extender.ledger.state("n1") is None)
        assert (await extender.filter(api_pod(), "n1"))["NodeNames"] == []
        extender.api.add_node("n1", 15, 1)
        await left(extender, 5)


async def test_a_new_extender_knows_the_same_as_the_old_one() -> None:
    api = cluster(n1=(30, 2), n2=(30, 2))
    async with rig(api) as old:
        for number in range(8):
            await old.add_and_bind(f"p{number}", str(2 + number % 5), f"n{1 + number % 2}")
        await old.caught_up()
        before = await old.inspect()
    async with rig(api) as new:
        assert await new.inspect() == before


async def test_lost_watches_and_forgotten_history_lose_nothing() -> None:
    async with rig(cluster(n1=(30, 2))) as extender:
        await extender.add_and_bind("a", "10")
        await extender.add_and_bind("b", "10")
        extender.api.cluster.drop_watches()
        extender.api.delete_pod("a")
        extender.api.cluster.compact()
        await left(extender, 15, 5)


async def left(extender: Rig, *expected: int) -> None:
    """Wait until that much is free on the cards of n1."""

    def reached() -> bool:
        state = extender.extender.ledger.state("n1")
        return state is not None and state.left == expected

    await until(reached)


def has_annotations(pod: dict[str, dict[str, object]]) -> bool:
    return bool(pod["metadata"].get("annotations"))


def test_a_pod_that_came_and_went_while_nothing_was_watched_holds_no_room() -> None:
    """Its bind read it from the API server; the next list alone can tell that it is gone."""
    with closing(Story(cards=1)) as story:
        version = int(story.api.add_pod("ghost", "15")["metadata"]["resourceVersion"])
        ghost = replace(make_pod("ghost", 15, node="n1"), uid="ghost", version=version)
        story.network.calm()
        story.extender.ledger.apply_pod(replace(ghost, placement=make_placement("n1", 15, 0)))
        assert story.extender.ledger.state("n1") is not None
        story.api.delete_pod("ghost")
        for stream in tuple(story.network.streams):
            story.network.cut(stream)
        story.api.cluster.compact()
        story.calm(3)
        assert "ghost" not in story.extender.ledger.pods
        state = story.extender.ledger.state("n1")
        assert state is not None
        assert state.left == (15,)
