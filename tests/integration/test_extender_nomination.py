"""Nominated nodes: kube-scheduler is spared the search, and all else is as without."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from math import log
from typing import Any

import pytest

from gpuslice.apps.extender.speedups.nominator import NominationLimits
from gpuslice.apps.extender.speedups.pending_queue import LASTS_S, LATE, MISSES, OF_LAST, PAUSE_S
from gpuslice.core.contract import ANN_INDEX, ANN_POD_UNITS
from tests.integration.nomination_rig import Queue

Make = Callable[..., Queue]
FEW = [f"p{number}" for number in range(4)]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Queue] = []

    def one(**fields: Any) -> Queue:
        for each in made:
            each.close()
        made[:] = [Queue(**fields)]
        return made[0]

    yield one
    made[0].close()


def test_those_behind_the_pod_looked_at_are_nominated(make: Make) -> None:
    queue = make()
    queue.add(*FEW)
    assert len(queue.search("p0")) == 1  # the best alone: what is planned for the others rests on it
    assert [bool(queue.nominated(name)) for name in FEW] == [False, True, True, True]
    node = queue.nominated("p1")
    assert not queue.marked("p1")
    assert not queue.api.bound_to("p1")
    queue.take("p1")
    assert queue.where("p1")[0] == node
    assert queue.nominated("p1") == ""  # the API server clears it with the binding
    assert queue.writes("p1") == [("PATCH", "status"), ("POST", "binding")]
    queue.bind("p0", node)  # the searched one as ever: a Binding alone
    assert queue.writes("p0") == [("POST", "binding")]
    assert queue.results == {"used": 1}


@pytest.mark.parametrize("policy", ["binpack", "spread", "opportunity-cost"])
def test_pods_go_where_they_would_have_gone(make: Make, policy: str) -> None:
    dice = random.Random(policy)
    sizes = [dice.choice([1, 3, 4, 7, 8, 15]) for _ in range(40)]
    ended = []
    for nominate in (False, True):
        queue = make(policy=policy, filter_best=1, nominate=nominate, limits=NominationLimits(room=10))
        for number, units in enumerate(sizes):
            queue.add(f"p{number:02}", units=units)
        for number in range(len(sizes)):
            queue.take(f"p{number:02}")
        ended.append([queue.where(f"p{number:02}") for number in range(len(sizes))])
    assert queue.results == {"used": len(sizes) - 1}
    assert ended[0] == ended[1]


def test_the_more_important_and_then_the_earlier_are_next(make: Make) -> None:
    queue = make(limits=NominationLimits(holds=3))
    path, head = "/apis/scheduling.k8s.io/v1/priorityclasses", {"apiVersion": "scheduling.k8s.io/v1"}
    queue.api.call("POST", path, {**head, "kind": "PriorityClass", "metadata": {"name": "high"}, "value": 9})
    queue.add("first", "b", "a")
    queue.add("important", priorityClassName="high")
    queue.search("first")
    assert [name for name in ("a", "b", "important") if queue.nominated(name)] == ["b", "important"]


CHOOSY: dict[str, Any] = {
    "preferred nodes": {
        "affinity": {
            "nodeAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 1, "preference": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}
                ]
            }
        }
    },
    "other pods": {
        "affinity": {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "kubernetes.io/hostname"}]
            }
        }
    },
    "spreading": {
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
        ]
    },
    "gated": {"schedulingGates": [{"name": "wait"}]},
    "another scheduler": {"schedulerName": "other"},
    "another selector": {"nodeSelector": {"zone": "b"}},
    "another tolerance": {"tolerations": [{"key": "gpu", "operator": "Exists"}]},
}


@pytest.mark.parametrize("spec", CHOOSY.values(), ids=CHOOSY.keys())
def test_a_pod_of_which_nothing_is_known_or_that_is_choosy_is_left_alone(make: Make, spec: Any) -> None:
    queue = make()
    queue.add("p0")
    queue.add("choosy", **spec)
    queue.add("p1")
    queue.search("p0")
    assert queue.nominated("p1")
    assert queue.writes("choosy") == []


def owned_by(uid: str) -> list[dict[str, object]]:
    return [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": uid, "uid": uid, "controller": True}]


REPLICAS = [f"r{number:02}" for number in range(20)]


def add_replicas(queue: Queue, seed: int) -> None:
    """A cluster of three zones that holds this and that, and one owner's pods that wait."""
    dice = random.Random(seed)
    for number, name in enumerate(queue.nodes):
        labels = {"topology.kubernetes.io/zone": "abc"[number % 3]}
        queue.api.patch(f"/api/v1/nodes/{name}", {"metadata": {"labels": labels}})
    for number, name in enumerate(dice.choices(queue.nodes, k=60)):
        marks = {ANN_INDEX: str(dice.randrange(2)), ANN_POD_UNITS: "4"}
        queue.api.add_pod(f"old{number}", "4", node=name, annotations=marks, owners=owned_by("old"))
    queue.add(*REPLICAS, units=3, owners=owned_by("web"))


