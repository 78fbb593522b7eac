"""``gpuslice doctor``: each fault that it knows is made, found, and told with its cure."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trustme
import yaml

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.objects import ConfigMap, Metadata, Node
from gpuslice.adapters.kube.resources import CONFIG_MAPS, SECRETS, SERVICES
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.core.contract import GPU_COUNT, GPU_MEM
from gpuslice.core.node_sample import sample_size
from gpuslice.diagnosis.doctor.facts import HOOKS, POLICIES, SLICES, Facts, Level
from gpuslice.diagnosis.doctor.scheduler import scheduler_configuration
from tests.builders import api_pod
from tests.contract.test_cli_cluster import Shell, shell
from tests.contract.test_cli_explain import node, placed

__all__ = ["shell"]

Object = dict[str, Any]


def ready_slice(name: str, ready: bool = True) -> Object:
    return {
        "metadata": {"name": f"{name}-x", "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": ["10.0.0.1"], "conditions": {"ready": ready}}],
    }


def configuration(**changes: Any) -> Object:
    """The ConfigMap of a second scheduler; None as a value takes a field out."""
    section = {
        "urlPrefix": "https://extender",
        "enableHTTPS": True,
        "tlsConfig": {"caFile": "/tls/ca.crt", "certFile": "/tls/tls.crt", "keyFile": "/tls/tls.key"},
        "filterVerb": "filter",
        "prioritizeVerb": "prioritize",
        "preemptVerb": "preempt",
        "bindVerb": "bind",
        "nodeCacheCapable": True,
        "ignorable": False,
        "managedResources": [{"name": GPU_MEM, "ignoredByScheduler": False}],
    }
    whole = {
        "kind": "KubeSchedulerConfiguration",
        "percentageOfNodesToScore": 100,
        "profiles": None,
        "extenders": [section],
    }
    for name, value in changes.items():
        (whole if name in whole else section)[name] = value
    return {"metadata": {"name": "scheduler"}, "data": {"config.yaml": yaml.safe_dump(whole)}}


async def put(shell: Shell, *things: tuple[Any, Object]) -> None:
    async with HttpTransport(Connection(shell.server.url)) as transport:
        client = KubeClient(transport)
        for resource, document in things:
            head = {"apiVersion": resource.api_version, "kind": resource.kind}
            await client.create(resource, head | document, "kube-system" if resource.namespaced else "")


async def healthy(shell: Shell, extender: str = "gpushare-schd-extender", **changes: Any) -> None:
    service = {
        "metadata": {"name": extender, "labels": {"component": "gpushare-schd-extender"}},
        "spec": {"ports": [{"port": 12345}], "selector": {"app": "gpushare"}},
    }
    await put(
        shell,
        (SERVICES, service),
        (SLICES, ready_slice(extender, changes.pop("ready", True))),
        (CONFIG_MAPS, configuration(**changes)),
        *((kind, enforced(name)[kind]) for name in ENFORCED for kind in POLICIES),
    )


ENFORCED = ("agent-own-node", "annotations")
"""The chart's policies where claims are not served."""


OURS = {"app.kubernetes.io/name": "gpuslice"}


def enforced(name: str) -> dict[Any, Object]:
    """One of them and its binding, in the least that the API server takes."""
    policy, binding = POLICIES
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]
    spec = {"matchConstraints": {"resourceRules": rules}, "validations": [{"expression": "true"}]}
    bound = {"policyName": f"gpuslice-{name}", "validationActions": ["Deny"]}
    return {
        policy: {"metadata": {"name": f"gpuslice-{name}", "labels": OURS}, "spec": spec},
        binding: {"metadata": {"name": f"gpuslice-{name}"}, "spec": bound},
    }


async def findings(shell: Shell) -> tuple[int, dict[str, Object]]:
    """The exit code, and the findings by where they are."""
    told = await shell("gpuslice", "doctor", "-o", "json")
    assert told.out, told.err
    return told.code, {each["where"]: each for each in json.loads(told.out)["findings"]}


async def test_a_healthy_cluster_has_nothing_to_tell(shell: Shell) -> None:
    await healthy(shell)
    pod = placed("a", 4, "n1", "0", ALIYUN_COM_GPU_MEM_ASSIGNED="true")
    await shell.has([node("n1", 8, 8, labels={"cgpu": "true"})], [pod])
    told = await shell("gpuslice", "doctor")
    assert told.out == "1 node and 1 pod looked at: 0 errors, 0 warnings, 0 notes.\n"
    assert told.code == 0


