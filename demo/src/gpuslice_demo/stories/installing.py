"""The step that every story has: the product comes onto the cluster."""

from __future__ import annotations

from collections.abc import Iterable

from gpuslice_demo.expected import columns
from gpuslice_demo.steps import Step

INSTALL = Step(
    "Install the product: the scheduler extender and, on every node with the label, the agent.",
    "kubectl apply -f install.yaml",
    columns(
        "daemonset.apps/gpushare-device-plugin-ds created\n"
        "deployment.apps/gpushare-schd-extender created\n"
        "service/gpushare-schd-extender created\n"
        "configmap/gpuslice-scheduler created"
    ),
)


def agents_ready(names: Iterable[str]) -> Step:
    """Wait until the agent of each of these nodes runs."""
    counts = " ".join([str(len(list(names)))] * 5)
    return Step(
        "Both run as ordinary pods.",
        "kubectl get daemonset,deployment -n kube-system",
        columns(
            "NAME DESIRED CURRENT READY UP-TO-DATE AVAILABLE NODE SELECTOR AGE\n"
            f"daemonset.apps/gpushare-device-plugin-ds {counts} cgpu=true «age»\n\n"
            "NAME READY UP-TO-DATE AVAILABLE AGE\n"
            "deployment.apps/gpushare-schd-extender 1/1 1 1 «age»"
        ),
    )
