"""``gpuslice capacity``: what waits, how many nodes of which group, and which nodes could be emptied."""

from __future__ import annotations

import json

from gpuslice.core.contract import GATE_POD_GROUP
from tests.builders import api_pod
from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_explain import node, placed

__all__ = ["shell"]
TYPE = "node.kubernetes.io/instance-type"


PAIR, LARGE = {TYPE: "pair"}, {TYPE: "large"}


async def test_nodes_that_sums_hide_are_told_from_those_that_anybody_sees(shell: Shell) -> None:
    nodes = [node("n0", 16, 16, labels=PAIR), node("n1", 80, labels=LARGE)]
    pods = [placed("a", 12, "n0", "0"), placed("b", 12, "n0", "1"), placed("c", 80, "n1", "0")]
    pods += [api_pod("hidden", "6"), api_pod("seen", "60"), api_pod("never", "90")]
    pods += [api_pod("small", "4"), api_pod("gated", "6", schedulingGates=[{"name": GATE_POD_GROUP}])]
    await shell.has(nodes, pods)
    found = json.loads((await shell("gpuslice", "capacity", "-o", "json")).out)
    assert {each["pod"].split("/")[1]: each["fits"] for each in found["waiting"]} == {
        "hidden": "on a new node of large",  # with the other: one node holds both
        "seen": "on a new node of large",
        "never": "on no node of any group, even empty",
        "small": "on a node that there is",
    }
    assert found["groups"] == [
        {"group": "large", "nodes": 1, "add": 1, "hidden": 0},
        {"group": "pair", "nodes": 1, "add": 0, "hidden": 0},
    ]
    text = (await shell("gpuslice", "capacity")).out
    assert "default/never 90 units on no node of any group, even empty" in " ".join(text.split())


async def test_a_node_can_be_emptied_by_moving_named_pods(shell: Shell) -> None:
    nodes = [node("n0", 16, 16, labels=PAIR), node("n1", 16, 16, labels=PAIR)]
    pods = [placed("a", 12, "n0", "0"), placed("b", 8, "n0", "1"), placed("c", 6, "n1", "0")]
    await shell.has(nodes, pods)
    found = json.loads((await shell("gpuslice", "capacity", "-o", "json")).out)
    assert found["emptied"] == [{"node": "n1", "moves": [{"pod": "default/c", "to": "n0"}]}]
    printed = (await shell("gpuslice", "capacity")).out.splitlines()
    assert printed[-1].split() == ["n1", "default/c", "n0"]


async def test_where_no_node_shares_cards_standard_error_says_so(shell: Shell) -> None:
    answer = await shell("gpuslice", "capacity")
    assert (answer.out, answer.code) == ("", 0)
    assert "No node shares its cards" in answer.err
