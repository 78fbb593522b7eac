"""``gpuslice explain`` against the simulated API server."""

from __future__ import annotations

import json
import re
from typing import Any

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.core.annotations import encode_cards
from gpuslice.core.contract import (
    ANN_TIERS,
    GATE_POD_GROUP,
    GPU_COUNT,
    LABEL_GROUP_MIN,
    LABEL_GROUP_NAME,
    NODE_GPUS,
    NODE_TIER,
)
from tests.builders import api_node, api_pod, make_card
from tests.contract.test_cli_cluster import Shell, shell

__all__ = ["shell"]


def node(name: str, *cards: int, **fields: Any) -> dict[str, Any]:
    """A node whose annotation tells the true size of its cards."""
    described = tuple(make_card(index, units, node=name) for index, units in enumerate(cards))
    annotations = {NODE_GPUS: encode_cards(described)} if cards else None
    made = api_node(name, sum(cards), len(cards), annotations=annotations, labels=fields.pop("labels", None))
    made["spec"] |= fields
    return made


def placed(name: str, units: int, on: str, card: str, **annotations: str) -> dict[str, Any]:
    where = {"ALIYUN_COM_GPU_MEM_IDX": card, "ALIYUN_COM_GPU_MEM_POD": str(units), **annotations}
    return api_pod(name, str(units), node=on, annotations=where, phase="Running")


def rows(out: str) -> list[list[str]]:
    """The table's cells: columns are two spaces apart or more."""
    lines = out[out.index("NODES") :].split("\n\n", maxsplit=1)[0].splitlines()[1:]
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]


async def test_a_pod_that_waits_is_told_what_speaks_against_each_kind_of_node(shell: Shell) -> None:
    nodes = [
        node("full", 8, 8),
        node("cordoned", 8, unschedulable=True),
        node("tainted", 8, taints=[{"key": "team", "value": "b", "effect": "NoSchedule"}]),
        node("plain"),
        node("small", 4),
    ]
    await shell.has(nodes, [placed("a", 4, "full", "0"), placed("b", 3, "full", "1"), api_pod("p", "8")])
    told = await shell("gpuslice", "explain", "p")
    assert told.code == 0, told.err
    assert told.out.startswith("Pod default/p is Pending.\nIt asks for 8 units of one card.\n")
    assert sorted(rows(told.out)) == [
        ["1", "Cordoned", "8 (cordoned, card 0)", "cordoned"],
        ["1", "Shares no cards", "-", "plain"],
        ["1", "Taint team=b:NoSchedule is not tolerated", "8 (tainted, card 0)", "tainted"],
        ["2", "Insufficient GPU Memory in one device", "5 (full, card 1)", "full, small"],
    ]
    assert (
        "The free memory is fragmented: full has 9 units free in all, the most on one card is 5, and 8 are "
        "wanted of one card." in told.out
    )


async def test_a_pod_too_large_for_any_card_is_told_so(shell: Shell) -> None:
    await shell.has([node("n1", 8, 8)], [api_pod("p", "9")])
    assert (
        "It will never fit here: it asks for 9 units, and the largest shared card"
        in (await shell("gpuslice", "explain", "p")).out
    )


