"""Pods that run and want more: the extender grants it where there is room, once, whatever is lost."""

from __future__ import annotations

import json
from typing import Any

from gpuslice.core.contract import ANN_ASSIGNED
from simcluster.cluster.faults import Fault
from tests.builders import api_pod
from tests.integration.extender_rig import Api, Rig, cluster, rig, until

REQUEST, GRANTED = "gpuslice.io/memory-request", "gpuslice.io/memory-granted"
PODS = "/api/v1/namespaces/default/pods"


def annotate(api: Api, name: str, **annotations: str | None) -> None:
    names = {"request": REQUEST, "granted": GRANTED, "assigned": ANN_ASSIGNED}
    api.patch(
        f"{PODS}/{name}",
        {"metadata": {"annotations": {names[key]: text for key, text in annotations.items()}}},
    )


def wish(api: Api, name: str, text: str) -> None:
    """Not by a PATCH, so that faults of PATCH are the extender's."""
    pod = api.pod(name)
    pod["metadata"]["annotations"][REQUEST] = text
    api.call("PUT", f"{PODS}/{name}", pod)


async def running(extender: Rig, name: str, memory: str) -> None:
    """Bound, and confirmed by the node's agent."""
    await extender.add_and_bind(name, memory)
    annotate(extender.api, name, assigned="true")


def granted(api: Api, name: str) -> Any:
    return json.loads(api.annotations(name).get(GRANTED, "null"))


async def test_more_is_granted_on_the_same_card_and_counts_at_once() -> None:
    async with rig(cluster(n1=(30, 2))) as extender:
        await running(extender, "a", "4")
        annotate(extender.api, "a", request="12")
        await until(lambda: granted(extender.api, "a") == {"main": 12})
        await extender.caught_up()
        assert sorted((await extender.used()).values()) == [0, 12]
        assert (await extender.filter(api_pod(memory="15"), "n1"))["NodeNames"] == ["n1"]
        assert (await extender.filter(api_pod("q", memory="16"), "n1"))["NodeNames"] == []
        await until(lambda: bool(extender.api.events("GPUResized")))
        (event,) = extender.api.events("GPUResized")
        assert event["message"] == "it holds 12 units instead of 4"


async def test_without_room_the_pod_is_told_who_holds_it_and_gets_it_when_they_have_gone() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        await running(extender, "a", "4")
        await running(extender, "b", "8")
        annotate(extender.api, "a", request="12")
        await until(lambda: bool(extender.api.events("GPUResizeWaits")))
        (event,) = extender.api.events("GPUResizeWaits")
        assert "asked for 8 more of card 0 of n1, 3 of 15 are free" in event["message"]
        assert "default/b (8 units)" in event["message"]
        assert granted(extender.api, "a") is None
        extender.api.delete_pod("b")
        await until(lambda: granted(extender.api, "a") == {"main": 12})


async def test_the_quota_of_the_namespace_counts_what_was_granted_too() -> None:
    async with rig(cluster(n1=(60, 4))) as extender:
        quota = {
            "metadata": {"name": "team"},
            "spec": {"hard": {"requests.aliyun.com/gpu-mem": "24"}},
        }
        extender.api.call("POST", "/api/v1/namespaces/default/resourcequotas", quota)
        status = {
            "hard": {"requests.aliyun.com/gpu-mem": "24"},
            "used": {"requests.aliyun.com/gpu-mem": "16"},
        }
        extender.api.patch("/api/v1/namespaces/default/resourcequotas/team/status", {"status": status})
        await running(extender, "a", "4")
        await running(extender, "b", "12")
        annotate(extender.api, "a", request="10")
        await until(lambda: granted(extender.api, "a") == {"main": 10})
        annotate(extender.api, "b", request="15")
        await until(lambda: bool(extender.api.events("GPUResizeWaits")))
        (event,) = extender.api.events("GPUResizeWaits")
        assert event["message"] == (
            "The namespace's quota team is exceeded: asked for 3 more, 22 of 24 requests.aliyun.com/gpu-mem "
            "are used"
        )
        annotate(extender.api, "b", request="14")
        await until(lambda: granted(extender.api, "b") == {"main": 14})


async def test_a_wish_that_cannot_be_read_is_told_and_takes_nothing() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        await running(extender, "a", "4")
        annotate(extender.api, "a", request="12Gi")
        await until(lambda: bool(extender.api.events("GPURequestUnreadable")))
        await extender.caught_up()
        assert await extender.used() == {0: 4}


async def test_a_lost_answer_grants_once_and_gives_the_room_to_nobody_else() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        await running(extender, "a", "4")
        lost = Fault("PATCH", f"{PODS}/a", 504, after=True, times=1)
        extender.api.cluster.faults.add(lost)
        wish(extender.api, "a", "12")
        await until(lambda: lost.times == 0)
        assert (await extender.filter(api_pod(memory="4"), "n1"))["NodeNames"] == []
        await until(lambda: granted(extender.api, "a") == {"main": 12})
        await extender.caught_up()
        assert await extender.used() == {0: 12}


async def test_what_the_api_server_refuses_is_free_for_others() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        await running(extender, "a", "4")
        refused = Fault("PATCH", f"{PODS}/a", 403, times=1)
        extender.api.cluster.faults.add(refused)
        wish(extender.api, "a", "12")
        await until(lambda: refused.times == 0)
        assert (await extender.filter(api_pod(memory="11"), "n1"))["NodeNames"] == ["n1"]
        await until(lambda: granted(extender.api, "a") == {"main": 12})


async def test_a_pod_whose_card_is_not_confirmed_waits() -> None:
    async with rig(cluster(n1=(15, 1))) as extender:
        await extender.add_and_bind("a", "4")
        annotate(extender.api, "a", request="12")
        await until(lambda: bool(extender.api.events("GPUResizeWaits")))
        assert granted(extender.api, "a") is None
        annotate(extender.api, "a", assigned="true")
        await until(lambda: granted(extender.api, "a") == {"main": 12})
