"""Where a kubelet has rejected pods, the next ones are not sent for a while: the whole extender."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from gpuslice.adapters.wire.extender import Questions
from gpuslice.apps.extender.main import WEB_LIMITS
from gpuslice.core.contract import ANN_ASSIGNED, ANN_ASSUME_TIME, ANN_INDEX, ANN_POD_UNITS, NODE_GPUS
from gpuslice.core.rejections import FIRST_BACKOFF_S
from gpuslice.core.unconfirmed import LEAST
from tests.integration.preemption_rig import PODS, Story

UNAVAILABLE = (
    "Allocate failed due to requested number of devices unavailable for aliyun.com/gpu-mem. "
    "Requested: 15, Available: 0, which is unexpected"
)
ONE_CARD = '[{"index":0,"uuid":"GPU-0","memory_mib":16130,"units":15}]'
Owner = dict[str, Any]
REPLICA_SET: Owner = {
    "apiVersion": "apps/v1",
    "kind": "ReplicaSet",
    "name": "any",
    "uid": "uid-of-any",
    "controller": True,
}


class Kubelets(Story):
    """The story is kubelet too: it rejects and admits."""

    def reject(self, name: str, reason: str = "UnexpectedAdmissionError", message: str = UNAVAILABLE) -> None:
        started = datetime.fromtimestamp(self.now_ns() // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        status = {
            "phase": "Failed",
            "reason": reason,
            "message": f"Pod was rejected: {message}",
            "startTime": started,
        }
        self.api.patch(f"{PODS}/{name}/status", {"status": status})
        self.calm(0.25)

    def admit(self, name: str) -> None:
        """The agent has seen that the pod has its devices."""
        said = {ANN_ASSIGNED: "true", ANN_ASSUME_TIME: str(self.now_ns())}
        self.api.patch(f"{PODS}/{name}", {"metadata": {"annotations": said}})
        self.calm()

    def send(self, name: str, units: int = 15, **fields: Any) -> str:
        """A new pod; where it is bound to, "" if nowhere."""
        self.add(name, units, **fields)
        self.calm()
        return self.schedule(name)

    def replaced(
        self, seconds: float, rejects: Callable[[str, str], bool], units: int = 15, **fields: Any
    ) -> list[tuple[float, str]]:
        """A controller makes a new pod as soon as one is rejected; when and where that happened.

        Ends when a pod is admitted. `rejects`: by node and card.
        """
        rejected: list[tuple[float, str]] = []
        began_s = self.loop.time()
        name = f"r{len(self.uids)}"
        self.add(name, units, **fields)
        self.calm()
        woken = self.versions()
        node = self.schedule(name)
        while self.loop.time() < began_s + seconds:
            if node and rejects(node, self.api.card(name) or ""):
                rejected.append((self.loop.time() - began_s, node))
                self.reject(name)
                name = f"r{len(self.uids)}"
                self.add(name, units, **fields)
                self.calm(0.25)
                node = self.schedule(name)
            elif node:
                self.admit(name)
                return rejected
            self.calm(0.25)
            if not node and self.versions() != woken:  # an event of a node: kube-scheduler tries again
                woken = self.versions()
                node = self.schedule(name)
        return rejected

    def waits_for_news(self, name: str) -> bool:
        """Whether filter's answer waits to hear of pods that were sent before."""
        body = msgspec.json.encode({"Pod": self.api.pod(name), "Nodes": None, "NodeNames": self.nodes})
        news = self.extender.cycle.awaits_news(Questions(WEB_LIMITS).decode(body))
        if news is not None:
            news.close()  # type: ignore[attr-defined]  # a coroutine that nobody awaits
        return news is not None

    def versions(self) -> list[str]:
        found = (self.api.call("GET", f"/api/v1/nodes/{name}") for name in self.nodes)
        return [each["metadata"]["resourceVersion"] for each in found]

    def said(self, reason: str) -> list[str]:
        return [f"{each['involvedObject']['kind']}: {each['message']}" for each in self.api.events(reason)]


def in_a_minute(rejected: list[tuple[float, str]]) -> int:
    """The most on one node in any minute."""
    return max(
        (
            sum(node == other and at_s <= when_s < at_s + 60 for when_s, other in rejected)
            for at_s, node in rejected
        ),
        default=0,
    )


def test_the_next_pod_goes_to_another_node_and_the_owner_and_the_node_are_told() -> None:
    with closing(Kubelets(cards=1, nodes=2)) as story:
        first = story.send("a", owners=[REPLICA_SET])
        story.reject("a")
        second = story.send("b", owners=[REPLICA_SET])
        assert {first, second} == {"n1", "n2"}
        kinds = {each.partition(":")[0] for each in story.said("KubeletRejectsPods")}
        assert kinds == {"Node", "ReplicaSet"}
        assert all(f"kubelet on {first} rejected 1 pod" in each for each in story.said("KubeletRejectsPods"))


