"""Pod groups by labels: behind a gate until cards for all are held, and bound together or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from msgspec import convert

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kube.objects import Pod
from gpuslice.adapters.kube.resources import PODS
from gpuslice.apps.extender.gated_groups import MOST_TRIES, GatedGroups
from gpuslice.apps.extender.main import Extender
from gpuslice.apps.extender.settings import ExtenderSettings
from gpuslice.core.contract import GATE_POD_GROUP, LABEL_GROUP_MIN, LABEL_GROUP_NAME
from gpuslice.diagnosis.cluster import Cluster as KnownCluster
from gpuslice.diagnosis.explain.rule import explained
from simcluster.cluster.faults import Fault
from tests.builders import api_pod
from tests.integration.extender_rig import Rig, cluster, rig, until
from tests.unit.kube_wire import line, page

CARD = "16"
FOUR_CARDS = {"n1": (32, 2), "n2": (32, 2)}
NAMES = tuple(FOUR_CARDS)
Object = dict[str, Any]


def member(extender: Rig, number: int, least: int = 4, *, gate: bool = True, **fields: Any) -> Object:
    labels = {LABEL_GROUP_NAME: "train", LABEL_GROUP_MIN: str(least)}
    gates = {"schedulingGates": [{"name": GATE_POD_GROUP}]} if gate else {}
    return extender.api.add_pod(f"worker-{number}", CARD, labels=labels, **gates, **fields)


def gated(extender: Rig) -> set[str]:
    return {pod["metadata"]["name"] for pod in extender.api.pods() if pod["spec"].get("schedulingGates")}


async def asked(extender: Rig, pod: Object, *names: str) -> list[str]:
    answer = await extender.filter(pod, *(names or NAMES))
    assert not answer["Error"]
    found: list[str] = answer["NodeNames"]
    return found


async def all_bound(extender: Rig, pods: list[Object], *names: str) -> list[str]:
    """As kube-scheduler does it: one filter after the other, each bind beside the next ones."""
    binds = []
    for pod in pods:
        (node,) = await asked(extender, pod, *names)
        binds.append(asyncio.create_task(extender.bind_unasked(pod, node)))
        await asyncio.sleep(0)
    return list(await asyncio.gather(*binds))


def versions(extender: Rig) -> list[str]:
    return [
        node["metadata"]["resourceVersion"] for node in extender.api.call("GET", "/api/v1/nodes")["items"]
    ]


def groups(extender: Rig) -> GatedGroups:
    return extender.extender.groups.gated


async def test_gates_are_taken_off_when_all_members_are_there_and_each_has_its_card() -> None:
    async with rig(cluster(**FOUR_CARDS)) as extender:
        pods = [member(extender, number) for number in range(3)]
        await extender.caught_up()
        assert groups(extender).check() == []
        assert len(gated(extender)) == 3
        pods.append(member(extender, 3))
        await until(lambda: not gated(extender))
        assert extender.extender.ledger.holds.tentative_count == 4
        assert await all_bound(extender, pods) == [""] * 4
        assert sorted(map(extender.api.bound_to, (pod["metadata"]["name"] for pod in pods))) == [
            "n1",
            "n1",
            "n2",
            "n2",
        ]


async def test_a_group_that_does_not_fit_holds_nothing_and_starts_when_it_does() -> None:
    async with rig(cluster(**FOUR_CARDS)) as extender:
        await extender.add_and_bind("other", CARD)
        for number in range(4):
            member(extender, number)
        await extender.caught_up()
        assert groups(extender).check() == []
        assert extender.extender.ledger.holds.tentative_count == 0
        extender.api.delete_pod("other")
        await until(lambda: not gated(extender))


async def test_what_is_held_makes_way_for_nobody_and_no_member_is_bound_alone() -> None:
    async with rig(cluster(**FOUR_CARDS)) as extender:
        pods = [member(extender, number) for number in range(4)]
        await until(lambda: not gated(extender))
        other = extender.api.add_pod("other", CARD)
        await extender.caught_up()
        assert await asked(extender, other) == []
        (node,) = await asked(extender, pods[0])
        assert "other members" in await extender.bind_unasked(pods[0], node)
        assert extender.api.bound_to("worker-0") == ""
        assert await all_bound(extender, pods) == [""] * 4


async def test_a_member_that_no_node_takes_frees_what_is_held_for_the_others() -> None:
    async with rig(cluster(**FOUR_CARDS)) as extender:
        pods = [member(extender, number) for number in range(4)]
        await until(lambda: not gated(extender))
        (node,) = await asked(extender, pods[0])
        bind = asyncio.create_task(extender.bind_unasked(pods[0], node))
        # kube-scheduler's own filters let the others go to n1 alone, which has two cards
        found = [await asked(extender, pod, "n1") for pod in pods[1:]]
        assert [] in found
        assert "not fitted" in await bind
        assert extender.extender.ledger.holds.tentative_count == 0
        assert await asked(extender, pods[0]) == []  # the group rests, and others come first
        other = extender.api.add_pod("other", CARD)
        await extender.caught_up()
        assert await extender.bind(other, "n1") == ""


async def test_a_group_that_has_begun_keeps_what_is_held_for_the_others() -> None:
    async with rig(cluster(**FOUR_CARDS, n3=(15, 1))) as extender:
        pods = [member(extender, number) for number in range(4)]
        await until(lambda: not gated(extender))
        nodes = [await asked(extender, pod) for pod in pods]
        for pod, (node,) in zip(pods[:2], nodes[:2], strict=True):
            assert await extender.bind_unasked(pod, node) == ""
        assert await asked(extender, pods[2], "n3") == []
        assert extender.extender.ledger.holds.tentative(pods[3]["metadata"]["uid"]) is not None


async def test_members_go_where_kube_scheduler_lets_them() -> None:
    async with rig(cluster(**FOUR_CARDS, n3=(64, 4))) as extender:
        pods = [member(extender, number) for number in range(4)]
        await until(lambda: not gated(extender))
        assert await all_bound(extender, pods, "n1", "n2") == [""] * 4


async def test_members_without_a_gate_wait_in_filter_and_are_woken() -> None:
    async with rig(cluster(**FOUR_CARDS)) as extender:
        pods = [member(extender, number, gate=False) for number in range(3)]
        await extender.caught_up()
        answer = await extender.filter(pods[0], *NAMES)
        assert answer["NodeNames"] == []
        assert set(answer["FailedNodes"].values()) == {"Pod group train waits: 3 of 4 members are there"}
        assert answer["FailedAndUnresolvableNodes"] == answer["FailedNodes"]  # nobody is evicted for it
        before = versions(extender)
        pods.append(member(extender, 3, gate=False))
        await until(lambda: extender.extender.ledger.holds.tentative_count == 4)
        await until(lambda: versions(extender) != before)  # which wakes kube-scheduler
        assert await all_bound(extender, pods) == [""] * 4


async def test_members_that_vanish_leave_nothing_held() -> None:
    async with rig(cluster(**FOUR_CARDS)) as extender:
        for number in range(4):
            member(extender, number)
        await until(lambda: extender.extender.ledger.holds.tentative_count == 4)
        extender.api.delete_pod("worker-2")
        await until(lambda: extender.extender.ledger.holds.tentative_count == 0)


async def test_a_lost_member_is_replaced_alone() -> None:
    async with rig(cluster(**FOUR_CARDS)) as extender:
        pods = [member(extender, number) for number in range(4)]
        await until(lambda: not gated(extender))
        assert await all_bound(extender, pods) == [""] * 4
        extender.api.delete_pod("worker-1")
        again = member(extender, 4)
        await until(lambda: not gated(extender))
        assert await all_bound(extender, [again]) == [""]


@pytest.mark.parametrize(("owner", "starts"), [("this run", True), ("the run before", False)])
async def test_members_that_ended_well_count_beside_others_of_their_job(owner: str, starts: bool) -> None:
    def owned(uid: str) -> Object:
        job = {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "controller": True}
        return {"owners": [{**job, "uid": uid}]}

    async with rig(cluster(**FOUR_CARDS)) as extender:
        pods = [member(extender, number, **owned(owner)) for number in range(4)]
        await until(lambda: not gated(extender))
        assert await all_bound(extender, pods) == [""] * 4
        for number in range(4):
            extender.api.finish_pod(f"worker-{number}")
        member(extender, 4, **owned("this run"))
        await extender.caught_up()
        if starts:
            await until(lambda: not gated(extender))
        else:
            assert groups(extender).check() == []


async def test_a_pod_with_another_gate_is_not_there_yet() -> None:
    async with rig(cluster(**FOUR_CARDS)) as extender:
        for number in range(3):
            member(extender, number)
        gates = [{"name": GATE_POD_GROUP}, {"name": "kueue.x-k8s.io/admission"}]
        member(extender, 3, gate=False, schedulingGates=gates)
        await extender.caught_up()
        assert groups(extender).check() == []
        path = "/api/v1/namespaces/default/pods/worker-3"
        extender.api.patch(path, {"spec": {"schedulingGates": [{"name": GATE_POD_GROUP}]}})
        await until(lambda: not gated(extender))


async def test_a_member_without_cards_counts_and_needs_none() -> None:
    async with rig(cluster(**FOUR_CARDS)) as extender:
        for number in range(3):
            member(extender, number)
        await extender.caught_up()
        assert groups(extender).check() == []
        labels = {LABEL_GROUP_NAME: "train", LABEL_GROUP_MIN: "4"}
        extender.api.add_pod("launcher", "0", labels=labels, containers=[{"name": "main", "image": "image"}])
        await until(lambda: not gated(extender))


async def test_an_answer_lost_while_gates_are_taken_off_is_asked_again() -> None:
    async with rig(cluster(**FOUR_CARDS)) as extender:
        extender.api.cluster.add_fault(Fault(method="PATCH", path=".*/pods/worker-.*", times=6, code=500))
        for number in range(4):
            member(extender, number)
        await until(lambda: not gated(extender))


async def test_who_takes_over_in_the_middle_holds_cards_for_the_rest() -> None:
    api = cluster(**FOUR_CARDS)
    async with rig(api) as first:
        pods = [member(first, number) for number in range(4)]
        await until(lambda: not gated(first))
        nodes = [await asked(first, pod) for pod in pods]
        for pod, (node,) in zip(pods[:2], nodes[:2], strict=True):
            assert await first.bind_unasked(pod, node) == ""
    async with rig(api) as second:
        other = second.api.add_pod("other", CARD)
        await second.caught_up()
        assert await asked(second, other) == []
        assert await all_bound(second, pods[2:]) == [""] * 2


async def test_a_node_that_is_kept_for_those_who_have_no_other_will_do() -> None:
    api = cluster(n1=(64, 4))
    api.patch("/api/v1/nodes/n1", {"spec": {"taints": [{"key": "gpu", "effect": "PreferNoSchedule"}]}})
    async with rig(api) as extender:
        for number in range(4):
            member(extender, number)
        await until(lambda: not gated(extender))


async def test_many_groups_that_do_not_fit_leave_a_turn_to_those_behind_them() -> None:
    async with rig(cluster(n1=(32, 2), n2=(15, 1))) as extender:
        await extender.add_and_bind("other", CARD)
        for number in range(MOST_TRIES):
            for half in range(2):
                labels = {LABEL_GROUP_NAME: f"large-{number}", LABEL_GROUP_MIN: "2"}
                gates = {"schedulingGates": [{"name": GATE_POD_GROUP}]}
                extender.api.add_pod(f"large-{number}-{half}", CARD, labels=labels, **gates)
        await extender.caught_up()
        member(extender, 0, least=1)
        await extender.caught_up()
        opened: list[str] = []
        for number in range(8):
            await extender.add_and_bind(f"small-{number}", "1", node="n2")  # room has changed
            opened += [pod.name for pod in groups(extender).check()]
        assert "worker-0" in opened or "worker-0" not in gated(extender)


def test_explain_says_how_many_members_are_missing() -> None:
    def hints(pods: list[Object]) -> tuple[str, ...]:
        found = [convert(each, Pod) for each in pods]
        return explained(found[0], KnownCluster(pods=found)).hints

    labels = {LABEL_GROUP_NAME: "train", LABEL_GROUP_MIN: "4"}
    gates = [{"name": GATE_POD_GROUP}]
    pods = [api_pod(f"worker-{number}", labels=labels, schedulingGates=gates) for number in range(3)]
    missing = "It waits for 1 of 4 members of pod group train: they start together or not at all."
    assert missing in hints(pods)
    pods.append(api_pod("fourth", labels=labels))
    (whole,) = (hint for hint in hints(pods) if "train" in hint)
    assert whole.startswith(
        "Pod group train has 4 members, 0 of them on a node: those that wait start once 4"
    )
    assert not any("gates" in hint for hint in hints(pods))


async def test_a_member_deleted_while_a_new_leader_reads_the_pods_is_no_member() -> None:
    """It could never be given cards, so its group would never start."""
    labels = {LABEL_GROUP_NAME: "train", LABEL_GROUP_MIN: "2"}
    worker = api_pod("worker", memory=4, uid="1", version="3", labels=labels)
    listed, deleted = asyncio.Event(), asyncio.Event()

    class Cluster:
        async def request(self, request: ApiRequest) -> ApiResponse:
            if request.path == PODS.path() and extender.watch.synced:
                listed.set()
                await deleted.wait()
            return page("9", *([worker] if request.path == PODS.path() else []))

        async def stream(self, request: ApiRequest) -> AsyncGenerator[bytes]:
            await listed.wait()
            if request.path == PODS.path():
                yield line("DELETED", api_pod("worker", memory=4, uid="1", version="10", labels=labels))
                deleted.set()  # the event has been handled
            await asyncio.Event().wait()

    extender = Extender(ExtenderSettings(), KubeClient(Cluster()))
    following = asyncio.create_task(extender.watch.run())
    async with asyncio.timeout(30):
        await extender.watch.until_synced()
        assert len(extender.groups.gated._groups) == 1
        await extender.watch.reread_pods()
    following.cancel()
    assert extender.groups.gated._groups == {}
