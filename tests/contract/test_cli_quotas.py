"""A quota under a name in which nothing is counted: who is told."""

from __future__ import annotations

from typing import Any

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.resources import LIMIT_RANGES, QUOTAS
from gpuslice.adapters.kube.transport import HttpTransport
from tests.builders import api_pod
from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_explain import node, placed

__all__ = ["shell"]


async def limited(shell: Shell, quota: dict[str, str], limits: dict[str, Any] | None = None) -> None:
    await shell.has([node("n1", 8)], [placed("runs", 4, "n1", "0"), api_pod("waits", "8")])
    metadata = {"name": "team", "namespace": "default"}
    async with HttpTransport(Connection(shell.server.url)) as transport:
        client = KubeClient(transport)
        await client.create(QUOTAS, {"metadata": metadata, "spec": {"hard": quota}})
        if limits:
            spec = {"limits": [{"type": "Container", **limits}]}
            await client.create(LIMIT_RANGES, {"metadata": metadata, "spec": spec})


@pytest.mark.parametrize(
    "name", ["requests.gpuslice.io/memory", "aliyun.com/gpu-mem", "limits.aliyun.com/gpu-mem"]
)
async def test_a_quota_that_counts_nothing_is_named_by_doctor_and_by_each_pods_explanation(
    shell: Shell, name: str
) -> None:
    await limited(shell, {name: "2", "pods": "10"})
    what = f"limits {name}, under which nothing is counted"
    found = (await shell("gpuslice", "doctor")).out
    assert found.count("resourcequota default/team") == 1
    assert f"resourcequota default/team {what}" in " ".join(found.split())
    assert "limit requests.aliyun.com/gpu-mem" in found
    for pod in ("runs", "waits"):
        told = (await shell("gpuslice", "explain", pod)).out
        assert f"Its resourcequota default/team {what}: limit requests.aliyun.com/gpu-mem." in told


async def test_a_quota_that_counts_is_not_spoken_of(shell: Shell) -> None:
    zero = {"aliyun.com/gpu-mem": "0"}
    limits = {"max": {"aliyun.com/gpu-mem": "8"}, "default": zero, "defaultRequest": zero}
    await limited(shell, {"requests.aliyun.com/gpu-mem": "12", "limits.cpu": "2"}, limits)
    assert "default/team" not in (await shell("gpuslice", "doctor")).out
    assert "default/team" not in (await shell("gpuslice", "explain", "runs")).out


async def test_a_range_that_gives_every_container_a_part_of_a_card_is_named(shell: Shell) -> None:
    await limited(shell, {"pods": "10"}, {"max": {"aliyun.com/gpu-mem": "8"}})
    said = "gives 8 aliyun.com/gpu-mem to every container that has no limit of its own"
    assert said in " ".join((await shell("gpuslice", "doctor")).out.split())
