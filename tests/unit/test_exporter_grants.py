"""kubelet's device assignments, pods by every key, and whose a process is."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuslice.adapters.cgroup.container import ContainerRef
from gpuslice.adapters.gpu.mig import MigSample
from gpuslice.adapters.gpu.telemetry import CardSample
from gpuslice.adapters.kube import objects
from gpuslice.adapters.kubelet.podresources import Claimed
from gpuslice.apps.exporter.device_grants import (
    DeviceGrant,
    ShareMode,
    claim_records,
    claimed_parts,
    devices_of,
    grants_of,
    is_card_resource,
)
from gpuslice.apps.exporter.node_pods import KnownPod, LogFolders, NodePods, known_pod
from gpuslice.apps.exporter.owners import CHECK_EVERY, Owners
from gpuslice.core.attribution import ContainerKey, Stranger
from gpuslice.core.contract import ANN_GRANTED, CLAIM_DRIVER
from gpuslice.core.device_assignment import DeviceAssignment
from tests.builders import api_pod

MIB = 1 << 20
UID = "0e1c2d3f-0000-4000-8000-00000000000a"
HASH = "0123456789abcdef0123456789abcdef"
FULL = "f" * 64
APP = ContainerKey("default", "app-0", "main")
CARD = CardSample(
    position=0,
    index=0,
    uuid="GPU-a",
    mig=(
        MigSample("MIG-1", "1g.5gb", 7, 0, 5 * MIB, MIB),
        MigSample("MIG-2", "1g.5gb", 7, 1, 5 * MIB, MIB),
        MigSample("MIG-3", "2g.10gb", 3, 0, 10 * MIB, 0),
    ),
)


def assignment(*ids: str) -> DeviceAssignment:
    return DeviceAssignment("default", "app-0", "main", frozenset(ids))


@pytest.mark.parametrize(
    ("resource", "identifier", "expected"),
    [
        ("aliyun.com/gpu-mem", "GPU-a-_-3", DeviceGrant("aliyun.com/gpu-mem", ShareMode.SHARE, 1)),
        ("nvidia.com/gpu", "GPU-a", DeviceGrant("nvidia.com/gpu", ShareMode.EXCLUSIVE)),
        ("nvidia.com/gpu", "GPU-a::2", DeviceGrant("nvidia.com/gpu", ShareMode.SHARE, replica="2")),
        ("nvidia.com/gpu", "nvidia0", DeviceGrant("nvidia.com/gpu", ShareMode.EXCLUSIVE)),
        ("nvidia.com/gpu", "nvidia0/vgpu1", DeviceGrant("nvidia.com/gpu", ShareMode.SHARE, replica="1")),
        ("nvidia.com/gpu", "MIG-3", DeviceGrant("nvidia.com/gpu", ShareMode.MIG, mig=("MIG-3",))),
        (
            "nvidia.com/mig-2g",
            "MIG-3::1",
            DeviceGrant("nvidia.com/mig-2g", ShareMode.MIG, replica="1", mig=("MIG-3",)),
        ),
        ("nvidia.com/gpu", "nvidia0/gi3", DeviceGrant("nvidia.com/gpu", ShareMode.MIG, mig=("MIG-3",))),
    ],
)
def test_each_sharing_scheme_has_its_own_device_ids(
    resource: str, identifier: str, expected: DeviceGrant
) -> None:
    assert grants_of({resource: [assignment(identifier)]}).of(CARD) == {APP: expected}


def test_what_a_running_pod_was_granted_counts_beside_its_device_ids() -> None:
    document = api_pod("app-0", "4", node="n1", annotations={ANN_GRANTED: '{"main":10}'})
    pods = NodePods()
    pods.put(known_pod(msgspec.convert(document, objects.Pod)))
    held = assignment(*(f"GPU-{card}-_-{unit}" for card in "ab" for unit in (0, 1)))
    found = grants_of({"aliyun.com/gpu-mem": [held]}, added=pods.added())
    assert [found.by_device[f"GPU-{card}"][APP].units for card in "ab"] == [5, 5]


def test_mig_devices_of_one_instance_share_its_memory() -> None:
    held = grants_of({"nvidia.com/mig-1g.5gb": [assignment("MIG-1", "MIG-2", "MIG-3")]}).of(CARD)[APP]
    assert held.mig == ("MIG-1", "MIG-2", "MIG-3")
    assert held.memory_bytes(CARD, "GiB") == 15 * MIB


@pytest.mark.parametrize("resource", ["nvidia.com/gpu.shared", "nvidia.com/mig-1g.5gb", "example.com/a10"])
def test_resources_of_cards_and_their_parts_are_ours(resource: str) -> None:
    assert is_card_resource(resource, ("example.com/a10",))
    assert not is_card_resource("cpu", ("example.com/a10",))


def claimed(device: str, container: str = "main") -> Claimed:
    return Claimed("default", "app-0", container, "claim", "default", "gpu.nvidia.com", "n1", device)


def test_a_claim_names_a_card_by_the_drivers_slices_or_by_its_number() -> None:
    devices = {("n1", "gpu-x"): "GPU-a", ("n1", "part"): "MIG-3"}
    assert grants_of({}, [claimed("gpu-x")], devices).of(CARD)[APP].mode is ShareMode.EXCLUSIVE
    assert grants_of({}, [claimed("gpu-0")]).of(CARD)[APP].claim == claimed("gpu-0")
    assert grants_of({}, [claimed("part")], devices).of(CARD)[APP].mig == ("MIG-3",)
    assert grants_of({}, [claimed("gpu-0"), claimed("gpu-0", "side")]).of(CARD)[APP].mode is ShareMode.SHARE
    assert "nowhere" in grants_of({}, [claimed("nowhere")]).problems[0]
    other = Claimed("default", "app-0", "main", "claim", "default", "net.example.com", "n1", "gpu-0")
    assert grants_of({}, [other]).of(CARD) == {}


@pytest.mark.parametrize("wrap", [lambda device: device, lambda device: {"basic": device}])
def test_slices_are_read_in_each_version_of_their_api(wrap: Callable[[object], object]) -> None:
    attributes = {"attributes": {"uuid": {"string": "GPU-a"}, "type": {"string": "gpu"}}}
    device = wrap(attributes)
    assert isinstance(device, dict)
    spec = {"driver": "gpu.nvidia.com", "pool": {"name": "n1"}, "devices": [{"name": "gpu-x", **device}]}
    assert list(devices_of({"spec": spec})) == [(("n1", "gpu-x"), "GPU-a")]
    assert list(devices_of({"spec": {**spec, "driver": "other"}})) == []


def test_an_id_that_means_nothing_is_a_problem_and_not_a_crash() -> None:
    grants = grants_of({"aliyun.com/gpu-mem": [assignment("nonsense")]})
    assert grants.of(CARD) == {}
    assert "nonsense" in grants.problems[0]


def test_only_claims_of_whole_cards_become_shares_of_one() -> None:
    """A MIG device that two containers use stays what it is, and so does who has the card another way."""
    devices = {("n1", "part"): "MIG-3"}
    both = [claimed("part"), claimed("part", "side")]
    assert {each.mode for each in grants_of({}, both, devices).by_device["MIG-3"].values()} == {ShareMode.MIG}
    whole = DeviceAssignment("default", "other", "main", frozenset({"nvidia0"}))
    mixed = grants_of({"nvidia.com/gpu": [whole]}, [claimed("gpu-0")]).by_device["nvidia0"]
    modes = {key.pod: grant.mode for key, grant in mixed.items()}
    assert modes == {"other": ShareMode.EXCLUSIVE, "app-0": ShareMode.SHARE}


def test_grants_know_the_containers_of_each_pod() -> None:
    beside = DeviceAssignment("default", "app-0", "side", frozenset({"GPU-a-_-1"}))
    other = DeviceAssignment("team", "app-0", "main", frozenset({"GPU-b-_-0"}))
    found = grants_of({"aliyun.com/gpu-mem": [assignment("GPU-a-_-0"), beside, other]})
    assert found.containers == {"default/app-0": ("main", "side"), "team/app-0": ("main",)}


def card_of(total_bytes: int | None) -> CardSample:
    return CardSample(position=0, index=0, uuid="GPU-a", total_bytes=total_bytes)


def test_a_card_smaller_than_a_unit_has_no_memory_to_grant() -> None:
    grant = DeviceGrant("aliyun.com/gpu-mem", ShareMode.SHARE, 1)
    assert grant.memory_bytes(card_of(1023 * MIB), "GiB") is None
    assert grant.memory_bytes(card_of(None), "GiB") is None
    assert grant.memory_bytes(card_of(1024 * MIB), "GiB") == 1024 * MIB


def test_units_are_the_documented_bytes() -> None:
    grant = DeviceGrant("aliyun.com/gpu-mem", ShareMode.SHARE, 4)
    assert grant.memory_bytes(card_of(16130 * MIB), "GiB") == 4301 * MIB
    assert grant.memory_bytes(card_of(15079 * MIB), "GiB") == 4308 * MIB
    assert grant.memory_bytes(card_of(None), "GiB") is None
    whole = DeviceGrant("nvidia.com/gpu", ShareMode.EXCLUSIVE)
    assert whole.memory_bytes(card_of(16130 * MIB), "GiB") == 16130 * MIB


def pods(**more: object) -> NodePods:
    found = NodePods()
    found.put(KnownPod("default", "app-0", UID, ("main",), {FULL: "main"}, **more))  # type: ignore[arg-type]
    return found


def test_a_container_is_known_by_its_id_and_before_that_by_its_pod() -> None:
    assert pods().owner(ContainerRef(FULL, UID), {}) == APP
    assert pods().owner(ContainerRef("e" * 64, UID), {}) == APP
    assert pods().owner(ContainerRef(FULL, "another"), {}) == APP
    assert pods().owner(ContainerRef("e" * 64, "another"), {}) is None


def test_of_several_containers_the_one_with_an_allocation_is_meant() -> None:
    found = NodePods()
    found.put(KnownPod("default", "app-0", UID, ("main", "sidecar")))
    ref = ContainerRef(FULL, UID)
    assert found.owner(ref, {}) is None
    assert found.owner(ref, {"default/app-0": ("main",)}) == APP


def test_a_static_pod_is_known_by_the_hash_that_its_cgroup_has() -> None:
    pod = objects.Pod(
        metadata=objects.Metadata(
            name="app-0", namespace="default", uid=UID, annotations={"kubernetes.io/config.hash": HASH}
        ),
        spec=objects.PodSpec(containers=[objects.Container(name="main")]),
    )
    found = NodePods()
    found.put(known_pod(pod))
    assert found.owner(ContainerRef(FULL, HASH), {}) == APP


def test_labels_that_would_have_one_name_are_told_apart() -> None:
    alike = {
        "app.kubernetes.io/name": "a",
        "app_kubernetes_io/name": "b",
        "tier": "c",
        "app-kubernetes.io.name": "d",
    }
    pod = KnownPod("default", "app-0", UID, labels=alike)
    assert pod.shown_labels((), "label_") == {
        "label_app_kubernetes_io_name_conflict1": "d",
        "label_app_kubernetes_io_name_conflict2": "a",
        "label_app_kubernetes_io_name_conflict3": "b",
        "label_tier": "c",
    }
    assert pod.shown_labels([re.compile("^tier$|^app_")]) == {"app_kubernetes_io_name": "b", "tier": "c"}


def test_a_pod_that_is_gone_owns_nothing_and_its_successor_keeps_the_name() -> None:
    found = pods()
    found.put(KnownPod("default", "app-0", "new", ("main",)))
    found.remove(UID)
    assert found.owner(ContainerRef(FULL, UID), {}) is None
    pod = found.pod("default", "app-0")
    assert pod is not None
    assert pod.uid == "new"


def test_log_folders_name_pods_without_any_permission(tmp_path: Path) -> None:
    (tmp_path / f"default_app-0_{UID}" / "main").mkdir(parents=True)
    (tmp_path / "something else").mkdir()
    assert LogFolders(tmp_path).pods() == [KnownPod("default", "app-0", UID, ("main",))]


def test_log_folders_that_did_not_change_are_not_listed_again(tmp_path: Path) -> None:
    place = tmp_path / f"default_app-0_{UID}"
    (place / "main").mkdir(parents=True)
    long_ago_s = 1_700_000_000
    os.utime(place, (long_ago_s, long_ago_s))
    folders = LogFolders(tmp_path)
    (first,) = folders.pods()
    (again,) = folders.pods()
    assert again is first
    (place / "sidecar").mkdir()
    (changed,) = folders.pods()
    (place / "third").mkdir()  # maybe within the same tick of the file system's clock
    assert changed.names == ("main", "sidecar")
    assert folders.pods()[0].names == ("main", "sidecar", "third")


class Proc:
    """A /proc of processes that the test makes up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, pid: int, cgroup: str, started: int = 1) -> None:
        place = self.folder / str(pid)
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        fields = " ".join(["S", *["0"] * 18, str(started), "0"])
        (place / "stat").write_text(f"{pid} (a (strange) name) {fields}\n")
        (place / "cgroup").write_text(f"0::{cgroup}\n")


