"""What doctor expects of a release by what is installed of it, and that a finding goes once it is mended."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import convert

from gpuslice.adapters.kube.objects import Node, Pod
from gpuslice.diagnosis.doctor import release as doctor_release
from gpuslice.diagnosis.doctor.facts import Facts, Finding
from tests.builders import api_node, api_pod

NOW = datetime(2026, 1, 2, tzinfo=UTC)
CALL = {"name": "x.gpuslice.io", "clientConfig": {"service": {"namespace": "sys", "name": "w"}}}
KINDS = ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
HOOKS = [{"webhooks": [CALL], "kind": kind} for kind in KINDS]


def service(component: str, **spec: Any) -> dict[str, Any]:
    labels = {"app": "gpushare", "component": component}
    return {"metadata": {"namespace": "sys", "name": component, "labels": labels}, "spec": spec}


def part(component: str, node: str = "", version: str = "0.1.0", *, ready: bool = True) -> Pod:
    labels = {"app": "gpushare", "component": component, "app.kubernetes.io/version": version}
    made = api_pod(f"{component}-{node}", None, namespace="sys", node=node, labels=labels)
    made["status"]["conditions"] = [{"type": "Ready", "status": str(ready)}]
    return convert(made, Pod)


def sharing(name: str) -> Node:
    return convert(api_node(name, 8, 1, labels={"cgpu": "true"}), Node)


def told(facts: Facts) -> list[Finding]:
    checks = (
        doctor_release.webhook_configurations,
        doctor_release.exporters,
        doctor_release.versions,
        doctor_release.console,
        doctor_release.failed,
    )
    return [each for check in checks for each in check(facts)]


def facts(**fields: Any) -> Facts:
    return Facts(now=NOW, node_label="cgpu", **fields)


@pytest.mark.parametrize(
    "there", [{"components": [service("gpuslice-webhook")]}, {"pods": [part("gpuslice-webhook")]}]
)
def test_a_webhook_that_nobody_calls_is_found_until_it_is_called_again(there: dict[str, Any]) -> None:
    found = told(facts(**there))
    assert [each.what.partition(":")[0] for each in found] == [f"is called by no {kind}" for kind in KINDS]
    assert len(told(facts(**there, hooks=HOOKS[:1]))) == 1
    assert told(facts(**there, hooks=HOOKS)) == []
    assert told(facts(**there, unreadable=[f"{kind.lower()}s" for kind in KINDS])) == []


def test_where_no_webhook_is_installed_none_is_expected() -> None:
    assert told(facts()) == []


def test_every_node_that_shares_cards_is_measured_where_any_is() -> None:
    nodes = [sharing("n1"), sharing("n2"), sharing("n3")]
    pods = [part("gpuslice-exporter", "n1"), part("gpuslice-exporter", "n2", ready=False)]
    found = told(facts(nodes=nodes, pods=pods))
    assert [each.where for each in found] == ["node n2", "node n3"]
    assert "is not ready there" in found[0].what
    assert "has no exporter" in found[1].what
    assert told(facts(nodes=nodes)) == []


def test_parts_of_different_versions_are_found() -> None:
    (found,) = told(facts(pods=[part("gpushare-schd-extender"), part("gpuslice-webhook-x", version="0.2.0")]))
    assert "0.1.0: gpushare-schd-extender; 0.2.0: gpuslice-webhook-x" in found.what


@pytest.mark.parametrize(
    ("spec", "number"),
    [
        ({"type": "LoadBalancer", "ports": [{"port": 80}]}, 1),
        ({"type": "NodePort"}, 1),
        ({"type": "LoadBalancer", "ports": [{"port": 443}]}, 0),
        ({"type": "ClusterIP"}, 0),
        ({}, 0),
    ],
)
def test_a_console_that_is_reachable_without_tls_is_found(spec: dict[str, Any], number: int) -> None:
    assert len(told(facts(components=[service("gpuslice-console", **spec)]))) == number


def test_pods_that_fail_in_numbers_are_found_by_node_and_reason() -> None:
    def failed(number: int, ended: timedelta = timedelta(minutes=5)) -> Pod:
        made = api_pod(f"p{number}", "4", node="n1", phase="Failed")
        made["metadata"]["creationTimestamp"] = (NOW - ended).isoformat()
        made["status"]["reason"] = "UnexpectedAdmissionError"
        return convert(made, Pod)

    (found,) = told(facts(failed=[failed(number) for number in range(4)]))
    assert (found.where, found.what) == (
        "node n1",
        "4 pods that asked for part of a card failed there (UnexpectedAdmissionError)",
    )
    assert told(facts(failed=[failed(number) for number in range(2)])) == []
    assert told(facts(failed=[failed(number, timedelta(days=2)) for number in range(9)])) == []
