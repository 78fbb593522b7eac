"""A pod that others keep from being changed, beside pods that may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuslice.adapters.kubelet.proto import deviceplugin_pb2 as dp
from gpuslice.diagnosis.doctor.facts import HOOKS
from tests.integration.agent_bench import Bench, eventually, uuid

V100 = 16130


async def test_a_pod_whose_webhook_is_away_holds_up_no_other_pods_move(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its annotation was surely not written, so nobody need wait for what may have become of it."""
    async with Bench(tmp_path, {0: V100, 1: V100, 2: V100}).running() as node:
        configuration = {
            "metadata": {"name": "away"},
            "webhooks": [
                {
                    "name": "away.example.com",
                    "clientConfig": {"url": "https://127.0.0.1:9/validate"},
                    "rules": [
                        {
                            "apiGroups": [""],
                            "apiVersions": ["v1"],
                            "operations": ["UPDATE"],
                            "resources": ["pods"],
                        }
                    ],
                    "objectSelector": {"matchLabels": {"webhook": "away"}},
                    "failurePolicy": "Fail",
                    "sideEffects": "None",
                    "admissionReviewVersions": ["v1"],
                }
            ],
        }
        stuck = await node.place("stuck", 5, 0, labels={"webhook": "away"})
        other = await node.place("other", 3, 0)
        await node.client.create(HOOKS[1], configuration)
        for pod, card, count in ((stuck, 1, 5), (other, 2, 3)):
            ids = frozenset(f"{uuid(card)}-_-{number}" for number in range(count))
            node.kubelet.hold(pod, ids, dp.ContainerAllocateResponse())
            if pod is stuck:
                await eventually(lambda: "annotations not written" in caplog.text, "the write was refused")
        await node.annotated("other", ASSIGNED="true", IDX="2")
        assert (await node.annotations("stuck"))["ALIYUN_COM_GPU_MEM_IDX"] == "0"