IN_POD = f"/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{FULL}.scope"


def test_processes_are_of_containers_of_the_host_of_nobody_known_or_gone(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.add(1, IN_POD)
    proc.add(2, "/system.slice/ssh.service")
    proc.add(3, IN_POD.replace("00a.slice", "00b.slice").replace(FULL, "e" * 64))
    owners = Owners(pods(), tmp_path).of([1, 2, 3, 4], {})
    assert owners == {1: APP, 2: Stranger.HOST, 3: Stranger.UNKNOWN_CONTAINER}


def test_a_number_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.add(1, IN_POD)
    owners = Owners(pods(), tmp_path)
    assert owners.of([1], {}) == {1: APP}
    proc.add(1, "/user.slice", started=2)
    found = [owners.of([1], {})[1] for _ in range(CHECK_EVERY)]
    assert found[-1] is Stranger.HOST


def test_a_pod_that_becomes_known_gets_its_processes(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.add(1, IN_POD)
    pods = NodePods()
    owners = Owners(pods, tmp_path)
    assert owners.of([1], {}) == {1: Stranger.UNKNOWN_CONTAINER}
    pods.put(KnownPod("default", "app-0", UID, ("main",), {FULL: "main"}))
    assert owners.of([1], {}) == {1: APP}


def test_a_process_that_is_moved_into_its_container_is_found_there(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.add(7, "/user.slice")
    owners = Owners(pods(), tmp_path)
    assert owners.of([7], {}) == {7: Stranger.HOST}
    proc.add(7, IN_POD)
    assert owners.of([7], {}) == {7: APP}


def test_one_that_stays_outside_is_looked_at_from_time_to_time(tmp_path: Path) -> None:
    proc = Proc(tmp_path)
    proc.add(7, "/user.slice")
    owners = Owners(pods(), tmp_path)
    for _ in range(2 * CHECK_EVERY):
        assert owners.of([7], {}) == {7: Stranger.HOST}
    proc.add(7, IN_POD)
    seen = [owners.of([7], {})[7] for _ in range(CHECK_EVERY)]
    assert seen[-1] == APP
    proc.add(8, "/user.slice")
    assert owners.of([8], {}) == {8: Stranger.HOST}  # and 7 is forgotten
    proc.add(7, "/user.slice", started=2)
    assert owners.of([7, 8], {}) == {7: Stranger.HOST, 8: Stranger.HOST}


@pytest.mark.parametrize("uuids", [{"uuids": {"1": CARD.uuid}}, {}], ids=["with uuids", "of an older agent"])
def test_a_container_has_of_a_claim_what_it_asks_for_by_name(tmp_path: Path, uuids: dict[str, Any]) -> None:
    """kubelet lists the whole claim to each of its containers, and before 1.35 does not tell shares apart.

    The card may have had another index when the claim was prepared.
    """
    card = 1 if uuids else CARD.index
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "broken.json").write_text("{")
    slices = [
        {"request": "a", "card": card, "units": 4, "share_id": "s1"},
        {"request": "b/small", "card": card, "units": 2, "share_id": "s2"},
        {"request": "m", "card": card, "units": 0, "share_id": "s3", "admin": True},
    ]
    record = {"uid": "u", "namespace": "default", "name": "c", "boot": "b", "slices": slices} | uuids
    (tmp_path / "claims" / "u.json").write_text(json.dumps(record))
    uses = {"train": ["a"], "serve": ["b"], "monitor": ["m"], "all": [""]}
    containers = [
        {"name": name, "resources": {"claims": [{"name": "gpu", "request": each} for each in requests]}}
        for name, requests in uses.items()
    ]
    document = {
        "metadata": {"namespace": "default", "name": "app-0", "uid": UID},
        "spec": {"resourceClaims": [{"name": "gpu"}], "containers": containers},
        "status": {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "c"}]},
    }
    shares = ("s1", "s2", "s3")
    claims = [
        Claimed("default", "app-0", container, "c", "default", CLAIM_DRIVER, "n1", "gpu-0", share)
        for container in uses
        for share in shares
    ]
    prepared, known = claim_records(tmp_path), NodePods()
    assert claimed_parts(claims, prepared, known) == {}, "of an unknown pod nobody knows"
    known.put(known_pod(msgspec.convert(document, objects.Pod)))
    for listed in (claims, [replace(each, share_id="") for each in claims]):
        grants = grants_of({}, listed, parts=claimed_parts(listed, prepared, known)).of(CARD)
        assert {key.container: (grant.units, grant.mode) for key, grant in grants.items()} == {
            "train": (4, ShareMode.SHARE),
            "serve": (2, ShareMode.SHARE),
            "all": (6, ShareMode.SHARE),
        }


