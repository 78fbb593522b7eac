"""The way of a pod on a real kubelet with containerd and runc; only the cards are simulated.

The tests share one node and run in order; each leaves it empty.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from gpuslice.core.contract import ANN_ASSIGNED, ANN_INDEX, GPU_COUNT, GPU_MEM, NODE_GPUS, NODE_KUBELET_AWAY
from gpuslice.core.units import limit_bytes
from tests.e2e import control_plane, node
from tests.e2e.kubelet_rig import (
    CARD_MIB,
    NODE,
    PODS,
    SHOW,
    STAY,
    UNITS,
    Cluster,
    checked,
    container,
    cuda_container,
    limits_of,
    lives,
    one_node,
    pod,
    variables,
)
from tests.e2e.node import until

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(node.missing()), reason=node.missing()),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with one_node() as made:
        yield made


@pytest.fixture(autouse=True)
def leave_no_pods(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.clear()


# -- tests -----------------------------------------------------------------------------------------------


def test_the_agent_registers_and_the_node_tells_its_cards(cluster: Cluster) -> None:
    assert cluster.offers(2 * UNITS)
    cards = json.loads(cluster.node()["metadata"]["annotations"][NODE_GPUS])
    assert [(each["index"], each["memory_mib"], each["units"]) for each in cards] == [
        (0, CARD_MIB, UNITS),
        (1, CARD_MIB, UNITS),
    ]


def test_bursts_of_pods_of_one_size_get_what_their_annotations_say(cluster: Cluster) -> None:
    """Of six at a time two have half their units on each card; 24 by kubelet's own ids, under the same names.

    It does not say for which pod it asks, and at its start it sees all that wait in an order nobody knows.
    """
    cluster.settle()
    counts = [2, 1, 2, 1, 1, 1]
    for _ in range(4):
        for number, count in enumerate(counts):
            made = pod(f"app-{number}", container(2))
            made["metadata"]["labels"] = {GPU_COUNT: str(count)}
            cluster.create(made)
        cards = [checked(cluster, f"app-{number}", 2) for number in range(len(counts))]
        assert [len(each.split(",")) for each in cards] == counts
        cluster.clear()


def test_no_card_is_promised_beyond_its_units_while_all_pods_exchange_cards(cluster: Cluster) -> None:
    """kubelet admits by age what was placed in the opposite order, and somebody adds up all the time."""
    units = UNITS // 2
    names = [f"app-{number}" for number in range(4)]
    cluster.settle()
    cluster.kubelet.signal(signal.SIGSTOP)  # not away, as nothing would be bound then, but it sees no pod
    for name in names:
        cluster.create(pod(name, container(units), schedulingGates=[{"name": "example.com/later"}]))
        time.sleep(1.0)  # the resolution of a pod's age
    for name in reversed(names):
        cluster.api.patch(f"{PODS}/{name}", {"spec": {"schedulingGates": []}})
        until(partial(cluster.bound, name), f"{name} is bound")
    meant = {name: cluster.pod(name)["metadata"]["annotations"][ANN_INDEX] for name in names}
    server = cluster.plane.pids["kube-apiserver"]
    os.kill(server, signal.SIGSTOP)  # kubelet shall not see them either before the agent has registered again
    try:
        with cluster.registered_again():
            cluster.kubelet.kill()
            cluster.kubelet.start()
    finally:
        os.kill(server, signal.SIGCONT)
    with cluster.adding_up() as sums:
        cards = {name: checked(cluster, name, units) for name in names}
    assert Counter(cards.values()) == Counter(meant.values()) == {"0": 2, "1": 2}
    assert cards != meant
    assert max(sums) <= UNITS


TRY = "nvidia-smi; cuda_malloc -size=3000; echo under=$?; cuda_malloc -size=4400 2>&1; echo over=$?; id -u"
TRY += "; touch /forbidden 2>&1; echo complete; " + STAY
STRICT = {
    "runAsUser": 65534,
    "runAsNonRoot": True,
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}


@pytest.mark.parametrize("context", [{}, STRICT], ids=["root", "strict"])
def test_a_container_sees_its_share_and_gets_no_more(cluster: Cluster, context: dict[str, Any]) -> None:
    volume = {"name": "gpus", "hostPath": {"path": str(cluster.places.folder / "gpus")}}
    cluster.create(pod("cuda", cuda_container(4, TRY, securityContext=context), volumes=[volume]))
    cluster.running("cuda")
    lines = cluster.said("cuda")
    text = "\n".join(lines)
    assert "/  4301MiB" in text
    assert text.count("MiB / ") == 1, "a container sees its own card only"
    assert "under=0" in lines
    assert "code=2(cudaErrorMemoryAllocation)" in text
    assert "over=1" in lines
    assert str(context.get("runAsUser", 0)) in lines
    assert ("Read-only file system" in text) == bool(context)


def test_containers_of_a_pod_share_its_card_after_an_init_container(cluster: Cluster) -> None:
    first = container(3, SHOW.removesuffix(f"; {STAY}"), name="first")
    cluster.create(pod("several", container(2, name="a"), container(3, name="b"), initContainers=[first]))
    cluster.running("several")
    said = {name: cluster.said("several", name) for name in ("first", "a", "b")}
    seen = {name: variables(lines) for name, lines in said.items()}
    units = {"first": 3, "a": 2, "b": 3}
    assert {name: int(each["ALIYUN_COM_GPU_MEM_CONTAINER"]) for name, each in seen.items()} == units
    assert {each["ALIYUN_COM_GPU_MEM_POD"] for each in seen.values()} == {"5"}
    cards = {each["ALIYUN_COM_GPU_MEM_IDX"] for each in seen.values()}
    assert cards == {cluster.pod("several")["metadata"]["annotations"][ANN_INDEX]}
    for name, lines in said.items():
        assert list(limits_of(lines).values()) == [limit_bytes(CARD_MIB, units[name], UNITS)]


def test_a_kubelet_restart_disturbs_nobody_and_is_noticed_at_once(cluster: Cluster) -> None:
    cluster.create(pod("before", container(4)))
    card = checked(cluster, "before", 4)
    lived = lives(cluster, "before")
    with cluster.registered_again():
        cluster.kubelet.stop()
        cluster.kubelet.start()
    cluster.offers(2 * UNITS)
    cluster.create(pod("after", container(12)))
    assert checked(cluster, "after", 12) != card
    assert lives(cluster, "before") == lived


def test_a_pod_created_while_kubelet_is_away_waits_and_is_not_lost(cluster: Cluster) -> None:
    """kubelet would admit it before the agent has registered again, and fail it for good."""
    cluster.offers(2 * UNITS)
    cluster.kubelet.stop()
    until(lambda: NODE_KUBELET_AWAY in cluster.node()["metadata"]["annotations"], "the node says so", 20)
    cluster.create(pod("meanwhile", container(4)))
    time.sleep(3)
    assert "nodeName" not in cluster.pod("meanwhile")["spec"]
    cluster.kubelet.start()
    checked(cluster, "meanwhile", 4)


def test_an_update_of_the_agent_starts_the_next_one_first(cluster: Cluster) -> None:
    """Pods that run are left alone, and the next one takes over what the first one granted."""
    cluster.create(pod("early", container(4)))
    cluster.running("early")
    before = lives(cluster, "early")
    cluster.next_agent.start()
    until(lambda: "standing by" in cluster.next_agent.log(), "the next agent stands by")
    cluster.create(pod("between", container(4)))
    cluster.running("between")
    assert "granted" not in cluster.next_agent.log()
    cluster.agent.stop()
    until(lambda: "registered with kubelet" in cluster.next_agent.log(), "the next agent registers")
    assert cluster.offers(2 * UNITS)
    cluster.create(pod("late", container(4)))
    cluster.running("late")
    assert lives(cluster, "early") == before
    assert {checked(cluster, name, 4) for name in ("early", "between", "late")} <= {"0", "1"}
    cluster.next_agent.stop()
    cluster.agent.start()
    cluster.registered()
    assert cluster.offers(2 * UNITS)


def test_a_container_that_ends_while_no_agent_is_there_starts_again_with_it(cluster: Cluster) -> None:
    """kubelet asks the plugin before each start, so that without one no container is started again."""
    cluster.create(pod("short", container(4, f"{SHOW.removesuffix(STAY)} sleep 5"), restartPolicy="Always"))
    cluster.running("short")
    cluster.agent.stop()

    def status() -> dict[str, Any]:
        (found,) = cluster.pod("short")["status"]["containerStatuses"]
        return dict(found)

    def waits() -> bool:
        return "has been stopped" in str(status()["state"].get("waiting", {}).get("message", ""))

    until(waits, f"it is not started; {status()}", 40)
    cluster.agent.start()
    until(lambda: status()["restartCount"] == 1, f"it is started again; {status()}", 60)


def end(cluster: Cluster, name: str) -> None:
    """Let a pod's program end, once kubelet knows it: at its start kubelet refuses pods that do not run."""
    until(lambda: "SyncLoop ADD" in cluster.kubelet.log(), "kubelet has looked at its pods")
    (status,) = cluster.pod(name)["status"]["containerStatuses"]
    identity = status["containerID"].removeprefix("containerd://")
    ended = node.ctr(cluster.places, "tasks", "kill", "--signal", "SIGTERM", identity)
    assert ended.returncode == 0, ended.stderr


