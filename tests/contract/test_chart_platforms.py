"""The chart as each platform is told to install it, its README, and what Artifact Hub is shown."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from release.chart_readme import CHART, readme

from tests.chart import documents, printed

ROOT = CHART.parents[1]
FILES = sorted((CHART / "ci").glob("*-values.yaml"))
PLATFORMS = {"ack", "aks", "bare-metal", "eks", "gke", "k3s", "kind", "openshift"}


def test_there_is_a_file_for_each_platform() -> None:
    assert {file.name.removesuffix("-values.yaml") for file in FILES} == PLATFORMS


@pytest.mark.parametrize("version", ["1.27.0", "1.31.0", "1.36.0"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_platforms_values_render(helm: str, file: Path, version: str) -> None:
    """What the API server says of them is asked end to end (tests/e2e/test_chart.py)."""
    command = [helm, "template", "cgpu", str(CHART), "-n", "gpuslice", "-f", str(file)]
    objects = documents(printed(*command, "--kube-version", version))
    repository = yaml.safe_load(file.read_text())["image"]["repository"]
    images = {
        container["image"]
        for each in objects
        if each["kind"] in ("DaemonSet", "Deployment", "Pod")
        for container in each.get("spec", {}).get("template", each)["spec"]["containers"]
    }
    assert {image for image in images if "kube-scheduler" not in image} == {f"{repository}:{_version()}"}


def _version() -> str:
    return str(yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"])


def test_a_cluster_whose_scheduler_could_not_read_our_configuration_is_refused(helm: str) -> None:
    command = [helm, "template", "cgpu", str(CHART), "--set=image.repository=r", "--kube-version=1.24.17"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "chart requires kubeVersion: >=1.25.0-0" in refused.stderr
    assert "kubescheduler.config.k8s.io/v1\n" in printed(*command[:-1], "--kube-version=1.25.0")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_platform_is_explained(file: Path) -> None:
    page = (ROOT / "docs/operate/platforms.md").read_text()
    assert f"ci/{file.name}" in page


def test_the_charts_readme_is_current() -> None:
    assert (CHART / "README.md").read_text() == readme(), "run `python -m release.chart_readme`"


def test_every_value_says_what_it_is_for() -> None:
    silent = re.findall(r"^\| `(\S+)` \|  \|", readme(), re.MULTILINE)
    assert silent == []


def test_what_is_shown_of_the_chart_is_whole() -> None:
    chart: dict[str, Any] = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["icon"].startswith("data:image/svg+xml;base64,")
    assert chart["annotations"]["artifacthub.io/license"] == "Apache-2.0"
    assert chart["annotations"]["artifacthub.io/category"] == "ai-machine-learning"
