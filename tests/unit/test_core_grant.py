"""What a container gets for the device ids that kubelet gave it."""

from __future__ import annotations

import pytest

from gpuslice.core.contract import device_id
from gpuslice.core.grant import GrantError, container_grant, placement_of_devices
from gpuslice.core.model import Card, CardSlice, Node, Placement

V100 = Card(0, "GPU-a", 16130, 15)
T4 = Card(2, "GPU-b", 15079, 14)
NODE = Node("n1", (V100, T4))


def ids(uuid: str, count: int, first: int = 0) -> list[str]:
    return [device_id(uuid, unit) for unit in range(first, first + count)]


def test_a_container_gets_its_card_and_plain_integers() -> None:
    grant = container_grant(ids("GPU-b", 4), NODE, pod_units=7)
    assert grant.environment == {
        "NVIDIA_VISIBLE_DEVICES": "GPU-b",
        "ALIYUN_COM_GPU_MEM_IDX": "2",
        "ALIYUN_COM_GPU_MEM_POD": "7",
        "ALIYUN_COM_GPU_MEM_CONTAINER": "4",
        "ALIYUN_COM_GPU_MEM_DEV": "14",
    }


@pytest.mark.parametrize(("units", "limit"), [(3, 3226), (4, 4301), (15, 16130)])
def test_the_limit_follows_the_published_formula(units: int, limit: int) -> None:
    (card,) = container_grant(ids("GPU-a", units), NODE).limits
    assert (card.card, card.units, card.memory_mib) == (V100, units, limit)


def test_without_isolation_the_container_is_told() -> None:
    assert container_grant(ids("GPU-a", 1), NODE, isolation=False).environment["CGPU_DISABLE"] == "true"
    assert "CGPU_DISABLE" not in container_grant(ids("GPU-a", 1), NODE).environment


def test_several_cards_are_listed_in_index_order_with_the_amount_on_one() -> None:
    grant = container_grant(ids("GPU-b", 2) + ids("GPU-a", 2), NODE)
    assert grant.environment["NVIDIA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert grant.environment["ALIYUN_COM_GPU_MEM_IDX"] == "0,2"
    assert grant.environment["ALIYUN_COM_GPU_MEM_CONTAINER"] == "2"
    assert [limit.memory_mib for limit in grant.limits] == [2150, 2154]
    assert grant.units == 4


def test_an_uneven_spread_promises_what_holds_on_every_card() -> None:
    grant = container_grant(ids("GPU-a", 1) + ids("GPU-b", 3), NODE)
    assert grant.environment["ALIYUN_COM_GPU_MEM_CONTAINER"] == "1"
    assert placement_of_devices(ids("GPU-a", 1) + ids("GPU-b", 3), NODE) == Placement(
        "n1", (CardSlice(0, 1), CardSlice(2, 3))
    )


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ([], "node n1: no device ids to grant"),
        (["GPU-a"], 'device id "GPU-a" is not <uuid>-_-<n>'),
        (ids("GPU-x", 1), "node n1 has no card GPU-x (it has: GPU-a, GPU-b)"),
        (ids("GPU-a", 16), "card 0 (GPU-a): 16 units are not within a card of 15"),
    ],
)
def test_what_cannot_be_granted_is_said(devices: list[str], text: str) -> None:
    with pytest.raises(GrantError) as caught:
        container_grant(devices, NODE)
    assert text in str(caught.value)
