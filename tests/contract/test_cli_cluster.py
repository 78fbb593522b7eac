"""The programs against the simulated API server, and kubectl finding them."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.resources import NODES, PODS, RESOURCE_CLAIMS
from gpuslice.adapters.kube.transport import HttpTransport
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster
from simcluster.cluster.faults import Fault
from tests import HANG_S, warm_start
from tests.golden.clusters import (
    T4_NODE,
    V100_NODE,
    five_nodes,
    node,
    pod,
    three_notebooks,
    two_apps,
    v100_node,
)
from tests.tools import find

PRINTED = Path(__file__).parent.parent / "golden" / "printed"
PROGRAMS = {
    "gpuslice": "main",
    "kubectl-inspect-cgpu": "inspect_main",
    "kubectl-inspect-gpushare": "inspect_main",
    "kubectl_complete-inspect-cgpu": "complete_main",
}


@dataclass
class Response:
    code: int
    out: str
    err: str


@dataclass
class Shell:
    """A folder with our programs as a user has them on PATH, and a kubeconfig for the cluster.

    The shell itself starts ours warm; kubectl finds them on PATH.
    """

    folder: Path
    server: ApiServer

    async def __call__(self, *words: str, **environ: str) -> Response:
        path = os.pathsep.join([str(self.folder), str(Path(sys.executable).parent), os.environ["PATH"]])
        known = {"PATH": path, "HOME": str(self.folder), "KUBECONFIG": str(self.folder / "config")}
        program, *arguments = words
        if function := PROGRAMS.get(program):
            done = await asyncio.to_thread(warm_start.run, arguments, {**known, **environ}, function)
            return Response(done.returncode, done.stdout, done.stderr)
        process = await asyncio.create_subprocess_exec(
            *words,
            env={**known, **environ},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), HANG_S)
        assert process.returncode is not None
        return Response(process.returncode, out.decode(), err.decode())

    async def has(self, nodes: list[Any], pods: list[Any] | None = None) -> None:
        """Put nodes and pods into the cluster with the status they are described with."""
        async with HttpTransport(Connection(self.server.url)) as transport:
            client = KubeClient(transport)
            for each in nodes:
                await client.create(NODES, each)
                await client.patch_status(NODES, each["metadata"]["name"], each["status"])
            for each in pods or []:
                await client.create(PODS, each)
                name, namespace = each["metadata"]["name"], each["metadata"]["namespace"]
                await client.patch_status(PODS, name, each["status"], namespace)


def install(folder: Path, name: str, function: str) -> None:
    """What pip makes of an entry point."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\nfrom gpuslice.apps.cli.main import {function}\n{function}()\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
async def shell(tmp_path: Path) -> AsyncIterator[Shell]:
    for name, function in PROGRAMS.items():
        install(tmp_path, name, function)
    async with ApiServer(Cluster()) as server:
        (tmp_path / "config").write_text(server.kubeconfig())
        yield Shell(tmp_path, server)


def printed(name: str) -> str:
    return (PRINTED / f"{name}.txt").read_text()


async def test_inspect_prints_the_documented_tables(shell: Shell) -> None:
    await shell.has(v100_node())
    assert (await shell("kubectl-inspect-cgpu")).out == printed("inspect")
    await shell.has([], two_apps())
    assert await shell("gpuslice", "inspect", "-d") == Response(0, printed("inspect-details"), "")


@pytest.mark.parametrize("words", ["inspect", "inspect -d", "explain", "doctor", "advise"])
async def test_nothing_of_the_cluster_speaks_to_the_terminal(shell: Shell, words: str) -> None:
    """A node writes its own addresses and annotations, and a kubeconfig may name anybody's server."""
    evil = "1.2.3.4\x1b]0;owned\x07\x9b2J\u202e"
    told = {"gpuslice.io/tier": evil, "gpuslice.io/gpus": evil, "gpuslice.io/links": evil}
    one = node(V100_NODE, units=14, cards=1, address=evil, annotations=told)
    await shell.has([one], [pod("a", 4, V100_NODE, evil), pod("b", 4, V100_NODE, phase=evil)])
    response = await shell("gpuslice", *words.split())
    assert response.out
    assert [each for each in response.out + response.err if each != "\n" and not each.isprintable()] == []


