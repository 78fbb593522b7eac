"""``gpuslice simulate --from-cluster`` against the simulated API server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.resources import CONFIG_MAPS, NODES, PODS
from gpuslice.adapters.kube.transport import HttpTransport
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster
from simcluster.cluster.faults import Fault
from tests import warm_start
from tests.builders import api_pod
from tests.golden.clusters import node, pod
from tests.integration.test_console_claims import claim, claiming, node_of_claims, offer

UNHEALTHY = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "unhealthy-gpu-b.2", "namespace": "kube-system"},
    "data": {"gpus": "1"},
}


async def nothing(_: KubeClient) -> None:
    pass


async def simulated(
    folder: Path,
    nodes: list[Any],
    pods: list[Any],
    *words: str,
    more: Callable[[KubeClient], Awaitable[None]] = nothing,
    forbidden: str = "",
) -> tuple[int, str, str]:
    """What the command says of a cluster with these objects, and what `more` makes. `forbidden`: a path."""
    async with ApiServer(cluster := Cluster()) as server:
        async with HttpTransport(Connection(server.url)) as transport:
            client = KubeClient(transport)
            for each in nodes:
                await client.create(NODES, each)
                await client.patch_status(NODES, each["metadata"]["name"], each["status"])
            for each in pods:
                await client.create(PODS, each)
            await client.create(CONFIG_MAPS, UNHEALTHY)
            await more(client)
        if forbidden:
            cluster.faults.add(Fault(path=forbidden, code=403))
        config = folder / "config"
        config.write_text(server.kubeconfig())
        arguments = ["--kubeconfig", str(config), "simulate", "--from-cluster", *words]
        done = await asyncio.to_thread(warm_start.run, arguments, os.environ)
        return done.returncode, done.stdout, done.stderr


def scattered() -> tuple[list[Any], list[Any]]:
    """Two nodes of two cards of 10 units: one not healthy, half of the others used, one pod waiting."""
    nodes = [node("a.1", units=20, cards=2), node("b.2", units=20, cards=2)]
    pods = [pod("p0", 5, "a.1", "0"), pod("p1", 5, "a.1", "1"), pod("p2", 5, "b.2", "0")]
    return nodes, [*pods, pod("whole", 10, "", None)]


async def test_placing_anew_shows_what_the_cluster_wastes(tmp_path: Path) -> None:
    code, out, err = await simulated(tmp_path, *scattered(), "-o", "json", "--policy", "binpack")
    assert code == 0, err
    found = json.loads(out)
    assert (found["nodes"], found["cards"], found["pods"]) == (2, 3, 4)
    assert (found["now"]["placed"], found["now"]["freeCards"]) == (3, 0)
    assert found["now"]["unplaced"][0]["reason"] == "15 units are free in pieces, at most 5 on one card"
    (policy,) = found["policies"]
    assert policy["placed"] == 4
    assert policy["needed"]["cards"] <= 3


async def test_without_the_right_to_config_maps_every_card_is_in_use(tmp_path: Path) -> None:
    path = "/api/v1/namespaces/kube-system/configmaps"
    code, out, err = await simulated(tmp_path, *scattered(), "-o", "json", forbidden=path)
    assert code == 0, err
    assert json.loads(out)["cards"] == 4


async def test_nodes_of_claims_and_pods_that_claim_a_part_are_placed_as_others(tmp_path: Path) -> None:
    async def more(client: KubeClient) -> None:
        await offer(client)
        await claim(client, "holds", 12, card=0)
        await claim(client, "waits", 15, card=None)

    pods = [claiming("holds", node="c1", phase="Running"), claiming("waits")]
    words = ("-o", "json", "--policy", "claims")
    code, out, err = await simulated(tmp_path, [node_of_claims()], pods, *words, more=more)
    assert code == 0, err
    found = json.loads(out)
    assert (found["nodes"], found["cards"], found["pods"]) == (1, 2, 2)
    assert (found["now"]["placed"], found["now"]["freeCards"]) == (1, 1)
    assert found["policies"][0]["placed"] == 2


@pytest.mark.parametrize(("guests", "placed"), [("59", 2), ("61", 1)])
async def test_cpu_beside_claims_is_counted_once(tmp_path: Path, guests: str, placed: int) -> None:
    """64 cores: what pods without cards eat stays, and what pods that claim ask for moves with them."""

    def with_cpu(pod: dict[str, Any], cpu: str) -> dict[str, Any]:
        pod["spec"]["containers"][0]["resources"] = {"requests": {"cpu": cpu}}
        return pod

    async def more(client: KubeClient) -> None:
        await offer(client)
        await claim(client, "holds", 12, card=0)
        await claim(client, "waits", 15, card=None)

    pods = [with_cpu(claiming("holds", node="c1", phase="Running"), "2"), with_cpu(claiming("waits"), "2")]
    pods.append(with_cpu(api_pod("guest", None, node="c1", phase="Running"), guests))
    words = ("-o", "json", "--policy", "bestfit")
    code, out, err = await simulated(tmp_path, [node_of_claims()], pods, *words, more=more)
    assert code == 0, err
    assert json.loads(out)["policies"][0]["placed"] == placed


async def test_the_table_compares_with_the_cluster_as_it_is(tmp_path: Path) -> None:
    code, out, err = await simulated(tmp_path, *scattered(), "--policy", "opportunity-cost", "--add", "1x4")
    assert code == 0, err
    assert "(now)" in out
    assert "opportunity-cost instead of the current placement: +4 wholly free cards, +1 free nodes" in out


def ascending() -> tuple[list[Any], list[Any]]:
    """One card of 15 units, 14 of them held, and a pod of 12 that waits."""
    pods = [pod(f"p{number}", units, "a.1", "0") for number, units in enumerate((4, 4, 3, 3))]
    return [node("a.1", units=15, cards=1)], [*pods, pod("large", 12, "", None)]


async def test_the_same_pods_on_the_same_nodes_are_placed_no_worse_than_now(tmp_path: Path) -> None:
    """In another order the large one would come first, and the table would compare two different things."""
    for seed in ("1", "2", "3"):
        words = ("--policy", "all", "-o", "json", "--no-needed", "--seed", seed)
        code, out, err = await simulated(tmp_path, *ascending(), *words)
        assert code == 0, err
        found = json.loads(out)
        assert round(found["now"]["allocatedPercent"], 1) == 93.3
        assert {each["allocatedPercent"] for each in found["policies"]} == {found["now"]["allocatedPercent"]}


async def test_of_other_nodes_the_amounts_are_told(tmp_path: Path) -> None:
    code, out, err = await simulated(tmp_path, *ascending(), "--add", "1x1", "--no-needed")
    assert code == 0, err
    lines = {line.split()[0]: line for line in out.splitlines() if " of " in line}
    assert "93.3 % of 15 units" in lines["(now)"]
    assert "86.7 % of 30 units" in lines["opportunity-cost"]


async def test_a_cluster_without_shared_cards_is_said(tmp_path: Path) -> None:
    code, _, err = await simulated(tmp_path, [node("a.1")], [])
    assert code == 1
    assert "there are no nodes with shared cards" in err