@contextmanager
def labelled(cluster: Cluster, name: str, value: str) -> Iterator[None]:
    """The node with a label; the agent reads it at its start."""

    def relabel(text: str | None) -> None:
        cluster.agent.stop()
        cluster.api.patch(f"nodes/{NODE}", {"metadata": {"labels": {name: text}}})
        cluster.agent.start()

    relabel(value)
    try:
        yield
    finally:
        relabel(None)


HEALTH_SINCE = 36  # kubelet tells of a pod's devices in its status


def test_pods_go_on_on_a_node_that_is_to_share_no_more_and_then_it_is_left(cluster: Cluster) -> None:
    """A container that holds units starts again, also after kubelet did; nobody new gets any."""
    cluster.offers(2 * UNITS)
    cluster.create(pod("short", container(4), restartPolicy="Always"))
    cluster.running("short")

    def status() -> dict[str, Any]:
        (found,) = cluster.pod("short")["status"]["containerStatuses"]
        return dict(found)

    def starts_again() -> None:
        before = status()["restartCount"]
        end(cluster, "short")

        def ask() -> bool:
            return "running" in status()["state"] and status()["restartCount"] > before

        until(ask, f"it is started again; {status()}")

    def health() -> set[str]:
        return {each["health"] for each in status()["allocatedResourcesStatus"][0]["resources"]}

    with labelled(cluster, "gpuslice.io/mode", "exclusive"):
        cluster.registered()
        until(lambda: cluster.allocatable() == ("4", None), f"only what is held; {cluster.allocatable()}")
        starts_again()
        cluster.create(pod("new", container(4), nodeName=NODE))
        assert "Requested: 4, Available: 0" in cluster.failed("new")
        with cluster.registered_again():
            cluster.kubelet.stop()
            cluster.kubelet.start()
        starts_again()
        if control_plane.minor_version("kubelet") >= HEALTH_SINCE:
            until(lambda: health() == {"Healthy"}, "the pod's status says that its devices are healthy")
        cluster.api.delete(f"{PODS}/short")
        until(lambda: "leaving kubelet" in cluster.agent.log(), "the agent leaves")
        until(lambda: cluster.allocatable() == ("0", None), f"nothing is left; {cluster.allocatable()}")
    cluster.registered()
    assert cluster.offers(2 * UNITS)