def test_a_container_has_its_part_of_a_claim_that_kube_scheduler_made(tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    slices = [{"request": f"container-{each}-request-0", "card": 0, "units": 4 + each} for each in (0, 1)]
    record = {"uid": "u", "namespace": "default", "name": "made", "boot": "b", "slices": slices}
    (tmp_path / "claims" / "u.json").write_text(json.dumps(record | {"uuids": {"0": CARD.uuid}}))
    mappings = [
        {"containerName": name, "resourceName": "r", "requestName": f"container-{place}-request-0"}
        for place, name in enumerate(("train", "serve"))
    ]
    document = {
        "metadata": {"namespace": "default", "name": "app-0", "uid": UID},
        "spec": {"containers": [{"name": "train"}, {"name": "serve"}, {"name": "sidecar"}]},
        "status": {"extendedResourceClaimStatus": {"resourceClaimName": "made", "requestMappings": mappings}},
    }
    listed = [
        Claimed("default", "app-0", container, "made", "default", CLAIM_DRIVER, "n1", "gpu-0", "")
        for container in ("train", "serve")
    ]
    known = NodePods()
    known.put(known_pod(msgspec.convert(document, objects.Pod)))
    parts = claimed_parts(listed, claim_records(tmp_path), known)
    grants = grants_of({}, listed, parts=parts).of(CARD)
    assert {key.container: grant.units for key, grant in grants.items()} == {"train": 4, "serve": 5}
