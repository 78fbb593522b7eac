"""What autoscalers are told: placeholders for nodes that sums hide, and marks on nodes that must stay."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.followed_pod import pod_news
from gpuslice.adapters.kube.http import ApiRequest, ApiResponse
from gpuslice.adapters.kube.slim import SlimNode, SlimPod
from gpuslice.adapters.kube.views import node_view, pod_view
from gpuslice.apps.extender.autoscaling import scale_down, scale_up
from gpuslice.apps.extender.autoscaling.node_groups import NodeGroups
from gpuslice.apps.extender.autoscaling.placeholders import CapacityBuffers, PlaceholderPods, Placeholders
from gpuslice.apps.extender.autoscaling.scale_down import ScaleDown
from gpuslice.apps.extender.autoscaling.scale_up import ScaleUp
from gpuslice.apps.extender.subscriber import FilterVerdict
from gpuslice.core.contract import GATE_POD_GROUP, LABEL_SHARED, NODE_KEPT, SCALE_DOWN_MARKS
from gpuslice.core.ledger import Ledger
from gpuslice.core.policy import DEFAULT_POLICY
from simcluster.cluster.cluster import Cluster
from simcluster.cluster.request import Request
from simcluster.cluster.resources import with_capacity_buffers
from tests.builders import api_node, api_pod, make_placement

TYPE = "node.kubernetes.io/instance-type"
PODS, NODES = "/api/v1/namespaces/kube-system/pods", "/api/v1/nodes"
BUFFERS = "/apis/autoscaling.x-k8s.io/v1beta1/namespaces/kube-system/capacitybuffers"
TEMPLATES = "/api/v1/namespaces/kube-system/podtemplates"
NO_SCHEDULE = {"key": "dedicated", "value": "x", "effect": "NoSchedule"}


@dataclass
class InMemory:
    """The simulated API server without its sockets; counts what is written."""

    cluster: Cluster
    writes: int = 0

    async def request(self, request: ApiRequest) -> ApiResponse:
        self.writes += request.method != "GET"
        headers = {name.lower(): value for name, value in request.headers.items()}
        asked = Request(request.method, request.path, dict(request.query), headers, request.body)
        found = self.cluster.handle(asked)
        return ApiResponse(found.status, found.headers, found.body)

    def stream(self, request: ApiRequest) -> AsyncGenerator[bytes]:
        raise NotImplementedError


@dataclass
class Stage:
    """A cluster whose news are told in order, at a time that the test sets."""

    buffers: bool = False
    now: float = 1000.0
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        cluster = Cluster(tracks_managers=False)
        if self.buffers:
            cluster.catalog = with_capacity_buffers(cluster.catalog)
        self.wire = InMemory(cluster)
        self.client = KubeClient(self.wire)
        self.groups = NodeGroups(self.ledger)
        kind = CapacityBuffers if self.buffers else PlaceholderPods
        self.placeholders: Placeholders = kind(self.client, "kube-system")
        self.up = self.new_leader()
        self.down = ScaleDown(self.client, self.ledger, self.groups, DEFAULT_POLICY, clock=lambda: self.now)
        self.down.started_leading()

    def new_leader(self) -> ScaleUp:
        self.up = ScaleUp(self.ledger, self.groups, self.placeholders, DEFAULT_POLICY, clock=lambda: self.now)
        self.up.started_leading()
        return self.up

    def new_marks(self, *, enabled: bool = True) -> ScaleDown:
        clock = lambda: self.now  # noqa: E731
        self.down = ScaleDown(
            self.client, self.ledger, self.groups, DEFAULT_POLICY, enabled=enabled, clock=clock
        )
        self.down.started_leading()
        return self.down

    def call(self, method: str, path: str, document: Any = None, **headers: str) -> Any:
        body = b"" if document is None else msgspec.json.encode(document)
        return msgspec.json.decode(self.wire.cluster.handle(Request(method, path, {}, headers, body)).body)

    def node(self, name: str, *cards: int, group: str = "pair", **spec: Any) -> None:
        """A node that shares its cards; without any it has just come."""
        labels = {LABEL_SHARED: "true", **({TYPE: group} if group else {})}
        made = api_node(name, sum(cards), max(1, len(cards)), labels=labels)
        made["spec"] = spec
        self.call("POST", NODES, made)
        self.see(name, made)

    def see(self, name: str, document: Any = None) -> None:
        """The node as it is now."""
        seen = msgspec.convert(document or self.call("GET", f"{NODES}/{name}"), SlimNode)
        self.ledger.apply_node(node_view(seen))
        for each in (self.groups, self.up, self.down):
            each.node_changed(seen)

    def hold(self, name: str, node: str, card: int, units: int, **more: Any) -> None:
        made = api_pod(name, str(units), node=node, **more)
        pod = pod_news(msgspec.convert(made, SlimPod)).view
        self.ledger.apply_pod(replace(pod, placement=make_placement(node, units, card)))

    def wait(self, name: str, units: int, *, asked: bool = True, **spec: Any) -> None:
        news = pod_news(msgspec.convert(api_pod(name, str(units), **spec), SlimPod))
        self.ledger.apply_pod(news.view)
        rows = np.arange(1 if asked else 0)
        self.up.decided(FilterVerdict(news.view, rows, rows[:0].astype(np.int64), is_known=True))
        self.up.pod_changed(news, None)

    def end(self, name: str) -> None:
        self.ledger.remove_pod(f"uid-{name}")
        self.up.pod_gone(f"uid-{name}", None)

    async def asked_for(self, after_s: float = scale_up.SETTLED_AFTER_S) -> dict[str, int]:
        """Placeholders by group, once the autoscaler's hints are up to date."""
        self.now += after_s
        await self.up.check()
        if self.buffers:
            found = {each["metadata"]["name"]: each["spec"]["replicas"] for each in self.all(BUFFERS)}
        else:
            names = [each["metadata"]["name"].rpartition("-")[0] for each in self.all(PODS)]
            found = {name: names.count(name) for name in names}
        return {name.split("-")[2]: count for name, count in found.items()}

    def all(self, path: str) -> list[Any]:
        return list(self.call("GET", path)["items"])

    def marked(self, name: str) -> set[str]:
        return set(self.call("GET", f"{NODES}/{name}")["metadata"].get("annotations") or {})


