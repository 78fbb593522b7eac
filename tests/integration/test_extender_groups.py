"""Pod groups: kube-scheduler tries all members before it binds any, and tells an extender nothing of it."""

from __future__ import annotations

from typing import Any

from tests.integration.extender_rig import Rig, cluster, rig, until

CARD = "16"
GROUP = {"schedulingGroup": {"podGroupName": "train"}}
FULL_NODES = {"n1": (32, 2), "n2": (32, 2)}
NAMES = tuple(FULL_NODES)


async def members(extender: Rig, count: int) -> list[dict[str, Any]]:
    made = [extender.api.add_pod(f"worker-{number}", CARD, **GROUP) for number in range(count)]
    await extender.caught_up()
    return made


async def asked(extender: Rig, pod: dict[str, Any], *names: str) -> list[str]:
    answer = await extender.filter(pod, *(names or NAMES))
    assert not answer["Error"]
    found: list[str] = answer["NodeNames"]
    return found


async def test_members_are_shown_cards_of_their_own_and_all_are_bound() -> None:
    async with rig(cluster(**FULL_NODES)) as extender:
        pods = await members(extender, 4)
        nodes = [await asked(extender, each) for each in pods]
        assert sorted(node for (node,) in nodes) == ["n1", "n1", "n2", "n2"]
        for pod, (node,) in zip(pods, nodes, strict=True):
            assert await extender.bind_unasked(pod, node) == ""
        assert {extender.api.card(each["metadata"]["name"]) for each in pods} == {"0", "1"}


async def test_who_is_asked_about_meanwhile_does_not_break_the_group_in_two() -> None:
    async with rig(cluster(**FULL_NODES)) as extender:
        pods = await members(extender, 4)
        nodes = [await asked(extender, each) for each in pods]
        other = extender.api.add_pod("other", CARD)
        await extender.caught_up()
        assert await asked(extender, other) == []
        assert "ask filter first" in await extender.bind(other, "n1")
        for pod, (node,) in zip(pods, nodes, strict=True):
            assert await extender.bind_unasked(pod, node) == ""


async def test_a_group_that_fits_nowhere_is_told_at_once_and_holds_nothing_a_second_later() -> None:
    async with rig(cluster(**FULL_NODES)) as extender:
        pods = await members(extender, 5)
        assert [len(await asked(extender, each)) for each in pods] == [1, 1, 1, 1, 0]
        other = extender.api.add_pod("other", CARD)
        await extender.caught_up()
        assert await asked(extender, other) == []
        await until(lambda: extender.extender.ledger.holds.tentative_count == 0)
        assert await extender.bind(other, "n1") == ""


async def test_a_member_that_is_asked_about_again_gives_its_cards_back_first() -> None:
    async with rig(cluster(**FULL_NODES)) as extender:
        pods = await members(extender, 4)
        first = [await asked(extender, each) for each in pods]
        assert sorted(node for (node,) in first) == ["n1", "n1", "n2", "n2"]
        assert [await asked(extender, each) for each in pods] == first
        assert extender.extender.ledger.holds.tentative_count == 4
        (node,) = first[0]
        assert await asked(extender, pods[0], node) == [node]  # its own, which was held for it


async def test_a_member_that_is_deleted_holds_nothing() -> None:
    async with rig(cluster(**FULL_NODES)) as extender:
        pods = await members(extender, 2)
        for each in pods:
            await asked(extender, each)
        extender.api.delete_pod("worker-0")
        await until(lambda: extender.extender.ledger.holds.tentative_count == 1)


async def test_a_member_that_the_watch_has_not_shown_is_asked_about_again() -> None:
    async with rig(cluster(**FULL_NODES)) as extender:
        (pod,) = await members(extender, 1)
        pod["metadata"]["uid"] = "unheard-of"
        answer = await extender.filter(pod, *NAMES)
        assert "ask again" in answer["Error"]


async def test_a_group_that_is_tried_again_and_again_does_not_starve_others() -> None:
    async with rig(cluster(**FULL_NODES)) as extender:
        pods = await members(extender, 5)
        other = extender.api.add_pod("other", CARD)
        await extender.caught_up()
        while not (nodes := await asked(extender, other)):
            for each in pods:
                await asked(extender, each)
        assert await extender.bind_unasked(other, nodes[0]) == ""
