"""What a container sees in the end: kubelet's rule of who wins, on pods that went through the webhook."""

from __future__ import annotations

from typing import Any

import pytest

from gpuslice.core.admission import AdmissionRules, EnvSource
from gpuslice.core.contract import device_id
from gpuslice.core.grant import container_grant
from simcluster.kubelet.environment import environment
from tests.builders import make_node, make_pod, placed_annotations
from tests.unit.admission_rig import PLAIN, Object, mutated, with_env

NODE = make_node(cards=(15, 15))
MINE = NODE.cards[1]
GREEDY = {"NVIDIA_VISIBLE_DEVICES": "all", "ALIYUN_COM_GPU_MEM_CONTAINER": "15"}
WAYS: dict[str, dict[str, Any]] = {
    "env": {"env": [{"name": name, "value": value} for name, value in GREEDY.items()]},
    "envFrom": {"env": [], "envFrom": [{"configMapRef": {"name": "greedy"}}]},
    "env from a key": {
        "env": [
            {
                "name": "NVIDIA_VISIBLE_DEVICES",
                "valueFrom": {"configMapKeyRef": {"name": "greedy", "key": name}},
            }
            for name in GREEDY
        ]
    },
}


def seen(pod: Object, rules: AdmissionRules | None) -> dict[str, str]:
    """The environment on a node where the pod got card 1, after scheduling wrote its annotations."""
    stored = mutated(pod, rules) if rules is not None else pod
    placed = make_pod(memory=4, node="n1", card=1)
    stored["metadata"]["annotations"] = placed_annotations(placed, NODE)
    ids = [device_id(MINE.uuid, unit) for unit in range(4)]
    granted = container_grant(ids, NODE).environment
    container = stored["spec"]["containers"][0]
    return environment(stored, container, granted, lambda *_: GREEDY, host_ip="", pod_ip="")


@pytest.mark.parametrize("way", WAYS)
def test_without_the_webhook_a_pod_sees_whatever_it_likes(way: str) -> None:
    assert seen(with_env(**WAYS[way]), None)["NVIDIA_VISIBLE_DEVICES"] != MINE.uuid


@pytest.mark.parametrize("rules", [PLAIN, AdmissionRules(env=EnvSource.ALWAYS)], ids=["hidden", "always"])
@pytest.mark.parametrize("way", WAYS)
def test_with_it_a_pod_sees_the_card_that_it_was_given(way: str, rules: AdmissionRules) -> None:
    found = seen(with_env(**WAYS[way]), rules)
    assert found["NVIDIA_VISIBLE_DEVICES"] == MINE.uuid
    assert {name: found[f"ALIYUN_COM_GPU_MEM_{name}"] for name in ("IDX", "POD", "CONTAINER", "DEV")} == {
        "IDX": "1",
        "POD": "4",
        "CONTAINER": "4",
        "DEV": "15",
    }
