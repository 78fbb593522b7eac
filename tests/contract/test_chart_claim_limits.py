"""How much one claim may ask for by its namespace's labels: the chart's policy, by an implementation of CEL.

Kubernetes' own additions to CEL that it uses, `quantity`, `sum` and `max`, are played here; a real API server
judges them in tests/e2e.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from cel_expr_python import cel

from gpuslice.core.claim_shape import claim_shape, template_spec
from gpuslice.core.contract import CLAIM_CLASS, LABEL_CLAIM_COMPUTE, LABEL_CLAIM_MEMORY
from gpuslice.core.quantity import whole_number
from tests.chart import render

NAME = "gpuslice-claim-limits"
LIMITS = {LABEL_CLAIM_MEMORY: "8Gi", LABEL_CLAIM_COMPUTE: "50"}
Object = dict[str, Any]
LIST = cel.Type.List(cel.Type.INT)


def function(
    name: str, result: cel.Type, parameter: cel.Type, played: Any, *, member: bool = True
) -> cel.FunctionDecl:
    overload = cel.Overload(
        f"{name}_of", return_type=result, parameters=[parameter], is_member=member, impl=played
    )
    return cel.FunctionDecl(name, [overload])


FUNCTIONS = [
    function(
        "quantity",
        cel.Type.DOUBLE,
        cel.Type.STRING,
        lambda text: float(whole_number(text) or 0),
        member=False,
    ),
    function("asApproximateFloat", cel.Type.DOUBLE, cel.Type.DOUBLE, lambda number: number),
    function("sum", cel.Type.INT, LIST, sum),
    function("max", cel.Type.INT, LIST, max),
]


@pytest.fixture(scope="module")
def policy(helm: str) -> Object:
    objects = render(helm, "--set=dra.enabled=true", "--kube-version=1.36.0")
    assert objects["ValidatingAdmissionPolicyBinding", NAME]["spec"]["policyName"] == NAME
    spec: Object = objects["ValidatingAdmissionPolicy", NAME]["spec"]
    return spec


def value(policy: Object, expression: str, known: Object) -> Any:
    variables = {each["name"]: each["expression"] for each in policy["variables"]}
    while "variables." in expression:
        expression = re.sub(r"variables\.(\w+)", lambda found: f"({variables[found[1]]})", expression)
    environment = cel.NewEnv(variables=dict.fromkeys(known, cel.Type.DYN), functions=FUNCTIONS)
    return environment.compile(expression).eval(data=known).value()


def denial(policy: Object, *requests: Object, labels: dict[str, str] | None = None) -> str:
    """What the first validation that fails says; "" for a claim that may be made."""
    namespace = {"metadata": {"name": "team-a", "labels": LIMITS if labels is None else labels}}
    known = {"object": {"spec": {"devices": {"requests": list(requests)}}}, "namespaceObject": namespace}
    for each in policy["validations"]:
        if value(policy, each["expression"], known) is not True:
            return str(value(policy, each["messageExpression"], known))
    return ""


def asks(memory: str = "", compute: str = "", **more: Any) -> Object:
    amounts = {name: amount for name, amount in (("memory", memory), ("compute", compute)) if amount}
    asked = {"capacity": {"requests": amounts}} if amounts else {}
    return {"deviceClassName": CLAIM_CLASS, "allocationMode": "ExactCount", "count": 1, **asked, **more}


def exactly(memory: str = "", compute: str = "", **more: Any) -> Object:
    return {"name": "r", "exactly": asks(memory, compute, **more)}


def test_a_claim_within_the_limits_is_made(policy: Object) -> None:
    assert denial(policy, exactly("8Gi", "50")) == ""
    assert denial(policy, exactly("4Gi", "25"), exactly("4096Mi", "25")) == ""
    assert denial(policy, exactly("4Gi", "25", count=2)) == ""


def test_a_sum_past_the_memory_is_denied_with_both_amounts(policy: Object) -> None:
    assert denial(policy, exactly("9Gi", "1")) == (
        "the claim asks for 9 GiB of shared cards, and a claim of namespace team-a may have 8Gi "
        "(label gpuslice.io/claim-memory)"
    )
    assert "asks for 10 GiB" in denial(policy, exactly("5Gi", "1"), exactly("5Gi", "1"))
    assert "asks for 12 GiB" in denial(policy, exactly("4Gi", "1", count=3))


def test_amounts_count_as_they_are_rounded_up(policy: Object) -> None:
    assert "asks for 9 GiB" in denial(policy, *[exactly("2200Mi", "1")] * 3)
    assert denial(policy, *[exactly("2048Mi", "1")] * 3) == ""


def test_a_sum_past_the_compute_is_denied(policy: Object) -> None:
    assert "asks for 60 percent" in denial(policy, exactly("1Gi", "30"), exactly("1Gi", "30"))


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (exactly("", "10"), "capacity.requests.memory"),
        (exactly(), "capacity.requests.memory"),
        (exactly("1Gi"), "capacity.requests.compute"),
        (exactly("1Gi", "10", allocationMode="All"), "count of devices"),
        ({"name": "r", "firstAvailable": [asks("1Gi", "10"), asks()]}, "capacity.requests.memory"),
    ],
)
def test_who_names_no_amount_would_have_a_whole_card(policy: Object, request_: Object, why: str) -> None:
    assert why in denial(policy, request_)


def test_of_alternatives_the_largest_counts(policy: Object) -> None:
    choices = {"name": "r", "firstAvailable": [asks("6Gi", "10"), asks("2Gi", "10")]}
    assert denial(policy, choices, exactly("2Gi", "10")) == ""
    assert "asks for 9 GiB" in denial(policy, choices, exactly("3Gi", "10"))


def test_others_devices_monitoring_and_namespaces_without_labels_are_free(policy: Object) -> None:
    nic = {"name": "nic", "exactly": {"deviceClassName": "nics", "allocationMode": "All"}}
    assert denial(policy, nic, {"name": "r", "firstAvailable": [{**asks(), "deviceClassName": "nics"}]}) == ""
    assert denial(policy, exactly(adminAccess=True)) == ""
    assert denial(policy, exactly(), labels={}) == ""
    assert denial(policy, exactly("8Gi"), labels={LABEL_CLAIM_MEMORY: "8Gi"}) == ""


def test_unchanged_manifests_are_measured_by_what_they_become(policy: Object) -> None:
    def claim_of(template: str) -> list[Object]:
        shape = claim_shape(template)
        assert shape is not None
        requests = template_spec(shape, "GiB")["spec"]["devices"]["requests"]
        defaults = {"allocationMode": "ExactCount", "count": 1}
        return [{**each, "exactly": {**defaults, **each["exactly"]}} for each in requests]

    only = {LABEL_CLAIM_MEMORY: "8Gi"}
    assert denial(policy, *claim_of("gpuslice-4c25.4"), labels=only) == ""
    assert "asks for 9 GiB" in denial(policy, *claim_of("gpuslice-4c25.5"), labels=only)
    assert "asks for 16 GiB" in denial(policy, *claim_of("gpuslice-16-x2"), labels=only)


def test_it_is_there_with_claims_alone(helm: str) -> None:
    assert ("ValidatingAdmissionPolicy", NAME) not in render(helm, "--kube-version=1.36.0")