async def test_a_pod_that_asks_for_whole_cards_as_well_is_told_that_no_node_has_both(shell: Shell) -> None:
    pod = api_pod("p", "4")
    pod["spec"]["containers"].append(
        {"name": "whole", "image": "image", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    )
    await shell.has([node("n1", 8)], [pod])
    told = (await shell("gpuslice", "explain", "p")).out
    assert (
        "It asks for whole cards (nvidia.com/gpu) beside aliyun.com/gpu-mem, and no node offers both" in told
    )
    assert "There is room" not in told


async def test_a_member_of_a_group_is_told_who_is_missing_and_not_to_look_at_its_scheduler(
    shell: Shell,
) -> None:
    labels = {LABEL_GROUP_NAME: "train", LABEL_GROUP_MIN: "4"}
    gates = [{"name": GATE_POD_GROUP}]
    members = [api_pod(f"worker-{number}", "2", labels=labels, schedulingGates=gates) for number in range(3)]
    await shell.has([node("n1", 8)], members)
    told = (await shell("gpuslice", "explain", "worker-0")).out
    assert "It waits for 1 of 4 members of pod group train" in told
    assert "There is room" not in told


async def test_a_scheduler_that_nobody_has_seen_is_named_until_it_speaks(shell: Shell) -> None:
    said = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]
    pods = [api_pod(name, "9", schedulerName="theirs") for name in ("unseen", "seen")]
    pods[1]["status"]["conditions"] = said
    await shell.has([node("n1", 8)], pods)
    assert "It waits for scheduler theirs" in (await shell("gpuslice", "explain", "unseen")).out
    assert "It waits for scheduler" not in (await shell("gpuslice", "explain", "seen")).out


async def test_room_is_told_with_the_card(shell: Shell) -> None:
    pod = api_pod("p", "4", nodeSelector={"zone": "a"}, tolerations=[{"operator": "Exists"}])
    taint = [{"key": "team", "effect": "NoSchedule"}]
    await shell.has([node("n1", 8, labels={"zone": "a"}, taints=taint), node("n2", 8)], [pod])
    document = json.loads((await shell("gpuslice", "explain", "p", "-o", "json")).out)
    assert document["request"] == {"units": 4, "gpuCount": 1, "unitsPerGpu": 4}
    fits, other = document["classes"]
    assert (fits["nodes"], fits["fits"], fits["detail"]) == (["n1"], True, "n1, card 0")
    assert other["reason"] == "Is not zone=a, as the pod's nodeSelector requires"
    assert document["hints"][-1].startswith("There is room")


async def test_a_pod_that_sits_is_told_its_card_and_its_neighbours(shell: Shell) -> None:
    await shell.has([node("n1", 15)], [placed("a", 4, "n1", "0"), placed("b", 3, "n1", "0")])
    told = (await shell("gpuslice", "explain", "default/b")).out
    assert told == (
        "Pod default/b is Running on n1.\n"
        "It asks for 3 units of one card.\n"
        "It holds 3 of 15 units of card 0, limit 3226 MiB.\n"
        "Other pods on its card: default/a (4301 MiB).\n"
        "\n"
        "The node's agent has not confirmed the card yet: see that it runs on that node.\n"
    )


async def test_what_holds_a_pods_limits_is_told_where_the_agent_says_so(shell: Shell) -> None:
    shared = node("n1", 15)
    shared["metadata"]["annotations"][NODE_TIER] = "library"
    loose = {ANN_TIERS: '{"main": "watchdog", "gone": "none"}'}
    await shell.has([shared], [placed("a", 4, "n1", "0"), placed("b", 3, "n1", "0", **loose)])
    assert "Its limits are enforced for main by the library." in (await shell("gpuslice", "explain", "a")).out
    assert (
        "Its limits are enforced for main by the watchdog." in (await shell("gpuslice", "explain", "b")).out
    )
    document = json.loads((await shell("gpuslice", "explain", "b", "-o", "json")).out)
    assert document["tiers"] == {"main": "watchdog"}


async def test_a_pod_that_has_ended_holds_nothing_any_more(shell: Shell) -> None:
    ended = placed("b", 3, "n1", "0")
    ended["status"] = {"phase": "Failed", "reason": "Evicted"}
    await shell.has([node("n1", 15)], [placed("a", 4, "n1", "0"), ended])
    assert (await shell("gpuslice", "explain", "b")).out == (
        "Pod default/b is Failed on n1 (Evicted).\n"
        "It asks for 3 units of one card.\n"
        "\n"
        "It has ended and released 3 units of card 0.\n"
    )
    document = json.loads((await shell("gpuslice", "explain", "b", "-o", "json")).out)
    assert document["phase"] == "Failed"
    assert document["reason"] == "Evicted"
    assert not {"gpus", "assigned", "neighbours"} & set(document)