def endpoints(*pods: Object) -> Object:
    labels = {"kubernetes.io/service-name": "gpuslice-exporter"}
    return {"metadata": {"namespace": "gpu", "name": "x", "labels": labels}, "endpoints": [*pods]}


def labelled(name: str, *cards: int, **labels: str) -> Object:
    return node(
        name, *cards, labels={key.replace("__", ".").replace("_S_", "/"): v for key, v in labels.items()}
    )


def without_resources(made: Object) -> Object:
    for amounts in (made["status"]["capacity"], made["status"]["allocatable"]):
        amounts.pop(GPU_MEM, None)
        amounts.pop(GPU_COUNT, None)
    return made


def with_amounts(made: Object, **amounts: str | None) -> Object:
    names = {"memory": GPU_MEM, "count": GPU_COUNT, "whole": "nvidia.com/gpu"}
    for short, amount in amounts.items():
        for each in (made["status"]["capacity"], made["status"]["allocatable"]):
            each.pop(names[short], None)
            if amount is not None:
                each[names[short]] = amount
    return made


@pytest.mark.parametrize(
    ("made", "level", "what"),
    [
        (with_amounts(labelled("n1", 8), whole="1"), "error", "offers both aliyun.com/gpu-mem (8)"),
        (without_resources(labelled("n1", cgpu="true")), "error", "no device plugin runs there"),
        (without_resources(labelled("n1", ack__node__gpu__schedule="share")), "error", "=share and no"),
        (without_resources(labelled("n1", 8)), "warning", "without label cgpu no device plugin runs there"),
        (with_amounts(labelled("n1", 8), count=None), "warning", "without aliyun.com/gpu-count"),
        (with_amounts(labelled("n1", 8), memory="8192"), "error", "kubelet counts 8192 of"),
        (labelled("n1", 8, cgpu="true", ack__node__gpu__schedule="default"), "error", "labels disagree"),
    ],
)
async def test_a_sick_node_is_told_with_its_cure(shell: Shell, made: Object, level: str, what: str) -> None:
    await healthy(shell)
    await shell.has([made])
    code, found = await findings(shell)
    assert code == 3
    assert found["node n1"]["level"] == level
    assert what in found["node n1"]["what"]
    assert found["node n1"]["fix"]


async def test_a_device_plugin_that_is_not_ready_is_named(shell: Shell) -> None:
    await healthy(shell)
    plugin = api_pod(
        "plugin-x",
        containers=[{"name": "a", "image": "a"}],
        labels={"name": "gpushare-device-plugin-ds"},
        node="n1",
    )
    await shell.has([without_resources(labelled("n1", cgpu="true"))], [plugin])
    _, found = await findings(shell)
    assert "device plugin plugin-x is not ready" in found["node n1"]["what"]


async def test_different_units_in_one_cluster_are_found(shell: Shell) -> None:
    await healthy(shell)
    await shell.has([node("n1", 15), node("n2", 16130)])
    _, found = await findings(shell)
    assert "n1 in GiB, n2 in MiB" in found["nodes n1, n2"]["what"]


