"""What a pod mounts where a container finds what enforces its limits, on a real kubelet with containerd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gpuslice.core.units import limit_bytes
from tests.e2e import node
from tests.e2e.kubelet_rig import CARD_MIB, UNITS, Cluster, container, limits_of, one_node, pod
from tests.e2e.node import until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(node.missing()), reason=node.missing()),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with one_node() as made:
        yield made


@pytest.fixture(autouse=True)
def leave_no_pods(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.clear()


HIDING = {
    "volume": {"volumeMounts": [{"name": "own", "mountPath": "/etc/ld.so.preload", "subPath": "file"}]},
    "message": {"terminationMessagePath": "/etc/ld.so.preload"},
    "link of a process": {"volumeMounts": [{"name": "own", "mountPath": "/proc/self/root/usr/lib/gpuslice"}]},
}


@pytest.mark.parametrize("fields", HIDING.values(), ids=HIDING)
def test_no_container_starts_that_would_hide_what_enforces_its_limits(
    cluster: Cluster, fields: dict[str, Any]
) -> None:
    """Of two mounts at one path kubelet and containerd let programs see the pod's own."""
    own = {"name": "own", "emptyDir": {}}
    cluster.create(pod("hiding", container(4, **fields), volumes=[own]))

    def why() -> str:
        (status,) = cluster.pod("hiding")["status"].get("containerStatuses") or [{}]
        return str(status.get("state", {}).get("waiting", {}).get("message", ""))

    until(
        lambda: "what enforces the container's GPU limits" in why(),
        f"it is refused; {why()}",
    )


def test_a_volume_above_what_enforces_limits_does_not_hide_it(cluster: Cluster) -> None:
    above = [{"name": "own", "mountPath": path} for path in ("/etc", "/usr/lib")]
    cluster.create(pod("above", container(4, volumeMounts=above), volumes=[{"name": "own", "emptyDir": {}}]))
    lines = cluster.said("above")
    assert "/usr/lib/gpuslice/libgpuslice.so" in lines
    assert list(limits_of(lines).values()) == [limit_bytes(CARD_MIB, 4, UNITS)]
