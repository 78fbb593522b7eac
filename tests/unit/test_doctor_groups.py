"""One cause that affects many objects is one finding, with what differs as a placeholder."""

from __future__ import annotations

from typing import Any

from msgspec import convert

from gpuslice.adapters.kube.objects import Node, Pod
from gpuslice.diagnosis.doctor import pods as doctor_pods
from gpuslice.diagnosis.doctor.facts import Facts, Finding, Level
from gpuslice.diagnosis.doctor.groups import Group, grouped
from tests.builders import api_node, api_pod

NODES = [convert(api_node(f"n{number}", 8), Node) for number in range(4)]


def warnings(*found: tuple[str, str, str]) -> list[Finding]:
    return [Finding(Level.WARNING, *each) for each in found]


def without_a_card(name: str, node: str) -> Pod:
    pod: dict[str, Any] = api_pod(name, "4")
    pod["spec"]["nodeName"] = node
    return convert(pod, Pod)


def test_many_pods_with_one_cause_are_one_finding() -> None:
    facts = Facts(nodes=NODES, pods=[without_a_card(f"p{at}", f"n{at % 4}") for at in range(2000)])
    (group,) = grouped(doctor_pods.pods_and_cards(facts), facts)
    assert group.where == "2000 pods: default/p0, default/p1, default/p2 and 1997 more"
    assert group.what.startswith("is on NODE without annotation ALIYUN_COM_GPU_MEM_IDX: its card is unknown")
    assert len(group.wheres) == 2000


def test_what_all_have_in_common_stays() -> None:
    found = warnings(
        *(
            (f"pod default/p{at}", f"container main restarted {at} times", f"logs p{at} -n default; p{at}")
            for at in range(3, 8)
        )
    )
    (group,) = grouped(found, Facts())
    assert (group.what, group.fix) == ("container main restarted N times", "logs POD -n default; POD")


def test_a_few_are_told_one_by_one_and_another_cause_or_level_is_another_group() -> None:
    three = warnings(*((f"pod a/p{at}", "has no room", "wait") for at in range(3)))
    four = [Finding(Level.ERROR, f"pod a/p{at}", "has no room", "wait") for at in range(4)]
    other = warnings(("pod a/p9", "has no image", "wait"))
    groups = grouped([*four, *three, *other], Facts())
    assert [(group.level, group.where) for group in groups] == [
        (Level.ERROR, "4 pods: a/p0, a/p1, a/p2 and 1 more"),
        *((Level.WARNING, f"pod a/p{at}") for at in (0, 1, 2, 9)),
    ]


def test_objects_of_other_kinds_are_counted_too() -> None:
    facts = Facts(nodes=NODES)
    cards = warnings(*((f"node n{at}, card {at}", f"{at} units on n{at}", "") for at in range(4)))
    maps = warnings(
        *((f"ConfigMap kube-system/unhealthy-gpu-n{at}", f"card 0 of n{at}", "") for at in range(4))
    )
    assert [(group.where, group.what) for group in grouped([*cards, *maps], facts)] == [
        ("4 places: node n0, card 0; node n1, card 1; node n2, card 2 and 1 more", "N units on NODE"),
        (
            "4 ConfigMaps: kube-system/unhealthy-gpu-n0, kube-system/unhealthy-gpu-n1, "
            "kube-system/unhealthy-gpu-n2 and 1 more",
            "card 0 of NODE",
        ),
    ]


def test_a_text_of_a_tenant_that_looks_like_a_time_breaks_nothing() -> None:
    said = ["2026-01-01T00:00:00Z-x", "2026-01-02T00:00:00Z-x", "1.-/", "", "…", "2026-01-03T"]
    found = warnings(*((f"pod a/{at}", said[at % 6], "") for at in range(24)))
    assert sorted(group.what for group in grouped(found, Facts())) == sorted(
        ["TIME-x", *("1.-/", "", "…", "2026-01-03T")]
    )
    assert isinstance(grouped(found, Facts())[0], Group)
