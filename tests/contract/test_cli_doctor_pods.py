"""``gpuslice doctor``: labels that are nearly right, and pods that wait, fall over or ask for what is not."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from msgspec import convert

from gpuslice.adapters.kube.objects import Node, Pod
from gpuslice.diagnosis.doctor import nodes as doctor_nodes
from gpuslice.diagnosis.doctor import pods as doctor_pods
from gpuslice.diagnosis.doctor.facts import Facts, Level
from tests import HANG_S
from tests.builders import api_pod
from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_doctor import findings, healthy
from tests.contract.test_cli_explain import asking, crashed, node, placed

__all__ = ["shell"]


async def test_a_label_that_is_nearly_right_is_found(shell: Shell) -> None:
    await healthy(shell)
    labels = {"cgpu": "true", "ack.node.gpu.schedule": "coremem"}
    await shell.has([node("n1", 8, labels=labels)], [])
    code, found = await findings(shell)
    assert code == 3
    assert found["node n1"]["level"] == "warning"
    assert found["node n1"]["what"].endswith("did you mean core_mem?")


def waiting(name: str, units: str) -> dict[str, Any]:
    pod = api_pod(name, units)
    pod["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    return pod


async def test_pods_that_wait_and_pods_that_never_fit_are_told_apart(shell: Shell) -> None:
    await healthy(shell)
    held = placed("a", 6, "n1", "0", ALIYUN_COM_GPU_MEM_ASSIGNED="true")
    await shell.has([node("n1", 8, labels={"cgpu": "true"})], [held])
    facts = Facts(
        nodes=[convert(node("n1", 8, labels={"cgpu": "true"}), Node)],
        pods=[
            convert(each, Pod)
            for each in (held, waiting("soon", "2"), waiting("later", "4"), waiting("never", "9"))
        ],
    )
    found = {each.where: each for each in doctor_pods.waiting(facts)}
    assert found["pod default/later"].level is Level.NOTE
    assert found["pod default/later"].what.startswith("has been waiting since 2026-01-01T00:00:00Z: ")
    assert found["pod default/soon"].what.endswith(
        ": there is room: if the pod still waits, look at its events and its scheduler"
    )
    assert found["pod default/never"].level is Level.WARNING
    assert "will never fit here: it asks for 9 units" in found["pod default/never"].what
    assert found["pod default/never"].fix == "gpuslice explain default/never"
    young = replace(facts, now=datetime(2026, 1, 1, 0, 0, 30, tzinfo=UTC))
    assert list(doctor_pods.waiting(young)) == []


@pytest.mark.parametrize("created", ["2026-01-01T00:00:00", "yesterday"])
def test_a_time_that_no_api_server_writes_counts_as_long_ago(created: str) -> None:
    pod = waiting("p", "4")
    pod["metadata"]["creationTimestamp"] = created
    facts = Facts(nodes=[convert(node("n1", 8), Node)], pods=[convert(pod, Pod)])
    assert [each.where for each in doctor_pods.waiting(facts)] == ["pod default/p"]


async def test_of_many_that_wait_the_rest_is_counted() -> None:
    pods = [convert(waiting(f"p{number}", "9"), Pod) for number in range(25)]
    found = list(doctor_pods.waiting(Facts(nodes=[convert(node("n1", 8), Node)], pods=pods)))
    assert len(found) == 21
    assert found[-1].what == "5 more pods that ask for a part of a card wait"


async def test_what_is_wrong_with_many_pods_is_one_finding(shell: Shell) -> None:
    await healthy(shell)
    lost = [placed(f"q{at}", 1, "n1", "7", ALIYUN_COM_GPU_MEM_ASSIGNED="true") for at in range(30)]
    await shell.has([node("n1", 8, labels={"cgpu": "true"})], lost)
    told, every = await shell("gpuslice", "doctor"), await shell("gpuslice", "doctor", "--all")
    assert "ERROR    30 pods: default/q0, default/q1, default/q10 and 27 more\n" in told.out
    assert "is annotated with card 7, which n1 does not have\n" in told.out
    assert every.out.count("is annotated with card 7") == 30
    assert told.code == every.code == 3
    assert told.out.splitlines()[-1] == every.out.splitlines()[-1]
    document = json.loads((await shell("gpuslice", "doctor", "-o", "json")).out)
    assert len([each for each in document["findings"] if "card 7" in each["what"]]) == 30


async def test_the_worst_are_shown_and_the_rest_is_counted(shell: Shell) -> None:
    await healthy(shell)
    pods = [crashed(f"p{at}") for at in range(25)]
    for at, pod in enumerate(pods):
        pod["status"]["containerStatuses"][0]["state"] = {"waiting": {"reason": "x" * (at + 1)}}
    await shell.has([node("n1", 8, labels={"cgpu": "true"})], pods)
    told = (await shell("gpuslice", "doctor")).out.splitlines()
    assert [line[:8] for line in told if line[:1].isupper()] == ["ERROR   ", *["WARNING "] * 19]
    assert told[-2:] == [
        "6 more findings not shown: gpuslice doctor --all",
        "1 node and 25 pods looked at: 1 error, 25 warnings, 0 notes.",
    ]


async def test_a_pod_that_falls_over_again_and_again_is_found(shell: Shell) -> None:
    await healthy(shell)
    await shell.has([node("n1", 15, labels={"cgpu": "true"})], [crashed("p")])
    code, found = await findings(shell)
    assert code == 3
    assert found["pod default/p"]["what"] == (
        "container main restarted 3 times, last with exit code 1, and is waiting: CrashLoopBackOff: it "
        "keeps its card"
    )
    assert "logs p -c main --previous" in found["pod default/p"]["fix"]


async def test_a_pod_that_holds_a_card_and_cannot_be_started_is_found() -> None:
    pods = []
    for reason in ("ImagePullBackOff", "ContainerCreating", "CreateContainerConfigError"):
        pod = placed(reason.lower(), 4, "n1", "0", ALIYUN_COM_GPU_MEM_ASSIGNED="true")
        state = {"waiting": {"reason": reason}}
        pod["status"]["containerStatuses"] = [{"name": "main", "restartCount": 0, "state": state}]
        pods.append(convert(pod, Pod))
    found = list(doctor_pods.falling_over(Facts(nodes=[], pods=pods)))
    assert [each.where.removeprefix("pod default/") for each in found] == [
        "imagepullbackoff",
        "createcontainerconfigerror",
    ]
    assert found[0].what == ("container main does not start (ImagePullBackOff): it keeps its card")


async def test_on_a_terminal_what_goes_on_is_indented(shell: Shell) -> None:
    await shell.has([], [])
    ours, terminal = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        Path(sys.executable).parent / "gpuslice",
        "doctor",
        env={"KUBECONFIG": str(shell.folder / "config"), "COLUMNS": "60", "HOME": str(shell.folder)},
        stdout=terminal,
    )
    await asyncio.wait_for(process.wait(), HANG_S)
    lines = os.read(ours, 1 << 16).decode().splitlines()
    os.close(terminal)
    os.close(ours)
    assert all(len(line) <= 60 for line in lines[:-1])
    at = next(number for number, line in enumerate(lines) if line.startswith("         to do: install"))
    assert lines[at + 1].startswith(" " * 9)


async def test_a_pod_that_asks_for_what_nobody_gives_is_found(shell: Shell) -> None:
    await healthy(shell)
    pods = [asking("typo", "aliyun.com/gpu-mm"), asking("hami", "nvidia.com/gpumem", "4096")]
    await shell.has([node("n1", 8, labels={"cgpu": "true"})], pods)
    _, found = await findings(shell)
    assert found["pod default/typo"]["what"].endswith("did you mean aliyun.com/gpu-mem?")
    assert found["pod default/hami"]["what"].startswith("nvidia.com/gpumem is HAMi's name")


NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ({"type": "Ready", "status": "Unknown", "message": "no news"}, "is not ready (no news)"),
        ({"type": "DiskPressure", "status": "True", "reason": "Full"}, "has DiskPressure (Full)"),
        (
            {"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-11-26T13:00:00Z"},
            "60 minutes ahead",
        ),
        (
            {"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-11-26T11:00:00Z"},
            "60 minutes behind",
        ),
        ({"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-11-26T11:54:00Z"}, ""),
        ({"type": "Ready", "status": "True", "lastHeartbeatTime": "2026-11-26T11:00:00"}, ""),
        ({"type": "Ready", "status": "True"}, ""),
        ({"type": "DiskPressure", "status": "False"}, ""),
    ],
)
def test_a_node_that_is_unwell_itself_is_told_with_what_it_is(condition: dict[str, str], said: str) -> None:
    shares = node("n1", 8, 8, labels={"cgpu": "true"})
    shares["status"]["conditions"] = [condition]
    others = node("n2", 0)
    others["status"]["conditions"] = [condition]
    nodes = [convert(each, Node) for each in (shares, others)]
    found = list(doctor_nodes.unwell(Facts(nodes=nodes, now=NOON)))
    assert [each.where for each in found] == (["node n1"] if said else [])
    assert said in "".join(each.what for each in found)