def test_the_next_pod_takes_another_card_where_no_other_node_has_room() -> None:
    with closing(Kubelets(cards=3)) as story:
        story.send("a")
        story.reject("a")
        assert story.send("b") == "n1"
        assert story.api.card("b") != story.api.card("a")
        assert story.send("c") == "", "b is on its way to cards that are in doubt"
        story.admit("b")
        assert story.send("d") == "n1"


def test_a_pod_without_other_room_waits_with_the_reason_and_is_tried_again() -> None:
    with closing(Kubelets(cards=1)) as story:
        story.send("a")
        story.reject("a")
        assert story.send("b") == ""
        story.calm()
        (told,) = story.said("InsufficientGPU")
        assert "card 0 there is in back-off until" in told
        assert UNAVAILABLE in told
        before = story.versions()
        story.calm(FIRST_BACKOFF_S - 2)
        assert story.versions() == before
        story.calm(4)
        assert story.versions() != before, "kube-scheduler is woken"
        assert story.schedule("b") == "n1"


@pytest.mark.parametrize("cards", [1, 2, 8])
@pytest.mark.parametrize("units", [1, 15])
def test_no_controller_makes_more_than_a_few_failed_pods_a_minute(cards: int, units: int) -> None:
    with closing(Kubelets(cards=cards)) as story:
        rejected = story.replaced(200, lambda node, card: True, units)
        assert 2 <= in_a_minute(rejected) <= 5


def test_one_failed_pod_is_enough_where_another_node_works() -> None:
    with closing(Kubelets(cards=2, nodes=3)) as story:
        sick = story.send("a")
        story.reject("a")
        for _ in range(4):
            assert not story.replaced(60, lambda node, card: node == sick)


def test_one_sick_card_costs_the_others_nothing() -> None:
    with closing(Kubelets(cards=4)) as story:
        for _ in range(3):
            story.replaced(60, lambda node, card: card == "0", owners=[REPLICA_SET])
        assert sorted(card for _, card in story.held()) != []
        living = [pod for pod in story.api.pods() if pod["status"]["phase"] != "Failed"]
        assert len(living) == 3
        assert len(story.api.pods()) - 3 <= 2


def test_somebody_who_ends_there_ends_the_waiting() -> None:
    with closing(Kubelets(cards=1)) as story:
        story.place("small", 1)
        story.admit("small")
        story.send("a", 14)
        story.reject("a")
        assert story.send("b", 14) == ""
        story.api.finish_pod("small")
        story.calm()
        assert story.schedule("b") == "n1"


@pytest.mark.parametrize("what", ["annotation", "capacity", "ready", "boot", "unhealthy"])
def test_news_of_the_node_ends_the_waiting(what: str) -> None:
    with closing(Kubelets(cards=1)) as story:
        story.send("a")
        story.reject("a")
        assert story.send("b") == ""
        path = "/api/v1/nodes/n1"
        match what:
            case "annotation":
                story.api.patch(path, {"metadata": {"annotations": {NODE_GPUS: ONE_CARD}}})
            case "capacity":
                more = {"aliyun.com/gpu-mem": "16"}
                story.api.patch(f"{path}/status", {"status": {"capacity": more, "allocatable": more}})
            case "ready":
                story.api.patch(
                    f"{path}/status", {"status": {"conditions": [{"type": "Ready", "status": "True"}]}}
                )
            case "boot":
                story.api.patch(f"{path}/status", {"status": {"nodeInfo": {"bootID": "another"}}})
            case _:
                story.api.set_unhealthy("n1", "")
        story.calm()
        assert story.schedule("b") == "n1", what


@pytest.mark.parametrize("what", ["heartbeat", "our own note", "the failed pod goes"])
def test_what_says_nothing_new_does_not(what: str) -> None:
    with closing(Kubelets(cards=1)) as story:
        story.send("a")
        story.reject("a")
        assert story.send("b") == ""
        path = "/api/v1/nodes/n1"
        match what:
            case "heartbeat":
                heard = {"type": "MemoryPressure", "status": "False"}
                for second in (1, 2):
                    at = f"2026-11-28T17:00:0{second}Z"
                    status = {"conditions": [{**heard, "lastHeartbeatTime": at}]}
                    story.api.patch(f"{path}/status", {"status": status})
                    if second == 1:  # the first report that it ever made is news
                        story.calm()
                        assert story.schedule("b") == "n1"
                        story.reject("b")
            case "our own note":
                story.api.patch(path, {"metadata": {"annotations": {"gpuslice.io/out-of-use": "0"}}})
            case _:
                story.api.delete_pod("a")
        story.calm()
        assert story.send("c") == "", what


def test_a_new_leader_knows_it_from_the_pods_that_failed() -> None:
    with closing(Kubelets(cards=2)) as story:
        story.send("a")
        story.reject("a")
        story.kill()
        story.start()
        story.calm(30)
        story.send("b")
        assert story.api.card("b") != story.api.card("a")


