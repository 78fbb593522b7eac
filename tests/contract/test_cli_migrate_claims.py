"""``gpuslice migrate --to dra`` on a simulated cluster: dry, done, done again, undone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.resources import NAMESPACES, NODES, PODS, RESOURCE_CLAIMS, RESOURCE_SLICES
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.core.contract import CLAIM_CLASS, LABEL_CLAIMS, LABEL_MODE
from gpuslice.diagnosis.doctor.facts import DEVICE_CLASSES
from tests.builders import api_pod
from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_explain import node, placed
from tests.unit.test_claim_explanation import claim, claiming, slice_of

__all__ = ["shell"]
Json = dict[str, Any]
SHARED = {"cgpu": "true"}
OWNER = [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "train", "uid": "rs", "controller": True}]


def agent(on: str) -> Json:
    made = api_pod(f"agent-{on}", containers=[{"name": "agent", "image": "image"}], node=on, phase="Running")
    made["metadata"] |= {"namespace": "kube-system", "labels": {"name": "gpushare-device-plugin-ds"}}
    return made


class Cluster:
    """Two nodes that share their cards, an agent on each."""

    def __init__(self, shell: Shell, client: KubeClient) -> None:
        self.shell, self.client = shell, client

    async def migrate(self, *words: str, code: int = 0) -> Json:
        answer = await self.shell("gpuslice", "migrate", "--to", "dra", "-o", "json", *words)
        assert answer.code == code, answer.err + answer.out
        found: Json = json.loads(answer.out)
        return found

    async def mode(self, name: str) -> str:
        labels = (await self.client.get(NODES, name)).metadata.labels or {}
        return labels.get(LABEL_MODE, "")

    async def agents(self) -> list[str]:
        found = await self.client.list(PODS, "kube-system")
        pods = [each.metadata for each in found.items or ()]
        return sorted(each.name for each in pods if not each.deletion_timestamp)  # no kubelet ends them here


@pytest.fixture
async def cluster(shell: Shell) -> AsyncIterator[Cluster]:
    await shell.has([node(name, 15, labels=SHARED) for name in ("n1", "n2")], [agent("n1"), agent("n2")])
    async with HttpTransport(Connection(shell.server.url)) as transport:
        client = KubeClient(transport)
        await client.create(DEVICE_CLASSES, {"metadata": {"name": CLAIM_CLASS}, "spec": {}})
        for name, labels in (("team", {LABEL_CLAIMS: "true"}), ("other", {})):
            await client.create(NAMESPACES, {"metadata": {"name": name, "labels": labels}})
        yield Cluster(shell, client)


def holder(name: str, units: int, namespace: str, *, owned: bool = True) -> Json:
    made = placed(name, units, "n1", "0")
    made["metadata"]["namespace"] = namespace
    if owned:
        made["metadata"]["ownerReferences"] = OWNER
    return made


async def test_a_node_is_switched_and_back_and_nothing_is_drained(cluster: Cluster) -> None:
    plan = await cluster.migrate("n1")
    assert [(each["where"], each["done"]) for each in plan["changes"]] == [
        ("node n1", False),
        ("pod kube-system/agent-n1", False),
    ]
    assert (await cluster.mode("n1"), await cluster.agents()) == ("", ["agent-n1", "agent-n2"])
    assert all(each["done"] for each in (await cluster.migrate("n1", "--apply"))["changes"])
    assert (await cluster.mode("n1"), await cluster.mode("n2")) == ("claims", "")
    assert await cluster.agents() == ["agent-n2"]
    assert (await cluster.migrate("n1", "--apply"))["changes"] == []
    await cluster.migrate("n1", "--undo", "--apply")
    assert await cluster.mode("n1") == ""


async def test_who_must_go_is_told_where_it_comes_back(cluster: Cluster) -> None:
    pods = [
        holder("small", 2, "other"),
        holder("large", 9, "other"),
        holder("ours", 2, "team"),
        holder("alone", 1, "other", owned=False),
    ]
    await cluster.shell.has([], [*pods, placed("busy", 10, "n2", "0")])
    plan = await cluster.migrate("n1")
    by = "of card 0 by the device plugin:"
    assert {each["where"]: each["what"] for each in plan["mustGo"]} == {
        "pod other/small": f"holds 2 units {by} its ReplicaSet recreates it, and n2 has room for it",
        "pod other/large": (
            f"holds 9 units {by} recreated, it waits, because no other node has room: label its namespace "
            "gpuslice.io/claims=true to have it here"
        ),
        "pod team/ours": f"holds 2 units {by} its ReplicaSet recreates it, and it may come back here",
        "pod other/alone": (
            f"holds 1 unit {by} nothing recreates it: do so yourself once it has ended or you have deleted it"
        ),
    }
    text = (await cluster.shell("gpuslice", "migrate", "--to", "dra", "n1")).out
    for part in ("WOULD CHANGE", "MUST GO FIRST", "run the same command with --apply"):
        assert part in text


async def test_the_way_back_waits_for_claims(cluster: Cluster) -> None:
    await cluster.migrate("n1", "--apply")
    pod = claiming("p", claim="c", node="n1", owners=OWNER)
    pod["metadata"] |= {"namespace": "other", "uid": "uid-p"}
    await cluster.shell.has([], [pod])
    given = claim("c", given="4Gi", to="p")
    given["metadata"]["namespace"] = "other"
    given["status"]["reservedFor"][0]["uid"] = (await cluster.client.get(PODS, "p", "other")).metadata.uid
    made = await cluster.client.create(RESOURCE_CLAIMS.as_dict(), given)
    await cluster.client.patch_status(RESOURCE_CLAIMS.as_dict(), "c", given["status"], "other")
    assert made["metadata"]["name"] == "c"
    offered = slice_of("n1", 15)
    offered["metadata"] = {"name": "n1-0"}
    offered["spec"]["pool"] = {"name": "n1", "generation": 1, "resourceSliceCount": 1}
    await cluster.client.create(RESOURCE_SLICES, offered)
    (must_go,) = (await cluster.migrate("n1", "--undo"))["mustGo"]
    assert must_go["where"] == "pod other/p"
    assert "holds 4 units of card 0 by a claim" in must_go["what"]


async def test_what_keeps_a_node_from_being_switched_is_said(cluster: Cluster) -> None:
    await cluster.shell.has([node("cpu")])
    (by_hand,) = (await cluster.migrate("cpu"))["byHand"]
    assert "label it cgpu=true first" in by_hand["what"]
    await cluster.client.delete(DEVICE_CLASSES, CLAIM_CLASS)
    plan = await cluster.migrate("n1")
    assert plan["changes"] == []
    assert "--set dra.enabled=true" in plan["waits"][0]["what"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--to", "dra", "gone"], 'nodes "gone" not found'),
        (["--to", "dra"], "NODE and --to go together"),
        (["--from", "hami", "n1"], "NODE and --to go together"),
        ([], "either --from SYSTEM or --to dra NODE must be given"),
    ],
)
async def test_a_wrong_call_is_refused(cluster: Cluster, words: list[str], sentence: str) -> None:
    answer = await cluster.shell("gpuslice", "migrate", *words)
    assert answer.code != 0
    assert sentence in answer.err
