"""Who writes what gpuslice records of a pod: the policy, by an implementation of CEL, and the webhook.

A real API server says the same of the policy in ``tests/e2e/test_annotations_policy.py``.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpuslice.adapters.wire.review import POD_PARTS, decode_review
from gpuslice.apps.webhook.reviews import Reviewer
from gpuslice.core.admission import AdmissionRules
from gpuslice.core.contract import ANN_LATENCY_CLASS, POD_ANNOTATION_WRITERS
from tests.builders import api_pod
from tests.chart import render
from tests.contract.test_chart_policy import AGENT, holds
from tests.unit.admission_rig import mutated, review

EXTENDER = "system:serviceaccount:kube-system:gpushare-schd-extender"
PROCESSES = (EXTENDER, AGENT)
OTHERS = ("tenant", "namespace-admin", "system:serviceaccount:kube-system:replicaset-controller")
NAMES = sorted(POD_ANNOTATION_WRITERS)
RULES = AdmissionRules(writers=frozenset(PROCESSES))
Object = dict[str, Any]
LIVES: dict[str, Object] = {
    "waiting": {},
    "bound": {"spec": {"nodeName": "n1"}},
    "running": {"spec": {"nodeName": "n1"}, "status": {"phase": "Running"}},
    "ended": {"spec": {"nodeName": "n1"}, "status": {"phase": "Failed"}},
    "ending": {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}},
}


def pod(life: str = "waiting", memory: str | None = "4", **annotations: str) -> Object:
    made = api_pod("p", memory, annotations=annotations)
    for part, values in LIVES[life].items():
        made.setdefault(part, {}).update(values)
    return made


def spec_of(helm: str, kind: str, name: str, *arguments: str) -> Any:
    return render(helm, "--kube-version", "1.33.0", *arguments)[kind, name]


class Policy:
    def __init__(self, helm: str) -> None:
        self.spec = spec_of(helm, "ValidatingAdmissionPolicy", "gpuslice-annotations")["spec"]

    def denies(self, user: str, old: Object | None, new: Object, groups: tuple[str, ...] = ()) -> bool:
        request = {"userInfo": {"username": user, "groups": list(groups)}}
        known = {"request": request, "object": new, "oldObject": old}
        return all(holds(each["expression"], {}, known) for each in self.spec["matchConditions"])


@pytest.fixture(scope="module")
def policy(helm: str) -> Policy:
    return Policy(helm)


@pytest.mark.parametrize("name", NAMES)
def test_a_record_is_nobody_elses_to_write(policy: Policy, name: str) -> None:
    bare: dict[str, str] = {}
    recorded, other = {name: "x"}, {name: "y"}
    for user in OTHERS:
        assert policy.denies(user, None, pod(**recorded))
        assert not policy.denies(user, None, pod(**{ANN_LATENCY_CLASS: "interactive"}))
        for life in LIVES:
            for before, after in ((bare, recorded), (recorded, other), (recorded, bare)):
                assert policy.denies(user, pod(life, **before), pod(life, **after))
            assert not policy.denies(user, pod(life, **recorded), pod(life, **recorded, theirs="1"))
    binding = {"metadata": {"name": "p", "annotations": recorded}, "target": {"name": "n1"}}
    assert policy.denies("tenant", None, binding)
    for user, groups in ((EXTENDER, ()), (AGENT, ()), ("root", ("system:masters",))):
        assert not policy.denies(user, None, binding, groups)
        assert not policy.denies(user, pod(), pod(**recorded), groups)


def test_each_way_to_write_a_pod_is_looked_at(helm: str, policy: Policy) -> None:
    looked_at = {
        (resource, operation)
        for rule in policy.spec["matchConstraints"]["resourceRules"]
        for resource in rule["resources"]
        for operation in rule["operations"]
    }
    parts = {f"pods/{part}" if part else "pods" for part in POD_PARTS}
    wanted = {("pods", "CREATE"), *((part, "UPDATE") for part in parts)}
    assert looked_at == wanted | {("pods/binding", "CREATE"), ("bindings", "CREATE")}
    hook = spec_of(helm, "ValidatingWebhookConfiguration", "gpuslice-validate", "--set=webhook.enabled=true")
    rules = hook["webhooks"][0]["rules"]
    assert {(part, op) for rule in rules for part in rule["resources"] for op in rule["operations"]} == wanted


def validated(new: Object, old: Object | None, part: str, user: str) -> str:
    body = msgspec.json.decode(review(new, "UPDATE" if old else "CREATE", old, user))
    body["request"]["subResource"] = part
    response = Reviewer(RULES).validate(decode_review(msgspec.json.encode(body)))["response"]
    return "" if response["allowed"] else str(response["status"]["message"])


@pytest.mark.parametrize("memory", ["4", None], ids=["asks for a card", "asks for none"])
@pytest.mark.parametrize("name", NAMES)
def test_the_webhook_says_the_same(name: str, memory: str | None) -> None:
    recorded = {name: "x"}
    assert name not in (mutated(pod("waiting", memory, **recorded))["metadata"].get("annotations") or {})
    for user in OTHERS:
        assert f'"{name}"' in validated(pod("waiting", memory, **recorded), None, "", user)
        for life in LIVES:
            for part in POD_PARTS:
                for before, after in (({}, recorded), (recorded, {name: "y"}), (recorded, {})):
                    said = validated(pod(life, memory, **after), pod(life, memory, **before), part, user)
                    assert "may be changed only by" in said
                same = validated(pod(life, memory, **recorded), pod(life, memory, **recorded), part, user)
                assert same == ""
    for user in PROCESSES:
        assert validated(pod("bound", memory, **recorded), pod("bound", memory), "", user) == ""


def test_the_api_server_calls_the_webhook_for_such_a_change_alone(helm: str) -> None:
    hook = spec_of(helm, "ValidatingWebhookConfiguration", "gpuslice-validate", "--set=webhook.enabled=true")
    conditions = hook["webhooks"][0]["matchConditions"]

    def called(old: Object | None, new: Object, part: str = "") -> bool:
        request = {"subResource": part, "operation": "CREATE" if old is None else "UPDATE"}
        known = {"request": request, "object": new, "oldObject": old}
        return all(holds(each["expression"], {}, known) for each in conditions)

    idle = pod(memory=None)
    assert called(None, pod()), "it asks for a card"
    assert not called(None, idle)
    for name in NAMES:
        recorded = pod(memory=None, **{name: "x"})
        assert called(None, recorded)
        for part in POD_PARTS:
            assert called(idle, recorded, part)
            assert called(recorded, idle, part)
    for part in POD_PARTS - {""}:
        assert not called(pod(), pod("running"), part), "what kubelet writes of every pod"
