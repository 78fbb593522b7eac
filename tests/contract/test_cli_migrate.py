"""``gpuslice migrate`` on a simulated cluster with each system's objects: dry, done, done again, undone."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.resources import CONFIG_MAPS, NODES
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.core.contract import of_our_chart
from gpuslice.migration.reader import WORKLOADS
from gpuslice.migration.systems import ACCOUNTS, DAEMON_SETS, DEPLOYMENTS, JOBS, ROLES, SYSTEMS
from gpuslice.migration.writes import Change, carry_out, unchanged
from tests.builders import api_container, api_node, api_pod
from tests.chart import render
from tests.contract.test_cli_cluster import Shell, shell

__all__ = ["shell"]
Object = dict[str, Any]
CRON_JOBS = next(each for each in WORKLOADS if each.plural == "cronjobs")


def node(name: str, labels: dict[str, str], **amounts: str) -> Object:
    made = api_node(name, 0, labels=labels)
    for side in ("capacity", "allocatable"):
        made["status"][side] |= {each.replace("__", "/").replace("_", "-"): n for each, n in amounts.items()}
    return made


def workload(name: str, kind: str = "Deployment", **template: Any) -> Object:
    """Something of namespace default that makes pods, with one container unless said otherwise."""
    pod: Object = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [api_container()]}}
    pod["metadata"] |= template.pop("metadata", {})
    pod["spec"] |= template
    spec: Object = {"selector": {"matchLabels": {"app": name}}, "template": pod}
    if kind in ("Job", "CronJob"):
        pod["spec"]["restartPolicy"] = "Never"
        spec = {"template": pod}
    if kind == "CronJob":
        spec = {"schedule": "0 3 * * *", "jobTemplate": {"spec": spec}}
    return {"metadata": {"name": name, "namespace": "default"}, "spec": spec}


def system(name: str) -> Object:
    """An object of the other system, or of ours."""
    made = workload(name)
    made["metadata"] = {"name": name, "namespace": "kube-system", "labels": {}}
    return made


INSTALLED = system("gpuslice-agent")
INSTALLED["metadata"]["labels"]["app.kubernetes.io/name"] = "gpuslice"


class Cluster:
    """The simulated API server with what a test puts there, and the command on it."""

    def __init__(self, shell: Shell, client: KubeClient) -> None:
        self.shell, self.client = shell, client

    async def has(self, *things: tuple[Any, Object]) -> None:
        for resource, thing in things:
            await self.client.create(resource, copy.deepcopy(thing))

    async def migrate(self, system: str, *words: str) -> Object:
        answer = await self.shell("gpuslice", "migrate", "--from", system, "-o", "json", *words)
        assert answer.code == 0, answer.err + answer.out
        found: Object = json.loads(answer.out)
        return found

    async def template(self, name: str, resource: Any = DEPLOYMENTS) -> Object:
        found: Object = (await self.client.get(resource, name, "default"))["spec"]
        found = found["jobTemplate"]["spec"] if "jobTemplate" in found else found
        template: Object = found["template"]
        return template

    async def labels(self, name: str) -> Object:
        meta = (await self.client.get(NODES.as_dict(), name))["metadata"]
        return {k: v for k, v in meta.get("labels", {}).items() if k != "kubernetes.io/hostname"}


@pytest.fixture
async def cluster(shell: Shell) -> Any:
    async with HttpTransport(Connection(shell.server.url)) as transport:
        yield Cluster(shell, KubeClient(transport))


def wheres(notes: list[Object]) -> list[str]:
    return [each["where"] for each in notes]


def limits(template: Object, container: int = 0) -> Object:
    found = template["spec"]["containers"][container]["resources"]
    assert found["limits"] == found["requests"]
    limits: Object = found["limits"]
    return limits


# -- HAMi --------------------------------------------------------------------------------------------------

HAMI = api_container(**{"nvidia.com/gpu": "1", "nvidia.com/gpumem": "4096", "nvidia.com/gpucores": "30"})


async def hami(cluster: Cluster) -> None:
    labels = {"gpu": "on", "nvidia.com/gpu.memory": "16130", "nvidia.com/gpu.product": "Tesla-V100"}
    busy = api_pod("busy", containers=[HAMI], node="gpu-2", phase="Running")
    await cluster.shell.has([node("gpu-1", labels), node("gpu-2", labels), node("cpu", {})], [busy])
    whole = api_container(**{"nvidia.com/gpu": "1"})
    far = api_container(**{"nvidia.com/gpumem-percentage": "50"})
    await cluster.has(
        (DAEMON_SETS, INSTALLED),
        (DEPLOYMENTS, workload("train", containers=[HAMI], schedulerName="hami-scheduler")),
        (DEPLOYMENTS, workload("half", containers=[far])),
        (DEPLOYMENTS, workload("whole", containers=[whole])),
        (DEPLOYMENTS, workload("plain")),
        (
            DEPLOYMENTS,
            workload(
                "pinned", metadata={"annotations": {"nvidia.com/use-gpuuuid": "GPU-1"}}, containers=[HAMI]
            ),
        ),
        (JOBS, workload("once", "Job", containers=[HAMI])),
        (CRON_JOBS, workload("nightly", "CronJob", containers=[HAMI])),
    )


async def test_nothing_is_written_without_apply(cluster: Cluster) -> None:
    await hami(cluster)
    before = await cluster.template("train")
    told = await cluster.migrate("hami")
    assert not any(each["done"] for each in told["changes"])
    assert await cluster.template("train") == before
    assert (await cluster.labels("gpu-1"))["gpu"] == "on"
    text = (await cluster.shell("gpuslice", "migrate", "--from", "hami")).out
    for part in (
        "WOULD CHANGE",
        "WAITS",
        "BY HAND",
        "HAS NO COUNTERPART",
        "run the same command with --apply",
    ):
        assert part in text


async def test_from_hami_and_back(cluster: Cluster) -> None:
    await hami(cluster)
    before = {each: await cluster.template(each) for each in ("train", "half", "whole")}
    told = await cluster.migrate("hami", "--apply")
    assert wheres(told["changes"]) == [
        "node gpu-1",
        "Deployment default/half",
        "Deployment default/train",
        "CronJob default/nightly",
    ]
    assert limits(await cluster.template("train")) == {
        "aliyun.com/gpu-mem": "4",
        "aliyun.com/gpu-core.percentage": "30",
    }
    assert (await cluster.template("train"))["spec"]["schedulerName"] == "default-scheduler"
    assert limits(await cluster.template("half")) == {"aliyun.com/gpu-mem": "7"}  # of 15 units
    assert limits(await cluster.template("nightly", CRON_JOBS))["aliyun.com/gpu-mem"] == "4"
    assert await cluster.template("whole") == before["whole"]
    labels = await cluster.labels("gpu-1")
    assert (labels.get("gpu"), labels["cgpu"]) == (None, "true")
    # what cannot be done, each with why
    assert wheres(told["waits"]) == ["node gpu-2"]
    assert "kubectl drain gpu-2" in told["waits"][0]["what"]
    by_hand = {each["where"]: each["what"] for each in told["byHand"]}
    assert "left out: cards are chosen by how they fit" in by_hand["Deployment default/pinned"]
    assert "Job cannot be changed" in by_hand["Job default/once"]
    assert "recreate it" in by_hand["pod default/busy"]
    lost = {each["where"]: each["what"] for each in told["lost"]}
    assert "here it is a whole card" in lost["Deployment default/whole"]
    # again: nothing is left but what waits
    again = await cluster.migrate("hami", "--apply")
    assert again["changes"] == []
    assert wheres(again["waits"]) == ["node gpu-2"]
    # and back
    back = await cluster.migrate("hami", "--undo", "--apply")
    assert wheres(back["changes"]) == wheres(told["changes"])
    for name, template in before.items():
        assert await cluster.template(name) == template
    labels = await cluster.labels("gpu-1")
    assert (labels["gpu"], labels.get("cgpu")) == ("on", None)
    assert (await cluster.migrate("hami", "--undo"))["changes"] == []


async def test_one_node_and_one_namespace_can_be_meant(cluster: Cluster) -> None:
    await hami(cluster)
    told = await cluster.migrate("hami", "--node", "gpu-2", "-n", "kube-system")
    assert told["changes"] == []
    assert wheres(told["waits"]) == ["node gpu-2"]


async def test_what_was_changed_since_is_not_undone_blindly(cluster: Cluster) -> None:
    await hami(cluster)
    await cluster.migrate("hami", "--apply")
    mended = [{"op": "remove", "path": "/spec/template/spec/containers/0/resources/limits"}]
    mended += [{"op": "remove", "path": "/spec/template/spec/containers/0/resources/requests"}]
    await cluster.client.json_patch(DEPLOYMENTS, "train", mended, "default")
    answer = await cluster.shell("gpuslice", "migrate", "--from", "hami", "--undo", "--apply", "-o", "json")
    assert answer.code == 3
    told = {each["where"]: each for each in json.loads(answer.out)["changes"]}
    assert not told["Deployment default/train"]["done"]
    assert told["Deployment default/train"]["error"]
    assert told["node gpu-1"]["done"]


# -- gpushare and ACK --------------------------------------------------------------------------------------


async def gpushare(cluster: Cluster) -> None:
    labels = {"gpushare": "true"}
    one = node("one", labels)
    two = node("two", labels)
    for made, cards in ((one, "1"), (two, "2")):
        for side in ("capacity", "allocatable"):
            made["status"][side] |= {"aliyun.com/gpu-mem": "30", "aliyun.com/gpu-count": cards}
    pods = [api_pod(name, "4", node=name, phase="Running") for name in ("one", "two")]
    await cluster.shell.has([one, two], pods)
    role = {"metadata": {"name": "gpushare-device-plugin"}, "rules": []}
    account = {"metadata": {"name": "gpushare-schd-extender", "namespace": "kube-system"}}
    await cluster.has(
        (DAEMON_SETS, system("gpushare-device-plugin-ds")),
        (DEPLOYMENTS, system("gpushare-schd-extender")),
        (ROLES, role),
        (ACCOUNTS, account),
    )


async def test_from_gpushare_in_two_runs_and_back(cluster: Cluster) -> None:
    await gpushare(cluster)
    daemon_set = (await cluster.client.get(DAEMON_SETS, "gpushare-device-plugin-ds", "kube-system"))["spec"]
    first = await cluster.migrate("gpushare", "--apply")
    assert {each.split(" ")[0] for each in wheres(first["changes"])} == {
        "DaemonSet",
        "Deployment",
        "ServiceAccount",
        "ClusterRole",
    }
    assert "gpuslice is not installed" in first["waits"][0]["what"]  # its objects have the names of ours
    assert not (await cluster.client.list(DAEMON_SETS, "kube-system")).items
    await cluster.has((DAEMON_SETS, INSTALLED))
    second = await cluster.migrate("gpushare", "--apply")
    assert wheres(second["changes"]) == ["node one"]  # one card: its pods go on; of two nobody knows which
    assert wheres(second["waits"]) == ["node two"]
    assert await cluster.labels("one") == {"cgpu": "true"}
    # back: not while ours is there
    await cluster.client.delete(DAEMON_SETS, "gpuslice-agent", "kube-system")
    back = await cluster.migrate("gpushare", "--undo", "--apply")
    assert all(each["done"] for each in back["changes"])
    assert await cluster.labels("one") == {"gpushare": "true"}
    restored = (await cluster.client.get(DAEMON_SETS, "gpushare-device-plugin-ds", "kube-system"))["spec"]
    assert restored == daemon_set
    assert (await cluster.migrate("gpushare", "--undo"))["changes"] == []


async def test_what_helm_installed_is_left_to_helm(cluster: Cluster) -> None:
    theirs = system("gpushare-device-plugin-ds")
    theirs["metadata"]["annotations"] = {"meta.helm.sh/release-name": "cgpu"}
    labels = {"cgpu": "true", "ack.node.gpu.schedule": "topology"}
    await cluster.shell.has([node("a", labels)])
    await cluster.has(
        (DAEMON_SETS, theirs),
        (
            JOBS,
            system("gpushare-installer")
            | workload("x", "Job")
            | {"metadata": {"name": "gpushare-installer", "namespace": "kube-system"}},
        ),
    )
    told = await cluster.migrate("ack", "--apply")
    assert wheres(told["changes"]) == ["Job kube-system/gpushare-installer"]
    assert {
        "where": "DaemonSet kube-system/gpushare-device-plugin-ds",
        "what": "belongs to a Helm release: helm uninstall cgpu",
    } in told["byHand"]
    assert "label ack.node.gpu.schedule=topology has no counterpart here" in [x["what"] for x in told["lost"]]
    kept = (await cluster.client.get(CONFIG_MAPS.as_dict(), "gpuslice-migration", "kube-system"))["data"]
    assert list(kept) == ["ack.job.gpushare-installer"]
    await cluster.migrate("ack", "--undo", "--apply")
    assert await cluster.client.get(JOBS, "gpushare-installer", "kube-system")


@pytest.mark.parametrize("named", ["gpuslice", "slicer"])  # nameOverride
async def test_what_our_chart_made_is_not_taken_for_another_systems(cluster: Cluster, named: str) -> None:
    ours = system("gpushare-device-plugin-ds")
    ours["metadata"]["labels"] = {"app.kubernetes.io/name": named, "helm.sh/chart": "gpuslice-0.1.0"}
    await cluster.shell.has([node("one", {"gpushare": "true"})])
    await cluster.has((DAEMON_SETS, ours))
    told = await cluster.migrate("gpushare")
    assert (wheres(told["changes"]), told["waits"]) == (["node one"], [])


@pytest.mark.parametrize(
    ("meanwhile", "why"),
    [
        ({"status": {"capacity": {"cpu": "9"}}}, ""),
        ({"metadata": {"labels": {"cgpu": "false"}}}, "changed by somebody else meanwhile: run the same"),
    ],
    ids=["kubelet writes the status", "somebody labels it"],
)
async def test_of_a_node_the_labels_alone_must_be_as_they_were(
    cluster: Cluster, meanwhile: Object, why: str
) -> None:
    """Its kubelet writes it at any time: where its version had to be the same, few migrations succeeded."""
    nodes = NODES.as_dict()
    await cluster.has((nodes, node("n1", {"gpushare": "true"})))
    version, tests = unchanged(nodes, await cluster.client.get(nodes, "n1"))
    step = {"op": "remove", "path": "/metadata/labels/gpushare"}
    change = Change("node n1", ("label gpushare is removed",), nodes, "", "n1", version, (*tests, step))
    await cluster.client.merge_patch(nodes, "n1", meanwhile, subresource="status" * ("status" in meanwhile))
    ((_, told),) = [each async for each in carry_out(cluster.client, "gpushare", [change])]
    assert (why in told, bool(told)) == (True, bool(why))


def test_what_the_chart_installs_is_not_taken_for_another_systems(helm: str) -> None:
    made = {key: each["metadata"].get("labels") for key, each in render(helm).items()}
    owned = {(resource.kind, name) for resource, name in SYSTEMS["gpushare"].owned}
    assert len(made.keys() & owned) >= 5
    assert [key for key in made.keys() & owned if not of_our_chart(made[key])] == []


# -- KAI ---------------------------------------------------------------------------------------------------


async def test_from_kai_and_back(cluster: Cluster) -> None:
    annotations = {"gpu-fraction": "0.5", "kept": "yes"}
    made = workload("half", metadata={"annotations": annotations}, schedulerName="kai-scheduler")
    made["metadata"]["labels"] = {"app.kubernetes.io/name": "kai"}  # somebody's program, not KAI's chart
    await cluster.shell.has([node("a", {"nvidia.com/gpu.memory": "16130"})])
    await cluster.has((DEPLOYMENTS, made))
    before = await cluster.template("half")
    told = await cluster.migrate("kai", "--apply")
    (change,) = told["changes"]
    assert change["what"][0] == 'container "main": gpu-fraction 0.5 becomes aliyun.com/gpu-mem 7'
    assert limits(await cluster.template("half")) == {"aliyun.com/gpu-mem": "7"}
    assert (await cluster.template("half"))["metadata"]["annotations"] == {"kept": "yes"}
    await cluster.migrate("kai", "--undo", "--apply")
    after = await cluster.template("half")
    assert after["metadata"] == before["metadata"]
    assert after["spec"]["schedulerName"] == "kai-scheduler"


async def test_a_cluster_that_never_had_the_system_has_nothing_to_change(cluster: Cluster) -> None:
    await cluster.shell.has([node("a", {})])
    for name in ("gpushare", "hami", "ack", "time-slicing", "kai"):
        assert (await cluster.migrate(name))["changes"] == []
