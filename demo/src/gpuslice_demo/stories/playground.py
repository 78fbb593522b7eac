"""A cluster to try things out: any number of nodes and cards, the webhook on, and pods in various states."""

from __future__ import annotations

from typing import Any

import yaml

from gpuslice_demo.expected import columns, containing
from gpuslice_demo.images import IMAGE
from gpuslice_demo.nodes import NodePlan
from gpuslice_demo.steps import Step, Story
from gpuslice_demo.stories.installing import INSTALL, agents_ready
from simcluster.workload.images import SEEDS

CARD, UNITS = "V100-SXM2-16GB", 15
SHARED = {"cgpu": "true"}


def _pod(name: str, units: int, image: str = "busybox", **container: Any) -> dict[str, Any]:
    limits = {"limits": {"aliyun.com/gpu-mem": units}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"containers": [{"name": "main", "image": image, "resources": limits, **container}]},
    }


def manifests() -> dict[str, str]:
    """The story's files beside those that install the product, by name."""
    finished = _pod("finished", 2, command=["nvidia-smi", "-L"])
    finished["spec"]["restartPolicy"] = "Never"
    pods = [
        _pod("idle", 4, f"{SEEDS}/cuda-malloc:3G"),
        _pod("computing", 4, IMAGE, args=["load", "--fieldId=1004", "--level=60", "--duration=86400"]),
        _pod("over-its-limit", 4, f"{SEEDS}/cuda-malloc:6G"),
        _pod("too-large", UNITS + 1),
        _pod("without-an-image", 1, "registry.example.com/nowhere:1"),
        finished,
    ]
    denied = _pod("denied", 4)
    denied["metadata"]["labels"] = {"aliyun.com/gpu-count": "two"}
    return {
        "pods.yaml": yaml.safe_dump_all(pods, sort_keys=False),
        "denied.yaml": yaml.safe_dump(denied, sort_keys=False),
    }


def playground(nodes: int, cards: int) -> Story:
    """`nodes` machines of `cards` cards each."""
    plans = tuple(
        NodePlan(f"node-{n}", f"192.168.9.{n}", (CARD,) * cards, SHARED, exclusive=True, subnet=f"172.20.{n}")
        for n in range(1, nodes + 1)
    )
    return Story(
        "playground",
        f"{nodes} nodes of {cards} cards to try things out",
        plans,
        (
            INSTALL,
            agents_ready([plan.name for plan in plans]),
            Step(
                "The webhook completes and checks pods as they are created.",
                "kubectl apply -f webhook.yaml",
                columns(
                    "secret/gpuslice-webhook created\n"
                    "deployment.apps/gpuslice-webhook created\n"
                    "mutatingwebhookconfiguration.admissionregistration.k8s.io/gpuslice-mutate created\n"
                    "validatingwebhookconfiguration.admissionregistration.k8s.io/gpuslice-validate created"
                ),
            ),
            Step("", "kubectl apply -f exporter.yaml", containing("gpuslice-exporter created")),
            Step(
                "",
                "kubectl rollout status deployment/gpuslice-webhook -n kube-system",
                containing("successfully rolled out"),
            ),
            Step(
                "It denies a pod whose request is invalid, and names the field.",
                "kubectl create -f denied.yaml",
                containing("aliyun.com/gpu-count«any»two"),
            ),
            Step(
                "Pods in various states.",
                "kubectl apply -f pods.yaml",
                containing("pod/idle created"),
            ),
            Step(
                "One uses 3 of its 4 GiB, one computes, one exceeds its limit, one fits on no card, one has"
                " no image, and one has finished.",
                "kubectl get pod",
                columns(
                    "NAME READY STATUS RESTARTS AGE\n"
                    "computing 1/1 Running 0 «age»\n"
                    "finished 0/1 Completed 0 «age»\n"
                    "idle 1/1 Running 0 «age»\n"
                    "over-its-limit 0/1 CrashLoopBackOff «n» («ago») «age»\n"
                    "too-large 0/1 Pending 0 «age»\n"
                    "without-an-image 0/1 ImagePullBackOff 0 «age»"
                ),
            ),
            Step("What is allocated to whom.", "kubectl inspect cgpu", containing("GPU Memory")),
            Step("What each pod uses.", "gpuslice top --once", containing("computing")),
        ),
        files=manifests(),
    )
