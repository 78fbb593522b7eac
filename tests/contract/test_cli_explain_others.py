"""`gpuslice explain` where somebody else decides, or another unit was meant: who, and what would help."""

from __future__ import annotations

import pytest

from tests.builders import api_pod
from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_explain import asking, create, deployment, node

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
