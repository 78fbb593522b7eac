"""The chart's console: it may read and nothing else, and starts with arguments that it knows."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from gpuslice.apps.cli.main import command
from gpuslice.apps.console.settings import ConsoleSettings
from gpuslice.apps.settings import load
from tests.chart import render

ON = ("--set", "console.enabled=true")
NAME = "gpuslice-console"


def container_of(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    (container,) = objects["Deployment", NAME]["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def test_it_is_off_until_it_is_wanted(helm: str) -> None:
    assert not [key for key in render(helm) if NAME in key[1]]


def test_its_arguments_are_its_settings(helm: str) -> None:
    values = "console.basePath=/gpus,console.clusterName=lab,console.prometheusUrl=http://prom:9090"
    chosen = (values, "--set", "console.prometheusTokenSecret=prom,console.prometheusCaSecret=ca")
    container = container_of(render(helm, *ON, "--set", *chosen, "--set", "console.tlsSecret=tls"))
    args, mounted = container["args"], {each["mountPath"] for each in container["volumeMounts"]}
    command_line = command.get_command(None, "console")  # type: ignore[arg-type]
    assert command_line is not None
    flags = command_line.make_context("console", list(args[1:])).params
    settings = load(ConsoleSettings, flags, {})
    assert (settings.access, settings.base_path, settings.cluster_name) == ("token", "/gpus", "lab")
    assert settings.prometheus_url == "http://prom:9090"
    assert settings.prometheus_token_file == "/etc/gpuslice/prometheus/token"
    assert settings.prometheus_ca_file == "/etc/gpuslice/prometheus-ca/ca.crt"
    assert settings.tls_certificate.startswith("/etc/gpuslice/tls/")
    files = (settings.prometheus_token_file, settings.prometheus_ca_file, settings.tls_certificate)
    assert {each.rpartition("/")[0] for each in files} <= mounted


def test_it_may_read_and_ask_who_somebody_is_and_nothing_else(helm: str) -> None:
    rules = render(helm, *ON)["ClusterRole", NAME]["rules"]
    created = {name for rule in rules if "create" in rule["verbs"] for name in rule["resources"]}
    assert created == {"tokenreviews", "subjectaccessreviews"}
    assert {verb for rule in rules for verb in rule["verbs"]} == {"list", "watch", "create"}
    assert "secrets" not in {name for rule in rules for name in rule["resources"]}


def test_it_is_reached_from_within_the_cluster_unless_an_ingress_is_wanted(helm: str) -> None:
    objects = render(helm, *ON)
    assert objects["Service", NAME]["spec"]["type"] == "ClusterIP"
    assert ("Ingress", NAME) not in objects
    ingress = ("console.ingress.enabled=true,console.ingress.host=gpus.example.com,console.basePath=/gpus",)
    (rule,) = render(helm, *ON, "--set", *ingress)["Ingress", NAME]["spec"]["rules"]
    assert (rule["host"], rule["http"]["paths"][0]["path"]) == ("gpus.example.com", "/gpus")


@pytest.mark.parametrize(("secret", "scheme"), [("", "HTTP"), ("tls", "HTTPS")])
def test_its_probes_speak_what_it_speaks(helm: str, secret: str, scheme: str) -> None:
    container = container_of(render(helm, *ON, "--set", f"console.tlsSecret={secret}"))
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http", "scheme": scheme}


def test_a_network_policy_opens_its_one_port(helm: str) -> None:
    policy = render(helm, *ON, "--set", "networkPolicy.enabled=true")["NetworkPolicy", NAME]["spec"]
    assert policy["podSelector"]["matchLabels"] == {"app": "gpushare", "component": NAME}
    (opened,) = policy["ingress"]
    assert [each["port"] for each in opened["ports"]] == [
        container_of(render(helm, *ON))["ports"][0]["containerPort"]
    ]


@pytest.mark.parametrize(("secret", "scheme"), [("", "http"), ("tls", "https")])
def test_its_own_metrics_are_scraped_where_it_listens(helm: str, secret: str, scheme: str) -> None:
    monitored = ("--set", f"monitoring.componentMonitors.enabled=true,console.tlsSecret={secret}")
    monitor = render(helm, *ON, *monitored)["PodMonitor", NAME]["spec"]
    assert monitor["selector"]["matchLabels"]["component"] == NAME
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint.get("scheme", "http")) == ("http", scheme)


def test_its_help_names_what_it_shows() -> None:
    told = CliRunner().invoke(command, ["console", "--help"]).output
    assert "which pods wait and why" in told
