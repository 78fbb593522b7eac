"""StatefulSets: pods with stable names, made and replaced in order or all at once."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simcluster.controllers.actions import Action, Create, Tell, delete, patch_status
from simcluster.controllers.ownership import controller_reference, is_going, labels_of
from simcluster.controllers.pods import is_available, is_finished, is_ready, new_pod, phase
from simcluster.controllers.revisions import LABEL, record, revision_name, template_of

Object = Mapping[str, Any]

_API, _KIND = "apps/v1", "StatefulSet"


@dataclass(frozen=True, slots=True)
class Revisions:
    """``templates`` by revision name; ``current`` is what a rollout came from, ``update`` what it goes to."""

    current: str
    update: str
    templates: Mapping[str, Object]


def reconcile(
    stateful_set: Object, pods: Sequence[Object], revisions: Sequence[Object], now_s: float
) -> list[Action]:
    """What to do next, given the set's own pods and ControllerRevisions."""
    if is_going(stateful_set):
        return []
    known = {item["metadata"]["name"]: item for item in revisions}
    update = revision_name(stateful_set)
    in_use = {labels_of(pod).get(LABEL, "") for pod in pods}
    templates = {name: template_of(item) for name, item in known.items()}
    templates[update] = stateful_set["spec"]["template"]
    current = (stateful_set.get("status") or {}).get("currentRevision") or update
    held = _Held(
        stateful_set, pods, Revisions(current if current in templates else update, update, templates), now_s
    )
    return [
        *record(stateful_set, _KIND, update, revisions, in_use | {held.revisions.current}),
        *held.steps(),
        *patch_status("StatefulSet", stateful_set, held.status()),
    ]