async def test_the_tables_of_a_node_of_claims_are_the_same(shell: Shell) -> None:
    cards = '[{"index":0,"uuid":"GPU-1","memory_mib":16130,"units":15}]'
    labels, annotations = {"gpuslice.io/mode": "claims"}, {"gpuslice.io/gpus": cards}
    apps = [
        pod(each["metadata"]["name"], 0, V100_NODE, None, labels=each["metadata"]["labels"])
        for each in two_apps()
    ]
    await shell.has([node(V100_NODE, labels=labels, annotations=annotations)], apps)
    assert (await shell("gpuslice", "inspect")).out == printed("inspect")
    async with HttpTransport(Connection(shell.server.url)) as transport:
        client = KubeClient(transport)
        for each in (await client.list(PODS)).items or []:
            uid, name = each.metadata.uid, each.metadata.name
            claim = {"metadata": {"name": name, "namespace": "default"}, "spec": {"devices": {}}}
            await client.create(RESOURCE_CLAIMS.as_dict(), claim)
            result = {"request": "gpu", "driver": "gpu.gpuslice.io", "pool": V100_NODE, "device": "gpu-0"}
            status = {
                "allocation": {"devices": {"results": [{**result, "consumedCapacity": {"memory": "4Gi"}}]}},
                "reservedFor": [{"resource": "pods", "name": name, "uid": uid}],
            }
            await client.patch_status(RESOURCE_CLAIMS.as_dict(), name, status, "default")
    assert await shell("gpuslice", "inspect", "-d") == Response(0, printed("inspect-details"), "")


async def test_top_node_prints_the_documented_tables(shell: Shell) -> None:
    await shell.has(five_nodes())
    assert (await shell("gpuslice", "top", "node")).out == printed("top-node")
    assert (await shell("gpuslice", "top", "node", "-s")).out == printed("top-node-shared-empty")
    await shell.has([], three_notebooks())
    assert (await shell("gpuslice", "top", "node", "-s")).out == printed("top-node-shared")
    assert (await shell("gpuslice", "top", "node", "-s", "-d")).out == printed("top-node-shared-details")


async def test_top_node_says_why_nothing_is_measured(shell: Shell) -> None:
    await shell.has(five_nodes())
    told = await shell("gpuslice", "top", "node", "--metric")
    assert (told.code, told.out) == (1, printed("top-node"))
    assert "is the exporter installed?" in told.err


@pytest.mark.parametrize("plugin", ["cgpu", "gpushare"])
async def test_kubectl_finds_the_plugin(shell: Shell, plugin: str) -> None:
    find("kubectl")
    await shell.has(v100_node())
    assert await shell("kubectl", "inspect", plugin) == Response(0, printed("inspect"), "")
    named = await shell("kubectl", "inspect", plugin, "-d", V100_NODE)
    assert named.out.startswith(f"\nNAME:       {V100_NODE}")


async def test_kubectl_finds_the_plugin_as_krew_links_it(shell: Shell) -> None:
    krew = shell.folder / "krew"
    krew.mkdir()
    install(krew, "kubectl-inspect", "main_by_name")
    path = os.pathsep.join([str(krew), str(Path(find("kubectl")).parent)])
    await shell.has(v100_node())
    for plugin in ("cgpu", "gpushare"):
        assert await shell("kubectl", "inspect", plugin, PATH=path) == Response(0, printed("inspect"), "")
    for words in ((), ("gpu",), ("-d",)):
        told = await shell("kubectl", "inspect", *words, PATH=path)
        assert (told.code, told.out) == (2, "")
        assert "kubectl inspect cgpu" in told.err


async def test_kubectl_completes_node_names_and_flags(shell: Shell) -> None:
    find("kubectl")
    await shell.has(five_nodes())
    told = await shell("kubectl", "__complete", "inspect", "cgpu", "cn-zhangjiakou.192.168.3")
    assert told.out.splitlines()[:3] == ["cn-zhangjiakou.192.168.3.115", T4_NODE, ":4"]
    assert "yaml" in (await shell("kubectl", "__complete", "inspect", "cgpu", "-o", "")).out.splitlines()


async def test_kubectl_finds_every_command_as_its_own(shell: Shell) -> None:
    await shell.has(v100_node())
    install(shell.folder, "kubectl-gpuslice", "main")
    install(shell.folder, "kubectl_complete-gpuslice", "complete_main")
    assert (await shell("kubectl", "gpuslice", "inspect")).out == printed("inspect")
    assert (await shell("kubectl", "gpuslice", "explain", "--help")).out.startswith(
        "Usage: kubectl gpuslice explain"
    )
    assert "doctor" in (await shell("kubectl", "__complete", "gpuslice", "doc")).out


@pytest.mark.parametrize(
    ("words", "proposals"),
    [
        ("gpuslice explain -n def", ["plain,default"]),
        ("gpuslice --context ", ["plain,gpuslice-sim"]),
        ("gpuslice inspect --kubeconfig con", ["file,con"]),
        ("gpuslice run --mem 4 python tr", ["file,tr"]),
    ],
)
async def test_a_shell_completes_what_selects_the_cluster_and_files(
    shell: Shell, words: str, proposals: list[str]
) -> None:
    place = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    told = await shell("gpuslice", _GPUSLICE_COMPLETE="bash_complete", **place)
    assert told == Response(0, "".join(f"{each}\n" for each in proposals), "")


