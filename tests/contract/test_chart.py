"""The chart, rendered by the real helm."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import tools

CHART = Path(__file__).resolve().parents[2] / "charts" / "gpuslice"


@pytest.fixture(scope="module")
def helm() -> str:
    return str(tools.find("helm"))


def render(helm: str, *arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    command = [helm, "template", "cgpu", str(CHART), "--namespace", "kube-system", *arguments]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(text) if o}


def test_lint_finds_nothing(helm: str) -> None:
    subprocess.run([helm, "lint", "--strict", str(CHART)], check=True, capture_output=True)


def test_the_vendors_names_are_kept(helm: str) -> None:
    objects = render(helm)
    for kind in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding"):
        assert (kind, "gpushare-schd-extender") in objects
        assert (kind, "gpushare-device-plugin") in objects
    assert ("DaemonSet", "gpushare-device-plugin-ds") in objects
    assert ("Deployment", "gpushare-schd-extender") in objects


def test_the_service_is_the_vendors_node_port(helm: str) -> None:
    service = render(helm)["Service", "gpushare-schd-extender"]["spec"]
    assert service["type"] == "NodePort"
    assert [(port["port"], port["nodePort"]) for port in service["ports"]] == [(12345, 32766)]


@pytest.mark.parametrize("label", ["cgpu", "gpushare"])
def test_the_node_label_is_a_value(helm: str, label: str) -> None:
    daemon_set = render(helm, "--set", f"nodeLabel={label}")["DaemonSet", "gpushare-device-plugin-ds"]
    assert daemon_set["spec"]["template"]["spec"]["nodeSelector"] == {label: "true"}


def test_nobody_is_cluster_admin(helm: str) -> None:
    objects = render(helm)
    roles = [o["roleRef"]["name"] for (kind, _), o in objects.items() if kind == "ClusterRoleBinding"]
    assert "cluster-admin" not in roles
    rules = [rule for (kind, _), o in objects.items() if kind == "ClusterRole" for rule in o["rules"]]
    assert rules
    assert not any("*" in rule[part] for rule in rules for part in ("verbs", "resources", "apiGroups"))


def test_the_second_scheduler_calls_the_extender_for_every_node(helm: str) -> None:
    objects = render(helm)
    config = yaml.safe_load(objects["ConfigMap", "gpuslice-scheduler"]["data"]["config.yaml"])
    (extender,) = config["extenders"]
    assert extender["urlPrefix"].endswith(":12345/gpushare-scheduler")
    assert extender["nodeCacheCapable"] is True
    assert extender["ignorable"] is False
    assert extender["managedResources"] == [{"name": "aliyun.com/gpu-mem", "ignoredByScheduler": False}]
    assert config["percentageOfNodesToScore"] == 100


def test_without_a_second_scheduler_only_the_vendors_objects_are_left(helm: str) -> None:
    names = {name for _, name in render(helm, "--set", "scheduler.enabled=false")}
    assert names == {"gpushare-schd-extender", "gpushare-device-plugin", "gpushare-device-plugin-ds"}


@pytest.mark.parametrize(
    ("setting", "named"),
    [("memoryUnit=TiB", "memoryUnit"), ("extender.replicas=0", "replicas"), ("nodeLable=x", "nodeLable")],
)
def test_a_wrong_value_is_refused_by_name(helm: str, setting: str, named: str) -> None:
    command = [helm, "template", str(CHART), "--set", setting]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert named in refused.stderr


def test_every_value_is_in_the_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def unknown(value: dict[str, Any], shape: dict[str, Any], path: str) -> list[str]:
        known = shape.get("properties")
        if known is None:
            return []
        here = [f"{path}{key}" for key in value if key not in known]
        deeper = [
            name
            for key, inner in value.items()
            if isinstance(inner, dict)
            for name in unknown(inner, known[key], f"{path}{key}.")
        ]
        return here + deeper

    assert unknown(values, schema, "") == []
