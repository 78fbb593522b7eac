"""``gpuslice migrate`` and what creates pods: selectors of a label that nodes lose, operators, lone pods."""

from __future__ import annotations

from typing import Any

import pytest

from gpuslice.migration.systems import DAEMON_SETS, DEPLOYMENTS
from tests.builders import api_container, api_pod
from tests.contract.test_cli_cluster import shell
from tests.contract.test_cli_migrate import (
    INSTALLED,
    Cluster,
    cluster,
    node,
    wheres,
    workload,
)

__all__ = ["cluster", "shell"]

HAMI = api_container(**{"nvidia.com/gpumem": "4096"})
GPUSHARE = api_container(**{"aliyun.com/gpu-mem": "4"})


def affinity(operator: str) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": "gpu", "operator": operator, "values": ["on"]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


@pytest.mark.parametrize(
    ("system", "label", "container"),
    [("hami", ("gpu", "on"), HAMI), ("gpushare", ("gpushare", "true"), GPUSHARE)],
)
async def test_pods_do_not_wait_for_a_label_that_nodes_lose(
    cluster: Cluster, system: str, label: tuple[str, str], container: Any
) -> None:
    await cluster.shell.has([node("gpu-1", dict([label]))])
    only, beside = dict([label]), dict([label, ("zone", "a")])
    await cluster.has(
        (DAEMON_SETS, INSTALLED),
        (DEPLOYMENTS, workload("only", containers=[container], nodeSelector=only)),
        (DEPLOYMENTS, workload("beside", containers=[container], nodeSelector=beside)),
    )
    told = await cluster.migrate(system, "--apply")
    assert wheres(told["changes"]) == ["node gpu-1", "Deployment default/beside", "Deployment default/only"]
    assert f"nodeSelector {'='.join(label)} is removed" in told["changes"][1]["what"]
    assert not (await cluster.template("only"))["spec"].get("nodeSelector")
    assert (await cluster.template("beside"))["spec"]["nodeSelector"] == {"zone": "a"}
    assert "manifests" in wheres(told["byHand"])  # the next `kubectl apply` would bring it back
    assert (await cluster.migrate(system))["changes"] == []
    back = await cluster.migrate(system, "--undo", "--apply")
    assert f"nodeSelector {'='.join(label)} is set" in back["changes"][1]["what"]
    assert (await cluster.template("only"))["spec"]["nodeSelector"] == only
    assert (await cluster.template("beside"))["spec"]["nodeSelector"] == beside


async def test_who_else_selects_nodes_by_that_label_is_named(cluster: Cluster) -> None:
    await cluster.shell.has([node("gpu-1", {"gpu": "on"})])
    await cluster.has(
        (DAEMON_SETS, INSTALLED),
        (DAEMON_SETS, workload("watcher", nodeSelector={"gpu": "on"})),  # asks for no card
        (DEPLOYMENTS, workload("elsewhere", nodeSelector={"gpu": "none"})),
        (DEPLOYMENTS, workload("avoids", affinity=affinity("NotIn"))),
        (DEPLOYMENTS, workload("wants", containers=[HAMI], affinity=affinity("In"))),
    )
    told = await cluster.migrate("hami", "--apply")
    selecting = [each["where"] for each in told["byHand"] if "by label gpu, which they lose" in each["what"]]
    assert selecting == ["Deployment default/avoids", "Deployment default/wants", "DaemonSet default/watcher"]
    assert (await cluster.template("watcher", DAEMON_SETS))["spec"]["nodeSelector"] == {"gpu": "on"}


async def test_what_creates_pods_itself_is_named_once(cluster: Cluster) -> None:
    ray = [{"apiVersion": "ray.io/v1", "kind": "RayCluster", "name": "ray", "uid": "1", "controller": True}]
    pods = [api_pod(name, containers=[HAMI]) for name in ("ray-head", "ray-worker")]
    for pod in pods:
        pod["metadata"]["ownerReferences"] = ray
    pinned = api_pod("pinned", containers=[HAMI], annotations={"nvidia.com/use-gpuuuid": "GPU-1"})
    await cluster.shell.has([node("gpu-1", {"gpu": "on"})], [*pods, pinned, api_pod("plain", 0)])
    by_hand = (await cluster.migrate("hami"))["byHand"]
    told = {each["where"]: each["what"] for each in by_hand if each["where"][0] in "Rp"}
    assert len(told) == 2
    assert told["RayCluster default/ray"] == "creates pods itself: change there what they ask for"
    assert "left out: cards are chosen by how they fit" in told["pod default/pinned"]


@pytest.mark.parametrize(
    ("name", "label", "plugin"),
    [
        ("hami", {"gpu": "on"}, "hami-device-plugin"),
        ("gpushare", {"gpushare": "true"}, "gpushare-device-plugin-ds"),
    ],
)
async def test_the_systems_own_plugin_is_not_told_to_choose_other_nodes(
    cluster: Cluster, name: str, label: dict[str, str], plugin: str
) -> None:
    theirs = workload(plugin, nodeSelector=label)
    theirs["metadata"] |= {"namespace": "kube-system", "labels": {"app.kubernetes.io/name": name}}
    if name == "gpushare":
        theirs["metadata"]["labels"] = {}
    await cluster.shell.has([node("n1", label)])
    await cluster.has((DAEMON_SETS, theirs), (DAEMON_SETS, workload("monitor", nodeSelector=label)))
    told = [where for where in wheres((await cluster.migrate(name))["byHand"]) if "DaemonSet" in where]
    assert told == ["DaemonSet default/monitor"]