@pytest.fixture(params=[False, True], ids=["pods", "buffers"])
def stage(request: pytest.FixtureRequest) -> Stage:
    """A node whose cards have 4 of 16 units left each."""
    made = Stage(bool(request.param))
    made.node("n0", 16, 16)
    for card in (0, 1):
        made.hold(f"held-{card}", "n0", card, 12)
    return made


async def test_a_pod_that_every_card_refuses_and_a_sum_would_hold_asks_for_a_node(stage: Stage) -> None:
    stage.wait("w", 6)
    assert await stage.asked_for(0) == {}  # most pods find a place before
    assert await stage.asked_for() == {"pair": 1}
    stage.wait("sums see it", 9, asked=False)
    assert await stage.asked_for() == {}  # the node for that one holds both


async def test_a_placeholder_is_as_large_as_a_node_and_only_its_group_holds_it(stage: Stage) -> None:
    stage.wait("w", 6)
    await stage.asked_for()
    made = stage.all(TEMPLATES)[0]["template"] if stage.buffers else stage.all(PODS)[0]
    spec = made["spec"]
    assert spec["nodeSelector"] == {TYPE: "pair"}
    assert spec["containers"][0]["resources"]["limits"] == {"aliyun.com/gpu-mem": "32"}
    if not stage.buffers:
        (condition,) = made["status"]["conditions"]
        assert (condition["type"], condition["status"], condition["reason"]) == (
            "PodScheduled", "False", "Unschedulable",
        )  # fmt: skip
        seen = msgspec.convert(made, SlimPod)
        assert pod_view(seen).request is None  # nobody takes it for a pod that waits
        seen.spec.node_name = "n0"
        assert pod_view(seen).request is not None


async def test_a_placeholder_tolerates_the_taints_of_its_group_alone() -> None:
    """With those of a node that is leaving, an autoscaler would take that for room."""
    stage = Stage()
    passing = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
    stage.node("n0", 16, 16, taints=[NO_SCHEDULE, passing])
    stage.hold("a", "n0", 0, 12)
    stage.hold("b", "n0", 1, 12)
    stage.wait("w", 6, tolerations=[{"key": "dedicated", "operator": "Exists"}])
    assert await stage.asked_for() == {"pair": 1}
    (made,) = stage.all(PODS)
    own = [each for each in made["spec"]["tolerations"] if each.get("effect") != "NoExecute"]
    assert own == [{**NO_SCHEDULE, "operator": "Equal"}]


