"""The simulated scheduler's filters, words, sampling and queue, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from simcluster.cluster.amounts import pod_requests
from simcluster.scheduler import configuration, filters, words
from simcluster.scheduler.configuration import ConfigurationError
from simcluster.scheduler.decision import nodes_to_find
from simcluster.scheduler.filters import Failure
from simcluster.scheduler.nodes import NodeCache, NodeInfo
from simcluster.scheduler.queue import SchedulingQueue

MEM = "aliyun.com/gpu-mem"


def make_pod(name: str = "p", units: int = 0, **spec: Any) -> dict[str, Any]:
    limits = {"cpu": "500m", **({MEM: str(units)} if units else {})}
    containers = [{"name": "main", "resources": {"limits": limits, "requests": limits}}]
    metadata = {"name": name, "namespace": "default", "uid": name}
    return {"metadata": metadata, "spec": {"containers": containers, **spec}}


def make_node(name: str = "n", units: int = 15, **spec: Any) -> dict[str, Any]:
    labels = spec.pop("labels", {})
    allocatable = {"cpu": "4", "memory": "8Gi", "pods": "110", MEM: str(units)}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
        "status": {"allocatable": allocatable},
    }


def info(node: dict[str, Any], *pods: dict[str, Any]) -> NodeInfo:
    cache = NodeCache()
    cache.set_node(node)
    for pod in pods:
        cache.set_pod({**pod, "spec": {**pod["spec"], "nodeName": node["metadata"]["name"]}})
    found = cache.get(node["metadata"]["name"])
    assert found is not None
    return found


def test_a_pods_request_is_the_larger_of_init_and_running_with_its_sidecars() -> None:
    def container(units: int, **more: Any) -> dict[str, Any]:
        return {"resources": {"limits": {MEM: str(units)}}, **more}

    spec = {
        "initContainers": [container(1, restartPolicy="Always"), container(6)],
        "containers": [container(2), container(3)],
        "overhead": {"cpu": "250m"},
    }
    assert pod_requests({"spec": spec}) == {MEM: 7, "cpu": 250}
    spec["initContainers"] = [container(4), container(1, restartPolicy="Always")]
    assert pod_requests({"spec": spec})[MEM] == 6


@pytest.mark.parametrize(
    ("pod", "node", "reason", "unresolvable"),
    [
        (make_pod(units=4), make_node(), None, False),
        (make_pod(units=16), make_node(), f"Insufficient {MEM}", True),
        (make_pod(), make_node(unschedulable=True), "node(s) were unschedulable", True),
        (
            make_pod(),
            make_node(taints=[{"key": "a", "value": "b", "effect": "NoSchedule"}]),
            "node(s) had untolerated taint(s)",
            True,
        ),
        (
            make_pod(tolerations=[{"key": "a", "operator": "Exists"}]),
            make_node(taints=[{"key": "a", "effect": "NoSchedule"}]),
            None,
            False,
        ),
        (
            make_pod(nodeSelector={"cgpu": "true"}),
            make_node(labels={"cgpu": "false"}),
            "node(s) didn't match Pod's node affinity/selector",
            True,
        ),
        (make_pod(nodeSelector={"cgpu": "true"}), make_node(labels={"cgpu": "true"}), None, False),
    ],
)
def test_each_filter_speaks_the_real_words(
    pod: dict[str, Any], node: dict[str, Any], reason: str | None, unresolvable: bool
) -> None:
    failure = filters.check(pod, info(node))
    if reason is None:
        assert failure is None
    else:
        assert failure == Failure((reason,), unresolvable)


def test_what_is_used_counts_and_more_than_a_node_has_is_unresolvable() -> None:
    node = info(make_node(), make_pod("a", 8), make_pod("b", 4))
    assert filters.check(make_pod(units=4), node) == Failure((f"Insufficient {MEM}",), unresolvable=False)
    assert filters.check(make_pod(units=3), node) is None
    assert filters.check(make_pod(units=4), node, ignored=frozenset({MEM})) is None


def test_an_assumed_pod_counts_until_it_is_forgotten() -> None:
    cache = NodeCache()
    cache.set_node(make_node())
    cache.assume(make_pod("a", 12), "n")
    node = cache.get("n")
    assert node is not None
    assert node.used[MEM] == 12
    cache.forget("a")
    assert node.used.get(MEM, 0) == 0


def test_the_event_has_the_seeds_sentence_and_what_preemption_says() -> None:
    failures = {f"n{n}": Failure(("Insufficient nvidia.com/gpu",), unresolvable=n < 5) for n in range(6)}
    assert words.fit_error(6, failures) == (
        "0/6 nodes are available: 6 Insufficient nvidia.com/gpu. no new claims to deallocate, "
        "preemption: 0/6 nodes are available: 1 No preemption victims found for incoming pod, "
        "5 Preemption is not helpful for scheduling."
    )
    assert words.fit_error(0, {}) == "no nodes available to schedule pods"


@pytest.mark.parametrize(
    ("nodes", "percentage", "wanted"), [(50, 0, 50), (5000, 0, 500), (5000, 100, 5000), (200, 0, 100)]
)
def test_a_large_cluster_is_sampled(nodes: int, percentage: int, wanted: int) -> None:
    assert nodes_to_find(nodes, percentage) == wanted


def test_a_pod_that_did_not_fit_waits_for_an_event_and_its_back_off() -> None:
    queue = SchedulingQueue()
    queue.add(make_pod(), 0.0)
    waiting = queue.pop(0.0)
    assert waiting is not None
    queue.requeue(waiting, 0.0, unschedulable=True)
    assert queue.pop(5.0) is None
    queue.wake(0.5)
    assert queue.pop(0.5) is None
    assert queue.pop(1.0) is waiting


def test_an_event_during_the_attempt_is_not_missed() -> None:
    queue = SchedulingQueue()
    queue.add(make_pod(), 0.0)
    waiting = queue.pop(0.0)
    assert waiting is not None
    queue.wake(0.0)
    queue.requeue(waiting, 0.0, unschedulable=True)
    assert queue.pop(1.0) is waiting


def test_back_off_doubles_up_to_its_limit_and_priority_goes_first() -> None:
    queue = SchedulingQueue()
    queue.add(make_pod("low"), 0.0)
    queue.add(make_pod("high", priority=10), 1.0)
    first = queue.pop(1.0)
    assert first is not None
    assert first.uid == "high"
    now, waits = 1.0, []
    for _ in range(6):
        queue.remove("low")
        queue.requeue(first, now, unschedulable=False)
        due = queue.next_due(now)
        assert due is not None
        waits.append(due - now)
        now = due
        assert queue.pop(now) is first
    assert waits == [1, 2, 4, 8, 10, 10]


def test_a_pod_deleted_while_it_is_tried_does_not_come_back() -> None:
    queue = SchedulingQueue()
    queue.add(make_pod(), 0.0)
    waiting = queue.pop(0.0)
    assert waiting is not None
    queue.remove("p")
    queue.requeue(waiting, 0.0, unschedulable=False)
    assert queue.next_due(0.0) is None


def test_the_configuration_is_read_as_kube_scheduler_reads_it() -> None:
    read = configuration.parse(
        {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "percentageOfNodesToScore": 100,
            "profiles": [{"schedulerName": "gpuslice-scheduler"}],
            "extenders": [
                {
                    "urlPrefix": "http://127.0.0.1:32766/gpushare-scheduler",
                    "filterVerb": "filter",
                    "bindVerb": "bind",
                    "httpTimeout": "1m30s",
                    "nodeCacheCapable": True,
                    "managedResources": [{"name": MEM, "ignoredByScheduler": False}],
                }
            ],
        }
    )
    assert read.scheduler_names == ("gpuslice-scheduler",)
    assert read.extenders[0].timeout_s == 90
    assert read.extenders[0].managed == {MEM}
    assert read.extenders[0].ignored_by_scheduler == frozenset()


@pytest.mark.parametrize(
    ("extenders", "complaint"),
    [
        ([{"urlPrefix": "a", "bindVerb": "b"}] * 2, "only one extender can implement bind"),
        ([{"urlPrefix": "a", "prioritizeVerb": "p"}], "positive weight"),
        (
            [{"urlPrefix": "a", "managedResources": [{"name": MEM}]}] * 2,
            "duplicate extender managed resource",
        ),
    ],
)
def test_a_configuration_that_kube_scheduler_refuses_is_refused(
    extenders: list[dict[str, Any]], complaint: str
) -> None:
    head = {"apiVersion": configuration.API_VERSION, "kind": "KubeSchedulerConfiguration"}
    with pytest.raises(ConfigurationError, match=complaint):
        configuration.parse({**head, "extenders": extenders})
