"""HAMi's way of asking, translated or denied with a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from gpuslice.adapters.wire.review import decode_review
from gpuslice.apps.webhook.reviews import Reviewer
from gpuslice.core.admission import AdmissionRules
from gpuslice.core.contract import GPU_COUNT, GPU_MEM
from gpuslice.core.hami import HamiRules
from tests.builders import api_container, api_pod
from tests.unit.admission_rig import HAMI, PLAIN, Object, denial, mutated, review


def hami_pod(annotations: dict[str, str] | None = None, **limits: Any) -> Object:
    named = {f"nvidia.com/{name.replace('_', '-')}": value for name, value in limits.items()}
    return api_pod(containers=[api_container(**named)], annotations=annotations)


def asked(pod: Object) -> Object:
    found: Object = pod["spec"]["containers"][0]["resources"]["limits"]
    assert found == pod["spec"]["containers"][0]["resources"]["requests"]
    return found


@pytest.mark.parametrize(
    ("limits", "ours"),
    [
        ({"gpu": "1", "gpumem": "4096"}, {GPU_MEM: "4"}),
        ({"gpumem": 3000}, {GPU_MEM: "3"}),
        ({"gpu": 1, "gpumem_percentage": "50"}, {GPU_MEM: "40"}),
        ({"gpu": 2, "gpumem": "4096"}, {GPU_MEM: "8"}),
        ({"gpumem": 1024, "gpucores": "31"}, {GPU_MEM: "1", "aliyun.com/gpu-core.percentage": "35"}),
        ({"gpucores": "50"}, {GPU_MEM: "80", "aliyun.com/gpu-core.percentage": "50"}),
        ({"gpumem": 1024, "gpucores": 0}, {GPU_MEM: "1"}),
        ({"gpu": 2, "gpumem_percentage": 100, "gpucores": 100}, {GPU_MEM: "160"}),
    ],
)
def test_hamis_amounts_become_ours(limits: Object, ours: Object) -> None:
    changed = mutated(hami_pod(**limits), hami=HAMI)
    assert asked(changed) == ours
    assert changed["metadata"].get("labels", {}).get(GPU_COUNT) == ("2" if limits.get("gpu") == 2 else None)


@pytest.mark.parametrize("card_units", [15, 23, 79, 80])  # a V100, a 4090, an H100, an A100
@pytest.mark.parametrize("parts", [(50, 50), (40, 60), (33, 33, 34), (25,) * 4, (10,) * 10, (1, 99)])
def test_percentages_that_fill_a_card_fit_on_one(card_units: int, parts: tuple[int, ...]) -> None:
    rules = HamiRules(card_units=card_units)
    pods = [mutated(hami_pod(gpumem_percentage=str(each)), hami=rules) for each in parts]
    amounts = [int(asked(pod)[GPU_MEM]) for pod in pods]
    assert sum(amounts) <= card_units
    for amount, part in zip(amounts, parts, strict=True):
        assert amount == max(1, card_units * part // 100)


def test_whole_cards_and_a_shut_door_are_left_alone() -> None:
    whole = hami_pod(gpu="2")
    assert mutated(whole, hami=HAMI) == whole
    theirs = hami_pod(gpu="1", gpumem="4096")
    assert mutated(theirs) == theirs


def test_a_wanted_model_becomes_a_wanted_node() -> None:
    pod = hami_pod({"nvidia.com/use-gputype": "a100,H100", "nvidia.com/nouse-gputype": "t4"}, gpumem="1024")
    pod["spec"]["affinity"] = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [
                    {"matchExpressions": [{"key": "zone", "operator": "Exists"}]},
                    {"matchExpressions": [{"key": "disk", "operator": "Exists"}]},
                ]
            }
        }
    }
    affinity = mutated(pod, hami=HAMI)["spec"]["affinity"]["nodeAffinity"]
    (required,) = affinity.values()
    for term in required["nodeSelectorTerms"]:
        assert term["matchExpressions"][1:] == [
            {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-A100-SXM4-80GB"]},
            {"key": "nvidia.com/gpu.product", "operator": "NotIn", "values": ["Tesla-T4"]},
        ]


@pytest.mark.parametrize(
    ("pod", "rules", "sentence"),
    [
        (
            hami_pod(gpumem_percentage="50"),
            HamiRules(),
            'gpumem-percentage"] is "50", must be given as nvidia.com/gpumem',
        ),
        (hami_pod(gpumem_percentage="500"), HAMI, "must be a whole number from 1 to 100"),
        (hami_pod(gpumem="1", gpumem_percentage="5"), HAMI, "must be left out beside nvidia.com/gpumem"),
        (hami_pod(gpumem="0"), HAMI, 'limits["nvidia.com/gpumem"] is "0"'),
        (hami_pod(gpumem="1024", priority="1"), HAMI, 'limits["nvidia.com/priority"] is "1"'),
        (hami_pod(gpu="2", gpumem="1024", gpucores="50"), HAMI, "a share of compute is of one card"),
        (hami_pod({"nvidia.com/use-gpuuuid": "GPU-1"}, gpumem="1"), HAMI, 'use-gpuuuid"] is "GPU-1"'),
        (hami_pod({"nvidia.com/numa-bind": "true"}, gpumem="1"), HAMI, "not chosen by NUMA node"),
        (hami_pod({"nvidia.com/vgpu-mode": "mig"}, gpumem="1"), HAMI, 'vgpu-mode"] is "mig"'),
        (hami_pod({"nvidia.com/use-gputype": "H200"}, gpumem="1"), HAMI, "knows as a value of label"),
        (hami_pod({"nvidia.com/nouse-gputype": "T4"}, gpumem="1"), HamiRules(), "of label"),
    ],
)
def test_what_has_no_counterpart_is_denied_with_a_sentence(
    pod: Object, rules: HamiRules, sentence: str
) -> None:
    assert sentence in denial(pod, hami=rules)


def told(pod: Object) -> list[str]:
    reviewed = decode_review(review(pod))
    answered = Reviewer(PLAIN, HAMI).mutate(reviewed)["response"]
    assert answered["allowed"]
    untranslated = Reviewer(PLAIN).mutate(reviewed)["response"].get("warnings", ())
    assert all(warning.endswith("(chart value webhook.hami.enabled).") for warning in untranslated)
    return list(answered.get("warnings", ()))


@pytest.mark.parametrize(
    ("annotations", "sentence"),
    [
        ({"hami.io/gpu-scheduler-policy": "spread"}, '"spread" has no effect: cards are chosen by'),
        ({"hami.io/node-scheduler-policy": "binpack"}, '"binpack" has no effect: nodes are chosen by'),
        ({"hami.io/device-scoring-weights": "slot=1"}, '"slot=1" has no effect: cards are chosen by'),
        (
            {"hami.io/vgpu-node": "n1", "hami.io/bind-phase": "success"},
            "mean nothing here: hami.io/bind-phase, hami.io/vgpu-node",
        ),
    ],
)
def test_an_annotation_that_changes_nothing_is_let_through_and_its_author_is_told(
    annotations: dict[str, str], sentence: str
) -> None:
    (warning,) = told(hami_pod(annotations, gpumem="1024"))
    assert sentence in warning


@pytest.mark.parametrize(
    "annotation",
    [
        "nvidia.com/use-gputype",
        "nvidia.com/nouse-gpuuuid",
        "nvidia.com/vgpu-mode",
        "hami.io/gpu-scheduler-policy",
    ],
)
def test_an_annotation_beside_whole_cards_is_let_through_and_its_author_is_told(annotation: str) -> None:
    (warning,) = told(hami_pod({annotation: "x"}, gpu="1"))
    assert (
        f'metadata.annotations["{annotation}"] "x" has no effect: limits["nvidia.com/gpu"] without' in warning
    )
    assert told(api_pod(containers=[api_container(cpu="1")], annotations={annotation: "x"})) == []


@pytest.mark.parametrize(
    "name",
    [
        "CUDA_DISABLE_CONTROL",
        "CUDA_TASK_PRIORITY",
        "GPU_CORE_UTILIZATION_POLICY",
        "CUDA_OVERSUBSCRIBE",
        "CUDA_DEVICE_MEMORY_LIMIT_0",
        "CUDA_DEVICE_SM_LIMIT",
    ],
)
def test_what_hamis_library_reads_from_the_environment_is_named(name: str) -> None:
    pod = hami_pod(gpumem="1024")
    pod["spec"]["containers"][0]["env"] = [{"name": name, "value": "1"}, {"name": "HOME", "value": "/"}]
    (warning,) = told(pod)
    assert f'container "main": env {name} has no effect: ' in warning


def test_hamis_scheduler_is_replaced_by_the_one_that_knows_these_cards() -> None:
    pod = hami_pod(gpumem="1024")
    pod["spec"]["schedulerName"] = "hami-scheduler"
    ours = AdmissionRules(scheduler="gpuslice-scheduler")
    assert mutated(pod, ours, hami=HAMI)["spec"]["schedulerName"] == "gpuslice-scheduler"
    assert mutated(pod, hami=HAMI)["spec"]["schedulerName"] == "default-scheduler"
    (warning,) = told(pod)
    assert 'spec.schedulerName "hami-scheduler" is replaced' in warning


def test_a_pod_that_opted_out_of_hamis_webhook_is_told_that_this_is_another() -> None:
    pod = hami_pod(gpumem="1024")
    pod["metadata"]["labels"] = {"hami.io/webhook": "ignore"}
    (warning,) = told(pod)
    assert "gpuslice.io/webhook=ignore" in warning