async def test_nothing_is_asked_once_a_node_has_come_even_before_its_cards(stage: Stage) -> None:
    stage.wait("w", 6)
    assert await stage.asked_for() == {"pair": 1}
    stage.node("n1")
    assert await stage.asked_for(0) == {}
    assert not stage.all(TEMPLATES)
    stage.now += scale_up.COMES_WITHIN_S
    assert await stage.asked_for() == {"pair": 1}  # its cards never came
    stage.see("n1", api_node("n1", 32, 2, labels={TYPE: "pair"}))
    assert await stage.asked_for(0) == {}


@pytest.mark.parametrize("key", ["node.kubernetes.io/unschedulable", "ToBeDeletedByClusterAutoscaler"])
async def test_a_node_that_is_leaving_has_no_room(key: str, stage: Stage) -> None:
    stage.node("n1", 16, 16, taints=[{"key": key, "effect": "NoSchedule"}])
    stage.hold("c", "n1", 0, 4)
    stage.wait("w", 6)
    assert await stage.asked_for() == {"pair": 1}
    await stage.down.check()
    assert NODE_KEPT in stage.marked("n1")


@pytest.mark.parametrize(
    ("units", "more"),
    [
        (20, {}),  # larger than any card
        (3, {}),  # it fits
        (6, {"nodeSelector": {TYPE: "other"}}),
        (6, {"schedulingGates": [{"name": GATE_POD_GROUP}]}),
        (6, {"asked": False}),  # it waits for something else
    ],
)
async def test_no_node_is_asked_for_a_pod_that_none_would_help(
    units: int, more: dict[str, Any], stage: Stage
) -> None:
    stage.wait("w", units, **more)
    assert await stage.asked_for() == {}
    assert stage.wire.writes == 0


async def test_a_group_is_asked_for_only_by_pods_that_tolerate_its_taints(stage: Stage) -> None:
    stage.node("n1", 16, 16)  # whose sum would hold them
    stage.node("t0", 32, 32, group="tainted", taints=[NO_SCHEDULE])
    passing = {"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"}
    stage.node("f0", 32, group="fresh", taints=[passing])
    stage.wait("w", 20)
    stage.hold("all", "f0", 0, 32)
    assert await stage.asked_for() == {"fresh": 1}
    stage.end("w")
    stage.wait("w2", 20, tolerations=[{"key": "dedicated", "operator": "Exists"}])
    stage.hold("t", "t0", 0, 20)
    stage.hold("u", "t0", 1, 20)
    assert await stage.asked_for() == {"fresh": 1}  # the smaller one that holds it


async def test_another_group_is_tried_if_no_node_comes(stage: Stage) -> None:
    """A group may be as large as it may become, or gone."""
    stage.node("n1", 32, 32, group="larger")
    stage.hold("c", "n1", 0, 28)
    stage.hold("d", "n1", 1, 28)
    stage.wait("w", 6)
    assert await stage.asked_for() == {"pair": 1}
    await stage.asked_for(scale_up.COMES_WITHIN_S)
    assert await stage.asked_for() == {"larger": 1}
    await stage.asked_for(scale_up.COMES_WITHIN_S)
    assert await stage.asked_for() == {"pair": 1}  # neither is better
    assert await stage.asked_for(scale_up.TRIES_LAST_S) == {"pair": 1}


async def test_a_pod_asks_a_few_times_and_no_more_if_it_never_starts(stage: Stage) -> None:
    """Something keeps it back that is not seen here; without an end nodes would come and go for ever."""
    stage.wait("w", 6)
    for number in range(2 * scale_up.MOST_TRIES):
        expected = {"pair": 1} if number < scale_up.MOST_TRIES else {}
        assert await stage.asked_for() == expected
        stage.node(f"n{number + 1}", 16, 16)
        assert await stage.asked_for(0) == {}
        stage.call("DELETE", f"{NODES}/n{number + 1}")
        stage.ledger.remove_node(f"n{number + 1}")
        stage.groups.node_gone(f"n{number + 1}")
    assert await stage.asked_for(scale_up.TRIES_LAST_S) == {"pair": 1}


