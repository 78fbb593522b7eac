"""The simulated device manager keeps to kubelet's contract, call by call."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from gpuslice.core.model import ContainerKind
from simcluster.kubelet import checkpoint
from simcluster.kubelet.devices import (
    STOP_GRACE_S,
    AdmissionError,
    ContainerDemand,
    Device,
    DeviceAssignments,
    Options,
)
from simcluster.kubelet.plugin_calls import AllocateCall, Call, PluginError, PreferredCall

MEM = "aliyun.com/gpu-mem"


def devices(card: str, count: int, healthy: bool = True) -> list[Device]:
    return [Device(f"{card}-_-{unit}", healthy) for unit in range(count)]


def manager_with(*lists: list[Device], preferred: bool = False, seed: int = 1) -> DeviceAssignments:
    device_manager = DeviceAssignments(rng=random.Random(seed))
    generation = device_manager.register(MEM, Options(preferred_allocation=preferred))
    device_manager.update(MEM, generation, [one for part in lists for one in part])
    return device_manager


def allocate(
    device_manager: DeviceAssignments,
    pod: str,
    demand: ContainerDemand,
    active: Iterable[str] = (),
    *,
    wish: Iterable[str] = (),
    fail: str = "",
) -> list[Call]:
    """Drive one admission like kubelet does; the calls that were made."""
    calls: list[Call] = []
    steps = device_manager.allocate(pod, demand, [pod, *active])
    try:
        call = next(steps)
        while True:
            calls.append(call)
            if isinstance(call, PreferredCall):
                call = steps.send(tuple(wish))
            elif fail:
                call = steps.throw(PluginError(fail))
            else:
                call = steps.send(f"answer for {pod}".encode())
    except StopIteration:
        return calls


def ids_of(device_manager: DeviceAssignments, pod: str, container: str = "main") -> frozenset[str]:
    return frozenset(one for held in device_manager.assignments_of(pod, container) for one in held.ids)


def demand(units: int, name: str = "main", kind: ContainerKind = ContainerKind.APP) -> ContainerDemand:
    return ContainerDemand(name, {MEM: units, "cpu": 1}, kind)


def test_a_container_gets_as_many_ids_as_its_limit_in_one_call() -> None:
    device_manager = manager_with(devices("a", 15))
    (call,) = allocate(device_manager, "p1", demand(4))
    assert isinstance(call, AllocateCall)
    assert len(call.ids) == 4
    assert ids_of(device_manager, "p1") == frozenset(call.ids)


def test_a_full_preferred_answer_is_what_allocate_gets() -> None:
    device_manager = manager_with(devices("a", 4), devices("b", 4), preferred=True)
    wish = {"b-_-0", "b-_-1", "b-_-2"}
    preferred, allocated = allocate(device_manager, "p1", demand(3), wish=wish)
    assert preferred == PreferredCall(MEM, device_manager.healthy(MEM), frozenset(), 3)
    assert isinstance(allocated, AllocateCall)
    assert set(allocated.ids) == wish


def test_a_short_preferred_answer_is_filled_from_any_card() -> None:
    device_manager = manager_with(devices("a", 4), devices("b", 4), preferred=True)
    wish = {f"b-_-{unit}" for unit in range(4)}
    allocate(device_manager, "p1", demand(6), wish=wish)
    held = ids_of(device_manager, "p1")
    assert wish < held
    assert len(held) == 6


def test_ids_held_by_an_active_pod_are_not_given_again() -> None:
    device_manager = manager_with(devices("a", 6))
    allocate(device_manager, "p1", demand(4))
    with pytest.raises(AdmissionError, match=r"Requested: 4, Available: 2"):
        allocate(device_manager, "p2", demand(4), active=["p1"])
    allocate(device_manager, "p3", demand(4))  # p1 is no longer active
    assert len(ids_of(device_manager, "p3")) == 4
    assert not ids_of(device_manager, "p1")


def test_a_refused_allocation_leaves_nothing_held() -> None:
    device_manager = manager_with(devices("a", 4))
    with pytest.raises(AdmissionError, match="rpc error"):
        allocate(device_manager, "p1", demand(4), fail="rpc error: code = Unknown desc = no")
    assert device_manager.allocated.get(MEM, set()) == set()
    assert len(allocate(device_manager, "p2", demand(4))) == 1


def test_an_init_containers_ids_are_used_again_by_the_app_container_with_another_call() -> None:
    device_manager = manager_with(devices("a", 8), preferred=True)
    allocate(device_manager, "p1", demand(2, "setup", ContainerKind.INIT))
    first = ids_of(device_manager, "p1", "setup")
    preferred, _ = allocate(device_manager, "p1", demand(3))
    assert isinstance(preferred, PreferredCall)
    assert preferred.must_include == first
    assert preferred.size == 3
    assert first < ids_of(device_manager, "p1")
    assert len(device_manager.allocated[MEM]) == 3


def test_a_smaller_app_container_is_served_from_the_init_container_without_asking_preference() -> None:
    device_manager = manager_with(devices("a", 8), preferred=True)
    allocate(device_manager, "p1", demand(5, "setup", ContainerKind.INIT))
    (call,) = allocate(device_manager, "p1", demand(3))
    assert isinstance(call, AllocateCall)
    assert set(call.ids) < ids_of(device_manager, "p1", "setup")


def test_a_sidecar_keeps_its_ids() -> None:
    device_manager = manager_with(devices("a", 8))
    allocate(device_manager, "p1", demand(2, "proxy", ContainerKind.SIDECAR))
    allocate(device_manager, "p1", demand(3))
    assert ids_of(device_manager, "p1").isdisjoint(ids_of(device_manager, "p1", "proxy"))


def test_two_app_containers_do_not_share_reused_ids() -> None:
    device_manager = manager_with(devices("a", 8))
    allocate(device_manager, "p1", demand(4, "setup", ContainerKind.INIT))
    allocate(device_manager, "p1", demand(3, "one"))
    allocate(device_manager, "p1", demand(3, "two"))
    assert ids_of(device_manager, "p1", "one").isdisjoint(ids_of(device_manager, "p1", "two"))


def test_a_container_that_holds_its_ids_is_not_allocated_again() -> None:
    device_manager = manager_with(devices("a", 8))
    allocate(device_manager, "p1", demand(4))
    assert allocate(device_manager, "p1", demand(4)) == []
    with pytest.raises(AdmissionError, match=r"changed request .* from 4 to 5"):
        allocate(device_manager, "p1", demand(5))


def test_a_stopped_plugin_zeroes_allocatable_at_once_and_capacity_after_five_minutes() -> None:
    device_manager = DeviceAssignments()
    generation = device_manager.register(MEM, Options())
    device_manager.update(MEM, generation, devices("a", 15))
    device_manager.stop(MEM, generation, now=100.0)
    during = device_manager.capacity(100.0 + STOP_GRACE_S)
    assert (during.capacity[MEM], during.allocatable[MEM]) == (15, 0)
    with pytest.raises(AdmissionError, match="no healthy devices present; cannot allocate unhealthy devices"):
        allocate(device_manager, "p1", demand(4))
    after = device_manager.capacity(100.1 + STOP_GRACE_S)
    assert after.removed == {MEM}
    assert MEM not in after.capacity


def test_the_end_of_an_older_stream_does_not_touch_the_newer_plugin() -> None:
    device_manager = DeviceAssignments()
    old = device_manager.register(MEM, Options())
    device_manager.update(MEM, old, devices("a", 15))
    new = device_manager.register(MEM, Options())
    device_manager.update(MEM, new, devices("a", 15))
    assert not device_manager.stop(MEM, old, now=1.0)
    assert not device_manager.update(MEM, old, [])
    assert device_manager.capacity(1.0).allocatable == {MEM: 15}


def test_an_unhealthy_card_stays_in_capacity_and_leaves_allocatable() -> None:
    device_manager = manager_with(devices("a", 15), devices("b", 14, healthy=False))
    now = device_manager.capacity(0.0)
    assert (now.capacity[MEM], now.allocatable[MEM]) == (29, 15)
    allocate(device_manager, "p1", demand(15))
    assert all(one.startswith("a") for one in ids_of(device_manager, "p1"))


def test_a_list_without_a_device_drops_it() -> None:
    device_manager = DeviceAssignments()
    generation = device_manager.register(MEM, Options())
    device_manager.update(MEM, generation, devices("a", 15))
    device_manager.update(MEM, generation, devices("a", 10))
    assert device_manager.capacity(0.0).capacity == {MEM: 10}


def test_a_readmitted_pod_whose_devices_are_gone_is_refused_unless_it_already_runs() -> None:
    device_manager = DeviceAssignments()
    generation = device_manager.register(MEM, Options())
    device_manager.update(MEM, generation, devices("a", 4))
    allocate(device_manager, "p1", demand(4))
    device_manager.update(MEM, generation, devices("b", 4))
    with pytest.raises(AdmissionError, match="previously allocated devices are no longer healthy"):
        allocate(device_manager, "p1", demand(4))
    assert list(device_manager.allocate("p1", demand(4), ["p1"], already_running=True)) == []


def test_a_checkpoint_brings_holdings_back_and_waits_for_the_plugin() -> None:
    device_manager = manager_with(devices("a", 15))
    allocate(device_manager, "p1", demand(4))
    raw = checkpoint.encode(device_manager.assignments(), device_manager.registered())
    saved = checkpoint.decode(raw)

    restarted = DeviceAssignments()
    restarted.restore(saved.assignments, saved.registered, now=0.0)
    assert restarted.capacity(1.0).capacity == {MEM: 0}
    assert ids_of(restarted, "p1") == ids_of(device_manager, "p1")
    generation = restarted.register(MEM, Options())
    restarted.update(MEM, generation, devices("a", 15))
    with pytest.raises(AdmissionError, match="Requested: 12, Available: 11"):
        allocate(restarted, "p2", demand(12), active=["p1"])


@pytest.mark.parametrize("raw", [b"", b"{}", b'{"Data": null, "Checksum": 1}', b"[1]", b"\xff\xfe"])
def test_a_file_that_is_no_checkpoint_is_called_corrupt(raw: bytes) -> None:
    with pytest.raises(checkpoint.CorruptCheckpointError):
        checkpoint.decode(raw)


def test_a_changed_checkpoint_fails_its_checksum() -> None:
    device_manager = manager_with(devices("a", 15))
    allocate(device_manager, "p1", demand(4))
    raw = checkpoint.encode(device_manager.assignments(), device_manager.registered())
    with pytest.raises(checkpoint.CorruptCheckpointError, match="checksum"):
        checkpoint.decode(raw.replace(b"a-_-0", b"a-_-9"))


def test_random_admissions_never_give_one_id_twice() -> None:
    rng = random.Random(7)
    device_manager = manager_with(devices("a", 15), devices("b", 14), preferred=True, seed=7)
    active: list[str] = []
    for number in range(400):
        if active and rng.random() < 0.4:
            active.remove(rng.choice(active))
        pod = f"p{number}"
        wish = rng.sample(sorted(device_manager.healthy(MEM)), rng.randrange(10))
        try:
            allocate(
                device_manager,
                pod,
                demand(rng.randrange(1, 8)),
                active,
                wish=wish,
                fail=rng.choice(["", "", "no"]),
            )
            active.append(pod)
        except AdmissionError:
            pass
        held = [
            one
            for assignment in device_manager.assignments()
            if assignment.pod_uid in active
            for one in assignment.ids
        ]
        assert len(held) == len(set(held))