def test_a_new_leader_is_not_misled_by_what_was_disproved() -> None:
    with closing(Kubelets(cards=1)) as story:
        story.send("a", 4)
        story.reject("a")
        story.calm(20)
        story.send("b", 4)
        story.calm(2)
        story.admit("b")
        story.kill()
        story.start()
        story.calm(30)
        assert story.send("c", 4) == "n1"
        assert not story.extender.ledger.kubelets.rejections


def test_a_pod_that_ran_and_failed_is_not_held_against_the_node() -> None:
    with closing(Kubelets(cards=1)) as story:
        for number in range(10):
            assert story.send(f"a{number}") == "n1"
            story.admit(f"a{number}")
            ended = {"terminated": {"exitCode": 1, "startedAt": "2026-11-28T17:00:00Z"}}
            status = {"phase": "Failed", "containerStatuses": [{"name": "main", "state": ended}]}
            story.api.patch(f"{PODS}/a{number}/status", {"status": status})
            story.calm()


def test_pods_that_their_owner_put_there_close_nothing_to_others() -> None:
    """Without the webhook a tenant can name node and card, and let kubelet reject as often as they like."""
    with closing(Kubelets(cards=2)) as story:
        for number in range(5):
            name = f"by-hand-{number}"
            said = {ANN_INDEX: str(number % 2), ANN_POD_UNITS: "1", ANN_ASSUME_TIME: str(story.now_ns())}
            story.add(name, 1, annotations=said, nodeName="n1")
            story.calm()
            story.reject(name)
        assert story.send("other", 4) == "n1"


def test_counts_by_node_and_reason_are_bounded_and_go_with_the_node() -> None:
    with closing(Kubelets(cards=4, nodes=2)) as story:
        for number in range(5):
            node = story.send(f"a{number}", number + 1)
            story.reject(f"a{number}", reason=f"Odd{number}")
            assert node

        def shown() -> dict[str, float]:
            families = story.extender.rejections.families()
            return {f"{each.name}{label}": value for each in families for label, value in each.samples}

        counted = {name for name in shown() if "rejections_total" in name}
        assert counted <= {
            f'gpuslice_extender_rejections_total{{node="{node}",reason="other"}}' for node in ("n1", "n2")
        }
        assert shown()["gpuslice_extender_nodes_in_backoff"] > 0
        for node in ("n1", "n2"):
            story.api.call("DELETE", f"/api/v1/nodes/{node}")
        story.calm()
        assert shown() == {"gpuslice_extender_nodes_in_backoff": 0.0}


def test_a_burst_reaches_a_node_that_rejects_only_with_its_first_few() -> None:
    """A device plugin is dead, and nobody knows: all of twenty pods would be bound before the first fails."""
    with closing(Kubelets(cards=1, nodes=2)) as story:
        for name in story.nodes:
            story.api.patch(f"/api/v1/nodes/{name}", {"metadata": {"annotations": {NODE_GPUS: ONE_CARD}}})
        names = [f"p{number}" for number in range(20)]
        for name in names:
            story.add(name, 1)
        story.calm()
        sent: dict[str, str] = {}
        for name in names:
            if story.waits_for_news(name):
                for other, node in sent.items():
                    if node == "n1" and story.api.pod(other)["status"].get("phase") != "Failed":
                        story.reject(other)
                    elif node == "n2":
                        story.admit(other)
            assert not story.waits_for_news(name)
            sent[name] = story.schedule(name)
        assert list(sent.values()).count("n1") == LEAST
        assert set(sent.values()) == {"n1", "n2", ""}, "the rest waits, as n2 is full"


def test_a_healthy_node_that_stands_alone_gets_all_of_a_burst() -> None:
    """filter waits for the first to start, and then less and less."""
    with closing(Kubelets(cards=1)) as story:
        story.api.patch("/api/v1/nodes/n1", {"metadata": {"annotations": {NODE_GPUS: ONE_CARD}}})
        waits = 0
        for number in range(15):
            story.add(f"p{number}", 1)
            story.calm()
            if story.waits_for_news(f"p{number}"):
                waits += 1
                for other in range(number):
                    story.admit(f"p{other}")
            assert story.schedule(f"p{number}") == "n1"
        assert waits <= 3


def test_nobody_is_evicted_where_kubelet_would_reject_the_preemptor() -> None:
    with closing(Kubelets(cards=1, nodes=2)) as story:
        story.place("small", 1)
        sick = story.api.bound_to("small")
        story.place("large", 15, 100)
        assert story.send("a", 14) == sick
        story.reject("a", "Evicted", "The node had condition: [DiskPressure]. ")
        assert story.send("b", 15, priority=100) == ""
        story.calm(FIRST_BACKOFF_S - 3)
        assert story.leaving() == set()
        assert story.propose("b", "small", node=sick) == set()
        story.calm(30)
        assert story.schedule("b") == ""
        story.calm(5)
        assert "small" not in story.names() or story.leaving() == {"small"}