async def test_a_pod_that_runs_without_its_devices_is_found(shell: Shell) -> None:
    """Its node's device plugin is there and has not confirmed it: kubelet never asked for its devices."""
    await healthy(shell)
    now = datetime.now(UTC)
    old, young = (f"{now - timedelta(seconds=age):%Y-%m-%dT%H:%M:%SZ}" for age in (90, 5))
    pods = [placed("bare", 1, "n1", "0"), placed("young", 1, "n1", "0")]
    for pod, since in zip(pods, (old, young), strict=True):
        state = {"name": "main", "state": {"running": {"startedAt": since}}}
        pod["status"] = {"phase": "Running", "containerStatuses": [state]}
    plugin = api_pod("plugin", node="n1", labels={"name": "gpushare-device-plugin-ds"})
    plugin["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    await shell.has([node("n1", 8)], [*pods, plugin])
    code, found = await findings(shell)
    assert code == 3
    assert "runs without the aliyun.com/gpu-mem it asks for" in found["pod default/bare"]["what"]
    assert "delete the pod" in found["pod default/bare"]["fix"]
    assert "pod default/young" not in found


async def test_pods_and_cards_that_do_not_agree_are_found(shell: Shell) -> None:
    await healthy(shell)
    pods = [
        placed("a", 6, "n1", "0", ALIYUN_COM_GPU_MEM_ASSIGNED="true"),
        placed("b", 6, "n1", "0", ALIYUN_COM_GPU_MEM_ASSIGNED="false"),
        placed("gone", 1, "n1", "7", ALIYUN_COM_GPU_MEM_ASSIGNED="true"),
        api_pod("nowhere", "1", node="n1"),
        api_pod("wrong", "7", labels={GPU_COUNT: "2"}),
    ]
    await shell.has([node("n1", 8)], pods)
    _, found = await findings(shell)
    assert found["node n1, card 0"]["what"] == "12 units are promised of 8, to default/a, default/b"
    assert "is not confirmed" in found["pod default/b"]["what"]
    assert "card 7, which n1 does not have" in found["pod default/gone"]["what"]
    assert "its card is unknown" in found["pod default/nowhere"]["what"]
    assert "must be a multiple of 2" in found["pod default/wrong"]["what"]
    assert "pod default/a" not in found


@pytest.mark.parametrize(
    ("changes", "level", "what"),
    [
        ({"ignorable": True}, "error", "placed on cards that are full"),
        ({"bindVerb": ""}, "error", "no bindVerb"),
        ({"nodeCacheCapable": False}, "warning", "sends whole nodes"),
        ({"preemptVerb": None}, "note", "picked by the node's sum"),
        (
            {"managedResources": [{"name": GPU_MEM, "ignoredByScheduler": True}]},
            "warning",
            "aliyun.com/gpu-mem ignoredByScheduler: nodes without cards fill",
        ),
    ],
)
async def test_a_scheduler_configuration_that_hurts_is_found(
    shell: Shell, changes: Object, level: str, what: str
) -> None:
    await healthy(shell, **changes)
    await shell.has([node("n1", 8)])
    code, found = await findings(shell)
    section = found["ConfigMap kube-system/scheduler, config.yaml"]
    assert (section["level"], code) == (level, 0 if level == "note" else 3)
    assert what in section["what"]


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"managedResources": [GPU_MEM]}, "$.extenders[0].managedResources[0]"),
        ({"extenders": [f"managedResources: {GPU_MEM}"]}, "$.extenders[0]"),
    ],
)
def test_a_scheduler_configuration_of_another_shape_is_found(changes: Object, place: str) -> None:
    told = configuration(**changes)
    config_map = ConfigMap(Metadata(name="scheduler", namespace="kube-system"), told["data"])
    (finding,) = scheduler_configuration(Facts(config_maps=[config_map]))
    assert (finding.level, finding.where) == (Level.WARNING, "ConfigMap kube-system/scheduler, config.yaml")
    why = f"Expected `object`, got `str` - at `{place}`"
    assert finding.what == f"is no KubeSchedulerConfiguration that can be read: {why}"


async def test_pods_of_a_scheduler_that_asks_nobody_are_found(shell: Shell) -> None:
    await healthy(shell, percentageOfNodesToScore=100)
    pods = [api_pod("astray", "4", schedulerName="theirs"), api_pod("fine", "4")]
    await shell.has([node("n1", 8)], pods)
    _, found = await findings(shell)
    assert "1 pods without a card name it: default/astray" in found["scheduler theirs"]["what"]
    assert "schedulerName default-scheduler" in found["scheduler theirs"]["fix"]


async def test_a_sample_of_the_nodes_is_found(shell: Shell) -> None:
    await healthy(shell, percentageOfNodesToScore=0)
    await shell.has([node(f"n{number}", 8) for number in range(220)])
    _, found = await findings(shell)
    where = found["ConfigMap kube-system/scheduler, config.yaml"]
    assert "the extender sees 107 of 220 nodes" in where["what"]


def judged(**changes: Any) -> list[str]:
    """What is found of a scheduler with this configuration in a cluster of 220 nodes."""
    config_map = ConfigMap(
        Metadata(name="scheduler", namespace="kube-system"), configuration(**changes)["data"]
    )
    nodes = [Node(Metadata(name=f"n{number}")) for number in range(220)]
    return [each.what for each in scheduler_configuration(Facts(config_maps=[config_map], nodes=nodes))]


def test_a_profiles_own_sample_wins() -> None:
    sample = ["the extender sees 107 of 220 nodes: pods wait while cards on the others are free"]
    all_of_them, default = {"percentageOfNodesToScore": 100}, {"percentageOfNodesToScore": 0}
    assert judged(profiles=[all_of_them], percentageOfNodesToScore=None) == []
    assert judged(profiles=[{"schedulerName": "ours"}, default]) == sample
    assert judged(profiles=[{"schedulerName": "ours"}], percentageOfNodesToScore=None) == sample


