"""``gpuslice doctor`` about an installation: what `helm test` tells who installs the chart."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.objects import Node
from gpuslice.adapters.kube.resources import CONFIG_MAPS, NODES, SERVICES
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.apps.cli.doctor_answers import answers, places_of
from gpuslice.core.contract import GPU_MEM
from gpuslice.diagnosis.doctor.facts import SLICES, Facts, Level
from simcluster.cluster.faults import Fault
from tests.builders import api_pod
from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_doctor import (
    configuration,
    endpoints,
    findings,
    healthy,
    labelled,
    put,
    ready_slice,
    without_resources,
)
from tests.contract.test_cli_explain import node

__all__ = ["shell"]

Object = dict[str, Any]
EXPORTER = "http://gpuslice-exporter.gpu.svc:9400/readyz"


def plugin(name: str, *, ready: bool = True, waiting: Object | None = None, restarts: int = 0) -> Object:
    """A pod of the device plugin on node n1."""
    labels = {"name": "gpushare-device-plugin-ds"}
    made = api_pod(name, containers=[{"name": "a", "image": "a"}], labels=labels, node="n1")
    made["status"] = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": str(ready)}],
        "containerStatuses": [
            {"name": "a", "restartCount": restarts, "state": {"waiting": waiting} if waiting else {}}
        ],
    }
    return made


@pytest.mark.parametrize("ready", [True, False])
async def test_an_extender_by_another_name_is_known_by_that(shell: Shell, ready: bool) -> None:
    """As the chart has it with fullnameOverride."""
    await healthy(shell, "own-schd-extender", ready=ready)
    await shell.has([node("n1", 8)])
    _, found = await findings(shell)
    told = {where: each["fix"] for where, each in found.items() if where.startswith("service")}
    fix = "kubectl -n kube-system logs deployment/own-schd-extender; its /readyz says what it waits for"
    assert told == ({} if ready else {"service kube-system/own-schd-extender": fix})


async def test_a_second_installation_is_one_too_many(shell: Shell) -> None:
    await healthy(shell)
    labels = {"component": "gpushare-schd-extender"}
    second = {"metadata": {"name": "own-schd-extender", "labels": labels}, "spec": {"ports": [{"port": 1}]}}
    await put(shell, (SERVICES, second), (SLICES, ready_slice("own-schd-extender", True)))
    await shell.has([node("n1", 8)])
    _, found = await findings(shell)
    what = found["service kube-system/own-schd-extender"]["what"]
    assert what.startswith("is of another installation than kube-system/gpushare-schd-extender")


PULLING = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "a"'}


async def test_a_device_plugin_that_cannot_start_is_told_with_the_reason(shell: Shell) -> None:
    await healthy(shell)
    await shell.has(
        [without_resources(labelled("n1", cgpu="true"))], [plugin("x", ready=False, waiting=PULLING)]
    )
    _, found = await findings(shell)
    assert 'x is not ready there: ImagePullBackOff: Back-off pulling image "a"' in found["node n1"]["what"]
    assert found["node n1"]["fix"] == "kubectl -n default describe pod x"


async def test_of_a_device_plugin_that_falls_the_log_is_shown(shell: Shell) -> None:
    await healthy(shell)
    falling = plugin("x", ready=False, waiting={"reason": "CrashLoopBackOff"}, restarts=3)
    await shell.has([without_resources(labelled("n1", cgpu="true"))], [falling])
    _, found = await findings(shell)
    assert "x is not ready there: CrashLoopBackOff" in found["node n1"]["what"]
    assert found["node n1"]["fix"] == "kubectl -n default logs x --previous"


async def test_an_update_that_does_not_go_on_is_found(shell: Shell) -> None:
    """The agent of before serves, so the node offers its cards; the next one never starts."""
    await healthy(shell)
    pods = [plugin("next", ready=False, waiting=PULLING), plugin("serving")]
    await shell.has([node("n1", 8, labels={"cgpu": "true"})], pods)
    _, found = await findings(shell)
    stuck = found["pod default/next"]
    assert stuck["level"] == "warning"
    assert "beside serving" in stuck["what"]
    assert "ImagePullBackOff" in stuck["what"]


async def test_an_update_on_its_way_is_nothing_to_tell(shell: Shell) -> None:
    await healthy(shell)
    pods = [plugin("next", ready=False, waiting={"reason": "ContainerCreating"}), plugin("serving")]
    await shell.has([node("n1", 8, labels={"cgpu": "true"})], pods)
    assert await findings(shell) == (0, {})


async def test_a_labelled_node_is_not_told_to_be_labelled(shell: Shell) -> None:
    await healthy(shell)
    await shell.has([without_resources(labelled("n1", cgpu="true"))], [plugin("x", ready=False)])
    _, found = await findings(shell)
    assert list(found) == ["node n1"]


@pytest.mark.parametrize("label", ["ack.node.gpu.schedule=default", "gpuslice.io/mode=exclusive"])
async def test_a_node_of_whole_cards_by_another_label_is_not_missed(shell: Shell, label: str) -> None:
    await healthy(shell)
    name, _, value = label.partition("=")
    bare = node("n1", 8, labels={"cgpu": "true", name: value})
    bare["status"]["allocatable"] = {GPU_MEM: "0"}  # as kubelet leaves it
    await shell.has([bare, node("n2", 8, labels={"cgpu": "true"})], [plugin("x")])
    _, found = await findings(shell)
    assert "out of use" not in str(found)
    assert ("labels disagree" in str(found)) == (value == "default")


async def test_what_is_still_held_on_a_node_of_whole_cards_is_a_note(shell: Shell) -> None:
    await healthy(shell)
    ending = node("n1", 8, labels={"cgpu": "true", "gpuslice.io/mode": "exclusive"})
    ending["status"]["allocatable"] = {GPU_MEM: "4"}
    await shell.has([ending, node("n2", 8, labels={"cgpu": "true"})], [plugin("x")])
    _, found = await findings(shell)
    assert list(found) == ["node n1"]
    assert found["node n1"]["level"] == "note"
    assert "still offers 4 aliyun.com/gpu-mem" in found["node n1"]["what"]


@pytest.mark.parametrize(("flags", "level", "code"), [((), "note", 0), (("--want-cards",), "error", 3)])
async def test_no_node_that_shares_is_an_error_where_cards_are_wanted(
    shell: Shell, flags: tuple[str, ...], level: str, code: int
) -> None:
    await healthy(shell)
    await shell.has([node("n1")])
    told = await shell("gpuslice", "doctor", "-o", "json", "--fail-on=error", *flags)
    (found,) = json.loads(told.out)["findings"]
    assert (told.code, found["level"], found["where"]) == (code, level, "cluster")
    assert found["what"] == "no node is labelled cgpu=true, so none offers parts of its cards"
    assert found["fix"].startswith(
        "kubectl label node NODE --overwrite cgpu=true, where NODE is one with cards"
    )
    assert ("test.wantCards=false" in found["fix"]) == bool(flags)


async def test_of_nodes_to_label_one_that_gives_out_whole_cards_is_named(shell: Shell) -> None:
    await healthy(shell)
    whole = node("n2")
    whole["status"]["capacity"]["nvidia.com/gpu"] = "2"
    await shell.has([node("n1"), whole])
    _, found = await findings(shell)
    assert found["cluster"]["fix"] == "kubectl label node n2 --overwrite cgpu=true, which has cards"


# -- services ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("labels", "level"), [({}, Level.NOTE), ({"cgpu": "true"}, Level.ERROR)])
def test_an_exporter_without_pods_is_missed_where_nodes_share(labels: dict[str, str], level: Level) -> None:
    """It runs on nodes that share cards; before the first is labelled there is none."""
    nodes = [msgspec.convert(node("n1", 8, labels=labels), Node)]
    (finding,) = answers(Facts(nodes=nodes, slices=[endpoints()]), [EXPORTER])
    assert (finding.level, finding.where, finding.what) == (level, EXPORTER, "has no pod behind it")


@pytest.mark.parametrize("slices", [[endpoints({"addresses": ["10.0.0.1"]})], []])
def test_a_service_of_which_nothing_is_known_is_asked(slices: list[Object]) -> None:
    assert places_of([EXPORTER]) == [("gpu", "gpuslice-exporter")]
    (finding,) = answers(Facts(slices=slices), [EXPORTER])
    assert (finding.level, finding.where) == (Level.ERROR, EXPORTER)
    assert finding.what.startswith("does not answer: ")


def test_a_webhook_without_pods_is_an_error_where_it_must_answer() -> None:
    url = "https://gpuslice-webhook.gpu.svc/readyz"
    service = {"namespace": "gpu", "name": "gpuslice-webhook"}
    hook = {"metadata": {"name": "gpuslice-mutate"}, "webhooks": [{"clientConfig": {"service": service}}]}
    empty = {
        "metadata": {"namespace": "gpu", "labels": {"kubernetes.io/service-name": "gpuslice-webhook"}},
        "endpoints": [],
    }
    (finding,) = answers(Facts(hooks=[hook], slices=[empty]), [url])
    assert (finding.level, finding.what) == (Level.ERROR, "has no pod behind it")


def test_an_extender_without_pods_is_told_once() -> None:
    """By the check of the extender itself."""
    url = "http://gpushare-schd-extender.gpu.svc:12345/readyz"
    assert places_of([url]) == [("gpu", "gpushare-schd-extender")]
    labels = {"kubernetes.io/service-name": "gpushare-schd-extender"}
    facts = Facts(
        services=[{"metadata": {"namespace": "gpu", "name": "gpushare-schd-extender"}}],
        slices=[{"metadata": {"namespace": "gpu", "labels": labels}, "endpoints": []}],
    )
    assert list(answers(facts, [url])) == []


SECOND = {"app.kubernetes.io/name": "gpuslice"}


@pytest.mark.parametrize("ready", [True, False])
async def test_a_second_scheduler_that_does_not_run_is_found(shell: Shell, ready: bool) -> None:
    """Nothing else would tell: no event is written about a pod whose scheduler is away."""
    await healthy(shell)
    second = configuration()
    second["metadata"] = {"name": "gpuslice-scheduler", "labels": SECOND}
    await put(shell, (CONFIG_MAPS, second))
    pod = api_pod("s", containers=[{"name": "a", "image": "a"}], labels={"component": "gpuslice-scheduler"})
    pod["metadata"]["namespace"] = "kube-system"
    pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]}
    await shell.has([node("n1", 8)], [pod])
    told = await findings(shell)
    if ready:
        assert told == (0, {})
    else:
        finding = told[1]["scheduler kube-system/gpuslice-scheduler"]
        assert finding["level"] == "error"
        assert "has no ready pod" in finding["what"]


@pytest.mark.parametrize(("runs_as_pod", "level"), [(True, "error"), (False, "warning")])
async def test_a_kube_scheduler_that_cannot_be_seen_is_no_error(
    shell: Shell, runs_as_pod: bool, level: str
) -> None:
    """k3s and others run it without a pod, with a file on the host: it may well call the extender."""
    await healthy(shell, managedResources=[])  # another scheduler's
    pods = []
    if runs_as_pod:
        pod = api_pod("s", containers=[{"name": "a", "image": "a"}], labels={"component": "kube-scheduler"})
        pod["metadata"]["namespace"] = "kube-system"
        pods = [pod]
    await shell.has([node("n1", 8)], pods)
    told = await shell("gpuslice", "doctor", "-o", "json", "--fail-on=error")
    (found,) = json.loads(told.out)["findings"]
    assert (found["where"], found["level"]) == ("kube-scheduler", level)
    assert told.code == (3 if runs_as_pod else 0)
    assert ("cannot be read" in found["what"]) == (not runs_as_pod)


# -- patience ----------------------------------------------------------------------------------------------


async def test_with_patience_it_looks_again_until_nothing_is_wrong(shell: Shell) -> None:
    """As right after the installation: the label is there, and kubelet has not told of the cards yet."""
    await healthy(shell)
    await shell.has([without_resources(labelled("n1", cgpu="true"))], [plugin("x")])
    first_look = Fault(path="/api/v1/nodes", times=1)
    shell.server.cluster.faults.add(first_look)
    looking = asyncio.create_task(shell("gpuslice", "doctor", "--patience-s=25"))
    while first_look.times:  # noqa: ASYNC110 - what is awaited happens in the server
        await asyncio.sleep(0.01)
    async with HttpTransport(Connection(shell.server.url)) as transport:
        status = node("n1", 8)["status"]
        await KubeClient(transport).patch_status(NODES, "n1", status)
    told = await looking
    assert (told.code, told.out) == (0, "1 node and 1 pod looked at: 0 errors, 0 warnings, 0 notes.\n")


async def test_patience_ends(shell: Shell) -> None:
    await healthy(shell, ready=False)
    await shell.has([node("n1", 8)])
    told = await shell("gpuslice", "doctor", "--patience-s=0.1")
    assert told.code == 3
    assert told.out.count("has no ready endpoint") == 1
