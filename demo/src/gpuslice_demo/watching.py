"""The exporter as a pod of the simulated node: what `helm install --set exporter.enabled=true` would add."""

from __future__ import annotations

from typing import Any

import yaml

from gpuslice.core.contract import LABEL_SCHEDULE, LABEL_SHARED, SYSTEM_NAMESPACE
from gpuslice_demo.install import IMAGE, node_environment
from gpuslice_demo.places import Places

_LABELS = {"app": "gpushare", "component": "gpuslice-exporter"}
_CARDS = {  # on every node that has information about its cards
    "nodeSelectorTerms": [
        {"matchExpressions": [{"key": label, "operator": "Exists"}]}
        for label in (LABEL_SHARED, LABEL_SCHEDULE)
    ]
}
_KUBELET = "/var/lib/kubelet"
_HOST_FILES = "/var/lib/gpuslice"


def exporter_manifest(places: Places, port: int) -> str:
    """The manifest. The nodes share this machine, where each pod has its own loopback address."""
    spec = {
        "hostPID": True,
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": _CARDS}},
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 5,
        "containers": [_container(places, port)],
        "volumes": [
            {"name": "kubelet", "hostPath": {"path": _KUBELET}},
            {"name": "host-files", "hostPath": {"path": _HOST_FILES}},
        ],
    }
    about = {
        "name": "gpuslice-exporter",
        "namespace": SYSTEM_NAMESPACE,
    }
    template = {
        "metadata": {"labels": _LABELS, "annotations": {"prometheus.io/port": str(port)}},
        "spec": spec,
    }
    return yaml.safe_dump(
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": about,
            "spec": {"selector": {"matchLabels": _LABELS}, "template": template},
        },
        sort_keys=False,
    )


def _container(places: Places, port: int) -> dict[str, Any]:
    return {
        "name": "exporter",
        "image": IMAGE,
        "args": [
            "exporter",
            f"--address=$(SIMCLUSTER_POD_ADDRESS):{port}",
            "--pod-resources-interval-s=0.5",
            f"--pod-resources-kubelet-socket={_KUBELET}/pod-resources/kubelet.sock",
            f"--root={_HOST_FILES}",
        ],
        "env": node_environment(places),
        "volumeMounts": [
            {"name": "kubelet", "mountPath": _KUBELET},
            {"name": "host-files", "mountPath": _HOST_FILES},
        ],
    }
