"""The chart, installed with the image of the release script: the story, an upgrade, a rollback, a removal.

GPUSLICE_E2E_BASE names what the image is to stand on: a root file system or an OCI archive.
The tests share one cluster and run in order.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuslice import __version__
from gpuslice.core.contract import GPU_COUNT, GPU_MEM
from tests.e2e import node
from tests.e2e.installed import ENOUGH, IMAGE, ROOT, Installed, cluster
from tests.e2e.kubelet_rig import CUDA, NODE, STAY, UNITS
from tests.e2e.node import until

BASE = os.environ.get("GPUSLICE_E2E_BASE", "")
SYSTEM = ("-n", "kube-system")
WORKLOADS = (
    "deployment/gpushare-schd-extender",
    "deployment/gpuslice-webhook",
    "daemonset/gpushare-device-plugin-ds",
    "daemonset/device-plugin-evict-ds",
    "daemonset/cgpu-installer",
)

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),  # to make the image takes minutes on a busy machine
    pytest.mark.skipif(bool(node.missing()), reason=node.missing()),
    pytest.mark.skipif(shutil.which("ip") is None, reason="pods get their networks by ip (Debian: iproute2)"),
    pytest.mark.skipif(not BASE, reason="GPUSLICE_E2E_BASE is not set; it names what the image stands on"),
]


@pytest.fixture(scope="module")
def here() -> Iterator[Installed]:
    folder = Path(tempfile.mkdtemp(prefix="gs-image-"))  # sockets need a short path
    folder.chmod(0o755)
    try:
        archive = os.environ.get("GPUSLICE_E2E_IMAGE") or _made(folder)
        with cluster(folder) as found:
            load = ("images", "import", "--snapshotter", "native", "--base-name", IMAGE)
            imported = node.ctr(found.places, *load, archive)
            assert imported.returncode == 0, imported.stderr
            yield found
    finally:
        if "GPUSLICE_E2E_KEEP" not in os.environ:
            shutil.rmtree(folder, ignore_errors=True)


def _made(folder: Path) -> str:
    command = [sys.executable, "-m", "release.build", "--build", "--only", "image", "--base", BASE]
    command += ["--arch", os.uname().machine, "--out", str(folder / "dist")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=1200)
    return str(folder / "dist" / f"gpuslice-{__version__}-image.tar")


def app(name: str, units: int, takes_mib: int, replicas: int = 1) -> dict[str, Any]:
    """The seeds' StatefulSet: a program that takes some memory and stays, or fails and is started again."""
    script = f"nvidia-smi; cuda_malloc -size={takes_mib} 2>&1 || exit 1; echo complete; {STAY}"
    main = {
        "name": "main",
        "image": CUDA,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", script],
        "env": [{"name": "GPUSLICE_SIM_STATE", "value": "/run/gpus/machine"}],
        "resources": {"limits": {GPU_MEM: str(units)}},
        "volumeMounts": [{"name": "gpus", "mountPath": "/run/gpus"}],
    }
    labels = {"app": name}
    spec = {
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 2,
        "containers": [main],
        "volumes": [{"name": "gpus", "hostPath": {"path": "HERE/gpus"}}],
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def apply(here: Installed, document: dict[str, Any]) -> None:
    text = json.dumps(document).replace("HERE", str(here.places.folder))
    here.kubectl("apply", "-f", "-", given=text)


def test_the_chart_is_installed_and_the_scheduler_of_the_master_calls_the_extender(here: Installed) -> None:
    """The installer's Job edits the static pod, kubelet starts the scheduler anew, and it is healthy."""
    here.chart("install")
    here.rolled_out(WORKLOADS[0], WORKLOADS[1])
    here.kubectl("wait", *SYSTEM, "job/gpushare-installer", "--for=condition=complete", ENOUGH)
    assert "--config=/etc/kubernetes/gpuslice/config.yaml" in here.manifest.read_text()
    here.kubectl("label", "node", NODE, "cgpu=true")
    here.rolled_out(*WORKLOADS)

    def offers() -> bool:
        amounts = here.api.get(f"nodes/{NODE}")["status"]["allocatable"]
        return (amounts.get(GPU_MEM), amounts.get(GPU_COUNT)) == (str(2 * UNITS), "2")

    until(offers, "the node offers its cards in parts", 120)


def test_programs_share_a_card_and_one_that_takes_too_much_harms_nobody(here: Installed) -> None:
    apply(here, app("app-3g-v1", 4, 3000, replicas=3))
    here.kubectl("rollout", "status", "statefulset/app-3g-v1", ENOUGH)
    assert "4301MiB" in until(lambda: here.kubectl("logs", "app-3g-v1-0"), "it says what it sees")
    apply(here, app("app-6g-v1", 4, 6000))

    def restarts(name: str) -> int:
        pods = here.api.get("namespaces/default/pods")["items"]  # of which it may not be one yet
        mine = [each["status"] for each in pods if each["metadata"]["name"] == name]
        return sum(each["restartCount"] for status in mine for each in status.get("containerStatuses", ()))

    until(lambda: restarts("app-6g-v1-0") > 0, "it fails and is started again", 120)
    refused = "code=2(cudaErrorMemoryAllocation)"  # of the life before: kubelet may be removing an older one
    until(lambda: refused in here.kubectl("logs", "app-6g-v1-0", "--previous"), "its log says why", 120)
    assert [restarts(f"app-3g-v1-{number}") for number in range(3)] == [0, 0, 0]
    said = here.kubectl("get", "pod", "-o", "jsonpath={.items[*].spec.schedulerName}").split()
    assert set(said) == {"default-scheduler"}, "the master's own scheduler placed them"
    assert "Allocated/Total GPU Memory In Cluster:" in here.gpuslice("inspect", "-d")


def test_a_wrong_request_is_refused_by_the_webhook_in_a_sentence(here: Installed) -> None:
    wrong = app("wrong", 4, 1)
    limits = wrong["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    limits["aliyun.com/gpu-core.percentage"] = "7"
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "wrong"},
        "spec": wrong["spec"]["template"]["spec"],
    }
    said = here.kubectl("apply", "-f", "-", given=json.dumps(pod), fails=True)
    assert "gpu-core.percentage" in said
    assert "multiple of 5" in said


