"""API servers with nodes and pods drawn at random, for programs of others that read them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec

from gpuslice.adapters.kube.slim import SlimNode, SlimPod
from gpuslice.adapters.kube.views import node_view, pod_view
from gpuslice.core.annotations import placement_annotations
from gpuslice.core.contract import ANN_ASSIGNED, GPU_COUNT, GPU_MEM
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Placement
from gpuslice.core.placement import place
from tests.builders import api_node, api_pod
from tests.integration.extender_rig import Api

PODS = "/api/v1/namespaces/default/pods"


def add_nodes(api: Api, ledger: Ledger, dice: random.Random) -> list[str]:
    names = []
    for number in range(dice.randint(1, 4)):
        name = f"node-{number}{dice.choice(['', '.example.com'])}"
        cards, units = dice.choice([0, 1, 1, 2, 4, 8]), dice.choice([7, 15, 15, 31, 79])
        node = api_node(name, units * cards, cards)
        if dice.random() < 0.8:
            node["status"]["addresses"] = [{"type": "InternalIP", "address": f"10.0.0.{number}"}]
        ready = dice.choice(["True", "True", "False", "Unknown"])
        node["status"]["conditions"] = [{"type": "Ready", "status": ready}]
        api.call("POST", "/api/v1/nodes", node)
        api.set_node(name, node["status"])
        ledger.apply_node(node_view(msgspec.convert(node, SlimNode)))
        names.append(name)
    return names


def pod_of(name: str, dice: random.Random, most_cards: int) -> dict[str, Any]:
    """One or two containers, on one card or several."""
    cards = min(dice.choice([1, 1, 1, 1, 2, 4]), most_cards)
    amounts = [dice.randint(1, 8) * cards for _ in range(dice.choice([1, 1, 1, 2]))]
    containers = [
        {"name": f"c{number}", "image": "i", "resources": {"limits": {GPU_MEM: str(amount)}}}
        for number, amount in enumerate(amounts)
    ]
    pod = api_pod(name, containers=containers, labels={GPU_COUNT: str(cards)} if cards > 1 else None)
    del pod["metadata"]["uid"]
    return pod


def settle(api: Api, ledger: Ledger, pod: dict[str, Any], nodes: list[str], dice: random.Random) -> None:
    """Annotate and bind it as the extender would, where it fits, and let it be in some phase."""
    path, request = f"{PODS}/{pod['metadata']['name']}", pod_view(msgspec.convert(pod, SlimPod)).request
    assert request is not None
    states = [state for name in nodes if (state := ledger.state(name)) is not None]
    answers = [(state, place(state, request)) for state in states]
    fits = [(state.node, found) for state, found in answers if isinstance(found, Placement)]
    if not fits:
        return
    node, placement = dice.choice(fits)
    annotations = placement_annotations(placement, request, node, 1)
    annotations[ANN_ASSIGNED] = dice.choice(["true", "true", "false"])
    api.patch(path, {"metadata": {"annotations": annotations}})
    api.call("POST", f"{path}/binding", {"target": {"kind": "Node", "name": node.name}})
    phase = dice.choice(["Running"] * 6 + ["Pending", "Succeeded", "Failed"])
    api.patch(f"{path}/status", {"status": {"phase": phase}})
    ledger.apply_pod(pod_view(msgspec.convert(api.call("GET", path), SlimPod)))


def some_cluster(seed: int, most_cards: int = 4) -> Api:
    """`most_cards`: of one pod."""
    dice, api, ledger = random.Random(seed), Api(), Ledger()
    nodes = add_nodes(api, ledger, dice)
    for number in range(dice.randint(1, 14)):
        pod = api.call("POST", PODS, pod_of(f"pod-{dice.choice('abcdef')}-{number}", dice, most_cards))
        if dice.random() < 0.9:
            settle(api, ledger, pod, nodes, dice)
    return api


async def printed(program: str | Path, config: Path, *words: str, **environ: str) -> str:
    environ |= {"KUBECONFIG": str(config), "HOME": str(config.parent)}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(program, *words, env=environ, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    assert process.returncode == 0, err
    return out.decode()


def lines_of(text: str) -> list[str]:
    """Without blanks at their ends; rulers are as long as the first line, which is another each time."""
    return sorted("-" if set(line) == {"-"} else line.rstrip() for line in text.splitlines())
