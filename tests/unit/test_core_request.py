"""What a pod asks for: its peak, as kube-scheduler and kubelet count it, or what is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest

from gpuslice.core.contract import GPU_CORE, GPU_COUNT, GPU_MEM
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.model import ContainerKind, ContainerRequest, Request
from gpuslice.core.quantity import whole_number
from gpuslice.core.request import ContainerSpec, held_at_peak, pod_request

INIT, SIDECAR, APP = ContainerKind.INIT, ContainerKind.SIDECAR, ContainerKind.APP


def spec(name: str, units: Any, kind: ContainerKind = APP, index: int = 0, **more: Any) -> ContainerSpec:
    limits = {} if units is None else {GPU_MEM: units}
    return ContainerSpec(name, index, {**limits, **more}, kind)


def ask(*specs: ContainerSpec, label: str | None = None) -> Request | None:
    return pod_request(specs, {GPU_COUNT: label} if label is not None else {})


def units_of(*specs: ContainerSpec) -> int:
    request = ask(*specs)
    assert request is not None
    return request.units


def core(percent: Any) -> dict[str, Any]:
    return {GPU_CORE: percent}


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ("4", 4),
        (4, 4),
        (4.0, 4),
        ("4k", 4000),
        ("1Ki", 1024),
        ("4000m", 4),
        ("4e3", 4000),
        ("+4", 4),
        ("4.0", 4),
        ("-1", -1),
        ("4.5", None),
        (4.5, None),
        ("4500m", None),
        ("abc", None),
        ("", None),
        ("4 ", None),
        ("٤", None),
        (True, None),
        (None, None),
        ([], None),
    ],
)
def test_quantities_are_read_as_the_api_reads_them(value: object, number: int | None) -> None:
    assert whole_number(value) == number


def test_a_pod_that_names_none_of_our_resources_asks_for_nothing() -> None:
    assert ask(spec("web", None), ContainerSpec("x", 1, {"cpu": "4"})) is None


def test_the_limits_of_all_app_containers_add_up() -> None:
    assert units_of(spec("a", "2"), spec("b", 3, index=1), spec("c", None, index=2)) == 5


def test_an_init_container_counts_only_where_it_needs_more() -> None:
    assert units_of(spec("init", "3", INIT), spec("a", "4")) == 4
    assert units_of(spec("init", "9", INIT), spec("a", "4")) == 9


def test_sidecars_run_beside_the_apps_and_beside_later_init_containers() -> None:
    early = spec("early", "8", INIT)
    sidecar = spec("sidecar", "2", SIDECAR, index=1)
    late = spec("late", "7", INIT, index=2)
    assert units_of(sidecar, spec("a", "4")) == 6
    assert units_of(early, sidecar, spec("a", "4")) == 8
    assert units_of(early, sidecar, late, spec("a", "4")) == 9


def test_what_is_held_at_the_peak_adds_up_to_the_request() -> None:
    request = ask(
        spec("sidecar", "2", SIDECAR),
        spec("late", "7", INIT, index=1),
        spec("a", "4"),
        spec("b", "1", index=1),
    )
    assert request is not None
    held = held_at_peak(request)
    assert [(container.name, units) for container, units in held] == [
        ("sidecar", 2),
        ("a", 4),
        ("b", 1),
        ("late", 2),
    ]
    assert sum(units for _, units in held) == request.units == 9


def test_of_several_init_containers_the_one_with_the_largest_peak_adds_the_difference() -> None:
    """Not the one that asks for most: what runs beside it counts."""
    request = ask(
        spec("early", "7", INIT),
        spec("sidecar", "3", SIDECAR, index=1),
        spec("late", "5", INIT, index=2),
        spec("last", "1", INIT, index=3),
        spec("a", "2"),
    )
    assert request is not None
    assert request.units == 8
    assert [(each.name, units) for each, units in held_at_peak(request)] == [
        ("sidecar", 3),
        ("a", 2),
        ("late", 3),
    ]


def test_an_init_container_that_fits_into_what_stands_adds_nothing() -> None:
    request = ask(spec("init", "4", INIT), spec("a", "4"))
    assert request is not None
    assert [(each.name, units) for each, units in held_at_peak(request)] == [("a", 4)]


def test_app_containers_are_counted_whether_they_ask_or_not() -> None:
    request = ask(
        spec("init", "1", INIT),
        spec("sidecar", None, SIDECAR, index=1),
        spec("a", "4"),
        spec("b", None, index=1),
    )
    assert request is not None
    assert request.app_containers == 2


@pytest.mark.parametrize(
    "value", ["-1", -1, "4.5", 4.5, "abc", "1000000000000", 10**12, "10G", "4Gi", None, ""]
)
def test_a_wrong_amount_names_the_container_and_the_field(value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        pod_request([ContainerSpec("train", 0, {GPU_MEM: value})])
    text = str(caught.value)
    assert text.startswith(
        f'container "train": limits["aliyun.com/gpu-mem"] is "{value}", must be a whole number'
    )


def test_the_containers_of_a_pod_together_ask_for_no_more_than_one_may() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"aliyun.com/gpu-mem.* at most 1000000000 for all containers"
    ):
        units_of(spec("a", "1000000000"), spec("b", "1", index=1))


@pytest.mark.parametrize("zero", ["0", 0, "0k"])
def test_zero_asks_for_nothing_as_of_any_resource(zero: Any) -> None:
    assert ask(spec("a", zero), spec("b", zero, **core("0"), index=1)) is None
    assert units_of(spec("a", zero), spec("b", "3", index=1)) == 3
    (only,) = _held(ContainerSpec("a", 0, {GPU_MEM: zero, "gpuslice.io/memory": "2"}))
    assert only.units == 2
    (plain,) = _held(spec("a", "4", **core(str(zero))))
    assert (plain.units, plain.compute_percent) == (4, 0)


def _held(*specs: ContainerSpec) -> tuple[ContainerRequest, ...]:
    request = ask(*specs)
    assert request is not None
    return request.containers


@pytest.mark.parametrize("percent", ["3", "101", "-5", "abc", "12.5", "105"])
def test_a_wrong_share_of_compute_names_the_container_and_the_field(percent: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=r'container "train": limits\["aliyun.com/gpu-core.percentage"\]'
    ):
        ask(spec("train", "4", **core(percent)))


def test_a_share_of_compute_needs_memory_in_the_same_container() -> None:
    with pytest.raises(
        InvalidRequestError, match=r'container "b".*must be accompanied by limits of aliyun.com/gpu-mem'
    ):
        ask(spec("a", "4"), spec("b", None, index=1, **core("20")))


def test_shares_of_compute_add_up_and_stay_within_one_card() -> None:
    request = ask(spec("a", "4", **core("60")), spec("b", "4", index=1, **core("40")))
    assert request is not None
    assert request.compute_percent == 100
    with pytest.raises(InvalidRequestError, match="at most 100 for all containers together"):
        ask(spec("a", "4", **core("60")), spec("b", "4", index=1, **core("60")))


def test_a_pod_is_spread_over_as_many_cards_as_its_label_says() -> None:
    request = ask(spec("a", "8"), label="4")
    assert request is not None
    assert (request.card_count, request.units, request.units_per_card) == (4, 8, 2)


@pytest.mark.parametrize("label", [None, "1"])
def test_one_card_is_the_rule_and_may_be_said(label: str | None) -> None:
    request = ask(spec("a", "3", **core("20")), label=label)
    assert request is not None
    assert (request.card_count, request.units_per_card, request.compute_percent) == (1, 3, 20)


@pytest.mark.parametrize("label", ["0", "-1", "two", "1.5", "", "2.0", "2k", "2e0", "9" * 25])
def test_a_wrong_number_of_cards_names_the_label(label: str) -> None:
    with pytest.raises(InvalidRequestError, match=r'label "aliyun\.com/gpu-count"'):
        ask(spec("a", "8"), label=label)


def test_every_container_must_divide_by_the_number_of_cards() -> None:
    with pytest.raises(InvalidRequestError, match=r'container "b": limits\["aliyun.com/gpu-mem"\] is "3"'):
        ask(spec("a", "4"), spec("b", "3", index=1), label="2")


def test_several_cards_and_a_share_of_compute_exclude_each_other() -> None:
    with pytest.raises(
        InvalidRequestError, match=r'gpu-core.percentage"\] is "20", must be left out beside label'
    ):
        ask(spec("a", "4", **core("20")), label="2")


def test_the_label_of_a_pod_that_asks_for_nothing_is_nobodys_business() -> None:
    assert ask(spec("a", None), label="many") is None
