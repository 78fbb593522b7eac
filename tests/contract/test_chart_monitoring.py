"""The exporter, its monitor, alerts and dashboards in the chart: off by default, each behind a value."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml
from monitoring.boards import dashboards
from monitoring.build import ROOT, RULES

from gpuslice.apps.agent.command import command as agent_command
from gpuslice.apps.exporter.command import command
from gpuslice.apps.exporter.flags import translated
from gpuslice.apps.extender.command import command as extender_command
from tests.chart import render

LOGIN = "scheme=https,basicAuth.username.name=scraper,basicAuth.username.key=name"
AT_ENDPOINT = ",".join(f"monitoring.serviceMonitor.endpoint.{each}" for each in LOGIN.split(","))
ALL = (
    "exporter.enabled=true,exporter.ackMetrics=true,exporter.legacyPort=9445,exporter.counters=x\\,gauge\\,y,"
    "exporter.webConfigSecret=web,monitoring.serviceMonitor.enabled=true,monitoring.alerts.enabled=true,"
    f"monitoring.dashboards.enabled=true,monitoring.labels.release=stack,{AT_ENDPOINT}"
)


def test_nothing_of_it_is_there_unless_asked_for(helm: str) -> None:
    assert not [name for name in render(helm) if "exporter" in name[1] or "dashboard" in name[1]]


def test_the_exporters_arguments_are_its_settings(helm: str) -> None:
    pod = render(helm, "--set", ALL)["DaemonSet", "gpuslice-exporter"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["args"][0] == "exporter"
    parsed = command.make_context("exporter", translated(container["args"][1:])[0]).params
    assert parsed["address"] == ":9400"
    assert parsed["legacy_address"] == ":9445"
    assert parsed["ack_metrics"] is True
    assert parsed["collectors"] == "/etc/gpuslice-exporter/counters.csv"
    assert pod["hostPID"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    assert all("subPath" not in mount for mount in container["volumeMounts"])  # it would never change


def test_the_applications_labels_survive_the_scrape(helm: str) -> None:
    objects = render(helm, "--set", ALL, "--set", "monitoring.componentMonitors.enabled=true")
    for name in ("gpuslice-exporter", "gpuslice-agents"):
        monitor = objects["ServiceMonitor", name]
        assert monitor["metadata"]["labels"]["release"] == "stack"
        for endpoint in monitor["spec"]["endpoints"]:
            assert endpoint["honorLabels"] is True
            (dropped,) = (rule["regex"] for rule in endpoint["relabelings"] if "action" in rule)
            assert {"namespace", "pod", "container"} <= set(dropped.split("|"))


def test_each_port_is_scraped_in_the_way_its_protection_asks_for(helm: str) -> None:
    objects = render(helm, "--set", ALL)
    endpoints = objects["ServiceMonitor", "gpuslice-exporter"]["spec"]["endpoints"]
    ports = {each["name"] for each in objects["Service", "gpuslice-exporter"]["spec"]["ports"]}
    assert {each["port"] for each in endpoints} == ports
    assert {each["scheme"] for each in endpoints} == {"https"}
    jobs = {
        rule["replacement"] for each in endpoints for rule in each["relabelings"] if "replacement" in rule
    }
    assert jobs == {"gpuslice-exporter", "gpuslice-exporter-legacy"}
    unprotected = render(helm, "--set", "exporter.enabled=true,monitoring.serviceMonitor.enabled=true")
    (endpoint,) = unprotected["ServiceMonitor", "gpuslice-exporter"]["spec"]["endpoints"]
    assert endpoint["port"] == "metrics"
    assert "scheme" not in endpoint


def test_a_protected_page_that_nobody_could_scrape_is_refused(helm: str) -> None:
    asked = "exporter.enabled=true,exporter.webConfigSecret=web,monitoring.serviceMonitor.enabled=true"
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render(helm, "--set", asked)
    assert "monitoring.serviceMonitor.endpoint must say" in refused.value.stderr


def test_the_rules_and_dashboards_are_those_of_the_repository(helm: str) -> None:
    objects = render(helm, "--set", ALL)
    rules = objects["PrometheusRule", "gpuslice"]["spec"]
    assert rules == yaml.safe_load((ROOT / RULES).read_text())
    for name in dashboards():
        data = objects["ConfigMap", f"gpuslice-dashboard-{name}"]
        assert data["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(data["data"][f"{name}.json"])["uid"] == dashboards()[name].uid


def test_the_exporter_may_read_the_config_map_it_is_told_of_and_no_other(helm: str) -> None:
    asked = "exporter.enabled=true,exporter.counterConfigMap=monitoring:counters,exporter.virtualGpus=true"
    objects = render(helm, "--set", asked)
    (rule,) = objects["Role", "gpuslice-exporter"]["rules"]
    assert (rule["resourceNames"], rule["verbs"]) == (["counters"], ["get"])
    assert objects["Role", "gpuslice-exporter"]["metadata"]["namespace"] == "monitoring"
    bound = objects["RoleBinding", "gpuslice-exporter"]
    assert bound["subjects"][0]["namespace"] == "kube-system"
    pod = objects["DaemonSet", "gpuslice-exporter"]["spec"]["template"]["spec"]
    flags = command.make_context("exporter", pod["containers"][0]["args"][1:]).params
    assert flags["configmap_data"] == "monitoring:counters"
    assert flags["kubernetes_virtual_gpus"] is True


def test_the_programs_themselves_are_watched_where_they_answer(helm: str) -> None:
    objects = render(helm, "--set", "webhook.enabled=true,monitoring.componentMonitors.enabled=true")
    service = objects["Service", "gpuslice-agents"]["spec"]
    agents = objects["DaemonSet", "gpushare-device-plugin-ds"]["spec"]["template"]
    assert service["selector"].items() <= agents["metadata"]["labels"].items()
    probe = agents["spec"]["containers"][0]["readinessProbe"]["httpGet"]
    assert service["ports"][0]["targetPort"] == probe["port"]
    wanted = objects["ServiceMonitor", "gpuslice-agents"]["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= objects["Service", "gpuslice-agents"]["metadata"]["labels"].items()
    for name in ("gpushare-schd-extender", "gpuslice-webhook"):
        monitor = objects["PodMonitor", name]["spec"]
        pod = objects["Deployment", name]["spec"]["template"]
        assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        ports = {port["name"] for each in pod["spec"]["containers"] for port in each["ports"]}
        assert {each["port"] for each in monitor["podMetricsEndpoints"]} <= ports


def test_prometheus_takes_native_histograms_where_asked_to(helm: str) -> None:
    values = "exporter.enabled=true,webhook.enabled=true,console.enabled=true"
    values += ",monitoring.componentMonitors.enabled=true,monitoring.serviceMonitor.enabled=true"
    values += ",monitoring.nativeHistograms="
    for wanted in ("true", "false"):
        objects = render(helm, "--set", values + wanted)
        monitors = [each["spec"] for (kind, _), each in objects.items() if kind.endswith("Monitor")]
        assert len(monitors) == 5
        # Boards and alerts ask for the classic ones.
        for field in ("scrapeNativeHistograms", "scrapeClassicHistograms"):
            assert {each.get(field, False) for each in monitors} == {wanted == "true"}


def test_extender_and_agents_send_traces_to_one_collector(helm: str) -> None:
    for endpoint in ("", "http://collector.observability:4318"):
        objects = render(helm, "--set", f"tracing.endpoint={endpoint}")
        found = []
        for key, process in (
            (("Deployment", "gpushare-schd-extender"), extender_command),
            (("DaemonSet", "gpushare-device-plugin-ds"), agent_command),
        ):
            args = objects[key]["spec"]["template"]["spec"]["containers"][0]["args"]
            found.append(process.make_context(args[0], list(args[1:])).params["otlp_endpoint"] or "")
        assert found == [endpoint, endpoint]


def test_each_alert_may_lead_to_a_page_on_the_web(helm: str) -> None:
    url = "https://git.example/gpuslice/"
    objects = render(helm, "--set", f"monitoring.alerts.enabled=true,monitoring.alerts.runbookUrl={url}")
    rules = [
        rule for group in objects["PrometheusRule", "gpuslice"]["spec"]["groups"] for rule in group["rules"]
    ]
    pages = {rule["annotations"]["runbook_url"] for rule in rules if "alert" in rule}
    assert f"{url}docs/operate/alerts.md#gpulost" in pages
    assert all(page.startswith(f"{url}docs/") for page in pages)
