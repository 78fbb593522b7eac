"""The step that every story has: installing the product on the cluster."""

from __future__ import annotations

from collections.abc import Iterable

from gpuslice_demo.expected import columns
from gpuslice_demo.steps import Step

INSTALL = Step(
    "Install gpuslice: the scheduler extender and, on every labelled node, the agent, which replaces the"
    " device plugin for whole cards.",
    "kubectl apply -f install.yaml",
    columns(
        "daemonset.apps/gpushare-device-plugin-ds created\n"
        "daemonset.apps/gpushare-device-plugin-ack-ds created\n"
        "daemonset.apps/device-plugin-evict-ds created\n"
        "daemonset.apps/device-plugin-evict-ack-ds created\n"
        "daemonset.apps/device-plugin-recover-ds created\n"
        "daemonset.apps/device-plugin-recover-ack-ds created\n"
        "deployment.apps/gpushare-schd-extender created\n"
        "service/gpushare-schd-extender created\n"
        "configmap/gpuslice-scheduler created"
    ),
)


def agents_ready(names: Iterable[str]) -> Step:
    """Wait until the agent of each of these nodes is running."""
    counts = " ".join([str(len(list(names)))] * 5)
    return Step(
        "Everything runs as ordinary pods.",
        "kubectl get daemonset,deployment -n kube-system",
        columns(
            "NAME DESIRED CURRENT READY UP-TO-DATE AVAILABLE NODE SELECTOR AGE\n"
            "daemonset.apps/device-plugin-evict-ack-ds 0 0 0 0 0 <none> «age»\n"
            f"daemonset.apps/device-plugin-evict-ds {counts} cgpu=true «age»\n"
            "daemonset.apps/device-plugin-recover-ack-ds 0 0 0 0 0 <none> «age»\n"
            "daemonset.apps/device-plugin-recover-ds 0 0 0 0 0 cgpu=false «age»\n"
            "daemonset.apps/gpushare-device-plugin-ack-ds 0 0 0 0 0 <none> «age»\n"
            f"daemonset.apps/gpushare-device-plugin-ds {counts} cgpu=true «age»\n\n"
            "NAME READY UP-TO-DATE AVAILABLE AGE\n"
            "deployment.apps/gpushare-schd-extender 1/1 1 1 «age»"
        ),
    )
