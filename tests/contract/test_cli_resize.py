"""``gpuslice resize`` against the simulated API server, where the test acts for extender and agent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_explain import node, placed
from tests.integration.extender_rig import Api, until

__all__ = ["shell"]

REQUEST, GRANTED = "gpuslice.io/memory-request", "gpuslice.io/memory-granted"


def running(name: str, units: int, card: str = "0", **annotations: str) -> dict[str, Any]:
    return placed(name, units, "n1", card, ALIYUN_COM_GPU_MEM_ASSIGNED="true", **annotations)


def api(shell: Shell) -> Api:
    return Api(shell.server.cluster)


def annotated(shell: Shell) -> dict[str, str]:
    return api(shell).annotations("a")


@pytest.mark.parametrize("amount", ["12", "12Gi", "12288Mi", "11.5Gi"])
async def test_a_pod_is_asked_to_hold_more_in_units_or_bytes(shell: Shell, amount: str) -> None:
    await shell.has([node("n1", 15)], [running("a", 4)])
    told = await shell("gpuslice", "resize", "a", "--request", amount)
    assert (told.code, told.out) == (0, "pod/a 4 units -> 12\n"), told.err
    assert annotated(shell)[REQUEST] == "12"


async def test_no_room_is_said_at_once_and_nothing_is_asked_for(shell: Shell) -> None:
    await shell.has([node("n1", 15)], [running("a", 4), running("b", 8)])
    told = await shell("gpuslice", "resize", "a", "--request", "12")
    assert told.code == 1
    assert "asked for 8 more of card 0 of n1, 3 of 15 are free; the rest is held by default/b" in told.err
    assert REQUEST not in annotated(shell)


async def test_the_quota_is_said_too(shell: Shell) -> None:
    await shell.has([node("n1", 15)], [running("a", 4)])
    key = "requests.aliyun.com/gpu-mem"
    status = {"hard": {key: "5"}, "used": {key: "4"}}
    path = "/api/v1/namespaces/default/resourcequotas"
    api(shell).call("POST", path, {"metadata": {"name": "team"}, "spec": {"hard": {key: "5"}}})
    api(shell).patch(f"{path}/team/status", {"status": status})
    told = await shell("gpuslice", "resize", "a", "--request", "6")
    assert told.code == 1
    assert "quota team is exceeded: asked for 2 more, 4 of 5" in told.err


@pytest.mark.parametrize(
    ("amount", "says"),
    [
        ("3", "for main from 4 up: kubelet counts what the pod was created with"),
        ("lots", "must be whole units such as 12, or memory such as 12Gi"),
        ("-4", "must be whole units"),
    ],
)
async def test_what_no_pod_can_have_is_refused(shell: Shell, amount: str, says: str) -> None:
    await shell.has([node("n1", 15)], [running("a", 4)])
    told = await shell("gpuslice", "resize", "a", "--request", amount)
    assert told.code == 1
    assert says in told.err


async def test_all_pods_of_a_deployment_or_none(shell: Shell) -> None:
    labels = {"app": "serve"}
    pods = [running("a", 4), running("b", 4, "1"), running("big", 12, "1")]
    for pod in pods[:2]:
        pod["metadata"]["labels"] = labels
    await shell.has([node("n1", 15, 15)], pods)
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "main", "image": "x"}]}}
    deployment = {
        "kind": "Deployment",
        "metadata": {"name": "serve"},
        "spec": {"selector": {"matchLabels": labels}, "template": template},
    }
    api(shell).call("POST", "/apis/apps/v1/namespaces/default/deployments", deployment)
    told = await shell("gpuslice", "resize", "deploy/serve", "--request", "8")
    assert told.code == 1
    assert "pod default/b: Insufficient GPU Memory" in told.err
    assert REQUEST not in annotated(shell)


async def test_of_several_containers_the_others_keep_what_is_wanted_for_them(shell: Shell) -> None:
    pod = running("a", 6, **{REQUEST: "main=5,side=2", GRANTED: '{"main":5}'})
    limits = {"aliyun.com/gpu-mem": "4"}
    pod["spec"]["containers"] = [
        {"name": name, "image": "x", "resources": {"limits": {**limits, "aliyun.com/gpu-mem": units}}}
        for name, units in (("main", "4"), ("side", "2"))
    ]
    await shell.has([node("n1", 15)], [pod])
    told = await shell("gpuslice", "resize", "a", "-c", "side", "--request", "3")
    assert (told.code, told.out) == (0, "pod/a 7 units -> 8\n"), told.err
    assert annotated(shell)[REQUEST] == "main=5,side=3"


async def test_with_wait_it_returns_once_the_nodes_agent_says_so(shell: Shell) -> None:
    await shell.has([node("n1", 15)], [running("a", 4)])
    waits = asyncio.create_task(shell("gpuslice", "resize", "a", "--request", "12", "--wait"))
    await until(lambda: REQUEST in annotated(shell))
    assert not waits.done()
    said = {GRANTED: '{"main":12}', "ALIYUN_COM_GPU_MEM_POD": "12"}
    api(shell).patch("/api/v1/namespaces/default/pods/a", {"metadata": {"annotations": said}})
    assert (await waits).code == 0


async def test_waiting_has_an_end_and_explain_says_what_for(shell: Shell) -> None:
    await shell.has([node("n1", 15)], [running("a", 4), running("b", 8)])
    told = await shell("gpuslice", "resize", "a", "--request", "12", "--wait", "--timeout", "0.1")
    assert told.code == 1
    assert "not in force after 0.1 s: default/a" in told.err
    told = await shell("gpuslice", "explain", "a")
    assert "It is to hold 12 units instead of 4 (resize): Insufficient GPU Memory in one device" in told.out


async def test_what_a_container_still_uses_is_explained(shell: Shell) -> None:
    await shell.has([node("n1", 15)], [running("a", 4, **{REQUEST: "6", GRANTED: '{"main":12}'})])
    told = await shell("gpuslice", "explain", "a")
    assert "It is to hold 6 units instead of 12 (resize)" in told.out


async def test_what_a_container_may_borrow_is_explained(shell: Shell) -> None:
    await shell.has([node("n1", 15)], [running("a", 4, **{"gpuslice.io/memory-limit": "12"})])
    told = await shell("gpuslice", "explain", "a")
    assert "Container main may use up to 12 units while nobody requests them" in told.out
    assert "4 are its own" in told.out
