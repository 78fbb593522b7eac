"""The way back of ``gpuslice migrate``: over several runs and systems, and what cannot be read of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpuslice.adapters.kube.resources import CONFIG_MAPS, NODES
from gpuslice.migration.reader import WORKLOADS
from gpuslice.migration.systems import DAEMON_SETS, DEPLOYMENTS
from tests.builders import api_container, api_pod
from tests.contract.test_cli_cluster import shell
from tests.contract.test_cli_migrate import INSTALLED, Cluster, cluster, node, system, wheres, workload

__all__ = ["cluster", "shell"]

HAMI = api_container(**{"nvidia.com/gpumem": "4096"})
REPLICA_SETS = next(each for each in WORKLOADS if each.plural == "replicasets")
ON = [{"op": "add", "path": "/metadata/labels/gpu", "value": "on"}]


async def write_labels(cluster: Cluster, name: str, operations: Any) -> None:
    await cluster.client.json_patch(NODES.as_dict(), name, operations)


async def test_a_node_that_came_twice_goes_back_all_the_way(cluster: Cluster) -> None:
    """Else it had both labels, and two device plugins gave out its cards."""
    await cluster.shell.has([node("gpu-1", {"gpu": "on"})])
    await cluster.has((DAEMON_SETS, INSTALLED))
    await cluster.migrate("hami", "--apply")
    await write_labels(cluster, "gpu-1", [*ON, {"op": "remove", "path": "/metadata/labels/cgpu"}])
    await cluster.migrate("hami", "--apply")
    assert await cluster.labels("gpu-1") == {"cgpu": "true"}
    told = await cluster.migrate("hami", "--undo", "--apply")
    assert told["changes"][0]["what"] == ["label gpu=on is set", "label cgpu=true is removed"]
    assert await cluster.labels("gpu-1") == {"gpu": "on"}
    assert (await cluster.migrate("hami", "--undo"))["changes"] == []


async def test_what_came_from_two_systems_goes_back_in_their_order(cluster: Cluster) -> None:
    labels = {"gpu": "on", "gpushare": "true"}
    await cluster.shell.has([node("gpu-1", labels)])
    await cluster.has((DAEMON_SETS, INSTALLED))
    await cluster.migrate("hami", "--apply")
    await cluster.migrate("gpushare", "--apply")
    told = await cluster.migrate("hami", "--undo", "--apply")
    first = "it came from gpushare since: gpuslice migrate --from gpushare --undo --apply first"
    assert (told["changes"], told["waits"]) == ([], [{"where": "node gpu-1", "what": first}])
    await cluster.migrate("gpushare", "--undo", "--apply")
    assert await cluster.labels("gpu-1") == {"gpushare": "true", "cgpu": "true"}
    await cluster.migrate("hami", "--undo", "--apply")
    assert await cluster.labels("gpu-1") == labels


async def test_what_a_deployment_made_goes_back_with_it(cluster: Cluster) -> None:
    """Its controller copies annotations, ours among them, to the ReplicaSet that it makes of each version."""
    await cluster.has((DEPLOYMENTS, workload("train", containers=[HAMI])))
    await cluster.migrate("hami", "--apply")
    made = await cluster.client.get(DEPLOYMENTS, "train", "default")
    meta, spec = made["metadata"], made["spec"]
    owner = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": "train",
        "uid": meta["uid"],
        "controller": True,
    }
    copied = {"name": "train-1", "namespace": "default", "annotations": meta["annotations"]}
    body = {key: spec[key] for key in ("selector", "template")}
    await cluster.has((REPLICA_SETS, {"metadata": {**copied, "ownerReferences": [owner]}, "spec": body}))
    told = await cluster.migrate("hami", "--undo", "--apply")
    assert wheres(told["changes"]) == ["Deployment default/train"]


async def test_the_way_back_is_told_in_words_and_leaves_nothing_behind(cluster: Cluster) -> None:
    labels = {"nvidia.com/gpu.memory": "16130", "nvidia.com/gpu.product": "Tesla-V100"}
    await cluster.shell.has([node("gpu-1", labels)])
    annotations = {"nvidia.com/use-gputype": "v100"}
    two = api_container(**{"nvidia.com/gpu": "2", "nvidia.com/gpumem": "4096"})
    kai = {"gpu-fraction": "0.5"}
    await cluster.has(
        (
            DEPLOYMENTS,
            workload(
                "a", metadata={"annotations": annotations}, containers=[two], schedulerName="hami-scheduler"
            ),
        ),
        (DEPLOYMENTS, workload("b", metadata={"annotations": kai}, schedulerName="kai-scheduler")),
    )
    before = {name: await cluster.template(name) for name in "ab"}
    for each in ("hami", "kai"):
        await cluster.migrate(each, "--apply")
    told = {
        name: (await cluster.migrate(name, "--undo", "--apply"))["changes"][0] for name in ("hami", "kai")
    }
    assert told["hami"]["what"] == [
        'container "main": aliyun.com/gpu-mem 8 becomes nvidia.com/gpu 2, nvidia.com/gpumem 4096',
        "label aliyun.com/gpu-count=2 is removed",
        "schedulerName default-scheduler becomes hami-scheduler",
        "node affinity to the wanted models is removed",
    ]
    assert told["kai"]["what"] == [
        'container "main": aliyun.com/gpu-mem 7 becomes gpu-fraction 0.5',
        "schedulerName default-scheduler becomes kai-scheduler",
    ]
    assert {name: (await cluster.template(name))["spec"].get("affinity", "none") for name in "ab"} == {
        "a": "none",
        "b": "none",
    }
    assert await cluster.template("a") == before["a"]
    assert (await cluster.template("b"))["metadata"] == before["b"]["metadata"]


@pytest.mark.parametrize("text", ["x", "[]", "{}", '{"from":"hami"}', '{"from":"hami","undo":[1]}'])
async def test_a_way_back_that_cannot_be_read_is_left_to_people(cluster: Cluster, text: str) -> None:
    spoilt = node("gpu-1", {"gpu": "on"})
    spoilt["metadata"].setdefault("annotations", {})["gpuslice.io/migration"] = text
    await cluster.shell.has([spoilt])
    await cluster.has((DAEMON_SETS, INSTALLED))
    for words in (["--undo"], []):
        told = await cluster.migrate("hami", *words)
        assert told["changes"] == []
        (why,) = (each["what"] for each in told["byHand"] if each["where"] == "node gpu-1")
        assert 'annotations["gpuslice.io/migration"]' in why


@pytest.mark.parametrize("text", ["x", "[]", "{}", '{"kind":"Foo","metadata":{"name":"x"}}'])
async def test_a_record_of_what_was_deleted_that_cannot_be_read_is_left_to_people(
    cluster: Cluster, text: str
) -> None:
    meta = {"name": "gpuslice-migration", "namespace": "kube-system"}
    await cluster.has((CONFIG_MAPS.as_dict(), {"metadata": meta, "data": {"gpushare.foo.bar": text}}))
    told = await cluster.migrate("gpushare", "--undo")
    assert told["changes"] == []
    assert "gpushare.foo.bar" in told["byHand"][0]["what"]


# -- what was meant, and what would be lost on the way there -------------------------------------------------


async def test_a_node_or_namespace_that_is_not_there_is_named(cluster: Cluster) -> None:
    await cluster.shell.has([node("gpu-1", {"gpu": "on"})])
    for words, why in (
        (("--from", "hami", "--node", "gpu-7"), 'nodes "gpu-7" not found; did you mean gpu-1?'),
        (("--to", "dra", "gpu-7"), 'nodes "gpu-7" not found; did you mean gpu-1?'),
        (("--from", "hami", "-n", "defalt"), 'there is no namespace "defalt"; did you mean default?'),
    ):
        answer = await cluster.shell("gpuslice", "migrate", *words)
        assert (answer.code, answer.err) == (1, f"Error: {why}\n")
    for flag in ("--card-units", "--slice-units"):
        answer = await cluster.shell("gpuslice", "migrate", "--from", "hami", flag, "-3")
        assert answer.code == 2
        assert "-3 is not in the range" in answer.err


async def test_pods_on_acks_nodes_go_before_our_agent_comes(cluster: Cluster) -> None:
    busy = node("gpu-1", {"cgpu": "true"}, **{"aliyun.com/gpu-count": "2"})
    await cluster.shell.has(
        [busy, node("gpu-2", {"cgpu": "true"})], [api_pod("app", "4", node="gpu-1", phase="Running")]
    )
    await cluster.has((DAEMON_SETS, system("gpushare-device-plugin-ds")))
    told = await cluster.migrate("ack", "--apply")
    assert wheres(told["waits"]) == ["nodes", "node gpu-1"]
    assert "kubectl drain gpu-1" in told["waits"][1]["what"]
    await cluster.has((DAEMON_SETS, INSTALLED))  # from now on the pods are ours
    assert (await cluster.migrate("ack"))["waits"] == []


@pytest.mark.parametrize("other", ["nvidia.com/gpu.shared", "aliyun.com/gpu-mem", "nvidia.com/gpumem"])
async def test_a_container_that_asks_for_a_slice_and_something_else_is_left_to_people(
    cluster: Cluster, other: str
) -> None:
    await cluster.shell.has([node("sliced", {"nvidia.com/gpu.sharing-strategy": "time-slicing"})])
    both = api_container(**{"nvidia.com/gpu": "1", other: "7"})
    await cluster.has((DEPLOYMENTS, workload("both", containers=[both])))
    told = await cluster.migrate("time-slicing", "--slice-units", "3")
    assert told["changes"] == []
    (why,) = (each["what"] for each in told["byHand"] if each["where"] == "Deployment default/both")
    assert "must be left out beside" in why
    assert json.dumps(other) in why or '"nvidia.com/gpu"' in why
