"""What each pod of a cluster holds, from the cluster's objects, as the extender sees it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.errors import ForbiddenError
from gpuslice.adapters.kube.resources import CONFIG_MAPS
from gpuslice.adapters.kube.sync import SyncClient
from gpuslice.adapters.kube.views import node_view, pod_view, unhealthy_view
from gpuslice.core.contract import SYSTEM_NAMESPACE
from gpuslice.core.ledger import Ledger


def ledger_of(
    nodes: Iterable[objects.Node], pods: Iterable[objects.Pod], config_maps: Iterable[objects.ConfigMap] = ()
) -> Ledger:
    """`config_maps`: includes those that say which cards are out of use."""
    views = map(unhealthy_view, config_maps)
    unhealthy = {view[0]: view[1] for view in views if view is not None}
    ledger = Ledger()
    for node in nodes:
        ledger.apply_node(node_view(node, unhealthy.get(node.metadata.name, frozenset())))
    for pod in pods:
        ledger.apply_pod(pod_view(pod))
    return ledger


def read_config_maps(client: SyncClient) -> Sequence[objects.ConfigMap]:
    """The ConfigMaps for `ledger_of`; none without permission, so that every card is in use."""
    try:
        return client.list(CONFIG_MAPS, SYSTEM_NAMESPACE)
    except ForbiddenError:
        return ()