def test_cards_in_use_stay_so_when_kubelet_loses_its_checkpoint(cluster: Cluster) -> None:
    """kubelet forgets who holds what and does not ask again for what runs; the annotations still tell."""
    cluster.offers(2 * UNITS)
    cluster.create(pod("before", container(4)))
    checked(cluster, "before", 4)
    lived = lives(cluster, "before")
    cluster.kubelet.stop()  # first, or it tells that the plugin has gone
    cluster.agent.stop()
    (cluster.places.plugins / "kubelet_internal_checkpoint").unlink()
    cluster.kubelet.start()
    cluster.agent.start()
    cluster.registered()
    cluster.offers(2 * UNITS)
    names = [f"after-{number}" for number in range(5)]
    for name in names:
        cluster.create(pod(name, container(4)))
    cards = Counter(checked(cluster, name, 4) for name in ("before", *names))
    assert cards == {"0": 3, "1": 3}, "cards that kubelet forgot were given out twice"
    assert lives(cluster, "before") == lived
    held = owners(cluster)
    assert held.keys() == {"before", *names}, "somebody's folder was taken over"
    assert len(frozenset[str]().union(*held.values())) == 6 * 4, "ids were given out twice"


def test_a_container_that_kubelet_forgot_is_not_started_again_in_its_pod(cluster: Cluster) -> None:
    """A fact about kubelet: it has no devices to name to the plugin, so it does not even try."""
    cluster.offers(2 * UNITS)
    cluster.create(pod("before", container(4), restartPolicy="Always"))
    cluster.running("before")
    cluster.kubelet.stop()  # first, or it tells that the plugin has gone
    cluster.agent.stop()
    (cluster.places.plugins / "kubelet_internal_checkpoint").unlink()
    cluster.kubelet.start()
    cluster.agent.start()
    cluster.registered()
    cluster.offers(2 * UNITS)
    end(cluster, "before")

    def waits() -> str:
        (state,) = cluster.pod("before")["status"]["containerStatuses"]
        return str(state["state"].get("waiting", {}).get("message", ""))

    until(lambda: "no devices found allocated" in waits(), f"it is not started again; {waits()}")


