"""What the workload controllers decide, as a function of what they see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster_wire import make_set

from simcluster.controllers import daemonset, deployment, garbage, job, nodes, quota, replicaset, statefulset
from simcluster.controllers.actions import Action, Again, Create, Delete, Patch
from simcluster.controllers.ownership import template_hash
from simcluster.controllers.revisions import LABEL, revision_name

_NOW_S = 1_700_000_000.0
_NOW = "2023-11-14T22:13:20Z"
_READY = {"type": "Ready", "status": "True", "lastTransitionTime": "2023-11-14T22:00:00Z"}


def _stored(obj: dict[str, Any], uid: str = "u") -> dict[str, Any]:
    obj["metadata"] |= {"namespace": "default", "uid": uid, "generation": 1, "resourceVersion": "1"}
    obj["metadata"].setdefault("creationTimestamp", _NOW)
    return obj


def _pod(name: str, revision: str = "", *, ready: bool = True, **metadata: Any) -> dict[str, Any]:
    labels = {"app": "s", LABEL: revision}
    pod = {
        "metadata": {"name": name, "labels": labels, **metadata},
        "spec": {"nodeName": "n1", "containers": []},
        "status": {"phase": "Running" if ready else "Pending", "conditions": [_READY] if ready else []},
    }
    return _stored(pod, f"uid-{name}")


def _created(actions: Sequence[Action], kind: str = "Pod") -> list[str]:
    found = [a.obj["metadata"] for a in actions if isinstance(a, Create) and a.kind == kind]
    return [item.get("name") or item["generateName"] for item in found]


def _deleted(actions: Sequence[Action]) -> list[str]:
    return [action.name for action in actions if isinstance(action, Delete)]


def _status(actions: Sequence[Action]) -> dict[str, Any]:
    patches = [action.change["status"] for action in actions if isinstance(action, Patch) and action.status]
    return dict(patches[-1]) if patches else {}


class TestStatefulSet:
    def _set(self, replicas: int, **spec: Any) -> dict[str, Any]:
        body = make_set("s", replicas, **{"podManagementPolicy": "Parallel", **spec})
        body["spec"].setdefault(
            "updateStrategy", {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}}
        )
        return _stored(body)

    def test_parallel_makes_all_pods_at_once_with_stable_names(self) -> None:
        actions = statefulset.reconcile(self._set(3), [], [], _NOW_S)
        assert _created(actions) == ["s-0", "s-1", "s-2"]
        assert len(_created(actions, "ControllerRevision")) == 1

    def test_in_order_waits_for_each_to_be_ready(self) -> None:
        owner = self._set(3, podManagementPolicy="OrderedReady")
        revision = revision_name(owner)
        assert _created(statefulset.reconcile(owner, [], [], _NOW_S)) == ["s-0"]
        starting = [_pod("s-0", revision, ready=False)]
        assert _created(statefulset.reconcile(owner, starting, [], _NOW_S)) == []
        assert _created(statefulset.reconcile(owner, [_pod("s-0", revision)], [], _NOW_S)) == ["s-1"]

    def test_a_pod_being_deleted_keeps_its_name_taken(self) -> None:
        owner = self._set(1)
        going = _pod("s-0", revision_name(owner), deletionTimestamp=_NOW)
        assert _created(statefulset.reconcile(owner, [going], [], _NOW_S)) == []

    def test_scaling_down_takes_the_highest(self) -> None:
        owner = self._set(1)
        revision = revision_name(owner)
        pods = [_pod(f"s-{n}", revision) for n in range(3)]
        assert _deleted(statefulset.reconcile(owner, pods, [], _NOW_S)) == ["s-2", "s-1"]

    def test_an_update_replaces_from_the_highest_one_at_a_time(self) -> None:
        owner = self._set(2)
        revision = revision_name(owner)
        assert _deleted(statefulset.reconcile(owner, [_pod("s-0"), _pod("s-1")], [], _NOW_S)) == ["s-1"]
        half = [_pod("s-0"), _pod("s-1", revision, ready=False)]
        assert _deleted(statefulset.reconcile(owner, half, [], _NOW_S)) == []
        half = [_pod("s-0"), _pod("s-1", revision)]
        assert _deleted(statefulset.reconcile(owner, half, [], _NOW_S)) == ["s-0"]

    def test_a_failed_pod_is_made_anew(self) -> None:
        owner = self._set(1)
        failed = _pod("s-0", revision_name(owner))
        failed["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError"}
        assert _deleted(statefulset.reconcile(owner, [failed], [], _NOW_S)) == ["s-0"]

    def test_the_status_ends_a_rollout_when_all_are_ready(self) -> None:
        owner = self._set(1)
        revision = revision_name(owner)
        status = _status(statefulset.reconcile(owner, [_pod("s-0", revision)], [], _NOW_S))
        assert (status["readyReplicas"], status["updatedReplicas"]) == (1, 1)
        assert status["currentRevision"] == status["updateRevision"] == revision


class TestReplicaSet:
    def _set(self, replicas: int) -> dict[str, Any]:
        return _stored({"metadata": {"name": "r"}, "spec": make_set("s", replicas)["spec"]})

    def test_missing_pods_are_made_from_the_template(self) -> None:
        actions = replicaset.reconcile(self._set(2), [_pod("r-a")], _NOW_S)
        assert _created(actions) == ["r-"]

    def test_surplus_pods_go_unready_and_young_first(self) -> None:
        pods = [
            _pod("r-old", creationTimestamp="2023-11-14T22:00:00Z"),
            _pod("r-young"),
            _pod("r-sick", ready=False),
        ]
        assert _deleted(replicaset.reconcile(self._set(1), pods, _NOW_S)) == ["r-sick", "r-young"]

    def test_finished_and_going_pods_do_not_count(self) -> None:
        done = _pod("r-done")
        done["status"]["phase"] = "Succeeded"
        pods = [done, _pod("r-going", deletionTimestamp=_NOW)]
        assert _created(replicaset.reconcile(self._set(1), pods, _NOW_S)) == ["r-"]


class TestDeployment:
    def _deployment(self, replicas: int, image: str = "x:2", **spec: Any) -> dict[str, Any]:
        body = make_set("d", replicas)["spec"]
        body["template"]["spec"]["containers"][0]["image"] = image
        strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
        return _stored({"metadata": {"name": "d"}, "spec": body | {"strategy": strategy} | spec})

    def _set_of(self, owner: dict[str, Any], replicas: int, available: int) -> dict[str, Any]:
        (made,) = [a for a in deployment.reconcile(owner, [], _NOW_S) if isinstance(a, Create)]
        counts = {"replicas": replicas, "readyReplicas": available, "availableReplicas": available}
        obj = {**made.obj, "spec": {**made.obj["spec"], "replicas": replicas}, "status": counts}
        return _stored(obj, f"uid-{made.obj['metadata']['name']}")

    def _scaled(self, actions: Sequence[Action]) -> dict[str, int]:
        patches = [
            a for a in actions if isinstance(a, Patch) and a.kind == "ReplicaSet" and "spec" in a.change
        ]
        return {action.name: action.change["spec"]["replicas"] for action in patches}

    def test_the_first_set_has_all_replicas(self) -> None:
        (made,) = [a for a in deployment.reconcile(self._deployment(3), [], _NOW_S) if isinstance(a, Create)]
        assert made.obj["spec"]["replicas"] == 3
        assert made.obj["metadata"]["name"] == f"d-{template_hash(self._deployment(3)['spec']['template'])}"

    def test_a_new_template_surges_by_one_and_then_takes_from_the_old(self) -> None:
        old = self._set_of(self._deployment(2, "x:1"), 2, 2)
        owner = self._deployment(2)
        (made,) = [a for a in deployment.reconcile(owner, [old], _NOW_S) if isinstance(a, Create)]
        assert made.obj["spec"]["replicas"] == 1
        starting = self._set_of(owner, 1, 0)
        assert self._scaled(deployment.reconcile(owner, [old, starting], _NOW_S)) == {}
        running = self._set_of(owner, 1, 1)
        scaled = self._scaled(deployment.reconcile(owner, [old, running], _NOW_S))
        assert scaled == {old["metadata"]["name"]: 1}

    def test_recreate_waits_until_the_old_pods_are_gone(self) -> None:
        old = self._set_of(self._deployment(1, "x:1"), 0, 0)
        owner = self._deployment(1, strategy={"type": "Recreate"})
        waiting = deployment.reconcile(owner, [old], _NOW_S, live_pods=1)
        assert _created(waiting, "ReplicaSet") == []
        assert len(_created(deployment.reconcile(owner, [old], _NOW_S), "ReplicaSet")) == 1

    def test_going_back_reuses_the_old_set_with_a_new_revision(self) -> None:
        owner = self._deployment(1, "x:1")
        first = self._set_of(owner, 0, 0)
        second = self._set_of(self._deployment(1, "x:2"), 1, 1)
        second["metadata"]["annotations"] = {deployment.REVISION: "2"}
        patches = [a for a in deployment.reconcile(owner, [first, second], _NOW_S) if isinstance(a, Patch)]
        revisions = [a.change["metadata"]["annotations"] for a in patches if "metadata" in a.change]
        assert {deployment.REVISION: "3"} in revisions

    def test_a_rollout_that_is_stuck_says_so(self) -> None:
        owner = self._deployment(1)
        new = self._set_of(owner, 1, 0)
        first = _status(deployment.reconcile(owner, [new], _NOW_S))
        owner["status"] = {key: value for key, value in first.items() if value is not None}
        late = _status(deployment.reconcile(owner, [new], _NOW_S + 601))
        progressing = next(c for c in late["conditions"] if c["type"] == "Progressing")
        assert progressing["reason"] == "ProgressDeadlineExceeded"


class TestDaemonSet:
    def _set(self) -> dict[str, Any]:
        body = make_set("s")["spec"]
        body["template"]["spec"]["nodeSelector"] = {"cgpu": "true"}
        body["updateStrategy"] = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}}
        return _stored({"metadata": {"name": "ds"}, "spec": body})

    def _node(self, name: str, labels: dict[str, str], **spec: Any) -> dict[str, Any]:
        return _stored({"metadata": {"name": name, "labels": labels}, "spec": spec}, f"uid-{name}")

    def test_one_pod_for_each_selected_node(self) -> None:
        found = [self._node("a", {"cgpu": "true"}), self._node("b", {})]
        actions = daemonset.reconcile(self._set(), [], [], found, _NOW_S)
        (made,) = [action for action in actions if isinstance(action, Create) and action.kind == "Pod"]
        terms = made.obj["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert terms["nodeSelectorTerms"][0]["matchFields"][0]["values"] == ["a"]

    def test_taints_keep_it_away_unless_they_are_the_nodes_own_troubles(self) -> None:
        tainted = self._node("a", {"cgpu": "true"}, taints=[{"key": "x", "effect": "NoSchedule"}])
        key = "node.kubernetes.io/unschedulable"
        cordoned = self._node("b", {"cgpu": "true"}, taints=[{"key": key, "effect": "NoSchedule"}])
        actions = daemonset.reconcile(self._set(), [], [], [tainted, cordoned], _NOW_S)
        assert len(_created(actions)) == 1

    def test_a_pod_on_a_node_that_lost_its_label_goes(self) -> None:
        pod = _pod("ds-x")
        actions = daemonset.reconcile(self._set(), [pod], [], [self._node("n1", {})], _NOW_S)
        assert _deleted(actions) == ["ds-x"]

    def _rolling(self, *pods: tuple[str, str, bool]) -> list[Any]:
        """What is done where one pod may stand beside another: of each its node, image and readiness."""
        owner, old = self._set(), self._set()
        owner["spec"]["updateStrategy"]["rollingUpdate"] = {"maxSurge": "10%", "maxUnavailable": 0}
        owner["spec"]["minReadySeconds"] = 10
        old["spec"]["template"]["spec"]["containers"][0]["image"] = "old"
        held = []
        for number, (node, image, ready) in enumerate(pods):
            template = (old if image == "old" else owner)["spec"]["template"]
            pod = _pod(f"{image}-{node}", ready=ready, creationTimestamp=f"2023-11-14T21:00:0{number}Z")
            pod["metadata"]["labels"] = {LABEL: template_hash(template)}
            pod["spec"] = {"nodeName": node}
            held.append(pod)
        nodes = [self._node(name, {"cgpu": "true"}) for name in sorted({node for node, *_ in pods})]
        return daemonset.reconcile(owner, held, [], nodes, _NOW_S)

    def test_with_a_surge_the_new_pod_comes_before_the_old_one_goes(self) -> None:
        actions = self._rolling(("a", "old", True), ("b", "old", True))
        assert (len(_created(actions)), _deleted(actions)) == (1, [])
        actions = self._rolling(("a", "old", True), ("b", "old", True), ("a", "new", False))
        assert (_created(actions), _deleted(actions)) == ([], []), "one at a time"
        actions = self._rolling(("a", "old", True), ("b", "old", True), ("a", "new", True))
        assert (len(_created(actions)), _deleted(actions)) == (1, ["old-a"])

    def test_with_a_surge_who_is_of_no_use_waits_for_nobody(self) -> None:
        actions = self._rolling(("a", "old", False), ("b", "old", False), ("c", "old", True))
        assert len(_created(actions)) == 3

    def test_back_at_the_old_template_the_failed_new_pod_goes(self) -> None:
        actions = self._rolling(("a", "new", True), ("a", "old", False))
        assert (_created(actions), _deleted(actions)) == ([], ["old-a"])


class TestJob:
    def _job(self, **spec: Any) -> dict[str, Any]:
        template = {"spec": {"containers": [{"name": "c"}], "restartPolicy": "Never"}}
        return _stored({"metadata": {"name": "j"}, "spec": {"template": template, "backoffLimit": 1, **spec}})

    def _ended(self, name: str, phase: str) -> dict[str, Any]:
        pod = _pod(name, creationTimestamp="2023-11-14T21:00:00Z")
        pod["status"] = {"phase": phase}
        return pod

    def test_as_many_at_once_as_parallelism_allows(self) -> None:
        assert len(_created(job.reconcile(self._job(completions=5, parallelism=2), [], _NOW_S))) == 2

    def test_it_is_complete_when_enough_succeeded(self) -> None:
        pods = [self._ended("a", "Succeeded"), self._ended("b", "Succeeded")]
        status = _status(job.reconcile(self._job(completions=2, parallelism=2), pods, _NOW_S))
        assert [c["type"] for c in status["conditions"]] == ["SuccessCriteriaMet", "Complete"]
        assert (status["succeeded"], status["completionTime"]) == (2, _NOW)

    def test_without_completions_one_success_stops_new_pods(self) -> None:
        pods = [self._ended("a", "Succeeded"), _pod("b")]
        actions = job.reconcile(self._job(parallelism=3), pods, _NOW_S)
        assert _created(actions) == []
        assert "conditions" not in _status(actions)

    def test_it_fails_past_its_backoff_limit_and_stops_what_runs(self) -> None:
        pods = [self._ended("a", "Failed"), self._ended("b", "Failed"), _pod("c")]
        actions = job.reconcile(self._job(completions=1, parallelism=1), pods, _NOW_S)
        assert _deleted(actions) == ["c"]
        assert _status(actions)["conditions"][-1]["reason"] == "BackoffLimitExceeded"

    def test_a_retry_waits(self) -> None:
        failed = _pod("a", creationTimestamp=_NOW)
        failed["status"] = {"phase": "Failed"}
        actions = job.reconcile(self._job(completions=1, parallelism=1), [failed], _NOW_S + 1)
        assert _created(actions) == []
        assert Again(9.0) in actions

    def test_indexed_pods_know_their_number(self) -> None:
        actions = job.reconcile(self._job(completions=3, parallelism=2, completionMode="Indexed"), [], _NOW_S)
        made = [action.obj for action in actions if isinstance(action, Create)]
        assert [pod["spec"]["hostname"] for pod in made] == ["j-0", "j-1"]

    def test_a_finished_job_goes_after_its_time(self) -> None:
        over = self._job(ttlSecondsAfterFinished=10)
        done = {"type": "Complete", "status": "True", "lastTransitionTime": _NOW}
        over["status"] = {"conditions": [done]}
        assert job.reconcile(over, [], _NOW_S + 4) == [Again(6.0)]
        assert _deleted(job.reconcile(over, [], _NOW_S + 11)) == ["j"]


class TestNodes:
    def _node(self, ready: str, heartbeat: str = _NOW, **spec: Any) -> dict[str, Any]:
        condition = {"type": "Ready", "status": ready, "lastHeartbeatTime": heartbeat}
        return _stored({"metadata": {"name": "n1"}, "spec": spec, "status": {"conditions": [condition]}})

    def test_a_silent_node_becomes_unknown(self) -> None:
        actions = nodes.reconcile(self._node("True"), None, [], _NOW_S + 41, 40)
        assert _status(actions)["conditions"][0]["status"] == "Unknown"

    def test_a_lease_keeps_it_alive(self) -> None:
        lease = {"spec": {"renewTime": "2023-11-14T22:13:55.000000Z"}}
        assert _status(nodes.reconcile(self._node("True"), lease, [], _NOW_S + 41, 40)) == {}

    def test_a_node_nobody_reported_for_is_left_alone(self) -> None:
        silent = self._node("True")
        del silent["status"]["conditions"][0]["lastHeartbeatTime"]
        assert nodes.reconcile(silent, None, [], _NOW_S + 9999, 40) == []

    def test_cordoning_and_not_being_ready_are_taints(self) -> None:
        actions = nodes.reconcile(self._node("False", unschedulable=True), None, [], _NOW_S, 40)
        (change,) = [action.change for action in actions if isinstance(action, Patch)]
        keys = [(taint["key"], taint["effect"]) for taint in change["spec"]["taints"]]
        assert keys == [
            (nodes.NOT_READY, "NoSchedule"),
            (nodes.NOT_READY, "NoExecute"),
            (nodes.UNSCHEDULABLE, "NoSchedule"),
        ]

    def test_pods_leave_when_they_tolerate_no_longer(self) -> None:
        taint = {"key": nodes.NOT_READY, "effect": "NoExecute", "timeAdded": _NOW}
        node = self._node("False", taints=[{"key": nodes.NOT_READY, "effect": "NoSchedule"}, taint])
        patient, hasty = _pod("patient"), _pod("hasty")
        toleration = {"key": nodes.NOT_READY, "operator": "Exists", "tolerationSeconds": 300}
        patient["spec"]["tolerations"] = [toleration]
        assert _deleted(nodes.reconcile(node, None, [patient, hasty], _NOW_S + 20, 40)) == ["hasty"]
        assert "patient" in _deleted(nodes.reconcile(node, None, [patient], _NOW_S + 301, 400))


class TestGarbage:
    def _graph(self, *objects: dict[str, Any]) -> garbage.Graph:
        graph = garbage.Graph()
        for obj in objects:
            graph.put(garbage.Node("Pod", obj))
        return graph

    def _owned(self, name: str, owner: str, **reference: Any) -> dict[str, Any]:
        return _pod(name, ownerReferences=[{"uid": owner, "kind": "Pod", "name": owner, **reference}])

    def test_who_lost_every_owner_goes(self) -> None:
        graph = self._graph(self._owned("child", "uid-parent"))
        assert garbage.collect(graph, "uid-child", []) == []
        assert _deleted(garbage.collect(graph, "uid-child", ["uid-parent"])) == ["child"]

    def test_foreground_waits_for_dependents_that_block(self) -> None:
        parent = _pod("parent", deletionTimestamp=_NOW, finalizers=[garbage.FOREGROUND])
        child = self._owned("child", "uid-parent", blockOwnerDeletion=True)
        assert _deleted(garbage.collect(self._graph(parent, child), "uid-parent", [])) == ["child"]
        (done,) = garbage.collect(self._graph(parent), "uid-parent", [])
        assert isinstance(done, Patch)
        assert done.change["metadata"]["finalizers"] == []

    def test_orphans_are_cut_loose_before_the_owner_goes(self) -> None:
        parent = _pod("parent", deletionTimestamp=_NOW, finalizers=[garbage.ORPHAN])
        (cut,) = garbage.collect(self._graph(parent, self._owned("child", "uid-parent")), "uid-parent", [])
        assert isinstance(cut, Patch)
        assert (cut.name, cut.change["metadata"]["ownerReferences"]) == ("child", [])


def test_a_quota_says_what_of_it_is_used() -> None:
    hard = {"requests.aliyun.com/gpu-mem": "8", "cpu": "2", "count/secrets": "1"}
    cards = _stored({"metadata": {"name": "cards"}, "spec": {"hard": hard}})
    pods = [_pod("a"), _pod("b")]
    for pod in pods:
        limits = {"aliyun.com/gpu-mem": "3", "cpu": "500m"}
        pod["spec"]["containers"] = [{"name": "c", "resources": {"requests": limits}}]
    used = {"requests.aliyun.com/gpu-mem": "6", "cpu": "1"}
    assert _status(quota.reconcile(cards, pods)) == {"hard": hard, "used": used}
    assert quota.reconcile({**cards, "status": {"hard": hard, "used": used}}, pods) == []
