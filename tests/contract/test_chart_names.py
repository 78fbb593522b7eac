"""What people type by habit: names of other charts are refused with ours, and no value is without effect."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart import CHART, NAMED, render


@pytest.mark.parametrize(
    ("setting", "ours"),
    [
        ("devicePlugin.runtimeClassName=nvidia", "set runtimeClassName"),  # HAMi
        ("devicePlugin.deviceMemoryScaling=2", "never promised beyond its memory"),
        ("devicePlugin.nvidiaNodeSelector.gpu=on", "set nodeLabel"),
        ("scheduler.kubeScheduler.image.tag=v1.31.0", "scheduler.tag"),
        ("scheduler.defaultSchedulerPolicy.gpuSchedulerPolicy=spread", "extender.policy"),
        ("scheduler.admissionWebhook.enabled=false", "set webhook"),
        ("resourceMem=nvidia.com/gpumem", "webhook.hami.enabled"),
        ("namespaceOverride=gpu", "--namespace"),  # NVIDIA's charts
        ("gfd.enabled=true", "not needed"),
        ("migStrategy=mixed", "MIG"),
        ("dcgmExporter.enabled=true", "set exporter"),
        ("arguments[0]=-f", "exporter.extraArgs"),
        ("tlsServerConfig.enabled=true", "exporter.webConfigSecret"),
        ("image=registry/gpuslice:1", "image.repository and image.tag"),
        ("image.registry=registry", "image.repository"),
        ("replicaCount=2", "extender.replicas"),  # most charts
        ("exporter.serviceMonitor.enabled=true", "monitoring.serviceMonitor"),
        ("prometheusRule.enabled=true", "monitoring.alerts"),
        ("defaultRules.create=true", "monitoring.alerts"),
        ("grafana.enabled=true", "monitoring.dashboards"),
        ("webhook.certManager.enabled=true", "webhook.certificate.source"),
        ("console.env[0].name=A", "console.extraEnv"),
        ("extender.nodePort=32000", "extender.service.nodePort"),  # names of our own that moved
        ("imageRegistry=registry", "global.imageRegistry"),
        ("webhook.allowCgpuDisable=true", "set allowCgpuDisable"),
    ],
)
def test_a_name_of_another_chart_is_refused_with_our_name_for_it(helm: str, setting: str, ours: str) -> None:
    command = (helm, "template", "cgpu", str(CHART), *NAMED, "--set", setting)
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert f"unset: {ours}" in refused.stderr or (ours in refused.stderr and "unset: " in refused.stderr)


def test_every_such_refusal_names_values_that_exist() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    every_workload = schema["definitions"]["workload"]["properties"]

    def refusals(shape: dict[str, Any]) -> Iterator[str]:
        for inner in shape.get("properties", {}).values():
            if "const" in inner:
                yield inner["const"]
            if "const" in inner.get("then", {}):
                yield inner["then"]["const"]
            yield from refusals(inner)

    def is_there(name: str) -> bool:
        found: Any = values
        for key in name.split("."):
            if not isinstance(found, dict) or key not in found:
                section, _, last = name.partition(".")
                return section in values and last in every_workload
            found = found[key]
        return True

    texts = list(refusals(schema))
    assert len(texts) > 100
    named = [name for text in texts for name in re.findall(r"\b[a-z]\w+(?:\.[a-z]\w+)+", text)]
    assert [name for name in named if not is_there(name)] == []


def test_no_value_is_taken_without_effect(helm: str) -> None:
    """A monitor of what is not installed is refused; a tag for all images of a parent chart is taken."""
    monitor = "monitoring.serviceMonitor.enabled=true"
    command = (helm, "template", "cgpu", str(CHART), *NAMED, "--set", monitor)
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (refused.returncode, "exporter.enabled=true" in refused.stderr) == (1, True)
    for settings, tag in (("global.imageTag=v9", "v9"), ("global.imageTag=v9,image.tag=v8", "v8")):
        agent = render(helm, "--set", settings)["DaemonSet", "gpushare-device-plugin-ds"]
        assert agent["spec"]["template"]["spec"]["containers"][0]["image"].endswith(f":{tag}")


def test_objects_of_ones_own_are_installed_with_the_chart(helm: str, tmp_path: Path) -> None:
    text = "apiVersion: v1\nkind: Secret\nmetadata: {name: two}\n"
    one = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-one"}}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"extraObjects": [one, text]}))
    objects = render(helm, "-f", str(tmp_path / "values.yaml"))
    assert {("ConfigMap", "cgpu-one"), ("Secret", "two")} <= {*objects}


def test_a_way_to_update_is_taken_as_a_word_or_as_kubernetes_writes_it(helm: str) -> None:
    for setting in ("devicePlugin.updateStrategy=OnDelete", "devicePlugin.updateStrategy.type=OnDelete"):
        agent = render(helm, "--set", setting)["DaemonSet", "gpushare-device-plugin-ds"]
        assert agent["spec"]["updateStrategy"] == {"type": "OnDelete"}