async def test_one_node_counts_alone(shell: Shell) -> None:
    await shell.has(
        [node("a.1", units=15, cards=1), node("b.2", units=15, cards=1)],
        [pod("p", 3, "a.1"), pod("q", 5, "b.2")],
    )
    told = await shell("kubectl-inspect-cgpu", "b.2")
    assert "a.1" not in told.out
    assert "5/15 (33%)" in told.out


@pytest.mark.parametrize("form", ["json", "yaml"])
async def test_documents_can_be_read_back(shell: Shell, form: str) -> None:
    await shell.has(v100_node(), two_apps())
    read: Any = json.loads if form == "json" else yaml.safe_load
    inspected = read((await shell("gpuslice", "inspect", "-o", form)).out)
    assert (inspected["allocated"], inspected["total"], inspected["unit"]) == (8, 15, "GiB")
    top = read((await shell("gpuslice", "top", "node", "-o", form)).out)
    assert top["gpuShareNodes"][0]["allocatedGPUMemory"] == 8 << 30


async def test_an_unknown_node_is_named(shell: Shell) -> None:
    told = await shell("kubectl-inspect-cgpu", "nowhere")
    assert (told.code, told.out) == (1, "")
    assert told.err.startswith("Failed due to ")
    assert told.err == 'Failed due to nodes "nowhere" not found\n'


async def test_an_empty_cluster_says_what_to_do(shell: Shell) -> None:
    told = await shell("kubectl-inspect-cgpu")
    assert (told.code, told.out) == (0, "")
    assert told.err.startswith("No node shares its GPUs: nothing allocatable of aliyun.com/gpu-mem or")
    assert json.loads((await shell("gpuslice", "inspect", "-o", "json")).out)["nodes"] == []
    assert (await shell("gpuslice", "top", "node", "-s")).err.startswith("No node shares its GPUs")


async def test_a_node_that_gives_its_cards_out_twice_is_refused_by_top(shell: Shell) -> None:
    twice = node("a", units=15, cards=1, allocatable={"nvidia.com/gpu": "1"})
    await shell.has([twice])
    told = await shell("gpuslice", "top", "node")
    assert (told.code, told.out) == (1, "")
    assert "nvidia.com/gpu and aliyun.com/gpu-mem are both used in node a" in told.err


async def test_a_mistyped_namespace_is_no_namespace_without_advice(shell: Shell) -> None:
    told = await shell("gpuslice", "advise", "-n", "defalt")
    sentence = 'Error: there is no namespace "defalt"; did you mean default?\n'
    assert told == Response(1, "", sentence)


async def test_no_kubeconfig_says_where_it_looked(shell: Shell) -> None:
    told = await shell("kubectl-inspect-cgpu", KUBECONFIG="/nowhere/config")
    assert told.code == 1
    assert told.err == (
        "Failed due to kubeconfig /nowhere/config failed to find due to no such file or directory, "
        "please set KUBECONFIG env\n"
    )


async def test_a_server_that_is_away_is_named(shell: Shell) -> None:
    (shell.folder / "config").write_text(shell.server.kubeconfig().replace(str(shell.server.port), "1"))
    told = await shell("gpuslice", "inspect")
    assert told.code == 1
    assert "http://127.0.0.1:1: Connection refused" in told.err
    assert "Traceback" not in told.err


async def test_a_refusal_is_told_in_the_words_of_the_server(shell: Shell) -> None:
    shell.server.cluster.add_fault(Fault(path=".*nodes", code=403))
    told = await shell("gpuslice", "inspect")
    assert told.code == 1
    assert "injected fault: 403" in told.err


async def test_flags_may_stand_before_and_behind_the_command(shell: Shell) -> None:
    await shell.has(v100_node())
    config = str(shell.folder / "config")
    before = await shell("gpuslice", "--kubeconfig", config, "inspect", KUBECONFIG="/none")
    behind = await shell("gpuslice", "--kubeconfig", "/none", "inspect", "--kubeconfig", config)
    assert before.out == behind.out == printed("inspect")
    told = await shell("gpuslice", "inspect", "--context", "other")
    assert 'there is no context "other"; its contexts are: gpuslice-sim' in told.err


async def test_a_corrupt_annotation_is_told_beside_the_table(shell: Shell) -> None:
    await shell.has([node("a.1", units=15, cards=1, annotations={"gpuslice.io/gpus": "nonsense"})])
    told = await shell("gpuslice", "inspect")
    assert "0/15" in told.out
    assert told.err.startswith('node a.1: annotation "gpuslice.io/gpus" is "nonsense"')
