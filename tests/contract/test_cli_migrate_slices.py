"""``gpuslice migrate --from time-slicing``: NVIDIA's plugin, GKE, and whole cards in the same cluster."""

from __future__ import annotations

from gpuslice.migration.systems import DAEMON_SETS, DEPLOYMENTS
from tests.builders import api_container
from tests.contract.test_cli_cluster import shell
from tests.contract.test_cli_migrate import INSTALLED, Cluster, cluster, limits, node, wheres, workload

__all__ = ["cluster", "shell"]


async def test_from_time_slicing(cluster: Cluster) -> None:
    labels = {
        "nvidia.com/gpu.replicas": "5",
        "nvidia.com/gpu.memory": "15360",
        "nvidia.com/gpu.sharing-strategy": "time-slicing",
    }
    sliced = node("sliced", labels)
    for side in ("capacity", "allocatable"):
        sliced["status"][side] |= {"nvidia.com/gpu": "5"}
    await cluster.shell.has([sliced])
    one, two = (api_container(**{"nvidia.com/gpu": count}) for count in ("1", "2"))
    await cluster.has(
        (DAEMON_SETS, INSTALLED),
        (DEPLOYMENTS, workload("one", containers=[one])),
        (DEPLOYMENTS, workload("two", containers=[two])),
    )
    told = await cluster.migrate("time-slicing", "--apply")
    assert limits(await cluster.template("one")) == {"aliyun.com/gpu-mem": "3"}
    assert limits(await cluster.template("two")) == {"aliyun.com/gpu-mem": "6"}
    assert (
        "no larger share" in {each["where"]: each["what"] for each in told["lost"]}["Deployment default/two"]
    )
    assert (await cluster.labels("sliced"))["cgpu"] == "true"
    await cluster.migrate("time-slicing", "--undo", "--apply")
    assert limits(await cluster.template("one")) == {"nvidia.com/gpu": "1"}


async def test_where_cards_are_given_out_whole_too_only_slices_by_name_are_meant(cluster: Cluster) -> None:
    labels = {"nvidia.com/gpu.sharing-strategy": "time-slicing"}
    sliced, whole = node("sliced", labels), node("whole", {})
    for made, name in ((sliced, "nvidia.com/gpu.shared"), (whole, "nvidia.com/gpu")):
        for side in ("capacity", "allocatable"):
            made["status"][side] |= {name: "4"}
    await cluster.shell.has([sliced, whole])
    card, part = (api_container(**{name: "1"}) for name in ("nvidia.com/gpu", "nvidia.com/gpu.shared"))
    await cluster.has((DEPLOYMENTS, workload("card", containers=[card])))
    await cluster.has((DEPLOYMENTS, workload("part", containers=[part])))
    two = api_container(**{"nvidia.com/gpu": "2"})
    await cluster.has((DEPLOYMENTS, workload("cards", containers=[two])))
    told = await cluster.migrate("time-slicing")
    assert wheres(told["changes"]) == []
    assert wheres(told["lost"]) == ["programs"]  # two whole cards are no slices
    assert "say --slice-units" in {x["where"]: x["what"] for x in told["byHand"]}["Deployment default/part"]
    told = await cluster.migrate("time-slicing", "--slice-units", "3")
    assert wheres(told["changes"]) == ["Deployment default/part"]


async def test_gkes_nodes_stay_and_their_workloads_move(cluster: Cluster) -> None:
    selector = {
        "cloud.google.com/gke-gpu-sharing-strategy": "time-sharing",
        "cloud.google.com/gke-max-shared-clients-per-gpu": "3",
    }
    shared = node("gke-1", {**selector, "cloud.google.com/gke-accelerator": "nvidia-tesla-t4"})
    for side in ("capacity", "allocatable"):
        shared["status"][side] |= {"nvidia.com/gpu": "3"}
    await cluster.shell.has([shared])
    one = api_container(**{"nvidia.com/gpu": "1"})
    chosen = {**selector, "cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}
    await cluster.has(
        (DAEMON_SETS, INSTALLED), (DEPLOYMENTS, workload("one", containers=[one], nodeSelector=chosen))
    )
    told = await cluster.migrate("time-slicing", "--slice-units", "5", "--apply")
    assert wheres(told["changes"]) == ["Deployment default/one"]
    assert "create a node pool" in {x["where"]: x["what"] for x in told["byHand"]}["node gke-1"]
    template = await cluster.template("one")
    assert limits(template) == {"aliyun.com/gpu-mem": "5"}
    assert template["spec"]["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}
    assert selector.items() <= (await cluster.labels("gke-1")).items()
    await cluster.migrate("time-slicing", "--undo", "--apply")
    assert (await cluster.template("one"))["spec"]["nodeSelector"] == chosen
