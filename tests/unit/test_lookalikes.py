"""What is nearly right is told, what is right or none of our affair is left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.core.lookalikes import node_label_hints, pod_label_hints, resource_hint, resource_hints
from gpuslice.core.sizing import HEADROOM, suggested_size
from gpuslice.core.units import card_units, limit_mib


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("aliyun.com/gpu-mm", "did you mean aliyun.com/gpu-mem?"),
        ("aliyun.com/gpumem", "did you mean aliyun.com/gpu-mem?"),
        ("aliyun.com/gpu-memory", "did you mean aliyun.com/gpu-mem?"),
        ("aliyun.com/gpu-core.percent", "did you mean aliyun.com/gpu-core.percentage?"),
        ("nvidia.com/gpus", "did you mean nvidia.com/gpu?"),
        ("nvidia.com/gpu-mem", "did you mean nvidia.com/gpumem?"),
        ("aliyun.com/gpu-count", "is a label of the pod, not a resource"),
        ("nvidia.com/gpumem", "is HAMi's name, and nothing in this cluster translates it"),
        ("nvidia.com/gpucores", "is HAMi's name"),
        ("volcano.sh/vgpu-memory", "is Volcano's name"),
        ("volcano.sh/vgpu-memory-percentage", "is Volcano's name"),
        ("koordinator.sh/gpu-memory-ratio", "is Koordinator's name"),
        ("k8s.amazonaws.com/vgpu", "is the AWS virtual GPU plugin's name"),
        ("aliyun.com/gpu", "ask for nvidia.com/gpu."),
    ],
)
def test_a_resource_that_is_nearly_right_names_what_was_meant(name: str, meant: str) -> None:
    assert meant in resource_hint(name)
    assert resource_hint(name).startswith(name)


@pytest.mark.parametrize(
    "name",
    [
        *("aliyun.com/gpu-mem", "aliyun.com/gpu-core.percentage", "nvidia.com/gpu", "cpu", "memory"),
        *("nvidia.com/mig-1g.5gb", "nvidia.com/gpu.shared", "ephemeral-storage", "rdma/hca", "amd.com/gpu"),
    ],
)
def test_a_resource_that_is_right_or_none_of_ours_is_left_alone(name: str) -> None:
    assert resource_hint(name) == ""


def test_a_resource_that_several_containers_name_is_told_once() -> None:
    assert len(resource_hints(["cpu", "aliyun.com/gpu-mm", "aliyun.com/gpu-mm"])) == 1


@pytest.mark.parametrize(
    ("labels", "told"),
    [
        (
            {"ack.node.gpu.schedule": "coremem"},
            'label ack.node.gpu.schedule is "coremem", must be one of cgpu, core_mem, default, share; '
            "did you mean core_mem?",
        ),
        ({"cgpu": "True"}, 'label cgpu is "True", must be one of true, false; did you mean true?'),
        (
            {"ack.node.gpu.placement": "zzz"},
            'label ack.node.gpu.placement is "zzz", must be one of binpack, spread',
        ),
        (
            {"ack.node.gpu.schedul": "cgpu"},
            "label ack.node.gpu.schedul means nothing; did you mean ack.node.gpu.schedule?",
        ),
        (
            {"gpuslice.io/mod": "shared"},
            "label gpuslice.io/mod means nothing; did you mean gpuslice.io/mode?",
        ),
    ],
)
def test_a_label_that_is_nearly_right_is_told(labels: dict[str, str], told: str) -> None:
    assert list(node_label_hints(labels)) == [told]


@pytest.mark.parametrize(
    "labels",
    [
        {"cgpu": "true", "ack.node.gpu.schedule": "core_mem", "gpuslice.io/mode": "shared-without-isolation"},
        {"kubernetes.io/hostname": "n1", "gpu": "yes", "nvidia.com/gpu.product": "T4"},
    ],
)
def test_labels_that_are_right_or_others_are_left_alone(labels: dict[str, str]) -> None:
    assert list(node_label_hints(labels)) == []


def test_the_charts_own_node_label_is_known() -> None:
    assert list(node_label_hints({"team/cards": "yes"}, "team/cards")) == [
        'label team/cards is "yes", must be one of true, false'
    ]


@given(st.text(max_size=60))
def test_no_name_is_too_strange(name: str) -> None:
    assert isinstance(resource_hint(name), str)
    assert isinstance(list(node_label_hints({name: name})), list)


@given(st.integers(2, 80), st.integers(1, 80), st.floats(0, 90_000), st.booleans())
def test_a_suggested_size_is_there_to_be_had_and_holds_the_peak(
    gib: int, units: int, peak_mib: float, refused: bool
) -> None:
    card_mib = gib * 1024 + 100
    total = card_units(card_mib)
    found = suggested_size(
        units=units, card_units=total, card_mib=card_mib, peak_mib=peak_mib, refused=refused
    )
    if found is None:
        return
    assert 1 <= found.units <= total
    assert found.limit_mib == limit_mib(card_mib, found.units, total)
    assert found.more is refused
    assert found.units > units if refused else found.units < units
    assert found.limit_mib >= peak_mib * HEADROOM or found.units == total


def test_what_fits_well_is_left_alone() -> None:
    def size(peak_mib: float, refused: bool = False) -> object:
        found = suggested_size(units=4, card_units=15, card_mib=16130, peak_mib=peak_mib, refused=refused)
        return None if found is None else found.units

    assert size(4000) is None
    assert size(1000) == 2
    assert size(0) is None  # it has not begun
    assert size(3193, refused=True) == 5
    assert suggested_size(units=15, card_units=15, card_mib=16130, peak_mib=16000, refused=True) is None


def test_a_label_of_a_pod_that_is_nearly_right_names_what_was_meant() -> None:
    told = pod_label_hints(["aliyun.com/gpu-cuont", "app", "gpuslice.io/min-teir", "aliyun.com/gpu-count"])
    assert told == (
        "label aliyun.com/gpu-cuont means nothing; did you mean aliyun.com/gpu-count?",
        "label gpuslice.io/min-teir means nothing; did you mean gpuslice.io/min-tier?",
    )


@pytest.mark.parametrize(
    ("hints", "wrong"), [(resource_hints, "aliyun.com/gpu-mm"), (pod_label_hints, "gpuslice.io/min-tiers")]
)
def test_a_pod_of_many_names_is_not_looked_at_to_its_last(
    hints: Callable[[Iterable[str]], tuple[str, ...]], wrong: str
) -> None:
    """A look at one takes a tenth of a millisecond, and the API server waits for the webhook."""
    few, many = [f"a{each}" for each in range(50)], [f"a{each}" for each in range(5000)]
    assert hints([*few, wrong]) == hints([wrong])
    assert hints([*many, wrong]) == ()
