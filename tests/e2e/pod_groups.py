"""What a control plane needs for pod groups (Kubernetes 1.36, alpha), and one such group."""

from __future__ import annotations

from tests.e2e.cluster import Object

FIRST = 36
API = "--runtime-config=scheduling.k8s.io/v1alpha2=true"
GATES = "--feature-gates=GenericWorkload=true,GangScheduling=true"
GROUPS = "/apis/scheduling.k8s.io/v1alpha2/namespaces/default/podgroups"


def group(name: str, members: int) -> Object:
    return {
        "apiVersion": "scheduling.k8s.io/v1alpha2",
        "kind": "PodGroup",
        "metadata": {"name": name},
        "spec": {"schedulingPolicy": {"gang": {"minCount": members}}},
    }
