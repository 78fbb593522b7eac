"""The step that every story has: installing the product on the cluster."""

from __future__ import annotations

from collections.abc import Iterable

from gpuslice_demo.expected import columns, containing
from gpuslice_demo.steps import Step

CHART = "cgpu charts/gpuslice -n kube-system"
VALUES = "--set image.repository=registry.example.com/gpuslice"


def install(*values: str) -> Step:
    """As README says, with more values."""
    more = "".join(f",{value}" for value in values)
    return Step(
        "Install gpuslice: on every labelled node the agent, which replaces the plugin of whole cards;"
        " the scheduler extender with a kube-scheduler that calls it; the webhook.",
        f"helm install {CHART} {VALUES}{more}",
        containing("STATUS: deployed"),
    )


INSTALL = install()
EXPORTER = Step(
    "Install the exporter to see who uses what.",
    f"helm upgrade {CHART} --reset-then-reuse-values --set exporter.enabled=true",
    containing("STATUS: deployed"),
)


def agents_ready(names: Iterable[str]) -> Step:
    """Wait until the agent of each of these nodes is running."""
    counts = " ".join([str(len(list(names)))] * 5)  # available is an agent a minute later
    return Step(
        "Everything runs as ordinary pods.",
        "kubectl get daemonset,deployment -n kube-system",
        columns(
            "NAME DESIRED CURRENT READY UP-TO-DATE AVAILABLE NODE SELECTOR AGE\n"
            "daemonset.apps/device-plugin-evict-ack-ds 0 0 0 0 0 kubernetes.io/os=linux «age»\n"
            f"daemonset.apps/device-plugin-evict-ds {counts} cgpu=true «age»\n"
            "daemonset.apps/device-plugin-recover-ack-ds 0 0 0 0 0 kubernetes.io/os=linux «age»\n"
            "daemonset.apps/device-plugin-recover-ds 0 0 0 0 0 cgpu=false «age»\n"
            "daemonset.apps/gpushare-device-plugin-ack-ds 0 0 0 0 0 kubernetes.io/os=linux «age»\n"
            f"daemonset.apps/gpushare-device-plugin-ds {counts[:-2]} «n» cgpu=true «age»\n\n"
            "NAME READY UP-TO-DATE AVAILABLE AGE\n"
            "deployment.apps/gpushare-schd-extender 1/1 1 1 «age»\n"
            "deployment.apps/gpuslice-scheduler 1/1 1 1 «age»\n"
            "deployment.apps/gpuslice-webhook 2/2 2 2 «age»"
        ),
    )