async def test_a_pod_that_is_being_deleted_is_told_that_it_holds_its_card_until_then(shell: Shell) -> None:
    pod = placed("p", 4, "n1", "0", ALIYUN_COM_GPU_MEM_ASSIGNED="true")
    pod["metadata"]["finalizers"] = ["example.com/slow"]
    await shell.has([node("n1", 15)], [pod])
    assert (await shell("kubectl", "delete", "pod", "p", "--wait=false")).code == 0
    told = (await shell("gpuslice", "explain", "p")).out
    assert "It is being deleted, and holds its card until its containers have ended." in told


async def test_a_pod_of_a_dead_node_is_told_so(shell: Shell) -> None:
    dead = node("dead", 15)
    dead["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]
    await shell.has([dead, node("n1", 15)], [placed("a", 4, "dead", "0"), placed("b", 4, "gone", "0")])
    a, b = (await shell("gpuslice", "explain", "a")).out, (await shell("gpuslice", "explain", "b")).out
    assert "Its node dead is not ready: it is unknown whether the pod runs there. It holds its card" in a
    assert "Its node gone no longer exists." in b
    assert "agent has not confirmed" not in a + b


async def test_events_are_shown_and_a_wrong_request_is_named(shell: Shell) -> None:
    await shell.has([node("n1", 8)], [api_pod("p", "7", labels={GPU_COUNT: "2"})])
    event = {
        "metadata": {"name": "e1", "namespace": "default"},
        "involvedObject": {"kind": "Pod", "name": "p", "namespace": "default"},
        "reason": "FailedScheduling",
        "message": "0/1 nodes are available",
        "type": "Warning",
        "lastTimestamp": "2026-01-01T00:00:00Z",
        "count": 3,
    }
    await create_event(shell, event)
    told = (await shell("gpuslice", "explain", "p")).out
    assert 'Problem: container "main": limits["aliyun.com/gpu-mem"] is "7", must be a multiple of 2' in told
    assert re.search(r"  \d+ d( \d+ h)? ago  Warning  FailedScheduling \(x3\)  0/1 nodes are available", told)


async def create_event(shell: Shell, event: dict[str, Any]) -> None:
    from gpuslice.adapters.kube.resources import EVENTS

    async with HttpTransport(Connection(shell.server.url)) as transport:
        await KubeClient(transport).create(EVENTS, {"apiVersion": "v1", "kind": "Event", **event})


async def test_a_pod_that_is_none_of_ours_is_told_so(shell: Shell) -> None:
    await shell.has([node("n1", 8)], [api_pod("web", containers=[{"name": "a", "image": "a"}])])
    assert "gpuslice does not decide where it goes" in (await shell("gpuslice", "explain", "web")).out


async def test_an_unknown_pod_names_the_nearest(shell: Shell) -> None:
    await shell.has([node("n1", 8)], [api_pod("train-0")])
    told = await shell("gpuslice", "explain", "trian-0")
    assert told.code == 1
    assert 'there is no pod "trian-0" in namespace default; did you mean train-0?' in told.err


def asking(name: str, resource: str, amount: str = "4", **spec: Any) -> dict[str, Any]:
    """A pod with a limit of any resource."""
    limits = {"limits": {resource: amount}}
    return api_pod(name, containers=[{"name": "main", "image": "image", "resources": limits}], **spec)


async def test_what_was_meant_in_place_of_a_pod_is_named(shell: Shell) -> None:
    await shell.has([node("n1", 8)], [api_pod("train-0")])
    await create(shell, deployment("serve"))
    for asked, told in {
        "deplyo/serve": 'there is no pod "serve" in namespace deplyo; did you mean deploy or deployment?',
        "serve": 'there is no pod "serve" in namespace default; did you mean deployment/serve?',
        "ns/defualt": 'there is no namespace "defualt"; did you mean default?',
        "nowhere/p": 'there is no pod "p" in namespace nowhere; nor any other pod',
    }.items():
        answer = await shell("gpuslice", "explain", asked)
        assert (answer.code, answer.err) == (1, f"Error: {told}\n")


async def test_a_misspelt_resource_is_told_with_what_was_meant(shell: Shell) -> None:
    await shell.has(
        [node("n1", 8)], [asking("p", "aliyun.com/gpu-mm"), asking("h", "nvidia.com/gpumem", "4096")]
    )
    told = (await shell("gpuslice", "explain", "p")).out
    assert (
        "aliyun.com/gpu-mm is not a resource of gpuslice or NVIDIA: did you mean aliyun.com/gpu-mem?" in told
    )
    assert "asks for no part of a card" not in told
    assert (
        "nvidia.com/gpumem is HAMi's name, and nothing in this cluster translates it"
        in (await shell("gpuslice", "explain", "h")).out
    )


async def test_kais_annotation_is_told_to_need_the_webhook(shell: Shell) -> None:
    pod = api_pod("k", containers=[{"name": "m", "image": "m"}], annotations={"gpu-fraction": "0.5"})
    await shell.has([node("n1", 8)], [pod])
    told = (await shell("gpuslice", "explain", "k")).out
    assert "annotation gpu-fraction is KAI-Scheduler's" in told
    assert "webhook.kai.enabled" in told


def crashed(name: str) -> dict[str, Any]:
    pod = placed(name, 4, "n1", "0", ALIYUN_COM_GPU_MEM_ASSIGNED="true")
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}
    pod["status"]["containerStatuses"] = [
        {
            "name": "main",
            "restartCount": 3,
            "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m"}},
            "lastState": {"terminated": ended},
        }
    ]
    return pod