def test_verbs_that_are_missing_or_misspelt_are_found() -> None:
    missing, unknown = judged(filterVerb=None), judged(prioritizeVerb="priorities")
    assert missing == [
        "the extender has no filterVerb: pods are sent to nodes where no card has room, and wait there"
    ]
    assert unknown == ['prioritizeVerb is "priorities", which the extender does not know']
    assert judged(prioritizeVerb=None) == [
        "the extender has no prioritizeVerb: any of the nodes that filter lets pass is taken"
    ]
    assert judged(bindVerb="/bind") == []


@pytest.mark.parametrize(
    ("nodes", "percentage", "shown"),
    [(99, 0, 99), (100, 0, 100), (1000, 0, 420), (5000, 0, 500), (20000, 0, 1000), (5000, 100, 5000)],
)
def test_the_sample_is_what_kube_scheduler_takes(nodes: int, percentage: int, shown: int) -> None:
    assert sample_size(nodes, percentage) == shown


async def test_an_extender_that_is_away_is_found(shell: Shell) -> None:
    await healthy(shell, ready=False)
    await shell.has([node("n1", 8)])
    _, found = await findings(shell)
    assert "has no ready endpoint" in found["service kube-system/gpushare-schd-extender"]["what"]


async def test_a_cluster_without_anything_says_what_is_missing(shell: Shell) -> None:
    code, found = await findings(shell)
    assert code == 3
    assert "install the chart" in found["service gpushare-schd-extender"]["fix"]
    assert found["cluster"]["level"] == "note"


def hook(bundle: bytes, **fields: Any) -> Object:
    each = {
        "name": "mutate.gpuslice.io",
        "clientConfig": {
            "service": {"namespace": "kube-system", "name": "gpuslice-webhook", "path": "/mutate"},
            "caBundle": base64.b64encode(bundle).decode(),
        },
        "rules": [],
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        **fields,
    }
    return {"metadata": {"name": "gpuslice-mutate"}, "webhooks": [each]}


async def test_a_webhook_that_is_away_or_runs_out_is_found(shell: Shell) -> None:
    await healthy(shell)
    await shell.has([node("n1", 8)])
    authority = trustme.CA()
    short = authority.issue_cert("x", not_after=datetime.now(UTC) + timedelta(days=3))
    secret = {
        "metadata": {"name": "gpuslice-webhook-tls"},
        "data": {"tls.crt": base64.b64encode(short.cert_chain_pems[0].bytes()).decode()},
    }
    await put(shell, (HOOKS[0], hook(authority.cert_pem.bytes(), failurePolicy="Fail")), (SECRETS, secret))
    told = await shell("gpuslice", "doctor")
    assert "service kube-system/gpuslice-webhook has no ready endpoint" in told.out
    assert "failurePolicy is Fail and kube-system is not left out" in told.out
    assert "its certificate runs out on" in told.out
    assert told.code == 3


async def test_a_webhook_that_is_well_is_not_mentioned(shell: Shell) -> None:
    await healthy(shell)
    await shell.has([node("n1", 8)])
    authority = trustme.CA()
    fields = {"failurePolicy": "Ignore"}
    slice_ = ready_slice("gpuslice-webhook")
    await put(shell, (HOOKS[0], hook(authority.cert_pem.bytes(), **fields)), (SLICES, slice_))
    assert await findings(shell) == (0, {})


async def test_cards_out_of_use_are_told_with_the_one_who_took_them_out(shell: Shell) -> None:
    await healthy(shell)
    await shell.has([node("n1", 8, 8, 8)])
    assigned = {"ALIYUN_COM_GPU_MEM_ASSIGNED": "true"}
    data = {"gpus": "0,1,2,x", "agent": "1,2", "reasons": "1: does not answer; 2: Xid 79"}
    await shell.has(
        [], [placed(name, 4, "n1", card, **assigned) for name, card in (("train-0", "1"), ("other", "0"))]
    )
    gone = {"metadata": {"name": "unhealthy-gpu-gone"}, "data": {"gpus": "0"}}
    await put(
        shell,
        (CONFIG_MAPS, {"metadata": {"name": "unhealthy-gpu-n1"}, "data": data}),
        (CONFIG_MAPS, gone),
    )
    told = await shell("gpuslice", "doctor", "-o", "json")
    found = [(each["level"], each["what"]) for each in json.loads(told.out)["findings"]]
    reasons = "1: does not answer; 2: Xid 79"
    assert ("error", f"card 1, 2 of n1 is out of use: {reasons}; on it: default/train-0") in found
    assert ("note", "card 0 of n1 was taken out of use by hand") in found
    assert any(level == "warning" and '"x", must be card indices' in what for level, what in found)
    assert len(found) == 3
