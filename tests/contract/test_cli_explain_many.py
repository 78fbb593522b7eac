"""``gpuslice explain`` of many pods: of all namespaces, of those that wait, of a node."""

from __future__ import annotations

from gpuslice.core.units import limit_mib
from tests.builders import api_pod, make_card
from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_explain import node, placed

__all__ = ["shell"]


async def test_all_that_wait_in_all_namespaces_are_one_command(shell: Shell) -> None:
    running, other = placed("runs", 4, "n1", "0"), api_pod("b", "9", namespace="kube-system")
    await shell.has([node("n1", 8)], [running, api_pod("a", "9"), other])
    told = (await shell("gpuslice", "explain", "-A", "--waiting")).out
    assert told.startswith("2 pods of all namespaces.\n")
    assert [line.split()[0] for line in told.splitlines()[3:5]] == ["default/a", "kube-system/b"]
    rows = (await shell("gpuslice", "explain", "-A", "--no-headers")).out.splitlines()
    assert sorted(line.split()[0] for line in rows) == ["default/a", "default/runs", "kube-system/b"]
    assert (await shell("gpuslice", "explain", "--waiting", "-o", "name")).out == "pod/a\n"
    assert (await shell("gpuslice", "-A", "explain", "-n", "default", "-o", "name")).out.count("pod/") == 2


async def test_a_node_is_explained_by_its_name(shell: Shell) -> None:
    nodes = [node("n1", 8, 8, unschedulable=True), node("n2", 8)]
    await shell.has(nodes, [placed("a", 4, "n1", "1"), placed("b", 4, "n2", "0")])
    told = (await shell("gpuslice", "explain", "node/n1")).out
    held = limit_mib(make_card(0, 8).memory_mib, 4, 8)
    assert told.startswith("1 pod of node n1.\nNode n1 is cordoned: no new pod is put there.\nCard 0: 0 of ")
    assert f"Card 1: {held} of {make_card(0, 8).memory_mib} MiB held." in told
    assert "a " in told
    told_wrong = await shell("gpuslice", "explain", "node/n3")
    assert (told_wrong.code, told_wrong.err) == (1, 'Error: nodes "n3" not found\n')
