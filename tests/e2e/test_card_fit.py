"""Kueue's own controller with random workloads on a nearly full cluster: who is let go without a card.

Kueue counts units; the check `gpuslice.io/card-fit` asks the extender. GPUSLICE_E2E_WORKLOADS
is how many there are.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuslice.core.contract import CARD_FIT, GPU_MEM
from tests.builders import api_node
from tests.e2e import control_plane, kueue
from tests.e2e.kueue import Kubectl
from tests.e2e.marks import ON_A_CONTROL_PLANE
from tests.e2e.node import Api, until
from tests.e2e.test_kueue import extender

pytestmark = [
    *ON_A_CONTROL_PLANE,
    pytest.mark.skipif(bool(kueue.missing()), reason=kueue.missing()),
]
NODES, CARDS, CARD_UNITS = 4, 4, 16
WORKLOADS = int(os.environ.get("GPUSLICE_E2E_WORKLOADS", "40"))
LIFE_S = (2.0, 6.0)
PATIENCE_S = 540.0
API = "kueue.x-k8s.io/v1beta2"


def queue(checks: tuple[str, ...] = (), units: int = NODES * CARDS * CARD_UNITS) -> str:
    """A queue with all units of the cluster, and these checks of card fit."""
    quotas = {"cpu": "1000", "memory": "1000Gi", GPU_MEM: str(units)}
    resources = [{"name": name, "nominalQuota": amount} for name, amount in quotas.items()]
    flavor = {"name": "cards", "resources": resources}
    spec: dict[str, Any] = {
        "namespaceSelector": {},
        "resourceGroups": [{"coveredResources": list(quotas), "flavors": [flavor]}],
    }
    if checks:
        spec["admissionChecksStrategy"] = {"admissionChecks": [{"name": each} for each in checks]}
    made = [
        *(
            {"kind": "AdmissionCheck", "metadata": {"name": each}, "spec": {"controllerName": CARD_FIT}}
            for each in checks
        ),
        {"kind": "ResourceFlavor", "metadata": {"name": "cards"}, "spec": {"nodeLabels": {"cgpu": "true"}}},
        {"kind": "ClusterQueue", "metadata": {"name": "all"}, "spec": spec},
        {"kind": "LocalQueue", "metadata": {"name": "all"}, "spec": {"clusterQueue": "all"}},
    ]
    for each in made[-1:]:
        each["metadata"]["namespace"] = "default"  # type: ignore[index]
    return yaml.safe_dump_all({"apiVersion": API, **each} for each in made)


def job(name: str, pods: int, units: int) -> dict[str, Any]:
    resources = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {GPU_MEM: units}}
    container = {"name": "main", "image": "x", "resources": resources}
    template = {"spec": {"restartPolicy": "Never", "containers": [container]}}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "all"}},
        "spec": {"suspend": True, "parallelism": pods, "completions": pods, "template": template},
    }


@dataclass
class Watched:
    """Pods that were bound, until when they run, and those that kube-scheduler called unschedulable."""

    api: Api
    luck: random.Random
    ends_s: dict[str, float] = field(default_factory=dict)
    unschedulable: set[str] = field(default_factory=set)
    ended: set[str] = field(default_factory=set)
    most_units: int = 0

    def look(self) -> None:
        """And end those whose time has come: there is no kubelet."""
        units = 0
        for pod in self.api.get("namespaces/default/pods")["items"]:
            name, now_s = pod["metadata"]["name"], time.monotonic()
            conditions = pod.get("status", {}).get("conditions", [])
            if any(each.get("reason") == "Unschedulable" for each in conditions):
                self.unschedulable.add(pod["metadata"]["labels"]["job-name"])
            if not pod["spec"].get("nodeName") or name in self.ended:
                continue
            units += int(pod["spec"]["containers"][0]["resources"]["limits"][GPU_MEM])
            if now_s >= self.ends_s.setdefault(name, now_s + self.luck.uniform(*LIFE_S)):
                self.ended.add(name)
                self.api.patch(f"namespaces/default/pods/{name}/status", {"status": {"phase": "Succeeded"}})
        self.most_units = max(self.most_units, units)

    def finished(self) -> int:
        jobs = self.api.get("/apis/batch/v1/namespaces/default/jobs")["items"]
        return sum(
            int(each.get("status", {}).get("succeeded", 0)) == each["spec"]["completions"] for each in jobs
        )


def play(folder: Path, checks: tuple[str, ...]) -> tuple[Watched, float]:
    """All workloads at once, until the last has ended; and how long that took."""
    luck = random.Random(48)
    with ExitStack() as stack:
        plane = stack.enter_context(control_plane.api_server(folder, without=("TaintNodesByCondition",)))
        extender(stack, plane, *(["--card-fit"] if checks else []))
        stack.enter_context(control_plane.controller_manager(plane, *kueue.CONTROLLERS))
        kubectl: Kubectl = stack.enter_context(kueue.kueue(plane, {}))
        for number in range(NODES):
            made = api_node(f"n{number}", CARDS * CARD_UNITS, CARDS, labels={"cgpu": "true"})
            made["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
            kubectl("create", "-f", "-", given=yaml.safe_dump(made))
        kubectl("apply", "-f", "-", given=queue(checks))
        kubectl("wait", "clusterqueue/all", "--for=condition=Active", "--timeout=60s")
        api = stack.enter_context(closing(Api(plane)))
        watched, began_s = Watched(api, luck), time.monotonic()
        for number in range(WORKLOADS):
            wanted = job(f"w{number}", luck.choice((1, 1, 1, 2, 4)), luck.choice((2, 4, 6, 10, 12, 16)))
            api.create("/apis/batch/v1/namespaces/default/jobs", wanted)

        def done() -> bool:
            watched.look()
            return watched.finished() == WORKLOADS

        until(done, "all workloads end", PATIENCE_S)
        return watched, time.monotonic() - began_s


@pytest.mark.timeout(580)
@pytest.mark.parametrize("checks", [(), ("fits-on-cards",)], ids=["kueue-alone", "card-fit"])
def test_a_workload_is_let_go_only_if_cards_hold_its_pods(checks: tuple[str, ...], tmp_path: Path) -> None:
    watched, took_s = play(tmp_path, checks)
    full = watched.most_units / (NODES * CARDS * CARD_UNITS)
    stuck = len(watched.unschedulable)
    print(f"\n{WORKLOADS} workloads, at most {full:.0%} in use: {stuck} got stuck, {took_s:.0f} s")
    assert bool(stuck) == (not checks), sorted(watched.unschedulable)
