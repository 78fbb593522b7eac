"""`gpuslice explain` where somebody else decides, another unit was meant, or a card fails: what helps."""

from __future__ import annotations

import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.resources import CONFIG_MAPS
from gpuslice.adapters.kube.transport import HttpTransport
from tests.builders import api_container, api_pod
from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_explain import asking, create, deployment, node, placed

__all__ = ["shell"]  # the fixture


async def test_a_pod_that_wants_a_whole_card_where_all_are_shared_is_told_what_to_do(shell: Shell) -> None:
    await shell.has([node("n1", 8)], [asking("whole", "nvidia.com/gpu", "1")])
    told = (await shell("gpuslice", "explain", "whole")).out
    assert "No node offers whole cards, because those with cards share them: ask for a part of one" in told
    assert "or label a node cgpu=false." in told


async def test_a_pod_that_wants_a_whole_card_where_some_are_offered_is_left_to_its_scheduler(
    shell: Shell,
) -> None:
    whole = node("n2")
    whole["status"]["allocatable"] = {"nvidia.com/gpu": "1"}
    await shell.has([node("n1", 8), whole], [asking("whole", "nvidia.com/gpu", "1")])
    assert "No node offers" not in (await shell("gpuslice", "explain", "whole")).out


async def test_a_pod_that_wants_a_whole_card_where_nobody_gives_any_out_is_told_of_the_plugin(
    shell: Shell,
) -> None:
    plain = {"metadata": {"name": "n1", "labels": {}}, "status": {"allocatable": {"cpu": "4"}}}
    await shell.has([plain], [asking("whole", "nvidia.com/gpu", "1")])
    told = (await shell("gpuslice", "explain", "whole")).out
    assert "No node offers nvidia.com/gpu: see that NVIDIA's device plugin runs" in told


async def test_a_pod_that_wants_a_mig_device_is_told_whose_that_is(shell: Shell) -> None:
    await shell.has([node("n1", 8)], [asking("mig", "nvidia.com/mig-3g.20gb", "1")])
    told = (await shell("gpuslice", "explain", "mig")).out
    assert "It asks for nvidia.com/mig-3g.20gb of NVIDIA's device plugin, so gpuslice does not decide" in told
    assert "No node offers nvidia.com/mig-3g.20gb" in told


async def test_the_scheduler_of_a_pod_that_is_none_of_ours_is_named_as_well(shell: Shell) -> None:
    await shell.has([node("n1", 8)], [asking("theirs", "nvidia.com/gpu", "1", schedulerName="kai-scheduler")])
    assert "It waits for scheduler kai-scheduler" in (await shell("gpuslice", "explain", "theirs")).out


async def test_a_pod_with_kais_annotation_is_among_those_of_its_namespace(shell: Shell) -> None:
    plain = [{"name": "main", "image": "image"}]
    pod = api_pod("theirs", containers=plain, annotations={"gpu-fraction": "0.5"})
    await shell.has([node("n1", 8)], [pod, api_pod("web", containers=plain)])
    told = (await shell("gpuslice", "explain")).out
    assert "Its annotation gpu-fraction is KAI-Scheduler's" in told
    assert "default/web" not in told


async def test_a_job_that_a_queue_holds_back_is_told_to_be_suspended(shell: Shell) -> None:
    job = deployment("queued") | {"apiVersion": "batch/v1", "kind": "Job"}
    job["spec"] = {"suspend": True, "template": job["spec"]["template"]}
    job["spec"]["template"]["spec"] |= {"restartPolicy": "Never"}
    job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] = {"aliyun.com/gpu-mem": "4"}
    await shell.has([node("n1", 15)], [])
    await create(shell, job)
    told = (await shell("gpuslice", "explain", "job/queued")).out
    assert "job queued is suspended: it gets its pods once it is resumed" in told
    assert "kubectl" not in told


@pytest.mark.parametrize(("asked", "told"), [("16276", "16276 MiB are 16 units"), ("9", "")])
async def test_an_amount_that_must_have_been_meant_in_mib_is_put_into_gib(
    shell: Shell, asked: str, told: str
) -> None:
    await shell.has([node("n1", 8)], [api_pod("p", asked)])
    out = (await shell("gpuslice", "explain", "p")).out
    assert told in out
    assert ("a unit is one GiB here" in out) == bool(told)


async def test_many_containers_that_ask_for_a_unit_each_were_not_meant_in_mib(shell: Shell) -> None:
    containers = [api_container("1", f"worker-{number}") for number in range(1024)]
    await shell.has([node("n1", 8)], [api_pod("p", containers=containers)])
    out = (await shell("gpuslice", "explain", "p")).out
    assert "It will never fit here: it asks for 1024 units" in out
    assert "MiB" not in out


async def test_a_pod_on_a_card_that_is_out_of_use_is_told_so(shell: Shell) -> None:
    await shell.has([node("n1", 15, 15)], [placed("a", 4, "n1", "1"), placed("b", 3, "n1", "0")])
    async with HttpTransport(Connection(shell.server.url)) as transport:
        metadata = {"name": "unhealthy-gpu-n1", "namespace": "kube-system"}
        gone = {"metadata": metadata, "data": {"gpus": "1", "agent": "1", "reasons": "1: does not answer"}}
        await KubeClient(transport).create(CONFIG_MAPS, gone)
    a, b = (await shell("gpuslice", "explain", "a")).out, (await shell("gpuslice", "explain", "b")).out
    assert "Card 1 of n1 is out of use, for the reason that ConfigMap kube-system/unhealthy-gpu-n1 names" in a
    assert "would be put there again" not in a
    assert "out of use" not in b
