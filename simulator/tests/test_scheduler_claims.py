"""Structured parameters: what a claim is given of a node's devices, by the rules of resource.k8s.io/v1."""

from __future__ import annotations

from typing import Any

import pytest

from simcluster.scheduler.allocator import AllocatorError, allocate, consumed_amount, devices_of

DRIVER, NODE = "gpu.example.com", "n1"
CLASSES = {"gpu": {"spec": {"selectors": [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}]}}}
MEMORY = {
    "value": "15Gi",
    "requestPolicy": {"default": "15Gi", "validRange": {"min": "0", "max": "15Gi", "step": "1Gi"}},
}


def device(name: str, *, shared: bool = True, **more: Any) -> dict[str, Any]:
    capacity = {"capacity": {"memory": MEMORY}, "allowMultipleAllocations": True} if shared else {}
    return {"name": name, "attributes": {"uuid": {"string": name}}, **capacity, **more}


def pool(*devices: dict[str, Any], generation: int = 1, slices: int = 1, name: str = "s") -> dict[str, Any]:
    about = {"name": NODE, "generation": generation, "resourceSliceCount": slices}
    spec = {"driver": DRIVER, "nodeName": NODE, "pool": about, "devices": list(devices)}
    return {"metadata": {"name": name}, "spec": spec}


def request(name: str = "r", memory: str = "", **more: Any) -> dict[str, Any]:
    capacity = {"capacity": {"requests": {"memory": memory}}} if memory else {}
    return {"name": name, "exactly": {"deviceClassName": "gpu", **capacity, **more}}


def claim(*requests: dict[str, Any], **constraint: Any) -> dict[str, Any]:
    constraints = {"constraints": [constraint]} if constraint else {}
    return {"spec": {"devices": {"requests": list(requests), **constraints}}}


def given(
    *claims: dict[str, Any], devices: list[dict[str, Any]], allocated: tuple[dict[str, Any], ...] = ()
) -> list[list[str]] | None:
    """The devices of each claim."""
    found = allocate(claims, devices_of([pool(*devices)], NODE), CLASSES, allocated)
    return None if found is None else [[each["device"] for each in results] for results in found]


def held(name: str, memory: str, **more: Any) -> dict[str, Any]:
    return {"driver": DRIVER, "pool": NODE, "device": name, "consumedCapacity": {"memory": memory}, **more}


def test_a_shared_device_is_given_until_its_capacity_is_consumed() -> None:
    one = [device("a")]
    assert given(claim(request(memory="4Gi")), devices=one, allocated=(held("a", "11Gi"),)) == [["a"]]
    assert given(claim(request(memory="4Gi")), devices=one, allocated=(held("a", "12Gi"),)) is None
    assert given(*[claim(request(memory="5Gi"))] * 3, devices=one) == [["a"]] * 3
    assert given(*[claim(request(memory="5Gi"))] * 4, devices=one) is None


def test_the_first_device_that_fits_is_taken_and_taken_back_where_that_leads_nowhere() -> None:
    devices = [device("a"), device("b")]
    full = (held("a", "12Gi"),)
    assert given(claim(request(memory="4Gi")), devices=devices, allocated=full) == [["b"]]
    assert given(claim(request(memory="3Gi")), devices=devices, allocated=full) == [["a"]]
    together = claim(
        request("x", "3Gi"), request("y", "3Gi"), requests=["x", "y"], matchAttribute=f"{DRIVER}/uuid"
    )
    assert given(together, devices=devices, allocated=full) == [["b", "b"]]


def test_constraints_compare_attributes_and_a_device_without_one_meets_none() -> None:
    devices = [device("a"), device("b")]
    apart = claim(request("x", "3Gi"), request("y", "3Gi"), distinctAttribute=f"{DRIVER}/uuid")
    assert given(apart, devices=devices) == [["a", "b"]]
    assert given(apart, devices=devices[:1]) is None
    unknown = claim(request("x", "3Gi"), matchAttribute=f"{DRIVER}/rack")
    assert given(unknown, devices=devices) is None


def test_several_devices_of_one_request_are_different_ones() -> None:
    assert given(claim(request(memory="1Gi", count=2)), devices=[device("a"), device("b")]) == [["a", "b"]]
    assert given(claim(request(memory="1Gi", count=2)), devices=[device("a")]) is None


def test_a_device_that_is_not_shared_has_one_holder() -> None:
    whole = [device("a", shared=False)]
    assert given(claim(request()), devices=whole) == [["a"]]
    assert given(claim(request()), claim(request()), devices=whole) is None
    assert given(claim(request()), devices=whole, allocated=(held("a", "0"),)) is None
    large = [{**whole[0], "capacity": {"memory": {"value": "15Gi"}}}]
    assert given(claim(request(memory="15Gi")), devices=large) == [["a"]]
    assert given(claim(request(memory="16Gi")), devices=large) is None