def lives(here: Installed) -> set[str]:
    """Containers of the apps: what changes when one is started anew."""
    pods = here.api.get("namespaces/default/pods?labelSelector=app%3Dapp-3g-v1")["items"]
    return {each["containerID"] for pod in pods for each in pod["status"]["containerStatuses"]}


def revision(here: Installed, image: str) -> bool:
    """Whether every program of ours, and nobody else's, runs this image."""
    pods = here.api.get("namespaces/kube-system/pods?labelSelector=app%3Dgpushare")["items"]
    serving = [pod for pod in pods if not pod["spec"]["containers"][0]["args"][0].startswith("install-ext")]
    return all(
        each["image"] == image
        for pod in serving
        if "deletionTimestamp" not in pod["metadata"]
        for each in pod["spec"]["containers"]
    )


def test_an_upgrade_and_a_rollback_disturb_no_pod(here: Installed) -> None:
    before = lives(here)
    assert len(before) == 3
    tagged = node.ctr(here.places, "images", "tag", f"{IMAGE}:{__version__}", f"{IMAGE}:next")
    assert tagged.returncode == 0, tagged.stderr
    here.chart("upgrade", **{"image.tag": "next", "extender.policy": "binpack"})
    here.rolled_out(*WORKLOADS)
    here.kubectl("wait", *SYSTEM, "job/gpushare-installer", "--for=condition=complete", ENOUGH)
    until(lambda: revision(here, f"{IMAGE}:next"), "all of ours run the next image", 120)
    apply(here, app("during", 2, 100))
    here.kubectl("rollout", "status", "statefulset/during", ENOUGH)
    here.helm("rollback", "cgpu", "1", "--namespace", "kube-system")
    here.rolled_out(*WORKLOADS)
    here.kubectl("wait", *SYSTEM, "job/gpushare-installer", "--for=condition=complete", ENOUGH)
    until(lambda: revision(here, f"{IMAGE}:{__version__}"), "all of ours run the first image again", 120)
    apply(here, app("after", 2, 100))
    here.kubectl("rollout", "status", "statefulset/after", ENOUGH)
    assert lives(here) == before


def test_removal_gives_the_master_its_scheduler_back_and_leaves_nothing(here: Installed) -> None:
    before = lives(here)
    backup = here.places.folder / "kubernetes" / "manifests-backup" / "kube-scheduler.ori.yaml"
    was = backup.read_bytes()
    here.helm("uninstall", "cgpu", "--namespace", "kube-system", "--wait", "--timeout", "300s")
    assert here.manifest.read_bytes() == was
    assert was.startswith(b"# As kubeadm writes it; this line and the  odd spacing  must come back.\n")
    assert not (here.places.folder / "kubernetes" / "gpuslice").exists()
    kinds = "ds,deploy,job,svc,cm,secret,sa,role,rolebinding,pdb"
    left = here.kubectl("get", kinds, "-A", "-l", "app.kubernetes.io/instance=cgpu", "-o", "name")
    assert left.strip() == ""
    wide = "clusterrole,clusterrolebinding,mutatingwebhookconfiguration,validatingwebhookconfiguration"
    assert here.kubectl("get", wide, "-l", "app.kubernetes.io/instance=cgpu", "-o", "name").strip() == ""
    assert lives(here) == before, "pods that run go on"
