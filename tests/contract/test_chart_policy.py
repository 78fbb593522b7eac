"""What an agent's account may write by the policy that the chart installs, by an implementation of CEL.

A real API server compiles the same expressions; here they run on the objects of an AdmissionReview. The
webhook, which judges where there are no policies, is asked about each of them, too.
"""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
from cel_expr_python import cel

from gpuslice.core import own_node
from gpuslice.core.annotations import PLACEMENT_ANNOTATIONS
from gpuslice.core.contract import (
    CARDS_NAMES,
    CONDITION_PARKED,
    LABEL_GROUP_MIN,
    LABEL_GROUP_NAME,
    LABEL_MIN_TIER,
    NAME_SETS,
    NODE_GPUS,
    NODE_KUBELET_AWAY,
    NODE_LINKS,
    NODE_TIER,
    POD_ANNOTATION_WRITERS,
)
from tests.chart import render

AGENT = "system:serviceaccount:kube-system:gpushare-device-plugin"
NODE_CLAIM = "authentication.kubernetes.io/node-name"
NAME = "gpuslice-agent-own-node"
Object = dict[str, Any]

NODE: Object = {
    "metadata": {"name": "n1", "labels": {"cgpu": "true", "zone": "a"}, "annotations": {"theirs": "x"}},
    "spec": {"podCIDR": "10.0.0.0/24"},
    "status": {"capacity": {"cpu": "8"}, "conditions": [{"type": "Ready", "status": "True"}]},
}
POD: Object = {
    "metadata": {"name": "p", "namespace": "default", "labels": {"app": "a"}, "annotations": {"theirs": "x"}},
    "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "good"}]},
}
RUNS: Object = {**POD, "status": {"phase": "Running", "conditions": []}}
CONFIG: Object = {"metadata": {"name": "unhealthy-gpu-n1", "namespace": "kube-system"}, "data": {"gpus": "0"}}
EVENT: Object = {
    "metadata": {"name": "e", "namespace": "default"},
    "source": {"component": "gpushare-device-plugin", "host": "n1"},
}


@pytest.fixture(scope="module")
def policy(helm: str) -> Object:
    spec: Object = render(helm, "--kube-version", "1.33.0")["ValidatingAdmissionPolicy", NAME]["spec"]
    return spec


def holds(expression: str, variables: dict[str, str], known: Object) -> bool:
    """Whether it is true of the `known`; variables are put in place of their names."""
    while "variables." in expression:
        expression = re.sub(r"variables\.(\w+)", lambda found: f"({variables[found[1]]})", expression)
    environment = cel.NewEnv(variables=dict.fromkeys(known, cel.Type.DYN))
    found = environment.compile(expression).eval(data=known).value()
    assert isinstance(found, bool), (expression, found)
    return found


def changed(original: Object, **paths: Any) -> Object:
    """`original` with the values at dotted paths (``__`` for a dot) in place."""
    found = deepcopy(original)
    for path, value in paths.items():
        *parents, last = path.split("__")
        at = found
        for each in parents:
            at = at[int(each)] if isinstance(at, list) else at.setdefault(each, {})
        at[last] = value
    return found


def denial(
    policy: Object, what: str, old: Object | None, new: Object, *, node: str = "n1", user: str = AGENT
) -> str:
    """The message of the first validation that fails; "" when the request is let through.

    What the webhook says of it before Kubernetes 1.30 is the same.
    """
    resource, _, subresource = what.partition("/")
    request = {
        "resource": {"group": "", "version": "v1", "resource": resource},
        "subResource": subresource,
        "name": new["metadata"]["name"],
        "namespace": new["metadata"].get("namespace", ""),
        "userInfo": {"username": user, "extra": {NODE_CLAIM: [node]} if node else {}},
    }
    known: Object = {"request": request, "object": new, "oldObject": old}
    if not all(holds(each["expression"], {}, known) for each in policy["matchConditions"]):
        return ""
    variables = {each["name"]: each["expression"] for each in policy["variables"]}
    failed = (each for each in policy["validations"] if not holds(each["expression"], variables, known))
    message = next((str(each["message"]) for each in failed), "")
    write = own_node.Write(what, request["namespace"], request["name"], old or {}, new)
    webhooks = own_node.denial(write, node)
    assert bool(webhooks) == bool(message), (webhooks, message)
    return message


