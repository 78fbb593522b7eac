"""The examples before a real API server: each field of every built-in kind; and what their quotas refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.builders import api_container
from tests.contract.test_examples import BUILT_IN, EXAMPLES, FILES, objects
from tests.e2e.control_plane import api_server, controller_manager, minor_version
from tests.e2e.marks import ON_A_CONTROL_PLANE
from tests.e2e.node import until

pytestmark = ON_A_CONTROL_PLANE

KUBECTL = Path(sys.executable).parent / "kubectl"


def names_claims(file: Path) -> bool:
    return any(each["kind"] == "ResourceClaimTemplate" for each in objects(file))


def test_a_real_api_server_takes_the_examples_and_keeps_their_quotas(tmp_path: Path) -> None:
    with api_server(tmp_path) as plane, controller_manager(plane, "resourcequota-controller"):

        def kubectl(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
            command = [str(KUBECTL), "--kubeconfig", str(plane.kubeconfig), *words]
            return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

        for file in FILES if minor_version() >= 34 else [each for each in FILES if not names_claims(each)]:
            things = [each for each in objects(file) if each["kind"] in BUILT_IN]
            whole = json.dumps({"apiVersion": "v1", "kind": "List", "items": things})
            answer = kubectl("apply", "--validate=strict", "-f", "-", text=whole) if things else None
            assert answer is None or answer.returncode == 0, f"{file.relative_to(EXAMPLES)}: {answer.stderr}"

        def created(name: str, units: str = "") -> subprocess.CompletedProcess[str]:
            container = api_container(units) if units else {"name": "main", "image": "x"}
            spec = {"containers": [container], "automountServiceAccountToken": False}
            about = {"name": name, "namespace": "team-b"}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}
            return kubectl("create", "-o", "json", "-f", "-", text=json.dumps(pod))

        counted = ("get", "quota", "cards", "-n", "team-b", "-o", "jsonpath={.status.used}")
        until(lambda: kubectl(*counted).stdout, "the quota is counted")
        assert (
            "exceeded quota: cards, requested: requests.aliyun.com/gpu-mem=24"
            in created("large", "24").stderr
        )
        assert created("fits", "16").returncode == 0
        without = json.loads(created("without-cards").stdout)
        assert "limits" not in without["spec"]["containers"][0]["resources"]
