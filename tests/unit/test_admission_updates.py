"""What the webhook says to changes of pods that are there."""

from __future__ import annotations

import pytest

from gpuslice.core.admission import AdmissionRules
from gpuslice.core.contract import (
    ANN_INDEX,
    CARDS_NAMES,
    GPU_COUNT,
    GPU_MEM,
    LABEL_GROUP_MIN,
    LABEL_GROUP_NAME,
    LABEL_MIN_TIER,
    POD_ANNOTATION_WRITERS,
)
from tests.builders import api_pod
from tests.unit.admission_rig import Object, invalid, mutated, with_env


def test_how_many_cards_a_pod_is_on_cannot_change() -> None:
    old, new = api_pod(memory="8", labels={GPU_COUNT: "2"}), api_pod(memory="8", labels={GPU_COUNT: "4"})
    assert 'must be "2" as at creation' in invalid(new, operation="UPDATE", old=old)
    assert not invalid(old, operation="UPDATE", old=old)


@pytest.mark.parametrize(
    ("label", "given", "sentence"),
    [
        (LABEL_MIN_TIER, "foo", 'label "gpuslice.io/min-tier" is "foo", must be one of'),
        (LABEL_MIN_TIER, "", 'label "gpuslice.io/min-tier" is "", must be one of'),
        (LABEL_GROUP_MIN, "few", "must be a whole number of pods"),
        (LABEL_GROUP_MIN, "0", "must be a whole number of pods"),
        ("gpuslice.io/cards", "two", 'must be "" as at creation'),
    ],
)
def test_a_label_of_a_pod_that_is_there_is_denied_as_at_creation(
    label: str, given: str, sentence: str
) -> None:
    named = {LABEL_GROUP_NAME: "train", LABEL_GROUP_MIN: "2"}
    old, new = api_pod(labels=named), api_pod(labels={**named, label: given})
    said = invalid(new, operation="UPDATE", old=old)
    assert sentence in said
    if label not in CARDS_NAMES:
        assert said == invalid(new)
    assert not invalid(old, operation="UPDATE", old=new) or label in CARDS_NAMES, "mended"
    assert not invalid(new, operation="UPDATE", old=new), "another change of a pod that has it already"


def test_a_container_that_is_added_to_a_pod_with_cards_sees_none() -> None:
    """`kubectl debug` with an image that asks for all cards by its own environment."""
    old, new = api_pod(), api_pod()
    old["spec"]["ephemeralContainers"] = [{"name": "before", "image": "x"}]
    added = {"name": "look", "image": "cuda", "env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}
    new["spec"]["ephemeralContainers"] = [{"name": "before", "image": "x"}, added]
    asked: Object = {"operation": "UPDATE", "old": old, "part": "ephemeralcontainers"}
    before, look = mutated(new, **asked)["spec"]["ephemeralContainers"]
    assert before == {"name": "before", "image": "x"}, "it cannot change any more"
    assert look["env"] == [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]
    assert mutated(new, AdmissionRules(hide_cards=False), **asked) == new
    plain = api_pod(memory="0")
    plain["spec"]["ephemeralContainers"] = [added]
    assert mutated(plain, **asked) == plain


def test_only_its_writers_may_change_where_a_pod_sits() -> None:
    old, new = api_pod(annotations={ANN_INDEX: "0"}), api_pod(annotations={ANN_INDEX: "1"})
    rules = AdmissionRules(writers=frozenset({"extender"}))
    assert "may be changed only by extender, not by mallory" in invalid(
        new, rules, operation="UPDATE", old=old, user="mallory"
    )
    assert not invalid(new, rules, operation="UPDATE", old=old, user="extender")
    assert not invalid(new, rules, operation="UPDATE", old=old, user="root", groups=("system:masters",))
    assert not invalid(new, operation="UPDATE", old=old, user="mallory")
    for name in POD_ANNOTATION_WRITERS:
        forged = api_pod(annotations={ANN_INDEX: "0", name: "forged"})
        assert name in invalid(forged, rules, operation="UPDATE", old=old, user="mallory")
        assert name not in mutated(forged)["metadata"].get("annotations", {}), "copied from another pod"


def test_a_wrong_pod_of_old_can_still_be_cleaned_up() -> None:
    old = with_env({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"})
    old["spec"]["containers"][0]["resources"]["limits"][GPU_MEM] = "4.5"
    assert not invalid(old, operation="UPDATE", old=old)
    gone = api_pod(labels={GPU_COUNT: "4"})
    gone["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert not invalid(gone, operation="UPDATE", old=api_pod(labels={GPU_COUNT: "2"}))