def test_a_tainted_device_needs_a_toleration() -> None:
    taint = {"key": "sick", "value": "xid-79", "effect": "NoSchedule"}
    devices = [device("a", taints=[taint]), device("b")]
    assert given(claim(request(memory="4Gi")), devices=devices) == [["b"]]
    tolerations = [{"key": "sick", "operator": "Exists"}]
    assert given(claim(request(memory="4Gi", tolerations=tolerations)), devices=devices) == [["a"]]
    other = [{"key": "sick", "value": "xid-48"}]
    assert given(claim(request(memory="4Gi", tolerations=other)), devices=devices) == [["b"]]


def test_admin_access_takes_nothing_and_is_given_where_its_amount_is_free() -> None:
    """As by kube-scheduler 1.36: of a full device it must ask for nothing."""
    watching = (held("a", "15Gi", adminAccess=True),)
    for taken, amount, got in (("10Gi", "5Gi", [["a"]]), ("11Gi", "5Gi", None), ("15Gi", "0", [["a"]])):
        wish = claim(request(memory=amount, adminAccess=True))
        assert given(wish, devices=[device("a")], allocated=(held("a", taken), *watching)) == got
    assert given(claim(request(memory="15Gi")), devices=[device("a")], allocated=watching) == [["a"]]


def test_of_a_prioritized_list_the_best_that_fits_is_given() -> None:
    choices = [
        {"name": size, "deviceClassName": "gpu", "capacity": {"requests": {"memory": size}}}
        for size in ("8Gi", "4Gi")
    ]
    wish = claim({"name": "r", "firstAvailable": choices})
    devices = devices_of([pool(device("a"))], NODE)
    for taken, got in (("0", "r/8Gi"), ("9Gi", "r/4Gi")):
        ((result,),) = allocate([wish], devices, CLASSES, [held("a", taken)]) or [[]]
        assert result["request"] == got


def test_another_alternative_is_tried_before_another_device_of_the_request_before() -> None:
    choices = [
        {"name": size, "deviceClassName": "gpu", "capacity": {"requests": {"memory": size}}}
        for size in ("9Gi", "2Gi")
    ]
    listed = {"name": "y", "firstAvailable": choices}
    wish = claim(request("x", "1Gi"), listed, matchAttribute=f"{DRIVER}/uuid")
    devices = devices_of([pool(device("a"), device("b"))], NODE)
    (results,) = allocate([wish], devices, CLASSES, [held("a", "8Gi")]) or [[]]
    assert [(each["request"], each["device"]) for each in results] == [("x", "a"), ("y/2Gi", "a")]


@pytest.mark.parametrize(
    ("requested", "consumed"),
    [
        (None, "15Gi"),
        ("4Gi", "4Gi"),
        ("3500Mi", str(4 << 30)),
        ("1", str(1 << 30)),
        ("15Gi", "15Gi"),
        ("16Gi", None),
    ],
)
def test_what_is_consumed_is_rounded_up_by_the_devices_policy(
    requested: str | None, consumed: str | None
) -> None:
    assert consumed_amount(requested, MEMORY) == consumed


def test_of_valid_values_the_next_larger_is_consumed() -> None:
    offered = {"value": "8", "requestPolicy": {"default": "8", "validValues": ["1", "4", "8"]}}
    assert [consumed_amount(each, offered) for each in ("1", "2", "9", None)] == ["1", "4", None, "8"]


def test_a_pool_counts_once_its_newest_generation_is_there_in_full() -> None:
    old, new = pool(device("old"), name="s1"), pool(device("new"), generation=2, slices=2, name="s2")
    assert devices_of([old, new], NODE) == []
    rest = pool(device("rest"), generation=2, slices=2, name="s3")
    assert [each.key[2] for each in devices_of([rest, old, new], NODE)] == ["new", "rest"]
    assert devices_of([old], "n2") == []


@pytest.mark.parametrize(
    "wish",
    [
        request(allocationMode="All"),
        request(selectors=[{"cel": {"expression": "device.attributes['x'].y"}}]),
        {"name": "r", "exactly": {"deviceClassName": "none"}},
    ],
)
def test_what_is_not_understood_is_said(wish: dict[str, Any]) -> None:
    with pytest.raises(AllocatorError, match="request r"):
        allocate([claim(wish)], [], CLASSES, [])