def kube_schedulers_sums(queue: Queue, name: str) -> dict[str, float]:
    """Our score and its own of each node that passes, as the shipped configuration weighs them."""
    scores = queue.score(name, queue.search(name))
    on = Counter(pod["spec"].get("nodeName", "") for pod in queue.api.pods() if is_owned_by(pod, "web"))
    zone = {node: queue.nodes.index(node) % 3 for node in queue.nodes}
    within = Counter({each: sum(on[node] for node in queue.nodes if zone[node] == each) for each in range(3)})
    zones = len({zone[node] for node in scores})
    crowd = {
        node: on[node] * log(len(scores) + 2) + 2 + within[zone[node]] * log(zones + 2) + 4 for node in scores
    }
    most, least = max(crowd.values()), min(crowd.values())
    return {node: 100 * score + 200 * (most + least - crowd[node]) / most for node, score in scores.items()}


def is_owned_by(pod: Any, uid: str) -> bool:
    return any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences", ()))


@pytest.mark.parametrize("policy", ["binpack", "spread", "opportunity-cost"])
def test_replicas_go_where_kube_scheduler_would_have_sent_them(make: Make, policy: str) -> None:
    settings = {"policy": policy, "filter_best": 16}
    queue = make(**settings, limits=NominationLimits(room=10))
    add_replicas(queue, seed=4)
    chosen = {name: queue.take(name) for name in REPLICAS}
    assert queue.results == {"used": len(REPLICAS) - 1}
    queue = make(**settings, nominate=False)
    add_replicas(queue, seed=4)
    for name in REPLICAS:
        sums = kube_schedulers_sums(queue, name)
        assert sums[chosen[name]] == pytest.approx(max(sums.values()))
        queue.bind(name, chosen[name])


def test_no_pod_is_sent_where_kube_schedulers_own_filters_let_none_go(make: Make) -> None:
    queue = make(limits=NominationLimits(room=1))
    allowed = queue.nodes[50:60]
    queue.add(*FEW)
    queue.search("p0", *allowed)
    assert {queue.nominated(name) for name in FEW[1:]} <= set(allowed)


def test_a_node_that_a_taint_asks_to_avoid_is_avoided(make: Make) -> None:
    queue = make(limits=NominationLimits(room=1, spare=0))
    taint = {"key": "old", "effect": "PreferNoSchedule"}
    for name in queue.nodes[:-1]:
        queue.api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": [taint]}})
    queue.add(*FEW)
    queue.search("p0")
    assert queue.nominated("p1") == queue.nodes[-1]


def test_a_node_without_cpu_for_it_is_not_named(make: Make) -> None:
    queue = make(limits=NominationLimits(room=1, spare=0))
    container = {"name": "main", "image": "app", "resources": {"requests": {"cpu": "63"}}}
    for name in queue.nodes[:-1]:
        queue.api.add_pod(f"guest-{name}", None, containers=[container], node=name)
    limits = {"aliyun.com/gpu-mem": "4", "cpu": "2"}
    asking = {"name": "main", "image": "app", "resources": {"limits": limits, "requests": limits}}
    queue.add(*FEW, containers=[asking])
    queue.search("p0")
    assert queue.nominated("p1") == queue.nodes[-1]


