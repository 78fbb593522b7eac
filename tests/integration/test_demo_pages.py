"""What README and the page for 3 am tell people to type, typed on an empty cluster of the demo, in order."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from gpuslice.core.contract import GPU_MEM
from gpuslice_demo import guard
from gpuslice_demo.stories.installing import CHART, EXPORTER, VALUES
from tests import HANG_S
from tests.integration.test_demo import PROGRAM, ROOT, folder, mark_of, needs_build, start, wait_for
from tests.tools import find

__all__ = ["folder"]  # a fixture
pytestmark = needs_build
PLACEHOLDERS = {
    "REGISTRY": "registry.example.com",
    "NODE": "node-1",
    "NAMESPACE": "default",
    "…": "cgpu charts/gpuslice -n kube-system",
}
FINDINGS = 3  # the exit status of doctor that says so
ELSEWHERE = ("gpuslice run",)  # on a machine without Kubernetes: test_isolation_run.py
AGENT = "daemonset/gpushare-device-plugin-ds"
DEPLOYMENTS = tuple(
    f"deployment/{name}" for name in ("gpushare-schd-extender", "gpuslice-scheduler", "gpuslice-webhook")
)
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "mine"},
    "spec": {
        "containers": [{"name": "c", "image": "busybox", "command": ["sleep", "1000"]}],
        "terminationGracePeriodSeconds": 0,
    },
}
POD["spec"]["containers"][0]["resources"] = {"limits": {GPU_MEM: 4}}  # type: ignore[index]

Shell = Callable[..., str]


def commands_of(page: str) -> list[str]:
    """Those of a cluster: whole lines of code, and spans of code in the text; no transcripts of the demo."""
    text = (ROOT / page).read_text()
    found = re.findall(
        r"^    ((?:helm|kubectl|gpuslice) .*)$|`((?:helm|kubectl|gpuslice) [^`]+)`", text, re.MULTILINE
    )
    commands = [(line or span).split("  #")[0].strip() for line, span in found]
    for name, value in PLACEHOLDERS.items():
        commands = [re.sub(rf"(?<![\w-]){name}(?![\w])", value, each) for each in commands]
    return [each for each in commands if not each.startswith(ELSEWHERE)]


@pytest.fixture
def shell(folder: Path) -> Iterator[Shell]:
    """Types a command in the empty cluster, where the demo says to; it must succeed."""
    find("helm")
    process = start(folder, "--empty", "--nodes", "2", "--cards", "2")
    shown = wait_for(process, "cd /")
    exports = dict(re.findall(r"export (\w+)=(\S+)", shown))
    (place,) = re.findall(r"^cd (\S+)", shown, re.MULTILINE)
    path = exports["PATH"].replace("$PATH", "/usr/local/bin:/usr/bin:/bin")
    environ = {"PATH": path, "KUBECONFIG": exports["KUBECONFIG"], "HOME": place, "LANG": "C.UTF-8"}

    def type_(command: str, given: str = "", allowed: tuple[int, ...] = (0,)) -> str:
        done = subprocess.run(
            ["bash", "-c", command], env=environ, cwd=place, input=given, text=True, timeout=HANG_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        print(f"$ {command}\n{done.stdout}")
        assert done.returncode in allowed, f"{command}\n{done.stdout}"
        return done.stdout

    yield type_
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_S)
    assert guard.marked(mark_of(folder)) == []


def rolled_out(shell: Shell) -> None:
    for each in (AGENT, *DEPLOYMENTS):
        shell(f"kubectl -n kube-system rollout status {each} --timeout={HANG_S:.0f}s")


def play(shell: Shell, commands: list[str]) -> None:
    for each in commands:
        command = f"{each} --once" if each == "gpuslice top" else each  # nobody watches
        shell(command, allowed=(0, FINDINGS) if "doctor" in each else (0,))
        if each.startswith("helm install"):
            rolled_out(shell)


def test_the_commands_of_readme_and_of_the_page_for_3_am(shell: Shell) -> None:
    readme, at_night = commands_of("README.md"), commands_of("docs/start/at-3-am.md")
    assert [each for each in readme if each.startswith(("helm install", "kubectl label"))] == [
        f"helm install {CHART} {VALUES}",
        "kubectl label node node-1 cgpu=true",
    ]
    play(shell, readme)
    shell("kubectl wait node/node-1 --for=jsonpath='{.status.allocatable.aliyun\\.com/gpu-mem}'=30")
    shell("kubectl apply -f -", yaml.safe_dump(POD))
    shell("kubectl wait pod/mine --for=condition=Ready --timeout=60s")
    assert "4/15" in shell("kubectl inspect cgpu")
    assert "0 errors, 0 warnings" in shell("gpuslice doctor")
    # an upgrade to an image that nobody pushed, at the end of which is a rollback
    for verb in ("test", "rollback"):
        assert any(each.startswith(f"helm {verb} cgpu") for each in at_night)
    nobodys = "--reset-then-reuse-values --set image.tag=next"
    before = [each for each in at_night if not each.startswith(("helm rollback", "kubectl label"))]
    shell(EXPORTER.command)
    shell("kubectl -n kube-system rollout status daemonset/gpuslice-exporter")
    play(shell, before)
    rolled_out(shell)
    shell(f"helm upgrade cgpu charts/gpuslice -n kube-system {nobodys}")
    stuck = shell(f"kubectl -n kube-system rollout status {DEPLOYMENTS[0]} --timeout=1s", allowed=(1,))
    assert "timed out" in stuck
    assert "Running" in shell("kubectl get pod mine")
    play(shell, [each for each in at_night if each.startswith("helm rollback")])
    rolled_out(shell)
    play(shell, [each for each in at_night if each.startswith("kubectl label")])
    assert "Running" in shell("kubectl get pod mine"), "a pod that has a share keeps it"
    shell("kubectl delete pod mine")
    shell("helm uninstall cgpu -n kube-system")
    kinds = "daemonset,deployment,service,configmap,secret,serviceaccount,validatingadmissionpolicies"
    left = shell(f"kubectl get {kinds} -A -l app.kubernetes.io/instance=cgpu -o name")
    assert left.strip() == ""


def test_an_empty_cluster_plays_no_story() -> None:
    told = subprocess.run(
        [PROGRAM, "demo", "--empty", "--story", "pools"], capture_output=True, text=True, check=False
    )
    assert told.returncode == 2
    assert "--empty plays no story" in told.stderr
