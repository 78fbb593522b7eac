"""A cluster in the afternoon of a working day, to try things out: four teams, as many cards as you like."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import yaml

from gpuslice.core.contract import LABEL_GROUP_MIN, LABEL_GROUP_NAME, VENDOR_NAMES
from gpuslice_demo.expected import containing
from gpuslice_demo.images import IMAGE
from gpuslice_demo.nodes import NodePlan
from gpuslice_demo.steps import Step, Story
from gpuslice_demo.stories.installing import EXPORTER, INSTALL, agents_ready
from simcluster.workload.images import SEEDS

if TYPE_CHECKING:
    from gpuslice_demo.world import World

CARD, UNITS = "V100-SXM2-16GB", 15
SHARED = {"cgpu": "true"}
TEAMS = ("search", "speech", "vision")
"""Namespaces, beside `default`."""
IDLE_H = {"default/idle": 4.0, "vision/notebook-anna": 9.5, "vision/notebook-ben": 26.0}
"""Who last computed so many hours ago."""
MORNING_H = 7.0
"""So long before now the pods were created."""
HOLDING = f"{SEEDS}/cuda-malloc:3G"
CARDS_FOR_A_FAULT = 3
"""With fewer cards none is taken away."""


def _pod(namespace: str, name: str, units: int, image: str = "busybox", **container: Any) -> dict[str, Any]:
    limits = {"aliyun.com/gpu-mem": units}
    main = {"name": "main", "image": image, "resources": {"limits": limits}, **container}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"team": namespace}},
        "spec": {"containers": [main]},
    }


def _computing(namespace: str, name: str, units: int, percent: int) -> dict[str, Any]:
    arguments = ["load", "--fieldId=1004", f"--level={percent}", "--duration=86400"]
    return _pod(namespace, name, units, IMAGE, args=arguments)


def _labelled(pod: dict[str, Any], labels: dict[str, str]) -> dict[str, Any]:
    pod["metadata"]["labels"] |= labels
    return pod


def manifests() -> dict[str, str]:
    """The story's files, by name."""
    finished = _pod("search", "reindex", 2, command=["nvidia-smi", "-L"])
    finished["spec"]["restartPolicy"] = "Never"
    elsewhere = _pod("vision", "notebook-cleo", 4, HOLDING)
    elsewhere["spec"]["nodeSelector"] = {"disk": "nvme"}
    group = {LABEL_GROUP_NAME: "sweep", LABEL_GROUP_MIN: "3"}  # of which two were created
    pods = [
        _pod("default", "idle", 4, HOLDING),
        _pod("default", "too-large", UNITS + 1),
        _pod("vision", "notebook-anna", 6, HOLDING),
        _pod("vision", "notebook-ben", 8, HOLDING),
        elsewhere,
        _computing("vision", "train", 10, 60),
        _computing("speech", "asr-0", 4, 30),
        _computing("speech", "asr-1", 4, 30),
        _labelled(_pod("speech", "sweep-0", 5), group),
        _labelled(_pod("speech", "sweep-1", 5), group),
        _pod("search", "embed", 3, HOLDING),
        _pod("search", "rank", 4, f"{SEEDS}/cuda-malloc:6G"),
        _labelled(_pod("search", "pretrain", 8 * UNITS), {VENDOR_NAMES.cards: "8"}),
        _pod("search", "prototype", 1, "registry.example.com/search/prototype:1"),
        finished,
    ]
    spaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in TEAMS]
    denied = _labelled(_pod("default", "denied", 4), {VENDOR_NAMES.cards: "two"})
    return {
        "day.yaml": yaml.safe_dump_all([*spaces, *pods], sort_keys=False),
        "denied.yaml": yaml.safe_dump(denied, sort_keys=False),
    }


async def _morning(world: World) -> None:
    world.behind_s = MORNING_H * 3600


async def _afternoon(world: World) -> None:
    """It has become late; what computed when is what an exporter would have kept."""
    world.behind_s = 0.0
    await world.remember_idle({name: hours * 3600 for name, hours in IDLE_H.items()})
    if world.cards >= CARDS_FOR_A_FAULT:
        world.break_card()


def playground(nodes: int, cards: int) -> Story:
    """`nodes` machines of `cards` cards each."""
    plans = tuple(
        NodePlan(f"node-{n}", f"192.168.9.{n}", (CARD,) * cards, SHARED, exclusive=True, subnet=f"172.20.{n}")
        for n in range(1, nodes + 1)
    )
    # where there is room for it, as on more than one card
    last = "pod/notebook-ben -n vision" if nodes * cards > 1 else "pod/idle"
    return Story(
        "playground",
        f"{nodes} nodes of {cards} cards in the afternoon of a working day",
        plans,
        (
            INSTALL,
            agents_ready([plan.name for plan in plans]),
            Step(
                "The webhook denies a pod whose request is invalid, and names the field.",
                "kubectl create -f denied.yaml",
                containing("aliyun.com/gpu-count«any»two"),
            ),
            Step(
                "Four teams start their pods in the morning: notebooks, training, services.",
                "kubectl apply -f day.yaml",
                containing("pod/reindex created"),
                before=_morning,
            ),
            Step("", f"kubectl wait {last} --for=condition=Ready", containing("condition met")),
            replace(EXPORTER, before=_afternoon),
            Step(
                "In the afternoon. Some compute, some are idle; others wait, each for another reason.",
                "kubectl get pod -A --field-selector=metadata.namespace!=kube-system",
                containing("CrashLoopBackOff"),
            ),
            Step("What is allocated to whom.", "kubectl inspect cgpu", containing("GPU Memory")),
            Step("Who holds memory without using it.", "gpuslice waste", containing(" 4 h ")),
        ),
        files=manifests(),
    )


def empty(nodes: int, cards: int) -> Story:
    """The same machines without gpuslice, with a manifest to apply later."""
    plans = tuple(
        NodePlan(f"node-{n}", f"192.168.9.{n}", (CARD,) * cards, exclusive=True, subnet=f"172.20.{n}")
        for n in range(1, nodes + 1)
    )
    return Story("empty", f"{nodes} nodes of {cards} cards without gpuslice", plans, (), files=manifests())
