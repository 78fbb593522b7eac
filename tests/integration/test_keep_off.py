"""NVIDIA's plugin as a DaemonSet of its own: kept off nodes that share their cards, and back as it was."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.resources import NAMESPACES
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.apps.agent.keep_off import BEFORE, DAEMON_SETS, REQUIRED, keep_off, kept_off, let_back
from gpuslice.apps.agent.settings import KeepOffSettings
from gpuslice.apps.settings import SettingsError
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster

EXPRESSION = st.fixed_dictionaries(
    {
        "key": st.sampled_from(["zone", "nvidia.com/gpu.present"]),
        "operator": st.just("In"),
        "values": st.just(["x"]),
    }
)
TERM = st.fixed_dictionaries({"matchExpressions": st.lists(EXPRESSION, min_size=1, max_size=2)})
NODE_AFFINITY = st.fixed_dictionaries(
    {},
    optional={
        REQUIRED: st.fixed_dictionaries({"nodeSelectorTerms": st.lists(TERM, min_size=1, max_size=3)}),
        "preferredDuringSchedulingIgnoredDuringExecution": st.just([{"weight": 1}]),
    },
)
AFFINITY = st.one_of(
    st.none(), st.fixed_dictionaries({}, optional={"nodeAffinity": NODE_AFFINITY, "podAffinity": st.just({})})
)
SHARED: tuple[dict[str, str], ...] = (
    {"cgpu": "true"},
    {"ack.node.gpu.schedule": "share"},
    {"ack.node.gpu.schedule": "core_mem"},
)
WHOLE: tuple[dict[str, str], ...] = ({}, {"cgpu": "false"}, {"ack.node.gpu.schedule": "default"})


def allows(affinity: Mapping[str, Any] | None, labels: dict[str, str]) -> bool:
    required = ((affinity or {}).get("nodeAffinity") or {}).get(REQUIRED)
    if required is None:
        return True
    return any(
        all(
            (labels.get(each["key"]) in each["values"]) == (each["operator"] == "In")
            for each in term["matchExpressions"]
        )
        for term in required["nodeSelectorTerms"]
    )


@given(
    before=AFFINITY, others=st.sampled_from([{}, {"zone": "x"}, {"zone": "x", "nvidia.com/gpu.present": "x"}])
)
def test_it_runs_where_it_ran_but_for_nodes_that_share(
    before: dict[str, Any] | None, others: dict[str, str]
) -> None:
    kept = kept_off(before, "cgpu")
    for labels in SHARED:
        assert not allows(kept, {**others, **labels})
    for labels in WHOLE:
        assert allows(kept, {**others, **labels}) == allows(before, {**others, **labels})
    assert kept_off(kept, "cgpu") == kept
    assert let_back(kept, before, "cgpu") == before


@given(before=AFFINITY)
def test_what_somebody_changed_meanwhile_stays(before: dict[str, Any] | None) -> None:
    changed = {**kept_off(before, "cgpu"), "podAntiAffinity": {"theirs": []}}
    back = let_back(changed, before, "cgpu")
    assert back is not None
    assert back["podAntiAffinity"] == {"theirs": []}
    for labels in SHARED:
        assert allows(back, {**labels, "zone": "x", "nvidia.com/gpu.present": "x"}) == allows(
            before, {**labels, "zone": "x", "nvidia.com/gpu.present": "x"}
        )


@pytest.mark.parametrize(
    "before",
    [
        None,
        {"podAffinity": {}},
        {
            "nodeAffinity": {
                REQUIRED: {
                    "nodeSelectorTerms": [
                        {
                            "matchExpressions": [
                                {"key": "nvidia.com/gpu.present", "operator": "In", "values": ["true"]}
                            ]
                        }
                    ]
                }
            }
        },
    ],
)
async def test_the_daemon_set_goes_and_comes_back_as_it_was(before: dict[str, Any] | None) -> None:
    labels = {"name": "nvidia"}
    template: dict[str, Any] = {
        "metadata": {"labels": labels},
        "spec": {"containers": [{"name": "c", "image": "plugin"}]} | ({"affinity": before} if before else {}),
    }
    plugin = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "nvidia", "namespace": "gpu"},
        "spec": {"selector": {"matchLabels": labels}, "template": template},
    }
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "gpu"}}
    async with ApiServer(Cluster()) as server, HttpTransport(Connection(server.url)) as transport:
        client = KubeClient(transport)
        await client.create(NAMESPACES, namespace)
        created = await client.create(DAEMON_SETS, plugin)
        settings = KeepOffSettings(daemon_set="gpu/nvidia")
        back = KeepOffSettings(daemon_set="gpu/nvidia", back=True)
        assert "was not kept off" in await keep_off(client, back)
        assert "from now on" in await keep_off(client, settings)
        assert "already" in await keep_off(client, settings)
        kept = await client.get(DAEMON_SETS, "nvidia", "gpu")
        assert not allows(kept["spec"]["template"]["spec"]["affinity"], {"cgpu": "true"})
        assert "again as before" in await keep_off(client, back)
        found = await client.get(DAEMON_SETS, "nvidia", "gpu")
        assert found["spec"]["template"] == created["spec"]["template"]
        assert BEFORE not in (found["metadata"].get("annotations") or {})


def test_a_name_without_its_namespace_is_refused() -> None:
    with pytest.raises(SettingsError, match='must be NAMESPACE/NAME; it is "nvidia"'):
        KeepOffSettings(daemon_set="nvidia")
