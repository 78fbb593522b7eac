"""KAI-Scheduler's annotations, translated or denied with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.adapters.wire.review import decode_review
from gpuslice.apps.webhook.reviews import Reviewer
from gpuslice.core.admission import AdmissionRules
from gpuslice.core.contract import ANN_LIMIT, GPU_COUNT, GPU_MEM, NEUTRAL_NAMES
from gpuslice.core.kai import ANNOTATIONS, READ, KaiRules
from tests.builders import api_container, api_pod
from tests.unit.admission_rig import Object, mutated, review

RULES = KaiRules(card_units=80)


def kai_pod(containers: int = 1, /, **annotations: str) -> Object:
    named = {name.replace("_", "-"): value for name, value in annotations.items()}
    made = [api_container(name=f"c{index}", cpu="1") for index in range(containers)]
    return api_pod(containers=made, annotations=named, schedulerName="kai-scheduler")


def translated(pod: Object, rules: AdmissionRules | None = None, kai: KaiRules | None = RULES) -> Object:
    return mutated(pod, rules or AdmissionRules(), kai=kai)


def limits(pod: Object, container: int = 0) -> dict[str, Any]:
    found = pod["spec"]["containers"][container]["resources"]
    assert found["limits"] == found["requests"]
    return {name: amount for name, amount in found["limits"].items() if name != "cpu"}


@pytest.mark.parametrize(
    ("annotations", "units", "cards"),
    [
        ({"gpu_memory": "4096"}, "4", None),
        ({"gpu_memory": "4097"}, "5", None),
        ({"gpu_fraction": "0.5"}, "40", None),
        ({"gpu_fraction": "0.33"}, "26", None),
        ({"gpu_fraction": "0.001"}, "1", None),
        ({"gpu_fraction": "1"}, "80", None),
        ({"gpu_memory": "2048", "gpu_fraction_num_devices": "2"}, "4", "2"),
    ],
)
def test_annotations_become_amounts(annotations: dict[str, str], units: str, cards: str | None) -> None:
    pod = translated(kai_pod(**annotations))
    assert limits(pod) == {GPU_MEM: units}
    assert pod["metadata"].get("labels", {}).get(GPU_COUNT) == cards
    assert set(ANNOTATIONS).isdisjoint(pod["metadata"].get("annotations", {}))
    assert pod["spec"]["schedulerName"] == "default-scheduler"
    assert translated(pod) == pod  # the webhook may be asked again


@pytest.mark.parametrize("card_units", [15, 23, 79])
@pytest.mark.parametrize(("fraction", "pods"), [("0.5", 2), ("0.333", 3), ("0.25", 4), ("0.1", 10)])
def test_fractions_that_fill_a_card_fit_on_one(card_units: int, fraction: str, pods: int) -> None:
    pod = translated(kai_pod(gpu_fraction=fraction), kai=KaiRules(card_units=card_units))
    assert pods * int(limits(pod)[GPU_MEM]) <= card_units


def test_a_pod_of_run_ai_leaves_its_scheduler_too() -> None:
    pod = kai_pod(gpu_fraction="0.5")
    pod["spec"]["schedulerName"] = "runai-scheduler"
    assert translated(pod)["spec"]["schedulerName"] == "default-scheduler"
    said = Reviewer(AdmissionRules(), kai=RULES).mutate(decode_review(review(pod)))["response"]["warnings"]
    assert said[0].startswith('spec.schedulerName "runai-scheduler" is replaced')


def test_the_container_is_the_one_that_is_named() -> None:
    pod = translated(kai_pod(2, gpu_memory="1024", gpu_fraction_container_name="c1"))
    assert (limits(pod, 0), limits(pod, 1)) == ({}, {GPU_MEM: "1"})


def test_the_container_may_be_an_init_container_but_only_where_it_is_named() -> None:
    warm = api_container(name="warm", cpu="1")
    named, unnamed = (
        kai_pod(gpu_memory="1024", **more) for more in ({"gpu_fraction_container_name": "warm"}, {})
    )
    for pod in (named, unnamed):
        pod["spec"]["initContainers"] = [warm]
    assert translated(named)["spec"]["initContainers"][0]["resources"]["limits"][GPU_MEM] == "1"
    assert limits(translated(named)) == {}
    assert limits(translated(unnamed)) == {GPU_MEM: "1"}


def test_amounts_are_in_the_names_that_nodes_offer_and_the_scheduler_is_ours() -> None:
    rules = AdmissionRules(scheduler="gpuslice-scheduler", names=NEUTRAL_NAMES)
    pod = translated(kai_pod(gpu_memory="1024"), rules)
    assert limits(pod) == {NEUTRAL_NAMES.memory: "1"}
    assert pod["spec"]["schedulerName"] == "gpuslice-scheduler"


def test_without_the_setting_and_without_the_annotations_nothing_changes() -> None:
    theirs, plain = kai_pod(gpu_fraction="0.5"), kai_pod()
    assert translated(theirs, kai=None) == theirs
    assert translated(plain) == plain


@pytest.mark.parametrize(
    ("pod", "rules", "sentence"),
    [
        (kai_pod(gpu_fraction="0.5"), KaiRules(), "a fraction needs cards of one size"),
        (kai_pod(gpu_fraction="1.5"), RULES, "more than 0 and at most 1"),
        (kai_pod(gpu_fraction="half"), RULES, "more than 0 and at most 1"),
        (kai_pod(gpu_memory="4Gi", gpu_fraction="0.5"), RULES, "left out beside gpu-memory"),
        (kai_pod(gpu_memory="0"), RULES, "a whole number from 1"),
        (kai_pod(gpu_memory="1024", gpu_fraction_num_devices="x"), RULES, "a whole number from 1 to 1024"),
        (
            kai_pod(gpu_memory="1024", gpu_fraction_container_name="c7"),
            RULES,
            "the name of a container of the pod: c0",
        ),
    ],
)
def test_what_has_no_counterpart_is_denied_by_field(pod: Object, rules: KaiRules, sentence: str) -> None:
    response = Reviewer(AdmissionRules(), kai=rules).mutate(decode_review(review(pod)))["response"]
    assert not response["allowed"]
    assert sentence in response["status"]["message"]


def test_the_author_is_told_what_the_pod_goes_without() -> None:
    pod = kai_pod(gpu_memory="1024")
    pod["metadata"]["labels"] = {"kai.scheduler/queue": "team-a"}
    told = Reviewer(AdmissionRules(), kai=RULES).mutate(decode_review(review(pod)))["response"]["warnings"]
    assert [each.split(" ")[0] for each in told] == [
        "spec.schedulerName",
        'metadata.labels["kai.scheduler/queue"]',
    ]


@given(st.text(max_size=30), st.sampled_from(ANNOTATIONS))
def test_any_text_gets_an_answer(text: str, name: str) -> None:
    pod = kai_pod(**{"gpu_memory": "1024", name: text})
    response = Reviewer(AdmissionRules(), kai=RULES).mutate(decode_review(review(pod)))["response"]
    assert response["allowed"] or name in response["status"]["message"]


def nvidia_pod(containers: int = 1, /, **annotations: str) -> Object:
    """`c0_request="4Gi"` for ``nvidia.com/container.c0.gpu-memory.request``."""
    words = {
        "request": "gpu-memory.request",
        "limit": "gpu-memory.limit",
        "mode": "gpu-compute.mode",
        "portion": "gpu-compute.portion",
        "devices": "gpus.devices",
    }
    pod = kai_pod(containers)
    pod["metadata"]["annotations"] = {
        f"nvidia.com/container.{container}.{words[word]}": value
        for name, value in annotations.items()
        for container, _, word in [name.rpartition("_")]
    }
    return pod


@pytest.mark.parametrize(
    ("annotations", "units"),
    [
        ({"c0_request": "4Gi"}, "4"),
        ({"c0_limit": "4Gi"}, "4"),
        ({"c0_request": "4Gi", "c0_limit": "8Gi"}, "8"),
        ({"c0_request": "2048Mi", "c0_limit": "2048Mi", "c0_mode": "time-slicing"}, "2"),
        ({"c0_request": "4097Mi"}, "5"),
        ({"c0_limit": "1024M"}, "1"),
        ({"c0_request": "1.5Gi", "c0_mode": "sm-sharing", "c0_portion": "0.5"}, "2"),
    ],
)
def test_nvidias_names_become_amounts_too(annotations: dict[str, str], units: str) -> None:
    """KAI 0.18 and Run:ai 3.0 write them; a pod that kept them would wait for their scheduler for ever."""
    pod = translated(nvidia_pod(**annotations), kai=KaiRules())
    assert limits(pod) == {GPU_MEM: units}
    assert not pod["metadata"].get("annotations")
    assert pod["spec"]["schedulerName"] == "default-scheduler"
    assert translated(pod) == pod


def test_each_container_has_its_own_amount_in_nvidias_names() -> None:
    pod = translated(nvidia_pod(3, c0_request="1Gi", c2_limit="3Gi"))
    assert [limits(pod, index) for index in range(3)] == [{GPU_MEM: "1"}, {}, {GPU_MEM: "3"}]


@pytest.mark.parametrize(
    ("pod", "request_units", "limit"),
    [
        (nvidia_pod(2, c1_request="4Gi", c1_limit="8Gi"), {1: "4"}, "c1=8"),
        (nvidia_pod(2, c0_request="1Gi", c0_limit="2Gi", c1_limit="8Gi"), {0: "1", 1: "8"}, "c0=2"),
        (kai_pod(gpu_memory="1024", gpu_memory_limit="3072"), {0: "1"}, "c0=3"),
        (kai_pod(gpu_fraction="0.25", gpu_fraction_limit="0.5"), {0: "20"}, "c0=40"),
    ],
)
def test_where_nodes_lend_the_request_is_kept_and_the_limit_may_be_borrowed(
    pod: Object, request_units: dict[int, str], limit: str
) -> None:
    found = translated(pod, kai=KaiRules(card_units=80, lends=True))
    assert {at: limits(found, at)[GPU_MEM] for at in request_units} == request_units
    assert found["metadata"]["annotations"] == {ANN_LIMIT: limit}


@pytest.mark.parametrize(
    ("annotations", "limit"),
    [({"gpu_memory": "1024", "gpu_memory_limit": "3072"}, "3"), ({"gpu_fraction_limit": "0.5"}, "40")],
)
def test_run_ais_dynamic_fraction_gets_all_of_its_limit(annotations: dict[str, str], limit: str) -> None:
    assert limits(translated(kai_pod(**annotations))) == {GPU_MEM: limit}


@pytest.mark.parametrize(
    ("pod", "sentence"),
    [
        (nvidia_pod(c7_request="4Gi"), "the name of a container of the pod: c0"),
        (nvidia_pod(c0_request="4 GB"), "an amount of memory"),
        (nvidia_pod(c0_limit="0"), "an amount of memory"),
        (nvidia_pod(c0_request="-4Gi"), "an amount of memory"),
        (nvidia_pod(c0_request="8Gi", c0_limit="4Gi"), "at most the limit, 4Gi"),
        (nvidia_pod(c0_request="8Gi", c0_mode="exclusive"), "time-slicing or sm-sharing"),
    ],
)
def test_what_nvidias_names_cannot_mean_is_denied_by_field(pod: Object, sentence: str) -> None:
    response = Reviewer(AdmissionRules(), kai=RULES).mutate(decode_review(review(pod)))["response"]
    assert not response["allowed"]
    assert 'metadata.annotations["nvidia.com/container.' in response["status"]["message"]
    assert sentence in response["status"]["message"]


def test_both_ways_at_once_are_denied() -> None:
    pod = nvidia_pod(c0_request="4Gi")
    pod["metadata"]["annotations"]["gpu-memory"] = "4096"
    response = Reviewer(AdmissionRules(), kai=RULES).mutate(decode_review(review(pod)))["response"]
    assert "left out beside nvidia.com/container." in response["status"]["message"]


def test_the_author_is_told_what_has_no_effect_of_nvidias_names() -> None:
    pod = nvidia_pod(
        c0_request="4Gi", c0_limit="8Gi", c0_mode="sm-sharing", c0_portion="0.5", c0_devices="GPU-1"
    )
    del pod["spec"]["schedulerName"]
    told = Reviewer(AdmissionRules(), kai=RULES).mutate(decode_review(review(pod)))["response"]["warnings"]
    assert [each.split('"')[1].rpartition("c0.")[2] for each in told] == [
        "gpu-memory.request",
        "gpu-compute.mode",
        "gpu-compute.portion",
        "gpus.devices",
    ]
    assert "all of nvidia.com/container.c0.gpu-memory.limit is kept for the container" in told[0]


def test_the_page_says_when_other_peoples_names_were_read() -> None:
    """They changed twice in 2026: whoever reads them again sets both dates."""
    page = Path(__file__).resolve().parents[2] / "docs/user/other-systems.md"
    assert f"read on {READ}" in page.read_text()