def test_where_few_nodes_fit_nobody_is_nominated(make: Make) -> None:
    queue = make(nodes=99)
    queue.add(*FEW)
    queue.search("p0")
    assert not any(queue.marked(name) for name in FEW)


def test_it_can_be_turned_off(make: Make) -> None:
    queue = make(nominate=False)
    queue.add(*FEW)
    queue.search("p0")
    assert not any(queue.marked(name) for name in FEW)


def test_a_nomination_that_is_there_already_stays(make: Make) -> None:
    queue = make()
    queue.add(*FEW)
    queue.api.patch(
        "/api/v1/namespaces/default/pods/p1/status", {"status": {"nominatedNodeName": queue.nodes[7]}}
    )
    queue.calm()
    queue.search("p0")
    assert queue.nominated("p1") == queue.nodes[7]
    assert queue.writes("p1") == []
    assert queue.nominated("p2")


def test_held_cards_make_way_for_a_pod_that_finds_no_others(make: Make) -> None:
    queue = make(nodes=3, limits=NominationLimits(room=1, spare=0))
    queue.add("p0", *[f"whole{number}" for number in range(5)], units=15)
    queue.add("choosy", units=15, nodeSelector={})
    queue.search("p0")
    assert sum(bool(queue.nominated(f"whole{number}")) for number in range(5)) == 5  # all of the six cards
    queue.add("asks", units=15, schedulingGates=None)
    assert queue.search("asks")
    queue.bind("asks", queue.nodes[0])
    assert list(queue.extender.ledger.overcommitted()) == []


def test_held_cards_stay_where_giving_them_up_would_not_help(make: Make) -> None:
    queue = make(limits=NominationLimits(room=1))
    queue.add(*FEW)
    queue.search("p0")
    queue.add("huge", units=16)
    assert queue.search("huge") == []
    assert queue.extender.ledger.holds.tentative_count == len(FEW)


def test_a_bind_comes_before_any_plan(make: Make) -> None:
    queue = make(limits=NominationLimits(room=1))
    queue.add("p0", "p1", units=15)
    queue.search("p0")
    node = queue.nominated("p1")
    queue.add("other", "more", units=15)
    for name in ("other", "more"):
        queue.bind(name, node)
    assert queue.where("other")[0] == queue.where("more")[0] == node
    assert queue.take("p1") != node or queue.results["used"]
    assert list(queue.extender.ledger.overcommitted()) == []


def test_what_came_to_nothing_is_taken_back(make: Make) -> None:
    queue = make()
    queue.add(*FEW)
    queue.search("p0")
    assert queue.nominated("p1")
    queue.search("p1", *queue.nodes[60:])  # the node is not among those that its filters let pass
    assert queue.results["missed"] == 1
    queue.calm(12)
    assert not queue.nominated("p1")
    assert queue.nominated("p2")  # its turn may come
    queue.calm(40)
    assert not any(queue.nominated(name) for name in FEW)
    assert queue.extender.ledger.holds.tentative_count == 0


def test_a_node_that_was_refused_is_not_named_again(make: Make) -> None:
    queue = make()
    queue.add(*FEW)
    queue.search("p0")
    bad = queue.nominated("p1")
    queue.search("p1", *[name for name in queue.nodes if name != bad])
    queue.add("p4", "p5")
    queue.search("p4", *[name for name in queue.nodes if name != bad])
    assert queue.nominated("p5") not in ("", bad)


