"""Admission policies of the API server: what their expressions see, who may write, what is denied."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_wire import PODS, Wire, make_pod

from simcluster.cluster.cel import CelError, evaluate
from simcluster.cluster.request import Request
from simcluster.cluster.users import ADMINISTRATOR, token_of, user_of

ADMISSION = "/apis/admissionregistration.k8s.io/v1"


def add_policy(wire: Wire, kind: str = "Validating", *, action: Any = None, **spec: Any) -> None:
    """A policy for pods with its binding."""
    plural = f"{kind.lower()}admissionpolicies"
    rule = {
        "apiGroups": [""],
        "apiVersions": ["v1"],
        "resources": ["pods", "pods/binding"],
        "operations": ["CREATE", "UPDATE"],
    }
    policy = {"matchConstraints": {"resourceRules": [rule]}, **spec}
    wire.make(f"{ADMISSION}/{plural}", {"metadata": {"name": "rule"}, "spec": policy})
    binding: dict[str, Any] = {"policyName": "rule"}
    if kind == "Validating":
        binding["validationActions"] = [action or "Deny"]
    wire.make(
        f"{ADMISSION}/{kind.lower()}admissionpolicybindings", {"metadata": {"name": "b"}, "spec": binding}
    )


def test_a_pod_that_no_validation_holds_for_is_denied_with_its_message() -> None:
    wire = Wire()
    holds = "has(object.metadata.labels) && 'team' in object.metadata.labels"
    add_policy(
        wire, validations=[{"expression": holds, "messageExpression": "'no team: ' + object.metadata.name"}]
    )
    status, told = wire.call("POST", PODS, make_pod("a"))
    assert (status, told["reason"]) == (422, "Invalid")
    said = "ValidatingAdmissionPolicy 'rule' with binding 'b' denied request: no team: a"
    assert told["message"] == f'pods "a" is forbidden: {said}'
    assert wire.call("POST", PODS, make_pod("a", labels={"team": "x"}))[0] == 201


@pytest.mark.parametrize("action", ["Warn", "Audit"])
def test_a_binding_that_does_not_deny_lets_through(action: str) -> None:
    wire = Wire()
    add_policy(wire, validations=[{"expression": "false"}], action=action)
    assert wire.call("POST", PODS, make_pod("a"))[0] == 201


def test_conditions_choose_and_variables_are_told_apart() -> None:
    wire = Wire()
    add_policy(
        wire,
        matchConditions=[{"name": "c", "expression": "object.metadata.name.startsWith('x')"}],
        variables=[
            {"name": "none", "expression": "object.spec.nothing"},
            {"name": "images", "expression": "object.spec.containers.map(c, c.image)"},
        ],
        validations=[{"expression": "!('bad' in variables.images)", "message": "a bad image"}],
    )
    bad = [{"name": "c", "image": "bad"}]
    assert wire.call("POST", PODS, make_pod("a", containers=bad))[0] == 201
    assert "a bad image" in wire.call("POST", PODS, make_pod("x", containers=bad))[1]["message"]
    assert wire.call("POST", PODS, make_pod("y"))[0] == 201


@pytest.mark.parametrize(("failure", "status"), [("Fail", 422), ("Ignore", 201)])
def test_an_expression_without_a_value_fails_as_the_policy_says(failure: str, status: int) -> None:
    wire = Wire()
    add_policy(wire, failurePolicy=failure, validations=[{"expression": "object.spec.nothing == 1"}])
    assert wire.call("POST", PODS, make_pod("a"))[0] == status


def test_a_policy_that_does_not_compile_is_not_taken() -> None:
    wire = Wire()
    spec = {"matchConstraints": {}, "validations": [{"expression": "a b"}]}
    policies = f"{ADMISSION}/validatingadmissionpolicies"
    status, told = wire.call("POST", policies, {"metadata": {"name": "rule"}, "spec": spec})
    assert status == 422
    assert "spec.validations[0].expression" in told["message"]


def test_a_mutating_policy_patches_what_is_created() -> None:
    wire = Wire()
    expression = (
        "[JSONPatch{op: 'add', path: '/metadata/labels/' + jsonpatch.escapeKey('a/b'), value: 'op'}]"
        " + object.spec.containers.transformList(i, c, JSONPatch{op: 'replace',"
        " path: '/spec/containers/' + string(i) + '/image', value: c.image + '-' + string(i)})"
    )
    add_policy(
        wire,
        "Mutating",
        reinvocationPolicy="Never",
        mutations=[{"patchType": "JSONPatch", "jsonPatch": {"expression": expression}}],
    )
    made = wire.make(PODS, make_pod("a", labels={"x": "y"}))
    assert made["metadata"]["labels"] == {"x": "y", "a/b": "op"}
    assert made["spec"]["containers"][0]["image"] == "x:1-0"


def test_policies_see_who_writes_and_from_which_node() -> None:
    wire = Wire()
    account = "system:serviceaccount:kube-system:agent"
    node = "request.userInfo.extra['authentication.kubernetes.io/node-name'][0]"
    add_policy(
        wire,
        matchConditions=[{"name": "c", "expression": f"request.userInfo.username == '{account}'"}],
        validations=[{"expression": f"{node} == 'n1'"}],
    )
    headers = {"authorization": f"Bearer {token_of('kube-system', 'agent', 'p', 'n2')}"}
    body = b'{"metadata": {"name": "a"}, "spec": {"containers": [{"name": "c", "image": "x"}]}}'
    assert wire.cluster.handle(Request("POST", PODS, {}, headers, body)).status == 422
    headers = {"authorization": f"Bearer {token_of('kube-system', 'agent', 'p', 'n1')}"}
    assert wire.cluster.handle(Request("POST", PODS, {}, headers, body)).status == 201


def test_a_binding_is_reviewed_as_what_it_is() -> None:
    wire = Wire()
    add_policy(
        wire, validations=[{"expression": "!has(request.subResource) || request.subResource != 'binding'"}]
    )
    if wire.call("POST", PODS, make_pod("a"))[0] != 201:
        pytest.fail("a pod is no binding")
    bound = {"metadata": {"name": "a"}, "target": {"name": "n1"}}
    assert wire.call("POST", f"{PODS}/a/binding", bound)[0] == 422
    assert "nodeName" not in wire.get(f"{PODS}/a")["spec"]


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({}, "system:admin"),
        ({"authorization": "Bearer whoever"}, "system:admin"),
        ({"authorization": f"Bearer {token_of('a', 'b')}"}, "system:serviceaccount:a:b"),
        ({"impersonate-user": "system:serviceaccount:a:b"}, "system:serviceaccount:a:b"),
        ({"impersonate-user": "somebody"}, "somebody"),
    ],
)
def test_a_request_is_its_users(headers: dict[str, str], name: str) -> None:
    user = user_of(Request("GET", "/", {}, headers))
    assert user["username"] == name
    assert ("system:masters" in user["groups"]) == (user == ADMINISTRATOR)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("quantity('1500m').asApproximateFloat()", 1.5),
        ("quantity('2Gi').asInteger()", 2 << 30),
        ("quantity('1.5').isInteger()", False),
        ("isQuantity('4x')", False),
        ("[3, 4].sum() + [1, 9, 2].max()", 16),
        ("{'a': [1, {'b': null}]}", {"a": [1, {"b": None}]}),
        ("['b', 'a'].join('/')", "b/a"),
    ],
)
def test_the_functions_that_kubernetes_adds(expression: str, value: object) -> None:
    assert evaluate(expression, {}) == value


def test_what_has_no_value_is_an_error() -> None:
    with pytest.raises(CelError, match="nothing"):
        evaluate("object.nothing", {"object": {}})
