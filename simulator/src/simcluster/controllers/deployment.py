"""Deployments: one ReplicaSet per template; pods move from the old ones to the new one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from simcluster.cluster.moment import format_time, parse_time
from simcluster.controllers.actions import Action, Again, Create, Tell, delete, patch, patch_status
from simcluster.controllers.ownership import controller_reference, is_going, template_hash
from simcluster.controllers.pods import condition

Object = Mapping[str, Any]

REVISION = "deployment.kubernetes.io/revision"
HASH_LABEL = "pod-template-hash"


def reconcile(
    deployment: Object, replica_sets: Sequence[Object], now_s: float, live_pods: int = 0
) -> list[Action]:
    """``live_pods`` are the pods of old ReplicaSets that still exist, which Recreate waits for."""
    if is_going(deployment):
        return []
    look = _Look(deployment, replica_sets, now_s)
    return [*look.steps(live_pods), *look.status()]


class _Look:
    """One look at a deployment and its ReplicaSets."""

    def __init__(self, deployment: Object, replica_sets: Sequence[Object], now_s: float) -> None:
        self.deployment = deployment
        self.spec: Object = deployment["spec"]
        self.name: str = deployment["metadata"]["name"]
        self.now_s = now_s
        self.sets = [item for item in replica_sets if not is_going(item)]
        self.new = next(
            (s for s in self.sets if _plain(s["spec"]["template"]) == _plain(self.spec["template"])), None
        )
        self.old = [item for item in self.sets if item is not self.new]
        self.wanted: int = self.spec.get("replicas", 1)

    def steps(self, live_pods: int) -> list[Action]:
        if self.new is None:
            if self.spec.get("paused"):
                return []
            return self._create(live_pods)
        # the template in use has the highest revision, also after going back to an older one
        new = self.new
        highest = max((_revision(item) for item in self.old), default=0)
        number = max(_revision(new), highest + 1) if _revision(new) <= highest else _revision(new)
        revised: list[Action] = []
        if number != _revision(new):
            change = {"metadata": {"annotations": {REVISION: str(number)}}}
            revised.append(patch("ReplicaSet", new, change))
        if _revision(self.deployment) != number:
            change = {"metadata": {"annotations": {REVISION: str(number)}}}
            revised.append(patch("Deployment", self.deployment, change))
        if self.spec.get("paused"):
            assert self.new is not None
            return revised + (
                []
                if any(s["spec"].get("replicas", 0) for s in self.old)
                else self._scale(self.new, self.wanted)
            )
        recreate = (self.spec.get("strategy") or {}).get("type") == "Recreate"
        moved = self._recreate(live_pods) if recreate else self._roll()
        limit = self.spec.get("revisionHistoryLimit", 10)
        idle = [
            item
            for item in self.old
            if not item["spec"].get("replicas", 0) and not (item.get("status") or {}).get("replicas", 0)
        ]
        surplus = sorted(idle, key=_revision)[: max(len(idle) - limit, 0)]
        return revised + moved + [delete("ReplicaSet", item) for item in surplus]

    # -- revisions ------------------------------------------------------------------------------------

    def _create(self, live_pods: int) -> list[Action]:
        recreate = (self.spec.get("strategy") or {}).get("type") == "Recreate"
        if recreate and (down := self._scale_down_all()):
            return down
        if recreate and live_pods:
            return []
        replicas = self.wanted if recreate or not self.old else self._room()
        template = self.spec["template"]
        digest = template_hash(template, (self.deployment.get("status") or {}).get("collisionCount", 0))
        labels = {**((template.get("metadata") or {}).get("labels") or {}), HASH_LABEL: digest}
        number = max((_revision(item) for item in self.old), default=0) + 1
        selector = self.spec["selector"]
        match_labels = {**(selector.get("matchLabels") or {}), HASH_LABEL: digest}
        body = {
            "metadata": {
                "name": f"{self.name}-{digest}",
                "labels": labels,
                "annotations": {REVISION: str(number)},
                "ownerReferences": [controller_reference(self.deployment, "apps/v1", "Deployment")],
            },
            "spec": {
                "replicas": replicas,
                "minReadySeconds": self.spec.get("minReadySeconds", 0),
                "selector": {**selector, "matchLabels": match_labels},
                "template": {**template, "metadata": {**(template.get("metadata") or {}), "labels": labels}},
            },
        }
        namespace = self.deployment["metadata"]["namespace"]
        events = [self._tell_scale(body["metadata"]["name"], 0, replicas)] if replicas else []
        return [Create("ReplicaSet", body, namespace), *events]

    # -- scaling --------------------------------------------------------------------------------------

    def _limits(self) -> tuple[int, int]:
        """How many pods there may be at most, and must be available at least."""
        rolling = (self.spec.get("strategy") or {}).get("rollingUpdate") or {}
        surge = _amount(rolling.get("maxSurge", 0), self.wanted, up=True)
        unavailable = _amount(rolling.get("maxUnavailable", 0), self.wanted, up=False)
        if not surge and not unavailable:
            unavailable = 1
        return self.wanted + surge, self.wanted - min(unavailable, self.wanted)

    def _room(self) -> int:
        """How many pods the new set may have now."""
        most, _ = self._limits()
        others = sum(item["spec"].get("replicas", 0) for item in self.old)
        held = self.new["spec"].get("replicas", 0) if self.new else 0
        return int(min(self.wanted, max(held, most - others)))

    def _roll(self) -> list[Action]:
        assert self.new is not None
        held = self.new["spec"].get("replicas", 0)
        room = self.wanted if held > self.wanted else self._room()
        if room != held:
            return self._scale(self.new, room)
        # unhealthy old pods first, then as many as availability allows
        assert self.new is not None
        old = [item for item in self.old if item["spec"].get("replicas", 0)]
        if not old:
            return []
        _, least = self._limits()
        total = sum(item["spec"].get("replicas", 0) for item in self.sets)
        new_unavailable = self.new["spec"].get("replicas", 0) - _available(self.new)
        may_go = total - least - new_unavailable
        actions: list[Action] = []
        for item in sorted(old, key=_created):
            replicas = item["spec"]["replicas"]
            unhealthy = min(max(replicas - _available(item), 0), may_go)
            spare = sum(_available(other) for other in self.sets) - least
            goes = min(replicas, max(unhealthy, min(may_go, max(spare, 0) + unhealthy)))
            if goes > 0:
                may_go -= goes
                actions += self._scale(item, replicas - goes)
        return actions

    def _scale_down_all(self) -> list[Action]:
        return [step for item in self.old if item["spec"].get("replicas", 0) for step in self._scale(item, 0)]

    def _recreate(self, live_pods: int) -> list[Action]:
        assert self.new is not None
        if down := self._scale_down_all():
            return down
        return [] if live_pods else self._scale(self.new, self.wanted)

    def _scale(self, item: Object, replicas: int) -> list[Action]:
        held = item["spec"].get("replicas", 0)
        if held == replicas:
            return []
        change = patch("ReplicaSet", item, {"spec": {"replicas": replicas}})
        return [change, self._tell_scale(item["metadata"]["name"], held, replicas)]

    def _tell_scale(self, name: str, held: int, replicas: int) -> Tell:
        direction = "up" if replicas > held else "down"
        return Tell("ScalingReplicaSet", f"Scaled {direction} replica set {name} from {held} to {replicas}")

    # -- status ---------------------------------------------------------------------------------------

    def status(self) -> list[Action]:
        total = _sum(self.sets, "replicas")
        available = _sum(self.sets, "availableReplicas")
        updated = _sum([self.new] if self.new else [], "replicas")
        status: dict[str, Any] = {
            "observedGeneration": self.deployment["metadata"]["generation"],
            "replicas": total or None,
            "updatedReplicas": updated or None,
            "readyReplicas": _sum(self.sets, "readyReplicas") or None,
            "availableReplicas": available or None,
            "unavailableReplicas": max(self.wanted - available, total - available, 0) or None,
        }
        complete = updated == self.wanted == total and available >= self.wanted
        status["conditions"] = [self._available(available), self._progressing(status, complete)]
        actions = patch_status("Deployment", self.deployment, status)
        if not complete and not self.spec.get("paused"):
            actions.append(Again(self.spec.get("progressDeadlineSeconds", 600) + 1.0))
        return actions

    def _available(self, available: int) -> dict[str, Any]:
        _, least = self._limits()
        if available >= least:
            words = ("True", "MinimumReplicasAvailable", "Deployment has minimum availability.")
        else:
            words = ("False", "MinimumReplicasUnavailable", "Deployment does not have minimum availability.")
        return self._condition("Available", *words)

    def _progressing(self, status: Mapping[str, Any], complete: bool) -> dict[str, Any]:
        name = (
            self.new["metadata"]["name"]
            if self.new
            else f"{self.name}-{template_hash(self.spec['template'])}"
        )
        if complete:
            text = f'ReplicaSet "{name}" has successfully progressed.'
            return self._condition("Progressing", "True", "NewReplicaSetAvailable", text)
        if self.new is None:
            text = f'Created new replica set "{name}"'
            return self._condition("Progressing", "True", "NewReplicaSetCreated", text)
        held = self.deployment.get("status") or {}
        counts = ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas")
        moved = any(held.get(key) != status[key] for key in counts)
        if not moved and self._is_late():
            text = f'ReplicaSet "{name}" has timed out progressing.'
            return self._condition("Progressing", "False", "ProgressDeadlineExceeded", text)
        text = f'ReplicaSet "{name}" is progressing.'
        return self._condition("Progressing", "True", "ReplicaSetUpdated", text, touch=moved)

    def _is_late(self) -> bool:
        held = condition(self.deployment, "Progressing")
        if held.get("reason") == "ProgressDeadlineExceeded":
            return True
        since = held.get("lastUpdateTime")
        if not since or held.get("reason") == "NewReplicaSetAvailable":
            return False
        return self.now_s - parse_time(since) > float(self.spec.get("progressDeadlineSeconds", 600))

    def _condition(
        self, kind: str, status: str, reason: str, message: str, touch: bool = False
    ) -> dict[str, Any]:
        held, now = condition(self.deployment, kind), format_time(self.now_s)
        same = (
            held.get("reason") == reason and held.get("message") == message and held.get("status") == status
        )
        return {
            "type": kind,
            "status": status,
            "lastUpdateTime": held["lastUpdateTime"] if same and not touch else now,
            "lastTransitionTime": held["lastTransitionTime"] if held.get("status") == status else now,
            "reason": reason,
            "message": message,
        }


def _plain(template: Object) -> Object:
    """The template without the label that distinguishes ReplicaSets."""
    metadata = dict(template.get("metadata") or {})
    labels = {k: v for k, v in (metadata.get("labels") or {}).items() if k != HASH_LABEL}
    return {**template, "metadata": {**metadata, "labels": labels}}


def _revision(obj: Object) -> int:
    return int((obj["metadata"].get("annotations") or {}).get(REVISION, 0))


def _available(replica_set: Object) -> int:
    return int((replica_set.get("status") or {}).get("availableReplicas", 0))


def _created(obj: Object) -> tuple[str, str]:
    return obj["metadata"]["creationTimestamp"], obj["metadata"]["name"]


def _sum(sets: Sequence[Object], field: str) -> int:
    return sum((item.get("status") or {}).get(field, 0) for item in sets)


def _amount(value: int | str, total: int, up: bool) -> int:
    """A number, or a percentage of ``total``."""
    if isinstance(value, int):
        return value
    share = int(value.rstrip("%")) * total / 100
    return math.ceil(share) if up else math.floor(share)
