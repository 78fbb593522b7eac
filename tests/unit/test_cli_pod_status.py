"""A pod's state in kubectl's word, which is what arena prints too."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpuslice.adapters.kube.objects import Pod
from gpuslice.apps.cli.cluster import pod_facts

RUNS = {"ready": True, "state": {"running": {}}}
STARTS = {"state": {"waiting": {"reason": "PodInitializing"}}}
DONE = {"state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
FALLS = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}


def ended(code: int, **more: Any) -> dict[str, Any]:
    return {"state": {"terminated": {"exitCode": code, **more}}}


@pytest.mark.parametrize(
    ("phase", "containers", "status"),
    [
        ("Pending", [], "Pending"),
        ("Running", [RUNS], "Running"),
        ("Running", [RUNS, FALLS], "CrashLoopBackOff"),
        ("Running", [DONE, RUNS], "Running"),
        ("Running", [DONE, FALLS], "Completed"),
        ("Pending", [{"state": {"waiting": {"reason": "ImagePullBackOff"}}}], "ImagePullBackOff"),
        ("Failed", [ended(137, reason="OOMKilled")], "OOMKilled"),
        ("Failed", [ended(3)], "ExitCode:3"),
        ("Failed", [ended(128, signal=9)], "Signal:9"),
    ],
)
def test_the_first_container_that_does_not_run_tells(
    phase: str, containers: list[dict[str, Any]], status: str
) -> None:
    assert status_of(phase=phase, containerStatuses=containers) == status


@pytest.mark.parametrize(
    ("phase", "first", "status"),
    [
        ("Pending", [STARTS, STARTS], "Init:0/2"),
        ("Pending", [DONE, RUNS], "Init:1/2"),
        ("Pending", [DONE, FALLS], "Init:CrashLoopBackOff"),
        ("Failed", [ended(1, reason="Error")], "Init:Error"),
        ("Running", [RUNS], "Running"),
    ],
)
def test_what_runs_before_the_containers_tells_until_they_run(
    phase: str, first: list[dict[str, Any]], status: str
) -> None:
    containers = [RUNS if phase == "Running" else STARTS]
    assert status_of(phase=phase, initContainerStatuses=first, containerStatuses=containers) == status


def test_a_pod_that_is_put_off_or_leaves_says_so() -> None:
    assert status_of(phase="Failed", reason="Evicted") == "Evicted"
    assert status_of("2026-01-01T00:00:00Z", phase="Running", containerStatuses=[RUNS]) == "Terminating"


def status_of(leaves: str | None = None, **status: Any) -> str:
    metadata = {"name": "p", "namespace": "default", "uid": "u", "deletionTimestamp": leaves}
    pod = {"metadata": metadata, "spec": {"containers": []}, "status": status}
    return pod_facts(msgspec.convert(pod, Pod)).status