def test_many_in_vain_end_it_for_a_while(make: Make) -> None:
    queue = make()
    names = [f"p{number:02}" for number in range(MISSES + 1)]
    queue.add(*names)
    queue.search("p00")
    for name in names[1:]:
        queue.search(name, *[each for each in queue.nodes if each != queue.nominated(name)])
    assert queue.results["missed"] == MISSES
    queue.add("q0", "q1")
    queue.search("q0")
    assert not queue.nominated("q1")
    queue.calm(PAUSE_S)
    queue.add("q2", "q3")
    queue.search("q2")
    assert queue.nominated("q3")


def test_one_taken_up_before_it_was_nominated_is_no_miss(make: Make) -> None:
    queue = make()
    queue.add("p0", "p1")
    queue.search("p0")
    queue.search("p1")
    assert queue.results == {"late": 1}


def test_a_scheduler_that_never_looks_at_the_nominated_node_is_not_told_for_ever(make: Make) -> None:
    queue = make()
    names = [f"p{number:02}" for number in range(LATE + 1)]
    queue.add(*names)
    for name in names:
        queue.search(name)
    assert queue.results == {"late": LATE}
    queue.add("q0", "q1")
    queue.search("q0")
    assert not queue.nominated("q1")


def test_a_scheduler_that_has_just_started_takes_them_by_name(make: Make) -> None:
    queue = make(limits=NominationLimits(holds=4, room=1, at_once=4, kept_s=1.0))
    names = [f"p{number:02}" for number in range(40)]
    queue.add(*reversed(names))
    for name in names[:OF_LAST]:  # the last to come are looked at first
        queue.take(name)
    queue.calm(6)  # those called before it was known make room
    behind = names[OF_LAST + 1 :]
    queue.take(names[OF_LAST])
    assert [name for name in behind if queue.nominated(name)][:2] == behind[:2]
    before = queue.results.get("used", 0)
    queue.add("a-later-one")
    for name in behind:
        queue.take(name)
    assert queue.results["used"] >= before + len(behind) - 4
    assert queue.nominated("a-later-one")


def test_what_was_learned_of_the_nodes_is_forgotten_soon(make: Make) -> None:
    queue = make()
    queue.add("p0")
    queue.search("p0")
    queue.calm(LASTS_S + 1)
    queue.add("p1", "p2")
    assert not queue.nominated("p2")
    queue.search("p1")
    assert queue.nominated("p2")


def test_to_who_takes_over_a_nomination_is_a_hint_as_good_as_before(make: Make) -> None:
    queue = make()
    queue.add(*FEW)
    queue.search("p0")
    queue.kill()
    queue.start()
    assert queue.nominated("p1")
    queue.take("p1")
    assert queue.where("p1")[0]


def test_a_conflict_ends_the_plan_and_the_pod_is_bound_all_the_same(make: Make) -> None:
    queue = make()
    queue.api.add_pod("p0")
    queue.api.add_pod("p1")
    queue.calm()
    queue._ask("p0", queue.nodes)  # the nomination of p1 is on its way
    queue.loop.settle()
    queue.api.patch("/api/v1/namespaces/default/pods/p1", {"metadata": {"labels": {"a": "b"}}})
    queue.calm()
    assert not queue.nominated("p1")
    queue.take("p1")
    assert queue.where("p1")[0]
    queue.calm(40)
    assert queue.extender.ledger.holds.tentative_count == 0


def test_a_bind_waits_for_a_nomination_that_is_on_its_way_and_holds_its_cards_meanwhile(make: Make) -> None:
    queue = make()
    queue.add("p0", "p1")
    queue._ask("p0", queue.nodes)
    (node,) = queue._ask("p1", queue.nodes)[:1]  # looked at before its nomination has arrived
    queue.bind("p1", node)
    assert queue.where("p1")[0] == node
    assert queue.writes("p1") == [("PATCH", "status"), ("POST", "binding")]


def test_who_leads_no_more_holds_nothing(make: Make) -> None:
    queue = make()
    queue.add(*FEW)
    queue.search("p0")
    assert queue.extender.ledger.holds.tentative_count == len(FEW)
    queue.extender._lease_changed(False)
    assert queue.extender.ledger.holds.tentative_count == 0
    assert not queue.extender.ledger.holds.reserved