async def test_what_does_not_change_is_not_written_again(stage: Stage) -> None:
    for number in range(9):
        stage.wait(f"w{number}", 6)
    await stage.asked_for()
    before = stage.wire.writes
    for _ in range(720):  # an hour
        assert await stage.asked_for() == {"pair": 1}
    assert stage.wire.writes == before


async def test_who_takes_over_removes_what_is_not_needed_any_more(stage: Stage) -> None:
    stage.wait("w", 6)
    assert await stage.asked_for() == {"pair": 1}
    stage.end("w")
    stage.new_leader()
    assert await stage.asked_for() == {}


async def test_nodes_of_no_group_are_left_alone() -> None:
    stage = Stage()
    stage.node("n0", 16, 16, group="")
    stage.hold("a", "n0", 0, 12)
    stage.hold("b", "n0", 1, 12)
    stage.wait("w", 6)
    assert await stage.asked_for() == {}
    await stage.down.check()
    assert stage.wire.writes == 0


# -- marks -------------------------------------------------------------------------------------------------


async def test_a_node_stays_whose_pods_fit_on_no_other_card(stage: Stage) -> None:
    stage.node("n1", 16, 16)
    stage.node("idle", 16, 16)
    stage.hold("c", "n1", 0, 6)
    await stage.down.check()
    for name in ("n0", "n1"):
        assert stage.marked(name) == {NODE_KEPT, *SCALE_DOWN_MARKS}
    assert stage.marked("idle") == set()


async def test_a_node_whose_pods_would_fit_elsewhere_may_go(stage: Stage) -> None:
    stage.node("n1", 16, 16)
    stage.hold("c", "n1", 0, 4)
    await stage.down.check()
    assert stage.marked("n1") == set()
    assert NODE_KEPT in stage.marked("n0")


async def test_pods_that_come_with_each_node_do_not_keep_it(stage: Stage) -> None:
    stage.node("n1", 16, 16)
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "d", "uid": "d", "controller": True}
    stage.hold("every", "n1", 0, 12, owners=[owner])
    await stage.down.check()
    assert stage.marked("n1") == set()


async def test_a_mark_goes_when_the_node_has_been_idle_for_a_while(stage: Stage) -> None:
    await stage.down.check()
    stage.see("n0")
    for card in (0, 1):
        stage.ledger.remove_pod(f"uid-held-{card}")
    await stage.down.check()
    assert NODE_KEPT in stage.marked("n0")
    stage.now += scale_down.UNMARKED_AFTER_S
    await stage.down.check()
    assert stage.marked("n0") == set()


async def test_pods_that_come_and_go_do_not_have_the_mark_written_again(stage: Stage) -> None:
    await stage.down.check()
    before = stage.wire.writes
    for _ in range(60):
        for card in (0, 1):
            stage.ledger.remove_pod(f"uid-held-{card}")
        stage.now += scale_down.UNMARKED_AFTER_S / 2
        await stage.down.check()
        stage.hold("again", "n0", 0, 12)
        stage.now += scale_down.LOOK_EVERY_S
        await stage.down.check()
        stage.ledger.remove_pod("uid-again")
        stage.ledger.gone.clear()
    assert stage.wire.writes == before


async def test_the_marks_go_when_nobody_wants_them_any_more(stage: Stage) -> None:
    await stage.down.check()
    stage.new_marks(enabled=False)
    stage.see("n0")
    await stage.down.check()
    stage.now += scale_down.UNMARKED_AFTER_S
    await stage.down.check()
    assert stage.marked("n0") == set()


async def test_a_mark_of_somebody_else_is_left_alone(stage: Stage) -> None:
    mark = {"metadata": {"annotations": {SCALE_DOWN_MARKS[0]: "true"}}}
    stage.call("PATCH", f"{NODES}/n0", mark, **{"content-type": "application/merge-patch+json"})
    stage.see("n0")
    await stage.down.check()
    assert stage.marked("n0") == {SCALE_DOWN_MARKS[0]}
