"""CPU and memory decide where a pod goes, never whether it may."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from gpuslice.adapters.kube import objects
from gpuslice.core.host_resources import (
    NO_HOST_RESOURCES,
    HostResources,
    HostUsage,
    node_host_resources,
    pod_host_resources,
)
from gpuslice.core.ledger import Ledger, shape_of
from gpuslice.core.model import Pod
from gpuslice.core.policy import NEVER, UNLIMITED, make_policy
from gpuslice.core.quantity import scaled
from gpuslice.diagnosis.simulate.facts import used_without_cards
from tests.builders import api_container, api_pod, make_node, make_placement, make_pod, make_request

BUSY = HostResources(4000, 8192)


def container(cpu: str, memory: str, **fields: object) -> dict[str, object]:
    each = api_container("1")
    each["resources"]["requests"] = {"cpu": cpu, "memory": memory}
    return each | fields


def decoded(**spec: object) -> objects.PodSpec:
    return msgspec.convert(api_pod(**spec), objects.Pod).spec  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("amounts", "host"),
    [
        ({"cpu": "500m", "memory": "1Gi"}, HostResources(500, 1024)),
        ({"cpu": "2", "memory": "1500M"}, HostResources(2000, 1430)),
        ({"cpu": "0.1", "memory": "128974848"}, HostResources(100, 123)),
        ({"cpu": "none", "memory": "1Gi"}, HostResources(0, 1024)),
        ({"cpu": "1", "memory": "much"}, HostResources(1000, 0)),
        ({"cpu": 2, "memory": 3145728.0}, HostResources(2000, 3)),
        ({"memory": "1Mi"}, HostResources(0, 1)),
        ({"cpu": "1"}, HostResources(1000, 0)),
        ({}, NO_HOST_RESOURCES),
        (None, NO_HOST_RESOURCES),
    ],
)
def test_amounts_are_read_as_kubernetes_writes_them(
    amounts: dict[str, str | int | float] | None, host: HostResources
) -> None:
    assert node_host_resources(amounts) == host


@pytest.mark.parametrize(
    ("value", "amount"),
    [("2", 20), (2, 20), (1.55, 15), (1e308, int(1e308) * 10), (True, None), ([], None), ("x", None)],
)
def test_a_quantity_is_scaled_and_what_is_none_is_not(value: object, amount: int | None) -> None:
    assert scaled(value, 10) == amount


@pytest.mark.parametrize(
    ("host", "eats"), [(NO_HOST_RESOURCES, False), (HostResources(1, 0), True), (HostResources(0, 1), True)]
)
def test_either_amount_is_something_to_eat(host: HostResources, eats: bool) -> None:
    assert bool(host) is eats


def test_a_pod_asks_for_its_peak() -> None:
    apps = [container("1", "1Gi"), container("500m", "2Gi")]
    inits = [container("200m", "1Gi", restartPolicy="Always"), container("3", "1Gi")]
    assert pod_host_resources(decoded(containers=apps)) == HostResources(1500, 3072)
    assert pod_host_resources(decoded(containers=apps, initContainers=inits)) == HostResources(3200, 4096)


def test_what_a_pod_asks_for_as_a_whole_wins_and_its_runtime_class_costs_more() -> None:
    apps = [container("1", "1Gi"), container("500m", "2Gi")]
    whole = {"requests": {"cpu": "4"}, "limits": {"cpu": "4"}}
    assert pod_host_resources(decoded(containers=apps, resources=whole)) == HostResources(4000, 3072)
    assert pod_host_resources(
        decoded(containers=apps, overhead={"cpu": "250m", "memory": "120Mi"})
    ) == HostResources(1750, 3192)
    bare = [{"name": "bare"}]
    assert pod_host_resources(
        decoded(containers=bare, resources={"requests": {"memory": "1Gi"}})
    ) == HostResources(0, 1024)


def test_who_asks_for_one_of_both_or_for_nothing_asks_for_no_more() -> None:
    bare, quiet = {"name": "bare"}, {"name": "quiet", "resources": {}}
    cpu = {"name": "cpu", "resources": {"requests": {"cpu": "1"}}}
    memory = {"name": "memory", "resources": {"requests": {"memory": "5Mi"}}}
    assert pod_host_resources(decoded(containers=[bare, quiet])) == NO_HOST_RESOURCES
    assert pod_host_resources(decoded(containers=[bare, cpu, memory])) == HostResources(1000, 5)
    assert pod_host_resources(decoded(containers=[bare], initContainers=[memory])) == HostResources(0, 5)
    assert pod_host_resources(decoded(containers=[cpu], initContainers=[quiet, memory])) == HostResources(
        1000, 5
    )


def test_a_pod_eats_of_one_node_and_is_told_where_that_changes() -> None:
    hosted = HostUsage()
    assert hosted.used("n1") == NO_HOST_RESOURCES
    assert hosted.put("a", "n1", HostResources(0, 5)) == {"n1"}
    assert hosted.put("b", "n1", HostResources(2, 5)) == {"n1"}
    assert hosted.put("b", "n1", HostResources(2, 5)) == set()
    assert hosted.used("n1") == HostResources(2, 10)
    assert hosted.put("b", "n2", HostResources(2, 5)) == {"n1", "n2"}
    assert (hosted.used("n1"), hosted.used("n2")) == (HostResources(0, 5), HostResources(2, 5))
    assert hosted.put("b", "n2", NO_HOST_RESOURCES) == {"n2"}
    assert hosted.put("a", "", HostResources(0, 5)) == {"n1"}
    assert hosted.put("a", "", HostResources(0, 5)) == set()
    assert (hosted.used("n1"), hosted.used("n2")) == (NO_HOST_RESOURCES, NO_HOST_RESOURCES)


def ledger() -> Ledger:
    made = Ledger()
    made.apply_node(make_node(cards=(15, 15), host=HostResources(16_000, 65_536)))
    return made


def left(made: Ledger) -> tuple[float, float]:
    fleet = made.flush()
    row = fleet.row_of["n1"]
    return float(fleet.cpu_left[row]), float(fleet.memory_left[row])


def test_every_bound_pod_eats_and_stops_when_it_is_gone() -> None:
    made = ledger()
    guest = Pod("guest", "default", "guest", "n1", host=BUSY, version=1)
    made.apply_pod(guest)
    made.apply_pod(replace(guest, version=2))
    made.apply_pod(make_pod("mine", 4, node="n1", card=0, host=BUSY))
    assert left(made) == (8_000, 49_152)
    made.remove_pod("guest")
    assert left(made) == (12_000, 57_344)
    made.apply_pod(replace(make_pod("mine", 4, node="n1", card=0, host=BUSY), finished=True))
    assert left(made) == (16_000, 65_536)


def test_a_pod_on_its_way_eats_until_it_is_forgotten() -> None:
    made = ledger()
    pod = make_pod("mine", 4, host=BUSY)
    assert made.assume(pod, make_placement("n1", 4, 0)) is None
    assert left(made) == (12_000, 57_344)
    made.forget(pod.uid)
    assert left(made) == (16_000, 65_536)


def test_who_eats_more_than_there_is_refuses_nobody() -> None:
    made = ledger()
    made.apply_pod(Pod("glutton", "default", "glutton", "n1", host=HostResources(99_000, 8)))
    shape = shape_of(replace(make_request(4), host=BUSY))
    for name in ("opportunity-cost", "fgd", "bestfit", "binpack", "spread"):
        policy = make_policy(name, made.flush())
        policy.arrived(shape)
        assert policy.keys(shape)[made.fleet.row_of["n1"]] != NEVER, name


def test_cores_beside_free_cards_are_left_for_those_who_need_the_cards() -> None:
    made = Ledger()
    for name, cpu in (("n1", 8_000), ("n2", 64_000)):
        made.apply_node(make_node(name, cards=(15, 15), host=HostResources(cpu, 262_144)))
    fleet = made.flush()
    policy = make_policy("opportunity-cost", fleet)
    hungry = shape_of(replace(make_request(1), host=HostResources(8_000, 1024)))
    policy.arrived(hungry)
    row = policy.choose(hungry)
    assert row == fleet.row_of["n2"]  # on n1 there was no CPU left for the other cards any more


def test_a_node_that_says_nothing_is_unlimited() -> None:
    made = Ledger()
    made.apply_node(make_node())
    assert left(made) == (UNLIMITED, UNLIMITED)


def test_what_guests_eat_is_told_apart_from_what_pods_with_cards_eat() -> None:
    made = ledger()
    made.apply_pod(Pod("guest", "default", "guest", "n1", host=HostResources(1000, 512)))
    made.apply_pod(make_pod("mine", 4, node="n1", card=0, host=BUSY))
    assert used_without_cards(made, "n1") == HostResources(1000, 512)
    assert used_without_cards(made, "nowhere") == NO_HOST_RESOURCES
