"""Which cards a pod has, by what kubelet lists and what was granted."""

from gpuslice.apps.agent.pods import NodePod
from gpuslice.apps.agent.repair import actual_placements
from gpuslice.core.device_assignment import DeviceAssignment
from gpuslice.core.model import ContainerKind, ContainerRequest, Request
from tests.builders import make_node, make_placement, make_pod


def ids_of(card: int, *units: int) -> frozenset[str]:
    return frozenset(f"GPU-n1-{card}-_-{unit}" for unit in units)


def test_a_grant_on_more_cards_than_the_pod_has_was_to_somebody_else() -> None:
    """After a restart the grants are known by their folders, and clocks may have dated an old one later."""
    containers = ContainerRequest("init", 0, 4, 0, ContainerKind.INIT), ContainerRequest("main", 0, 2)
    pod = make_pod("a", node="n1", card=0, request=Request(4, 1, 0, containers, 1))
    listed = DeviceAssignment(pod.namespace, "a", "main", ids_of(0, 0, 1))
    own, earlier = ids_of(0, 0, 1, 2, 3), ids_of(0, 0, 1) | ids_of(1, 0, 1)
    (found,) = actual_placements(
        [NodePod(pod)], [listed], make_node(cards=(6, 4)), [own, listed.ids, earlier]
    )
    assert found.placement == make_placement("n1", 4, 0)
