"""What `helm install` would install: our processes as pods of the simulated nodes, and what calls them."""

from __future__ import annotations

import sys
from typing import Any

import yaml

from gpuslice import __version__
from gpuslice.core.contract import (
    CLAIM_CLASS,
    CLAIM_DRIVER,
    GPU_MEM,
    LABEL_SCHEDULE,
    LABEL_SHARED,
    SYSTEM_NAMESPACE,
)
from gpuslice_demo.places import Places
from simcluster.workload.images import Image

IMAGE = f"gpuslice/gpuslice:{__version__}"
OF_THE_CHART = {"app.kubernetes.io/name": "gpuslice"}  # so that `gpuslice migrate` knows it is ours
PROFTESTER = "nvidia/samples:dcgmproftester-2.0.10-cuda11.0-ubuntu18.04"
_RUN = "from gpuslice.apps.cli.main import main; main()"
_KUBELET = "/var/lib/kubelet"
_HOST_FILES = "/var/lib/gpuslice"
_CDI = "/var/run/cdi"
_MANIFESTS = "/etc/kubernetes/manifests"


def product_image() -> dict[str, Image]:
    """Our image: this interpreter with this package; its load generator stands in for DCGM's."""
    load = Image(entrypoint=(sys.executable, "-c", _RUN, "load"))
    return {IMAGE: Image(entrypoint=(sys.executable, "-c", _RUN)), PROFTESTER: load}


def manifests(places: Places, extender_port: int) -> str:
    """The manifests to apply, with the vendor's names."""
    # the scheduler's file where `gpuslice doctor` can read it, as in the chart
    items = [
        *(_device_plugin(places, ack=ack) for ack in (False, True)),
        *(_switch(places, shared=True, ack=ack) for ack in (False, True)),
        *(_switch(places, shared=False, ack=ack) for ack in (False, True)),
        _extender(places, extender_port),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {
                "name": "gpushare-schd-extender",
                "namespace": SYSTEM_NAMESPACE,
                "labels": OF_THE_CHART,
            },
            "spec": {
                "type": "NodePort",
                "selector": {"app": "gpushare", "component": "gpushare-schd-extender"},
                "ports": [{"name": "http", "port": 12345, "targetPort": extender_port, "nodePort": 32766}],
            },
        },
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "gpuslice-scheduler", "namespace": SYSTEM_NAMESPACE},
            "data": {"config.yaml": scheduler_configuration(extender_port)},
        },
    ]
    return yaml.safe_dump_all(items, sort_keys=False)


def claims_manifests(places: Places) -> str:
    """What `--set dra.enabled=true` adds: the class of shared cards, and what creates templates of claims."""
    device_class = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": CLAIM_CLASS},
        "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{CLAIM_DRIVER}"'}}]},
    }
    labels = {"app": "gpushare", "component": "gpuslice-claims"}
    container = {
        "name": "claims",
        "image": IMAGE,
        "args": ["claims", "--host=127.0.0.1", "--port=0"],
        "env": [{"name": "KUBECONFIG", "value": str(places.kubeconfig)}],
    }
    spec = {"hostNetwork": True, "terminationGracePeriodSeconds": 5, "containers": [container]}
    items = [device_class, _workload("Deployment", "gpuslice-claims", labels, spec)]
    return yaml.safe_dump_all(items, sort_keys=False)


def scheduler_configuration(extender_port: int) -> str:
    """The configuration file of kube-scheduler; the chart has the same for another address."""
    return _CONFIGURATION.format(port=extender_port, resource=GPU_MEM)


def nodes_to_run_on(*, shared: bool, ack: bool) -> dict[str, Any]:
    """The part of a pod's spec that puts it on nodes labelled as shared, or as whole: ours, or only ACK's."""
    if not ack:
        return {"nodeSelector": {LABEL_SHARED: "true" if shared else "false"}}
    values = ["cgpu", "share", "core_mem"] if shared else ["default"]
    term = [
        {"key": LABEL_SCHEDULE, "operator": "In", "values": values},
        {"key": LABEL_SHARED, "operator": "NotIn", "values": ["true", "false"]},
    ]
    required = {"nodeSelectorTerms": [{"matchExpressions": term}]}
    return {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}}


def _device_plugin(places: Places, *, ack: bool) -> dict[str, Any]:
    labels = {"app": "gpushare", "component": "gpushare-device-plugin", "name": "gpushare-device-plugin-ds"}
    if ack:  # people find agents by the label above, whichever node label they are there for
        labels["gpuslice.io/node-label"] = "ack"
    spec = {
        "hostNetwork": True,
        **nodes_to_run_on(shared=True, ack=ack),
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 5,
        "containers": [_agent(places)],
        "volumes": _agent_volumes(),
    }
    return _workload("DaemonSet", f"gpushare-device-plugin{'-ack' if ack else ''}-ds", labels, spec)


