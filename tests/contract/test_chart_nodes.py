"""Which nodes the chart's pods run on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuslice.core.mode import wants_agent
from tests.chart import render

LABELS = [{}, *({"cgpu": value} for value in ("true", "false", "yes"))]
SCHEDULES = [
    {},
    *({"ack.node.gpu.schedule": value} for value in ("cgpu", "share", "core_mem", "default", "x")),
]


def chooses(spec: dict[str, Any], labels: dict[str, str]) -> bool:
    """Whether a pod of this spec may run on a node with these labels."""
    affinity = spec.get("affinity", {}).get("nodeAffinity", {})
    terms = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms")

    def holds(key: str, operator: str, values: tuple[str, ...] | list[str] = ()) -> bool:
        if operator == "Exists":
            return key in labels
        return (labels.get(key) in values) == (operator == "In")

    fits = terms is None or any(all(holds(**each) for each in term["matchExpressions"]) for term in terms)
    return fits and spec.get("nodeSelector", {}).items() <= {"kubernetes.io/os": "linux", **labels}.items()


def test_no_pod_that_is_not_sent_to_cards_by_a_label_may_go_to_a_windows_node(helm: str) -> None:
    """Their image is for Linux alone, and many providers give their Windows nodes no taint."""
    windows = {"kubernetes.io/os": "windows", "nvidia.com/gpu.present": "true"}
    values = (
        "exporter.enabled=true,exporter.nodes=all,console.enabled=true,webhook.enabled=true,dra.enabled=true"
    )
    for (kind, name), each in render(helm, "--set", values).items():
        if kind in {"Deployment", "DaemonSet", "Job", "Pod"}:
            spec = each["spec"] if kind == "Pod" else each["spec"]["template"]["spec"]
            assert not chooses(spec, windows), name


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("label", LABELS, ids=str)
def test_each_of_the_two_labels_acts_by_itself_and_no_program_runs_twice(
    helm: str, every_daemon_set: dict[str, dict[str, Any]], label: dict[str, str], schedule: dict[str, str]
) -> None:
    labels = {**label, **schedule}
    by_schedule = schedule.get("ack.node.gpu.schedule", "")
    shares = wants_agent(labels, "cgpu")
    whole = labels.get("cgpu") == "false" or ("cgpu" not in label and by_schedule == "default")
    whole |= labels.get("cgpu") == "yes" and by_schedule == "default"
    for start, wanted in (
        ("gpushare-device-plugin", shares),
        ("device-plugin-evict", shares),
        ("device-plugin-recover", whole),
        ("gpuslice-exporter", shares),
    ):
        there = [
            name
            for name, spec in every_daemon_set.items()
            if name.startswith(start) and chooses(spec, labels)
        ]
        assert len(there) == wanted, there


@pytest.fixture(scope="module")
def every_daemon_set(helm: str) -> dict[str, dict[str, Any]]:
    objects = render(helm, "--set", "exporter.enabled=true,exporter.nodes=shared")
    return {name: o["spec"]["template"]["spec"] for (kind, name), o in objects.items() if kind == "DaemonSet"}


def test_agents_are_found_by_one_label_whichever_of_the_nodes_brought_them(helm: str) -> None:
    objects = render(helm)
    for name in ("gpushare-device-plugin-ds", "gpushare-device-plugin-ack-ds"):
        labels = objects["DaemonSet", name]["spec"]["template"]["metadata"]["labels"]
        assert labels["name"] == "gpushare-device-plugin-ds"


def test_without_acks_label_there_is_a_daemon_set_less(helm: str) -> None:
    names = {name for _, name in render(helm, "--set", "ackNodeLabel=false")}
    assert not [name for name in names if "-ack" in name]


@pytest.mark.parametrize(
    ("labels", "shared", "all_cards"),
    [
        ({"cgpu": "true"}, True, True),
        ({"cgpu": "false"}, False, True),
        ({"ack.node.gpu.schedule": "share"}, True, True),
        ({"nvidia.com/gpu.present": "true"}, False, True),
        ({"feature.node.kubernetes.io/pci-10de.present": "true"}, False, True),
        ({"kubernetes.io/os": "linux"}, False, False),
    ],
)
def test_cards_that_are_given_out_whole_are_watched_too_unless_one_value_says_no(
    helm: str, labels: dict[str, str], shared: bool, all_cards: bool
) -> None:
    for only, wanted in ((",exporter.nodes=shared", shared), ("", all_cards)):
        objects = render(helm, "--set", f"exporter.enabled=true{only}")
        spec = objects["DaemonSet", "gpuslice-exporter"]["spec"]["template"]["spec"]
        assert chooses(spec, labels) is wanted


def test_an_affinity_of_ones_own_narrows_the_nodes_and_never_widens_them(helm: str, tmp_path: Path) -> None:
    zone = {"key": "zone", "operator": "In", "values": ["a"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [zone]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    values = {"devicePlugin": {"affinity": affinity}}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    objects = render(helm, "-f", str(tmp_path / "values.yaml"))
    spec = objects["DaemonSet", "gpushare-device-plugin-ack-ds"]["spec"]["template"]["spec"]
    shared = {"ack.node.gpu.schedule": "share"}
    assert [chooses(spec, labels) for labels in ({**shared, "zone": "a"}, shared, {"zone": "a"})] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("exporter", ["shared", "all"])
def test_what_holds_the_driver_leaves_while_the_gpu_operator_replaces_it(helm: str, exporter: str) -> None:
    """A kernel module that a process holds cannot be unloaded. Where no label says so, nobody leaves."""
    values = f"exporter.enabled=true,exporter.nodes={exporter},dra.enabled=true"
    objects = render(helm, "--set", values)
    node = {"cgpu": "true", "nvidia.com/gpu.deploy.client": "true"}
    at_work = {"nvidia.com/gpu-driver-upgrade-state": "upgrade-done"}
    pauses = [
        {"nvidia.com/gpu.deploy.client": "paused-for-driver-upgrade"},
        {"nvidia.com/gpu.deploy.client": "paused-for-mig-change"},
        {"nvidia.com/gpu-driver-upgrade-state": "pod-restart-required"},
    ]
    for name in ("gpushare-device-plugin-ds", "gpuslice-exporter"):
        spec = objects["DaemonSet", name]["spec"]["template"]["spec"]
        assert chooses(spec, {"cgpu": "true"})
        assert chooses(spec, {**node, **at_work})
        assert [chooses(spec, {**node, **pause}) for pause in pauses] == [False] * 3
    exclusive = objects["DaemonSet", "device-plugin-recover-ds"]["spec"]["template"]["spec"]
    assert [chooses(exclusive, {"cgpu": "false", **pause}) for pause in pauses] == [False] * 3
    shared = objects["DaemonSet", "device-plugin-evict-ds"]["spec"]["template"]["spec"]  # it opens no card
    assert chooses(shared, {**node, **pauses[0]})

    waited_for = render(helm, "--set", f"{values},gpuOperatorClient=true")
    for name in ("gpushare-device-plugin-ds", "gpuslice-exporter"):
        spec = waited_for["DaemonSet", name]["spec"]["template"]["spec"]
        assert spec["nodeSelector"]["nvidia.com/gpu.deploy.client"] == "true"