async def test_a_pod_that_crash_loops_is_told_how_it_ended(shell: Shell) -> None:
    await shell.has([node("n1", 15)], [crashed("p")])
    told = (await shell("gpuslice", "explain", "p")).out
    assert re.search(
        r"restarted 3 times, last ended with exit code 1 \(Error\) \d+ d( \d+ h)? ago, is waiting", told
    )
    assert "is waiting: CrashLoopBackOff: back-off 5m.\n" in told
    assert told.endswith("Its previous log: kubectl -n default logs p --previous\n")


async def set_conditions(shell: Shell, name: str, *conditions: dict[str, Any]) -> None:
    from gpuslice.diagnosis.explain.facts import OWNERS

    async with HttpTransport(Connection(shell.server.url)) as transport:
        status = {"conditions": list(conditions)}
        await KubeClient(transport).patch_status(OWNERS["deployment"], name, status, "default")


def deployment(name: str) -> dict[str, Any]:
    labels = {"app": name}
    template = {
        "metadata": {"labels": labels},
        "spec": {
            "containers": [
                {"name": "main", "image": "image", "resources": {"limits": {"aliyun.com/gpu-mm": "4"}}}
            ]
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"replicas": 2, "selector": {"matchLabels": labels}, "template": template},
    }


async def create(shell: Shell, document: dict[str, Any]) -> None:
    from gpuslice.diagnosis.explain.facts import OWNERS

    async with HttpTransport(Connection(shell.server.url)) as transport:
        await KubeClient(transport).create(OWNERS[document["kind"].lower()], document, "default")


async def test_a_deployment_is_told_pod_by_pod_and_what_waits_at_length(shell: Shell) -> None:
    pods = [placed("serve-a", 4, "n1", "0", ALIYUN_COM_GPU_MEM_ASSIGNED="true"), api_pod("serve-b", "16")]
    for pod in pods:
        pod["metadata"]["labels"] = {"app": "serve"}
    await shell.has([node("n1", 15)], [*pods, api_pod("other", "1")])
    await create(shell, deployment("serve"))
    told = await shell("gpuslice", "explain", "deploy/serve")
    assert told.code == 0, told.err
    assert told.out.startswith("2 pods of deployment default/serve.\n")
    lines = told.out.splitlines()
    assert lines[2].split() == ["POD", "STATUS", "NODE", "CARD", "MEMORY", "WHY"]
    assert lines[3].split() == ["serve-a", "Running", "n1", "0", "4301", "MiB", "-"]
    assert lines[4].startswith("serve-b  Pending  -     -     asks 16 units  It will never fit here")
    assert "Pod default/serve-b is Pending." in told.out
    assert "other" not in told.out
    for written in (
        "deployments/serve",
        "deployment.apps/serve",
    ):  # the latter as `kubectl get -o name` prints it
        document = json.loads((await shell("gpuslice", "explain", written, "-o", "json")).out)
        assert [each["name"] for each in document["pods"]] == ["serve-a", "serve-b"]