def test_what_an_agent_does_is_let_through(policy: Object) -> None:
    placed = {"theirs": "x", **dict.fromkeys(PLACEMENT_ANNOTATIONS, "0")}
    given = changed(POD, metadata__annotations=placed)
    assert denial(policy, "pods", POD, given) == ""
    assert denial(policy, "pods", given, POD) == "", "a withdrawal"
    bare = changed(POD)
    del bare["metadata"]["annotations"]
    assert (
        denial(policy, "pods", bare, changed(POD, metadata__annotations={"ALIYUN_COM_GPU_MEM_IDX": "0"}))
        == ""
    )
    said = dict.fromkeys((NODE_GPUS, NODE_KUBELET_AWAY, NODE_LINKS, NODE_TIER), "")
    noted = changed(NODE, metadata__annotations={"theirs": "x", **said})
    assert denial(policy, "nodes", NODE, noted) == ""
    amounts = {"cpu": "8"}
    for names in NAME_SETS.values():
        amounts |= {names.cards: "2", names.compute: "200"}
    counted = changed(NODE, status__capacity=amounts)
    assert denial(policy, "nodes/status", NODE, counted) == ""
    assert denial(policy, "nodes/status", counted, NODE) == "", "other names, or no cards"
    parked = changed(RUNS, status__conditions=[{"type": CONDITION_PARKED, "status": "True"}])
    assert denial(policy, "pods/status", RUNS, parked) == ""
    assert denial(policy, "pods/status", parked, RUNS) == ""
    assert denial(policy, "events", None, EVENT) == ""
    assert denial(policy, "events", EVENT, changed(EVENT, count=2)) == ""
    stored = changed(EVENT, reportingComponent="", reportingInstance="")
    assert denial(policy, "events", stored, changed(stored, count=2)) == ""
    assert denial(policy, "configmaps", None, CONFIG) == ""
    assert denial(policy, "configmaps", CONFIG, changed(CONFIG, data={"gpus": "0,1"})) == ""


def test_the_way_back_to_whole_cards_may_switch_the_other_plugin(policy: Object) -> None:
    label = "nvidia.com/gpu.deploy.device-plugin"
    old = changed(NODE, metadata__labels={**NODE["metadata"]["labels"], label: "true"})
    new = changed(NODE, metadata__labels={**NODE["metadata"]["labels"], label: "false"})
    assert denial(policy, "nodes", old, new) == ""


KEPT = changed(POD, metadata__finalizers=["stay"], metadata__ownerReferences=[{"uid": "u"}])


@pytest.mark.parametrize(
    ("what", "old", "new", "why"),
    [
        ("pods", POD, changed(POD, spec__containers__0__image="evil"), "spec"),
        ("pods", POD, changed(POD, metadata__labels={"app": "b"}), "labels"),
        ("pods", POD, changed(POD, metadata__finalizers=["stay"]), "finalizers"),
        ("pods", POD, changed(POD, metadata__ownerReferences=[{"uid": "u"}]), "owners"),
        ("pods", KEPT, changed(KEPT, metadata__finalizers=["go"]), "finalizers"),
        ("pods", KEPT, changed(KEPT, metadata__ownerReferences=[]), "owners"),
        ("pods", POD, changed(POD, metadata__annotations={"theirs": "y"}), "annotations"),
        ("pods", POD, changed(POD, metadata__annotations={}), "annotations"),
        ("pods", POD, changed(POD, metadata__annotations={"theirs": "x", "new": "y"}), "annotations"),
        ("nodes", NODE, changed(NODE, spec__unschedulable=True), "spec"),
        ("nodes", NODE, changed(NODE, metadata__labels={"cgpu": "true", "zone": "b"}), "labels"),
        ("nodes", NODE, changed(NODE, metadata__labels={"cgpu": "true"}), "labels"),
        ("nodes/status", NODE, changed(NODE, metadata__labels={"cgpu": "no", "zone": "a"}), "labels"),
        ("pods/status", RUNS, changed(RUNS, status__phase="Failed"), "parked"),
        ("pods/status", RUNS, changed(RUNS, status__hostIP="10.0.0.9"), "parked"),
        ("pods/status", RUNS, changed(RUNS, status__conditions=[{"type": "Ready"}]), "parked"),
        ("nodes/status", NODE, changed(NODE, status__conditions=[]), "amounts only"),
        ("nodes/status", NODE, changed(NODE, status__daemonEndpoints={"kubeletEndpoint": 1}), "amounts only"),
        ("nodes/status", NODE, changed(NODE, status__volumesAttached=[{"name": "v"}]), "amounts only"),
        ("nodes/status", NODE, changed(NODE, status__capacity={"cpu": "80"}), "shared cards"),
        ("nodes/status", NODE, changed(NODE, status__capacity={}), "shared cards"),
        ("nodes/status", NODE, changed(NODE, status__allocatable={"example.com/fpga": "9"}), "shared cards"),
    ],
)
def test_everything_else_of_its_own_is_refused(
    policy: Object, what: str, old: Object, new: Object, why: str
) -> None:
    assert why in denial(policy, what, old, new)


@pytest.mark.parametrize(
    ("what", "old"),
    [
        ("pods", changed(POD, spec__nodeName="n2")),
        ("pods/status", changed(POD, spec__nodeName="n2")),
        ("nodes", changed(NODE, metadata__name="n2")),
        ("nodes/status", changed(NODE, metadata__name="n2")),
        ("configmaps", changed(CONFIG, metadata__name="unhealthy-gpu-n2")),
        ("configmaps", changed(CONFIG, metadata__name="kubeadm-config")),
        ("events", changed(EVENT, source__host="n2")),
        ("events", changed(EVENT, source__component="kubelet")),
        ("events", {"metadata": EVENT["metadata"]}),
        ("events", changed(EVENT, reportingComponent="kubelet")),
        ("events", changed(EVENT, reportingInstance="n2")),
    ],
)
def test_nothing_of_another_node_may_be_written(policy: Object, what: str, old: Object) -> None:
    assert "own node" in denial(policy, what, old, changed(old))


