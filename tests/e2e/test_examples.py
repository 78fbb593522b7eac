"""The examples before a real API server: each field of every built-in kind; and what their quotas refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.builders import api_container
from tests.contract.test_examples import BUILT_IN, EXAMPLES, FILES, objects
from tests.e2e.control_plane import api_server
from tests.e2e.marks import ON_A_CONTROL_PLANE

pytestmark = ON_A_CONTROL_PLANE

KUBECTL = Path(sys.executable).parent / "kubectl"


def test_a_real_api_server_takes_the_examples_and_keeps_their_quotas(tmp_path: Path) -> None:
    with api_server(tmp_path) as plane:

        def kubectl(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
            command = [str(KUBECTL), "--kubeconfig", str(plane.kubeconfig), *words]
            return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

        for file in FILES:
            things = [each for each in objects(file) if each["kind"] in BUILT_IN]
            whole = json.dumps({"apiVersion": "v1", "kind": "List", "items": things})
            answer = kubectl("apply", "--validate=strict", "-f", "-", text=whole) if things else None
            assert answer is None or answer.returncode == 0, f"{file.relative_to(EXAMPLES)}: {answer.stderr}"
        large = {"name": "large", "namespace": "team-b"}
        spec = {"containers": [api_container("24")], "automountServiceAccountToken": False}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": large, "spec": spec}
        refused = kubectl("create", "-f", "-", text=json.dumps(pod))
        assert refused.returncode != 0
        assert "aliyun.com/gpu-mem" in refused.stderr
