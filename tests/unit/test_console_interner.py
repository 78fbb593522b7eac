"""Equal parts of pods are kept once."""

from __future__ import annotations

from typing import Any

from msgspec import convert

from gpuslice.adapters.kube.objects import Pod
from gpuslice.apps.console.kept_pod import MOST_INTERNED, Interner
from tests.builders import api_pod


def pod(name: str, units: str, **spec: Any) -> Pod:
    return convert(api_pod(name, units, **spec), Pod)


def test_pods_of_one_template_share_what_they_ask_for() -> None:
    interner, pods = Interner(), [pod("a", "4"), pod("b", "4"), pod("c", "5")]
    for each in pods:
        interner.containers(each)
    first, same, other = (each.spec.containers for each in pods)
    assert first is same
    assert other is not first
    assert other[0].resources != first[0].resources


def test_images_are_not_kept_since_nobody_asks_for_them() -> None:
    init = [{"name": "init", "image": "busybox"}]
    found = pod("a", "4", initContainers=init)
    Interner().containers(found)
    assert [each.image for each in (*found.spec.containers, *(found.spec.init_containers or ()))] == ["", ""]


def test_without_init_containers_there_are_none_afterwards() -> None:
    found = pod("a", "4")
    Interner().containers(found)
    assert found.spec.init_containers is None


def test_what_is_remembered_is_bounded_and_what_is_in_use_stays() -> None:
    interner = Interner()
    first = interner.one(["kept", 0])
    for number in range(MOST_INTERNED + 1):
        interner.one(["other", number])
    again = interner.one(["kept", 0])
    assert again == first
    assert again is not first
    assert interner.one(["kept", 0]) is again
