"""``import gpuslice``: its names and signatures stay, and each function against the simulated API server."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gpuslice
from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.transport import HttpTransport
from simcluster.cluster.faults import Fault
from tests.builders import api_container, api_pod
from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_explain import node, placed
from tests.integration.test_console_claims import claim, claiming, node_of_claims, offer

__all__ = ["shell"]

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "python" / "cluster.ipynb"
TRACES = ROOT / "tests" / "fixtures" / "traces"
SIGNATURES = {
    "read_cluster": "*, kubeconfig='', context='', usage=False",
    "explain": "pod, *, namespace='', kubeconfig='', context=''",
    "simulate": "pods, *, nodes=None, add=(), drop=(), growth=1.0, policies='opportunity-cost', seed=42, "
    "needed=True",
    "place": "cluster, request, *, policy='opportunity-cost'",
}
FIELDS: dict[type[Any], str] = {  # those that the page promises; more may come
    gpuslice.Cluster: "nodes pods usage problems unreadable read_at",
    gpuslice.ExplainedPod: "pod phase nodes sentences usage document",
    gpuslice.Candidates: "placements refusals hints",
    gpuslice.NodeState: "node left compute_left",
    gpuslice.Card: "index uuid memory_mib units model",
    gpuslice.Pod: "namespace name node request placement problem",
    gpuslice.Placement: "node slices",
    gpuslice.CardSlice: "card units compute_percent",
    gpuslice.Request: "units card_count compute_percent",
    gpuslice.NodeClass: "reason nodes fits never best card most",
    gpuslice.ContainerUsage: "node gpu container used_bytes limit_bytes peak_bytes idle_seconds",
    gpuslice.Simulation: "policies",
}


def config(shell: Shell) -> str:
    return str(shell.folder / "config")


async def read(shell: Shell) -> gpuslice.Cluster:
    """In a thread, as the simulated API server runs on this one."""
    return await asyncio.to_thread(gpuslice.read_cluster, kubeconfig=config(shell))


async def make_cluster(shell: Shell) -> None:
    """Two nodes of two cards; `b` is cordoned."""
    nodes = [node("a", 8, 8), node("b", 8, 8, unschedulable=True)]
    await shell.has(nodes, [placed("train", 6, "a", "0"), placed("infer", 2, "a", "1"), api_pod("wait", "7")])


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_stay_as_they_are(name: str) -> None:
    signature = inspect.signature(getattr(gpuslice, name))
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    assert str(inspect.Signature(plain)) == f"({SIGNATURES[name]})"
    assert all(each.annotation is not each.empty for each in signature.parameters.values())
    assert inspect.getdoc(getattr(gpuslice, name))


@pytest.mark.parametrize("value", FIELDS, ids=lambda value: value.__name__)
def test_results_are_frozen_values_with_the_fields_of_the_page(value: type[Any]) -> None:
    assert dataclasses.is_dataclass(value)
    assert value.__dict__["__dataclass_params__"].frozen
    assert set(FIELDS[value].split()) <= {each.name for each in dataclasses.fields(value)}


def test_the_page_names_every_function_its_result_and_its_arguments() -> None:
    page = (ROOT / "docs/reference/python.md").read_text()
    for name in SIGNATURES:
        assert re.search(
            rf"^\| `{name}` \| `{inspect.signature(getattr(gpuslice, name)).return_annotation}`", page, re.M
        )
    (example,) = re.findall(r"```python\n(.*?)```", page, re.S)
    used = {each.attr for each in ast.walk(ast.parse(example)) if isinstance(each, ast.Attribute)}
    assert set(SIGNATURES) <= used


def test_type_checkers_see_the_same_names() -> None:
    stub = ast.parse((ROOT / "src/gpuslice/__init__.pyi").read_text())
    seen = {
        (each.module, name.asname)
        for each in stub.body
        if isinstance(each, ast.ImportFrom)
        for name in each.names
    }
    assert {name for _, name in seen} == set(gpuslice.__all__)
    assert set(gpuslice.__all__) <= set(dir(gpuslice))
    for module, name in seen:
        assert getattr(sys.modules[module or ""], name or "") is getattr(gpuslice, name or "")


def test_the_api_is_imported_when_it_is_used() -> None:
    program = (
        "import gpuslice, sys; assert 'gpuslice.api' not in sys.modules; "
        "assert not hasattr(gpuslice, 'apps'), 'what is no name of it costs no import'; "
        "assert 'gpuslice.api' not in sys.modules; gpuslice.read_cluster; assert 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


async def test_a_cluster_is_read_with_who_holds_what(shell: Shell) -> None:
    await make_cluster(shell)
    cluster = await read(shell)
    assert [(each.node.name, each.left) for each in cluster.nodes] == [("a", (2, 6)), ("b", (8, 8))]
    assert [pod.key for pod in cluster.pods] == ["default/infer", "default/train", "default/wait"]
    assert cluster.holders("a", 0) == {"default/train": 6}
    assert cluster.holders("b", 0) == {}
    assert cluster.unreadable == ()


async def test_what_claims_hold_is_held_as_anything_else(shell: Shell) -> None:
    await shell.has([node_of_claims(), node("a", 8)], [claiming("holds", node="c1", phase="Running")])
    async with HttpTransport(Connection(shell.server.url)) as transport:
        client = KubeClient(transport)
        await offer(client)
        await claim(client, "holds", 12, card=0)
    cluster = await read(shell)
    assert [(each.node.name, each.left) for each in cluster.nodes] == [("a", (8,)), ("c1", (3, 15))]
    assert cluster.holders("c1", 0) == {"default/holds": 12}
    found = gpuslice.place(cluster, gpuslice.Request(units=8))
    assert [each.node for each in found.placements] == ["a"]
    assert [(each.reason, each.nodes) for each in found.refusals] == [
        ("Gives its cards out by claims", ("c1",))
    ]


async def test_what_may_not_be_read_is_said_and_no_cluster_is_an_error(shell: Shell) -> None:
    await make_cluster(shell)
    shell.server.cluster.faults.add(Fault(path="/api/v1/namespaces/kube-system/configmaps", code=403))
    assert (await read(shell)).unreadable == ("configmaps of kube-system",)
    with pytest.raises(gpuslice.GpusliceError, match="nowhere"):
        gpuslice.read_cluster(kubeconfig=str(shell.folder / "nowhere"))


async def test_a_pod_is_explained_as_the_command_does(shell: Shell) -> None:
    await make_cluster(shell)
    found = await asyncio.to_thread(gpuslice.explain, "wait", kubeconfig=config(shell))
    assert sorted((each.reason, each.nodes) for each in found.nodes) == [
        ("Cordoned", ("b",)),
        ("Insufficient GPU Memory in one device", ("a",)),
    ]
    assert found.sentences[0].startswith("The free memory is fragmented")
    assert str(found) == (await shell("gpuslice", "explain", "wait")).out
    assert found.document == json.loads((await shell("gpuslice", "explain", "wait", "-o", "json")).out)
    holds = await asyncio.to_thread(gpuslice.explain, "train", namespace="default", kubeconfig=config(shell))
    assert (holds.phase, holds.nodes, holds.pod.node) == ("Running", (), "a")


async def test_a_pod_that_is_not_there_is_named_with_one_like_it(shell: Shell) -> None:
    await make_cluster(shell)
    with pytest.raises(gpuslice.NoSuchPodError, match="did you mean train"):
        await asyncio.to_thread(gpuslice.explain, "trian", kubeconfig=config(shell))
    with pytest.raises(ValueError, match="without its namespace"):
        gpuslice.explain("default/train", kubeconfig=config(shell))


async def test_a_request_gets_the_cards_that_fit_and_the_reasons_against_the_others(shell: Shell) -> None:
    await make_cluster(shell)
    cluster = await read(shell)
    found = gpuslice.place(cluster, gpuslice.Request(units=4), policy="binpack")
    assert found.placements == (gpuslice.Placement("a", (gpuslice.CardSlice(1, 4),)),)
    assert [(each.reason, each.nodes, each.most) for each in found.refusals] == [("Cordoned", ("b",), 8)]
    assert found.hints == ()
    nowhere = gpuslice.place(cluster, gpuslice.Request(units=14, card_count=2))
    assert nowhere.placements == ()
    assert {each.reason for each in nowhere.refusals} == {
        "Cordoned",
        "Insufficient GPU Memory in 2 devices",
    }


async def test_the_policy_s_choice_comes_first_and_nodes_to_avoid_last(shell: Shell) -> None:
    avoid = [{"key": "team", "value": "b", "effect": "PreferNoSchedule"}]
    await shell.has([node("avoided", 4, taints=avoid), node("empty", 8), node("used", 8)])
    await shell.has([], [placed("train", 2, "used", "0")])
    cluster = await read(shell)

    def order(policy: str) -> list[str]:
        found = gpuslice.place(cluster, gpuslice.Request(units=2), policy=policy)
        return [each.node for each in found.placements]

    assert order("binpack") == ["used", "empty", "avoided"]
    assert order("spread") == ["empty", "used", "avoided"]


async def test_the_manifest_of_a_pod_brings_its_node_selector(shell: Shell) -> None:
    await make_cluster(shell)
    manifest = api_pod("new", "1", nodeSelector={"kubernetes.io/hostname": "b"})
    del manifest["metadata"], manifest["status"]  # as in a template
    found = gpuslice.place(await read(shell), manifest)
    assert found.placements == ()
    assert {name for each in found.refusals for name in each.nodes} == {"a", "b"}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (gpuslice.Request(units=0), "0 units on 1 cards"),
        (gpuslice.Request(units=3, card_count=2), "as many on each card"),
        ({"spec": {"containers": "none"}}, "not that of a pod"),
        (api_pod(containers=[api_container()]), "asks for no part of a card"),
        (api_pod(memory="4.5"), r'gpu-mem"\] is "4.5", must be a whole number'),
    ],
)
async def test_a_wrong_request_is_refused_with_what_would_be_right(
    shell: Shell, request_: Any, message: str
) -> None:
    await make_cluster(shell)
    with pytest.raises(ValueError, match=message):
        gpuslice.place(await read(shell), request_)


async def test_a_cluster_is_simulated_with_other_nodes(shell: Shell) -> None:
    await make_cluster(shell)
    cluster = await read(shell)
    alone = gpuslice.simulate(cluster, drop=["b"], policies=["binpack", "spread"])
    assert list(alone.policies) == ["binpack", "spread"]
    outcome = alone.policies["spread"].outcome
    assert (outcome.units, outcome.pods, outcome.placed) == (16, 3, 2)
    more = gpuslice.simulate(cluster, drop=["b"], add=["1x1x8"], needed=False)
    assert more.policies[more.best].outcome.placed == 3


def test_a_trace_is_simulated_as_the_command_does() -> None:
    found = gpuslice.simulate(TRACES / "openb_pod_list_small.csv", policies="binpack", needed=False)
    outcome = found.policies["binpack"].outcome
    assert outcome.pods == outcome.placed + sum(each.pods for each in outcome.unplaced)
    assert outcome.allocated_units > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policies": "best"}, '^policy names "best"'),
        ({"drop": ["nothing"]}, '^drop is "nothing"'),
        ({"add": ["many"]}, '^add is "many"'),
        ({"growth": 0.0}, "^growth is 0"),
        ({"nodes": "nodes.csv"}, "^nodes is for a trace"),
    ],
)
async def test_a_wrong_argument_of_a_simulation_is_named(
    shell: Shell, arguments: dict[str, Any], message: str
) -> None:
    await make_cluster(shell)
    with pytest.raises(ValueError, match=message):
        gpuslice.simulate(await read(shell), **arguments)


async def test_the_example_notebook_runs_in_a_loop_as_notebooks_do(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    await make_cluster(shell)
    monkeypatch.setenv("KUBECONFIG", config(shell))
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [each for each in notebook["cells"] if each["cell_type"] == "code"]
    assert all(each["outputs"] == [] and each["execution_count"] is None for each in cells)

    async def play() -> None:
        names: dict[str, Any] = {}
        for cell in cells:
            exec("".join(cell["source"]), names)

    await asyncio.to_thread(asyncio.run, play())
    shown = capsys.readouterr().out
    for line in (
        "a 0 2 of 8 units free {'default/train': 6}",
        "Pod default/wait is Pending.",
        "a [1]",
        "Cordoned ('b',) at most 8 units free on one card",
        "binpack 3 of 3 pods 24 % allocated",
    ):
        assert line in shown
