"""Under each policy of kubelet's topology manager a pod starts on the cards where it was placed.

The machine is shown to kubelet as one of two sockets, with four cards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gpuslice.core.contract import GPU_COUNT
from tests.e2e import node
from tests.e2e.kubelet_rig import UNITS, Cluster, checked, container, pod, start, variables

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(node.missing()), reason=node.missing()),
]
CARDS, SOCKETS = 4, 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with node.own_folder("gs-numa-") as folder, ExitStack() as stack:
        made = start(folder, stack, cards=CARDS, sockets=SOCKETS)
        made.registered()
        yield made


@pytest.mark.parametrize("scope", ["container", "pod"])
@pytest.mark.parametrize("policy", ["best-effort", "restricted", "single-numa-node"])
def test_a_pod_starts_on_the_cards_where_it_was_placed(cluster: Cluster, policy: str, scope: str) -> None:
    """Two cards are nearly full: kubelet adds up what is left of both if it takes them for one socket's."""
    file = cluster.places.folder / "kubelet.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings, "topologyManagerPolicy": policy, "topologyManagerScope": scope}))
    with cluster.registered_again():
        cluster.kubelet.stop()
        cluster.kubelet.start()
    cluster.offers(CARDS * UNITS, CARDS)
    log = cluster.kubelet.log()
    assert f'topologyPolicyName="{policy}"' in log
    cluster.settle()
    most = UNITS - 3
    for number in range(2):
        cluster.create(pod(f"full-{number}", container(most)))
        checked(cluster, f"full-{number}", most)
    for name, units, count in (("four", 4, 1), ("six", 6, 1), ("two", 2, 1), ("three", 3, 1), ("pair", 8, 2)):
        made = pod(name, container(units))
        made["metadata"]["labels"] = {GPU_COUNT: str(count)}
        cluster.create(made)
    for name, units in {"four": 4, "six": 6, "two": 2, "three": 3, "pair": 8}.items():
        checked(cluster, name, units)
    both = pod("both", container(2, name="main"), container(1, name="side"))
    cluster.create(both)
    cluster.running("both")
    cards = {variables(cluster.said("both", each))["ALIYUN_COM_GPU_MEM_IDX"] for each in ("main", "side")}
    assert len(cards) == 1
    cluster.clear()