class _Held:
    """One look at a set and its pods."""

    def __init__(
        self, stateful_set: Object, pods: Sequence[Object], revisions: Revisions, now_s: float
    ) -> None:
        self.set = stateful_set
        self.spec: Object = stateful_set["spec"]
        self.revisions = revisions
        self.now_s = now_s
        self.first: int = (self.spec.get("ordinals") or {}).get("start", 0)
        self.wanted = range(self.first, self.first + self.spec.get("replicas", 1))
        self.by_ordinal = {number: pod for pod in pods if (number := self._ordinal(pod)) is not None}
        self.in_order = self.spec.get("podManagementPolicy") != "Parallel"

    def _ordinal(self, pod: Object) -> int | None:
        match = re.fullmatch(re.escape(self.set["metadata"]["name"]) + r"-(\d+)", pod["metadata"]["name"])
        return int(match[1]) if match else None

    def steps(self) -> list[Action]:
        """Fill up, then scale down, then update; in ordered mode each step waits for the previous one."""
        actions: list[Action] = []
        for number in self.wanted:
            pod = self.by_ordinal.get(number)
            if pod is None:
                actions += self._create(number)
            elif is_finished(pod) and not is_going(pod):
                actions += [self._tell_delete(pod, "RecreatingFailedPod"), delete("Pod", pod)]
            if self.in_order and not (
                self._is_healthy(pod)
                and pod is not None
                and is_available(pod, self.spec.get("minReadySeconds", 0), self.now_s)
            ):
                break
        if actions and self.in_order:
            return actions
        down = self._scale_down()
        actions += down
        if self.in_order and (down or self._unsettled()):
            return actions
        return actions + self._update()

    def _unsettled(self) -> bool:
        return any(not self._is_healthy(self.by_ordinal.get(number)) for number in self.wanted)

    def _is_healthy(self, pod: Object | None) -> bool:
        return pod is not None and phase(pod) == "Running" and is_ready(pod) and not is_going(pod)

    def _tell_delete(self, pod: Object, reason: str) -> Tell:
        name, own = pod["metadata"]["name"], self.set["metadata"]["name"]
        if reason == "RecreatingFailedPod":
            return Tell(
                reason,
                f"StatefulSet {self.set['metadata']['namespace']}/{own} is recreating failed Pod {name}",
                "Warning",
            )
        return Tell(reason, f"delete Pod {name} in StatefulSet {own} successful")

    def _scale_down(self) -> list[Action]:
        extra = sorted((n for n in self.by_ordinal if n not in self.wanted), reverse=True)
        if not extra:
            return []
        if self.in_order:
            if self._unsettled() or is_going(self.by_ordinal[extra[0]]):
                return []
            extra = extra[:1]
        return self._delete(extra)

    def _delete(self, numbers: Sequence[int]) -> list[Action]:
        actions: list[Action] = []
        for pod in (self.by_ordinal[number] for number in numbers):
            if not is_going(pod):
                actions += [self._tell_delete(pod, "SuccessfulDelete"), delete("Pod", pod)]
        return actions

    def _update(self) -> list[Action]:
        """Deletes the highest pod of an old revision, one at a time, down to the partition."""
        strategy = self.spec.get("updateStrategy") or {}
        if strategy.get("type") == "OnDelete":
            return []
        lowest = (strategy.get("rollingUpdate") or {}).get("partition", 0)
        for number in sorted((n for n in self.wanted if n >= lowest), reverse=True):
            pod = self.by_ordinal.get(number)
            if pod is not None and not is_going(pod) and self._revision(pod) != self.revisions.update:
                return self._delete([number])
            if not self._is_healthy(pod):
                return []
        return []

    def _revision(self, pod: Object) -> str:
        return labels_of(pod).get(LABEL, "")

    def _create(self, number: int) -> list[Action]:
        own, namespace = self.set["metadata"]["name"], self.set["metadata"]["namespace"]
        name = f"{own}-{number}"
        partition = ((self.spec.get("updateStrategy") or {}).get("rollingUpdate") or {}).get("partition", 0)
        revision = self.revisions.current if number < partition else self.revisions.update
        claims: list[dict[str, Any]] = copy.deepcopy(self.spec.get("volumeClaimTemplates") or [])
        for claim in claims:
            claim["metadata"] = {**claim["metadata"], "name": f"{claim['metadata']['name']}-{name}"}
        actions: list[Action] = [Create("PersistentVolumeClaim", claim, namespace) for claim in claims]
        labels = {
            "statefulset.kubernetes.io/pod-name": name,
            "apps.kubernetes.io/pod-index": str(number),
            LABEL: revision,
        }
        reference = controller_reference(self.set, _API, _KIND)
        pod = new_pod(self.revisions.templates[revision], reference, labels, name=name)
        spec = pod["spec"]
        spec |= {"hostname": name, "subdomain": self.spec.get("serviceName", "")}
        for claim in claims:
            claim_name = claim["metadata"]["name"]
            volume = {
                "name": claim_name.removesuffix(f"-{name}"),
                "persistentVolumeClaim": {"claimName": claim_name},
            }
            spec["volumes"] = [v for v in spec.get("volumes") or [] if v["name"] != volume["name"]] + [volume]
        actions.append(Create("Pod", pod, namespace))
        return [*actions, Tell("SuccessfulCreate", f"create Pod {name} in StatefulSet {own} successful")]

    def status(self) -> dict[str, Any]:
        live = [pod for number, pod in self.by_ordinal.items() if not is_finished(pod)]
        min_ready_s = self.spec.get("minReadySeconds", 0)
        # pods of the current and of the update revision
        held = [self._revision(pod) for pod in live if not is_going(pod)]
        current, update = held.count(self.revisions.current), held.count(self.revisions.update)
        finished = update == len(live) == len(self.wanted) and all(self._is_healthy(pod) for pod in live)
        return {
            "observedGeneration": self.set["metadata"]["generation"],
            "replicas": len(live),
            "readyReplicas": sum(is_ready(pod) and not is_going(pod) for pod in live) or None,
            "availableReplicas": sum(is_available(pod, min_ready_s, self.now_s) for pod in live),
            "currentReplicas": (update if finished else current) or None,
            "updatedReplicas": update or None,
            "currentRevision": self.revisions.update if finished else self.revisions.current,
            "updateRevision": self.revisions.update,
            "collisionCount": 0,
        }
