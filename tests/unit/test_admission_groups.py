"""Admission of pod groups: their members' gate, and groups that cannot be."""

from __future__ import annotations

import pytest

from gpuslice.core.admission import GATE, AdmissionRules
from gpuslice.core.contract import LABEL_GROUP_MIN, LABEL_GROUP_NAME
from tests.builders import api_pod
from tests.unit.admission_rig import Object, denial, invalid, mutated

GROUP = {LABEL_GROUP_NAME: "train", LABEL_GROUP_MIN: "4"}
GATING = AdmissionRules(scheduler="ours", gate_groups=True)
OTHER = {"name": "kueue.x-k8s.io/admission"}


@pytest.mark.parametrize(
    ("labels", "spec", "gates"),
    [
        (GROUP, {}, [GATE]),
        (GROUP, {"schedulerName": "ours"}, [GATE]),
        (GROUP, {"schedulingGates": [OTHER]}, [OTHER, GATE]),
        (GROUP, {"schedulingGates": [GATE]}, [GATE]),
        (GROUP, {"schedulerName": "volcano"}, None),
        (GROUP, {"schedulingGroup": {"podGroupName": "train"}}, None),
        (GROUP, {"nodeName": "n1"}, None),
        ({LABEL_GROUP_NAME: "train"}, {}, None),
        ({}, {}, None),
    ],
)
def test_members_of_a_pod_group_get_a_gate_where_the_extender_takes_it_off(
    labels: dict[str, str], spec: Object, gates: list[Object] | None
) -> None:
    made = mutated(api_pod(labels=labels, **spec), GATING)
    assert made["spec"].get("schedulingGates") == gates
    assert mutated(made, GATING) == made


def test_without_a_gate_to_give_members_stay_as_they_are() -> None:
    assert "schedulingGates" not in mutated(api_pod(labels=GROUP), AdmissionRules())["spec"]


@pytest.mark.parametrize("least", ["0", "-1", "many", "2.5", "1001"])
def test_a_group_of_no_number_of_pods_is_denied(least: str) -> None:
    sentence = denial(api_pod(labels=GROUP | {LABEL_GROUP_MIN: least}))
    assert f'{LABEL_GROUP_MIN}"] is "{least}", must be a whole number of pods' in sentence
    assert sentence == invalid(api_pod(labels=GROUP | {LABEL_GROUP_MIN: least}))