async def test_a_deployment_without_pods_tells_why_it_has_none(shell: Shell) -> None:
    denied = {
        "type": "ReplicaFailure",
        "status": "True",
        "reason": "FailedCreate",
        "message": 'admission webhook "gpuslice" denied the request',
    }
    await shell.has([node("n1", 15)], [])
    await create(shell, deployment("serve"))
    await set_conditions(shell, "serve", denied)
    told = (await shell("gpuslice", "explain", "deploy/serve")).out
    assert told.startswith("0 pods of deployment default/serve.\n")
    assert 'FailedCreate: admission webhook "gpuslice" denied the request' in told
    assert "did you mean aliyun.com/gpu-mem?" in told
    missing = await shell("gpuslice", "explain", "job/train")
    assert (missing.code, missing.err) == (
        1,
        'Error: there is no job "train" in namespace default; -n names another namespace\n',
    )


async def test_without_a_name_it_tells_of_the_namespace(shell: Shell) -> None:
    web = api_pod("web", containers=[{"name": "a", "image": "a"}])
    await shell.has([node("n1", 15)], [placed("a", 4, "n1", "0"), asking("typo", "aliyun.com/gpu-mm"), web])
    told = (await shell("gpuslice", "explain")).out
    assert told.startswith("2 pods of namespace default.\n")
    assert "typo" in told
    assert "web" not in told
    assert (await shell("gpuslice", "explain", "ns/kube-system")).out == (
        "0 pods of namespace kube-system.\nno pod of namespace kube-system asks for a part of a card\n"
    )


async def test_pods_of_one_kind_are_told_alike_each_by_its_name(shell: Shell) -> None:
    pods = [
        api_pod("a", "16"),
        api_pod("b", "16"),
        api_pod("c", "9"),
        api_pod("d", "16", nodeSelector={"x": "y"}),
    ]
    await shell.has([node("n1", 15)], [*pods, placed("held", 4, "n1", "0")])
    found = json.loads((await shell("gpuslice", "explain", "-o", "json")).out)["pods"]
    assert [each["name"] for each in found] == ["a", "b", "c", "d", "held"]
    assert found[0]["hints"] == found[1]["hints"]
    assert found[0]["hints"][0].startswith("It will never fit here: it asks for 16 units")
    assert "9 units" not in json.dumps(found[:2])
    assert found[2]["hints"] != found[0]["hints"]
    assert found[3]["classes"] != found[0]["classes"]


async def test_a_namespace_of_claims_is_told_as_any_other(shell: Shell) -> None:
    labels, cards = {"cgpu": "true", "gpuslice.io/mode": "claims"}, (make_card(0, 8),)
    annotations = {NODE_GPUS: encode_cards(cards)}
    pod = api_pod("p", containers=[{"name": "main", "image": "image"}])
    pod["spec"]["resourceClaims"] = [{"name": "gpuslice", "resourceClaimTemplateName": "gpuslice-9"}]
    await shell.has([api_node("n1", 0, 0, annotations=annotations, labels=labels)], [pod])
    told = await shell("gpuslice", "explain")
    assert told.code == 0, told.err
    assert "It asks for 9 units of one card, by claim gpuslice-9." in told.out
    assert rows(told.out) == [["1", "Offers no cards by claims yet", "-", "n1"]]
    assert "Its claim waits for ResourceClaimTemplate default/gpuslice-9" in told.out