def test_an_event_of_others_does_not_become_ones_own(policy: Object) -> None:
    others = changed(EVENT, source__component="kubelet")
    assert "own node" in denial(policy, "events", others, EVENT)
    assert "own node" in denial(policy, "events", None, others)


def test_a_pod_that_no_node_has_yet_is_nobodys(policy: Object) -> None:
    old = changed(POD)
    del old["spec"]["nodeName"]
    assert "own node" in denial(policy, "pods", old, old)


def test_a_token_without_a_node_may_write_nothing(policy: Object) -> None:
    assert "does not say on which node" in denial(policy, "pods", POD, POD, node="")


def test_others_are_not_concerned(policy: Object) -> None:
    evil = changed(POD, spec__containers__0__image="other")
    assert denial(policy, "pods", POD, evil, user="system:serviceaccount:default:somebody") == ""


ASKING: Object = changed(POD, spec__containers__0__resources={"limits": {"aliyun.com/gpu-mem": "4"}})


def is_asked_about(helm: str, old: Object | None, new: Object, verb: str = "validate") -> bool:
    """Whether the API server calls the webhook for this write."""
    kinds = {"mutate": "MutatingWebhookConfiguration", "validate": "ValidatingWebhookConfiguration"}
    (hook,) = render(helm)[kinds[verb], f"gpuslice-{verb}"]["webhooks"]
    operation = "CREATE" if old is None else "UPDATE"
    known = {"request": {"operation": operation}, "object": new, "oldObject": old}
    matches = operation in hook["rules"][0]["operations"]
    return matches and all(holds(each["expression"], {}, known) for each in hook["matchConditions"])


def test_the_webhook_is_asked_about_new_pods_that_ask_for_cards(helm: str) -> None:
    for verb in ("mutate", "validate"):
        assert is_asked_about(helm, None, ASKING, verb)
        assert not is_asked_about(helm, None, POD, verb)


def test_the_webhook_is_asked_about_containers_that_are_added_to_pods_with_cards(helm: str) -> None:
    (hook,) = render(helm)["MutatingWebhookConfiguration", "gpuslice-mutate"]["webhooks"]
    assert [(each["resources"], each["operations"]) for each in hook["rules"]] == [
        (["pods"], ["CREATE"]),
        (["pods/ephemeralcontainers"], ["UPDATE"]),
    ]
    added = changed(ASKING, spec__ephemeralContainers=[{"name": "look", "image": "x"}])
    known = {"request": {"operation": "UPDATE"}, "object": added, "oldObject": ASKING}
    assert all(holds(each["expression"], {}, known) for each in hook["matchConditions"])


def test_of_pods_that_are_there_the_webhook_is_asked_only_about_what_it_reads(helm: str) -> None:
    for kind, names in (
        ("labels", (*CARDS_NAMES, LABEL_MIN_TIER, LABEL_GROUP_NAME, LABEL_GROUP_MIN)),
        ("annotations", POD_ANNOTATION_WRITERS),
    ):
        bare = deepcopy(ASKING)
        del bare["metadata"][kind]
        for name in names:
            given = changed(ASKING, **{f"metadata__{kind}": {name: ""}})
            other = changed(ASKING, **{f"metadata__{kind}": {name: "1"}})
            for old, new in ((ASKING, given), (given, ASKING), (given, other), (bare, given), (given, bare)):
                assert is_asked_about(helm, old, new), (name, old, new)
            assert not is_asked_about(helm, given, given)
        assert not is_asked_about(helm, bare, ASKING)
    noted = changed(ASKING, metadata__annotations={"theirs": "y"}, metadata__labels={"app": "b"})
    assert not is_asked_about(helm, ASKING, noted)
    assert not is_asked_about(helm, ASKING, changed(ASKING, spec__containers__0__image="other"))
    assert not is_asked_about(helm, POD, changed(POD, metadata__labels={LABEL_MIN_TIER: "driver"}))


def test_the_policy_is_there_where_the_api_server_knows_it(helm: str) -> None:
    kind = ("ValidatingAdmissionPolicy", NAME)
    binding = render(helm, "--kube-version", "1.30.0")["ValidatingAdmissionPolicyBinding", NAME]["spec"]
    assert binding == {"policyName": NAME, "validationActions": ["Deny"]}
    assert kind not in render(helm, "--kube-version", "1.29.9")
    assert kind not in render(helm, "--set", "devicePlugin.ownNodeOnly=false")
    assert kind in render(helm, "--kube-version", "1.29.9", "--set", "devicePlugin.ownNodeOnly=true")
