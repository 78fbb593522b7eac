"""Since when containers are idle: over samples without them, restarts, and pods of one name."""

from __future__ import annotations

from pathlib import Path

from gpuslice.apps.exporter.activity import FORGET_S, Activity
from gpuslice.apps.exporter.card_snapshot import Active, CardSnapshot, ContainerSnapshot
from gpuslice.apps.exporter.node_pods import KnownPod, NodePods
from tests.unit.test_exporter_page import UUID, A, sample

MIB = 1 << 20


class Node:
    """One card with one container, and a clock that the test sets."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.now_s = 1000.0
        self.pods = NodePods()
        self.pod_is("uid-0")
        self.restart()

    def pod_is(self, uid: str) -> None:
        self.pods.replace([KnownPod(A.namespace, A.pod, uid, (A.container,))])

    def restart(self) -> None:
        self.activity = Activity(self.folder, lambda: self.now_s)
        self.activity.load()

    def sees(self, sm_ratio: float | None = 0.0, used_bytes: int = 0) -> Active:
        card = CardSnapshot(sample(), {A: ContainerSnapshot(used_bytes, sm_ratio, 1)}, {}, None)
        return self.activity.after([card], self.pods)[UUID, A]

    def misses(self) -> None:
        self.activity.after([], self.pods)


def test_a_container_is_idle_since_it_last_computed_or_was_first_seen() -> None:
    node = Node()
    assert node.sees().last_s == 1000
    node.now_s = 1600
    assert node.sees().last_s == 1000
    assert node.sees(sm_ratio=0.5).last_s == 1600
    node.now_s = 2000
    assert node.sees(sm_ratio=0.001).last_s == 1600


def test_what_did_not_change_is_the_same_object() -> None:
    node = Node()
    first = node.sees()
    node.now_s += 1
    assert node.sees() is first


def test_missing_from_some_samples_is_not_gone() -> None:
    node = Node()
    node.sees()
    node.now_s += 30
    node.misses()
    node.now_s += FORGET_S - 1
    node.misses()
    assert node.sees().last_s == 1000
    node.misses()
    node.now_s += FORGET_S
    node.misses()
    node.misses()
    assert node.sees().last_s == node.now_s


def test_a_restart_of_the_exporter_forgets_neither_idleness_nor_peak(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.sees(used_bytes=7 * MIB)
    node.activity.save()
    node.now_s += 7200  # however long nothing ran
    node.restart()
    assert node.sees() == Active("uid-0", 1000, 7 * MIB)
    assert [file.name for file in tmp_path.iterdir()] == ["activity.json"]


def test_another_pod_of_the_same_name_begins_anew(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.sees(used_bytes=7 * MIB)
    node.activity.save()
    node.now_s += 60
    node.pod_is("uid-1")
    node.restart()
    assert node.sees() == Active("uid-1", 1060, 0)


def test_a_damaged_file_and_a_clock_that_was_set_back_do_no_harm(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.sees()
    node.activity.save()
    node.now_s = 400
    node.restart()
    assert node.sees().last_s == 400
    (tmp_path / "activity.json").write_bytes(b'[{"uuid": 1')
    node.restart()
    assert node.sees().last_s == 400
