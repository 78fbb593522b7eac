"""Required node affinity is met exactly where kube-scheduler finds it met."""

from __future__ import annotations

from typing import Any

import pytest

from gpuslice.core.node_affinity import meets

LABELS = {"gpu": "H100", "cards": "8", "odd": "many"}


def affinity(*terms: dict[str, Any]) -> dict[str, Any]:
    required = {"nodeSelectorTerms": list(terms)}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


@pytest.mark.parametrize(
    ("key", "operator", "values", "met"),
    [
        ("gpu", "In", ["T4", "H100"], True),
        ("gpu", "In", ["T4"], False),
        ("absent", "In", ["H100"], False),
        ("gpu", "NotIn", ["T4"], True),
        ("gpu", "NotIn", ["H100"], False),
        ("absent", "NotIn", ["H100"], True),
        ("gpu", "Exists", None, True),
        ("absent", "Exists", None, False),
        ("gpu", "DoesNotExist", None, False),
        ("absent", "DoesNotExist", None, True),
        ("cards", "Gt", ["7"], True),
        ("cards", "Gt", ["8"], False),
        ("cards", "Lt", ["9"], True),
        ("cards", "Lt", ["8"], False),
        ("odd", "Gt", ["1"], False),
        ("odd", "Lt", ["1"], False),
        ("absent", "Lt", ["1"], False),
        ("cards", "Gt", [], False),
        ("gpu", "Like", ["H100"], False),
    ],
)
def test_operators(key: str, operator: str, values: list[str] | None, met: bool) -> None:
    requirement = {"key": key, "operator": operator, "values": values}
    assert meets(affinity({"matchExpressions": [requirement]}), "n1", LABELS) is met


def test_a_node_is_known_by_name_too() -> None:
    named = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]}
    assert meets(affinity(named), "n1", {})
    assert not meets(affinity(named), "n2", {})
    both = {**named, "matchExpressions": [{"key": "gpu", "operator": "Exists"}]}
    assert not meets(affinity(both), "n1", {})


@pytest.mark.parametrize("nothing", [None, {}, {"nodeAffinity": None}, {"podAffinity": {}}])
def test_a_pod_that_requires_nothing_may_run_anywhere(nothing: dict[str, Any] | None) -> None:
    assert meets(nothing, "n1", {})


def test_no_node_meets_a_term_without_requirements() -> None:
    assert not meets(affinity(), "n1", LABELS)
    assert not meets(affinity({}), "n1", LABELS)