def owners(cluster: Cluster) -> dict[str, frozenset[str]]:
    """Device ids by the pod that owns their folder on the host."""
    files = (cluster.places.folder / "gpuslice" / "containers").glob("*/owner.json")
    found = [json.loads(file.read_text()) for file in files]
    alive = {each["metadata"]["uid"] for each in cluster.api.get(PODS)["items"]}
    return {each["pod"]: frozenset(each["ids"]) for each in found if each["uid"] in alive}


def test_a_kubelet_that_never_met_the_agent_starts_pods_without_devices(cluster: Cluster) -> None:
    """A fact about kubelet that we cannot change: such a container has neither cards of ours nor limits."""
    cluster.offers(2 * UNITS)
    cluster.kubelet.stop()  # first, or it tells that the plugin has gone
    cluster.agent.stop()
    (cluster.places.plugins / "kubelet_internal_checkpoint").unlink()
    cluster.kubelet.start()
    cluster.create(pod("early", container(4), nodeName=NODE))
    cluster.running("early")
    lines = cluster.said("early")
    assert "NVIDIA_VISIBLE_DEVICES" not in variables(lines)
    assert limits_of(lines) == {}
    cluster.agent.start()
    cluster.registered()
    cluster.create(pod("after", container(4)))
    checked(cluster, "after", 4)
    assert ANN_ASSIGNED not in cluster.pod("early")["metadata"].get("annotations", {})

    def told() -> list[str]:
        events = cluster.api.get("namespaces/default/events")["items"]
        mine = [each for each in events if each["reason"] == "RunsWithoutDevices"]
        return [each["involvedObject"]["name"] for each in mine]

    assert until(told, "the agent tells of it") == ["early"]


def test_a_zeroed_node_status_is_mended(cluster: Cluster) -> None:
    """As a kubelet zeroes it that finds its plugin folder empty while it registers a known node."""
    cluster.offers(2 * UNITS)
    zeroed = {"capacity": {GPU_COUNT: "0"}, "allocatable": {GPU_COUNT: "0"}}
    cluster.api.patch(f"nodes/{NODE}/status", {"status": zeroed})
    cluster.offers(2 * UNITS)


def test_without_the_agent_pods_are_refused_and_with_it_they_run_again(cluster: Cluster) -> None:
    cluster.create(pod("before", container(4)))
    checked(cluster, "before", 4)
    lived = lives(cluster, "before")
    cluster.agent.stop()
    cluster.offers(0)
    cluster.create(pod("meanwhile", container(4), nodeName=NODE))
    refusal = cluster.failed("meanwhile")
    assert "UnexpectedAdmissionError" in refusal
    assert f"cannot allocate unhealthy devices {GPU_MEM}" in refusal
    assert lives(cluster, "before") == lived
    cluster.agent.start()
    cluster.registered()
    cluster.offers(2 * UNITS)
    cluster.create(pod("after", container(4)))
    checked(cluster, "after", 4)
