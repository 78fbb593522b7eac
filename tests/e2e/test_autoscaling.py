"""The autoscaler of the documentation, held against a real API server and its controller's reading of it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from monitoring.build import ROOT

from tests import tools
from tests.e2e import control_plane
from tests.e2e.control_plane import ControlPlane
from tests.e2e.marks import ON_A_CONTROL_PLANE

pytestmark = ON_A_CONTROL_PLANE


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[ControlPlane]:
    with control_plane.api_server(tmp_path) as found:
        yield found


def test_the_api_server_takes_the_example_as_it_is_written(plane: ControlPlane) -> None:
    kubectl = [str(tools.find("kubectl")), "--kubeconfig", str(plane.kubeconfig)]
    hpa = ROOT / "examples" / "scaling" / "hpa.yaml"
    strict = [*kubectl, "apply", "--validate=strict", "-f", str(hpa)]
    done = subprocess.run(strict, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    path = "{.spec.metrics[0].pods.metric.name} {.spec.metrics[0].pods.target.averageValue}"
    shown = subprocess.run(
        [*kubectl, "get", "hpa", "infer", "-n", "default", "-o", f"jsonpath={path}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert shown.stdout == "pod_gpu_utilization 60"
