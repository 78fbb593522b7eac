"""What kubelets rejected and what runs without its pod: ``doctor``, ``explain`` and ``inspect``."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from gpuslice.core.contract import NODE_ORPHANS
from tests.builders import api_pod
from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_doctor import findings, healthy
from tests.contract.test_cli_explain import node, placed

__all__ = ["shell"]

WORDS = "Allocate failed due to requested number of devices unavailable for aliyun.com/gpu-mem"


def rejected(
    name: str, on: str = "n1", card: str = "0", ago_s: float = 2.0, reason: str = "UnexpectedAdmissionError"
) -> dict[str, Any]:
    at_s = time.time() - ago_s
    pod = placed(name, 8, on, card, ALIYUN_COM_GPU_MEM_ASSUME_TIME=str(int(at_s * 1e9)))
    started = datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    pod["status"] = {
        "phase": "Failed",
        "reason": reason,
        "message": f"Pod was rejected: {WORDS}",
        "startTime": started,
    }
    return pod


def running(name: str, on: str, card: str, ago_s: float) -> dict[str, Any]:
    at_ns = str(int((time.time() - ago_s) * 1e9))
    said = {"ALIYUN_COM_GPU_MEM_ASSUME_TIME": at_ns, "ALIYUN_COM_GPU_MEM_ASSIGNED": "true"}
    return placed(name, 8, on, card, **said)


async def test_doctor_names_the_node_that_rejects_and_the_command(shell: Shell) -> None:
    await healthy(shell)
    await shell.has([node("n1", 8, labels={"cgpu": "true"})], [rejected("a"), rejected("b")])
    _, found = await findings(shell)
    finding = found["node n1"]
    assert finding["level"] == "error"
    assert finding["what"] == (
        "kubelet rejected 2 pods that asked for cards, the last one with UnexpectedAdmissionError "
        f"({WORDS}); new ones are sent there later"
    )
    assert finding["fix"].startswith("kubectl -n kube-system delete pod -l name=gpushare-device-plugin-ds")


@pytest.mark.parametrize(
    "others",
    [
        [rejected("old", ago_s=3600)],
        [rejected("a", ago_s=60), running("b", "n1", "0", 30)],
        [api_pod("c", "8", node="n1", phase="Failed")],
    ],
    ids=["long ago", "disproved", "ran and failed"],
)
async def test_doctor_is_silent_about_what_is_over(shell: Shell, others: list[dict[str, Any]]) -> None:
    await healthy(shell)
    await shell.has([node("n1", 8, labels={"cgpu": "true"})], others)
    _, found = await findings(shell)
    assert "kubelet rejected" not in json.dumps(found)


async def test_explain_tells_of_a_rejected_pod_that_it_never_ran(shell: Shell) -> None:
    await shell.has([node("n1", 8)], [rejected("a")])
    told = await shell("gpuslice", "explain", "a")
    assert f"kubelet on n1 did not let it start: UnexpectedAdmissionError ({WORDS})" in " ".join(
        told.out.split()
    )
    assert "released" not in told.out


async def test_explain_tells_a_waiting_pod_what_it_is_kept_off(shell: Shell) -> None:
    await shell.has([node("n1", 8)], [rejected("a"), api_pod("p", "8")])
    told = " ".join((await shell("gpuslice", "explain", "p")).out.split())
    assert "kubelet on n1 rejected 1 pod, the last one with UnexpectedAdmissionError" in told
    assert "card 0 there is in back-off until" in told


async def test_what_runs_without_its_pod_is_in_inspect_and_in_doctor(shell: Shell) -> None:
    await healthy(shell)
    there = node("n1", 8, labels={"cgpu": "true"})
    there["metadata"]["annotations"][NODE_ORPHANS] = '[{"pod":"team/stuck","cards":{"0":5}}]'
    await shell.has([there], [api_pod("p", "8")])
    told = " ".join((await shell("gpuslice", "explain", "p")).out.split())
    assert "On n1, containers of pod team/stuck still hold 5 units of card 0, though the pod is gone." in told
    _, found = await findings(shell)
    finding = found["node n1"]
    assert "pod team/stuck is gone and its containers still hold 5 units of card 0" in finding["what"]
    assert "kubectl annotate node n1 gpuslice.io/orphans-" in finding["fix"]
    table = (await shell("kubectl-inspect-cgpu", "-d")).out
    assert "stuck (gone)" in table
    assert "5/8" in (await shell("kubectl-inspect-cgpu")).out


async def test_a_corrupt_account_of_it_is_named_and_holds_nothing(shell: Shell) -> None:
    await healthy(shell)
    there = node("n1", 8, labels={"cgpu": "true"})
    there["metadata"]["annotations"][NODE_ORPHANS] = '[{"pod":"a","cards":{"0":99999999}}]'
    await shell.has([there], [])
    _, found = await findings(shell)
    assert NODE_ORPHANS in found["node n1"]["what"]
    assert "0/8" in (await shell("kubectl-inspect-cgpu")).out
