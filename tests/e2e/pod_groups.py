"""What a control plane needs for pod groups (Kubernetes 1.36: alpha, 1.37: beta), and one such group.

Both are off by default. 1.37 replaced the alpha version of the API, and has one feature gate for all.
"""

from __future__ import annotations

from tests.e2e import control_plane
from tests.e2e.cluster import Object

FIRST = 36


def _api_version() -> str:
    version = "v1alpha2" if control_plane.minor_version() == FIRST else "v1beta1"
    return f"scheduling.k8s.io/{version}"


def gates() -> str:
    """The flag of kube-apiserver and kube-scheduler."""
    more = ",GangScheduling=true" if control_plane.minor_version() == FIRST else ""
    return f"--feature-gates=GenericWorkload=true{more}"


def api_flags() -> tuple[str, ...]:
    """All flags of kube-apiserver."""
    return gates(), f"--runtime-config={_api_version()}=true"


def groups_path() -> str:
    return f"/apis/{_api_version()}/namespaces/default/podgroups"


def group(name: str, members: int) -> Object:
    return {
        "apiVersion": _api_version(),
        "kind": "PodGroup",
        "metadata": {"name": name},
        "spec": {"schedulingPolicy": {"gang": {"minCount": members}}},
    }