def node_environment(places: Places) -> list[dict[str, Any]]:
    """The environment of a process on each node."""
    return [
        {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"},
        {"name": "KUBECONFIG", "value": str(places.kubeconfig)},
    ]


def _agent(places: Places, *arguments: str) -> dict[str, Any]:
    return {
        "name": "gpushare",
        "image": IMAGE,
        "args": [
            "agent",
            "--port=0",
            f"--device-plugin-folder={_KUBELET}/device-plugins",
            f"--pod-resources-socket={_KUBELET}/pod-resources/kubelet.sock",
            f"--dra-plugins={_KUBELET}/plugins",
            f"--dra-registry={_KUBELET}/plugins_registry",
            f"--cdi-folder={_CDI}",
            f"--root={_HOST_FILES}",
            f"--library={places.library}",
            *arguments,
        ],
        "env": node_environment(places),
        "volumeMounts": [
            {"name": "kubelet", "mountPath": _KUBELET},
            {"name": "host-files", "mountPath": _HOST_FILES},
            {"name": "cdi", "mountPath": _CDI},
        ],
    }


def _agent_volumes() -> list[dict[str, Any]]:
    return [
        {"name": "kubelet", "hostPath": {"path": _KUBELET}},
        {"name": "host-files", "hostPath": {"path": _HOST_FILES}},
        {"name": "cdi", "hostPath": {"path": _CDI}},
    ]


def _switch(places: Places, *, shared: bool, ack: bool) -> dict[str, Any]:
    """Removes the plugin of whole cards from nodes that share, or restores it, and serves the last pods."""
    name = f"device-plugin-{'evict' if shared else 'recover'}{'-ack' if ack else ''}-ds"
    labels = {"app": "gpushare", "component": "gpushare-device-plugin", "name": name}
    container = {
        "name": "switch",
        "image": IMAGE,
        "args": [
            "switch",
            f"--to={'shared' if shared else 'exclusive'}",
            "--manifest=/manifests/nvidia-device-plugin.yml",
            "--backup-folder=/manifests-backup",
            "--every-s=0.5",
            "--port=0",
        ],
        "env": [
            {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "KUBECONFIG", "value": str(places.kubeconfig)},
        ],
        "volumeMounts": [
            {"name": "manifests", "mountPath": "/manifests"},
            {"name": "backup", "mountPath": "/manifests-backup"},
        ],
    }
    spec = {
        **nodes_to_run_on(shared=shared, ack=ack),
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 5,
        "containers": [container] if shared else [container, _agent(places, "--no-new-pods")],
        "volumes": [
            {"name": "manifests", "hostPath": {"path": _MANIFESTS}},
            {"name": "backup", "hostPath": {"path": f"{_MANIFESTS}-backup"}},
            *([] if shared else _agent_volumes()),
        ],
    }
    return _workload("DaemonSet", name, labels, spec)


def _extender(places: Places, port: int) -> dict[str, Any]:
    labels = {"app": "gpushare", "component": "gpushare-schd-extender"}
    container = {
        "name": "gpushare-schd-extender",
        "image": IMAGE,
        "args": ["extender", "--host=127.0.0.1", f"--port={port}"],
        "env": [{"name": "KUBECONFIG", "value": str(places.kubeconfig)}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": port}, "periodSeconds": 5},
    }
    spec = {
        "hostNetwork": True,
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
    }
    return _workload("Deployment", "gpushare-schd-extender", labels, spec)


def _workload(kind: str, name: str, labels: dict[str, str], spec: dict[str, Any]) -> dict[str, Any]:
    template = {"metadata": {"labels": labels}, "spec": spec}
    return {
        "apiVersion": "apps/v1",
        "kind": kind,
        "metadata": {"name": name, "namespace": SYSTEM_NAMESPACE, "labels": {**labels, **OF_THE_CHART}},
        "spec": {"selector": {"matchLabels": labels}, "template": template},
    }


_CONFIGURATION = """\
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
percentageOfNodesToScore: 100
profiles:
  - schedulerName: default-scheduler
extenders:
  - urlPrefix: http://127.0.0.1:{port}/gpushare-scheduler
    filterVerb: filter
    prioritizeVerb: prioritize
    preemptVerb: preempt
    bindVerb: bind
    weight: 10
    enableHTTPS: false
    httpTimeout: 15s
    nodeCacheCapable: true
    ignorable: false
    managedResources:
      - {{name: {resource}, ignoredByScheduler: false}}
"""
