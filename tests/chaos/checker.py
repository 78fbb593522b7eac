"""Judges a cluster from outside: annotations, kubelet's checkpoints, limits files, what ``/inspect`` says.

It knows none of the code that it judges: the formula, the names and the files' forms are written down here
a second time. What must never be is a `Breach`; what may be for a while is a `Wrong`, whose time is taken.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Object = dict[str, Any]
Card = tuple[str, int]
"""Node and index."""

ContainerKey = tuple[str, str]
"""The pod's uid and the container's name."""

ALLOCATION = "scheduler.framework.gpushare.allocation"
ASSIGNED = "ALIYUN_COM_GPU_MEM_ASSIGNED"
INDEX = "ALIYUN_COM_GPU_MEM_IDX"
RESOURCE, COUNT = "aliyun.com/gpu-mem", "aliyun.com/gpu-count"


class Breach(AssertionError):
    """Something that must never be, not even for a moment."""


@dataclass(frozen=True)
class CardSize:
    uuid: str
    units: int
    memory_mib: int


@dataclass(frozen=True)
class NodeFiles:
    """What lies on one node's disk. `running`: the device ids of containers that run."""

    checkpoint: bytes
    containers: Path
    running: Mapping[ContainerKey, frozenset[str]]


@dataclass(frozen=True)
class Wrong:
    """What is not as it should be, and should be soon. `pod` is its uid; of a ledger, the replica's name."""

    what: str
    pod: str


class Checker:
    """Compares what the API server says with what lies on the nodes."""

    def __init__(self, cards: Mapping[Card, CardSize]) -> None:
        self._cards = cards
        self._index = {(node, card.uuid): index for (node, index), card in cards.items()}

    def check(
        self, pods: Iterable[Object], nodes: Mapping[str, NodeFiles], moved: Set[str] = frozenset()
    ) -> set[Wrong]:
        """All that is wrong now. Raises `Breach`.

        `moved`: uids of pods not where they were bound, or whose owners wrote their annotations.
        """
        living = [pod for pod in pods if pod["status"].get("phase") not in ("Failed", "Succeeded")]
        free = self._free_by_annotations(living)
        by_uid = {pod["metadata"]["uid"]: pod for pod in living}
        wrong = set(_waiting_though_they_fit(living, free)) | set(self._waiting_behind_lower(living))
        for card, left in free.items():
            if left < 0:
                there = {pod["metadata"]["uid"] for pod in living if card in _annotated(pod)}
                if (
                    not there & moved
                ):  # else kubelet gave one a card in the moment in which another was bound to it
                    raise Breach(
                        f"card {card} is promised {-left} units beyond its {self._cards[card].units}"
                    )
                wrong |= {Wrong("card promised beyond its units", uid) for uid in there}
        for node, files in nodes.items():
            held = _held(files.checkpoint)
            _no_id_twice(node, held)
            self._limits_are_right(node, files, held)
            wrong |= set(self._annotated_otherwise(node, files, held, by_uid, moved))
        return wrong

    def check_ledgers(self, pods: Iterable[Object], inspected: Mapping[str, Object]) -> set[Wrong]:
        """Each replica that does not know the bound pods and their cards. `inspected`: its answer, by name.

        What it holds for pods that are not bound yet is its own business.
        """
        living = [pod for pod in pods if pod["status"].get("phase") not in ("Failed", "Succeeded")]
        waiting = {pod["metadata"]["name"] for pod in living if not pod["spec"].get("nodeName")}
        true = Counter(
            (card, pod["metadata"]["name"], units)
            for pod in living
            for card, units in _annotated(pod).items()
        )
        wrong = set()
        for replica, answer in inspected.items():
            said = Counter(
                ((node["name"], card["id"]), pod["name"], pod["usedGPU"])
                for node in answer["nodes"] or ()
                for card in node["devs"]
                for pod in card["pods"]
                if pod["name"] not in waiting
            )
            if said != true:
                wrong.add(Wrong("a ledger that says otherwise", replica))
        return wrong

    def _waiting_behind_lower(self, pods: Iterable[Object]) -> Iterator[Wrong]:
        """Of what waits, what would fit if everybody less important had left."""
        pods = list(pods)
        for pod in pods:
            if priority := pod["spec"].get("priority") or 0:
                there = [each for each in pods if (each["spec"].get("priority") or 0) >= priority]
                if {*_waiting_though_they_fit([pod, *there], self._free_by_annotations(there))}:
                    yield Wrong("waits behind less important pods", pod["metadata"]["uid"])

    def _free_by_annotations(self, pods: Iterable[Object]) -> dict[Card, int]:
        promised: Counter[Card] = Counter()
        for pod in pods:
            promised.update(_annotated(pod))
        return {card: size.units - promised[card] for card, size in self._cards.items()}

    def _annotated_otherwise(
        self,
        node: str,
        files: NodeFiles,
        held: Mapping[ContainerKey, list[str]],
        pods: Mapping[str, Object],
        moved: Set[str],
    ) -> Iterator[Wrong]:
        forgotten = [one for key, ids in files.running.items() if key not in held for one in ids]
        by_pod: dict[str, set[str]] = {}  # an app container has what an init container had before it
        for (uid, _), its in held.items():
            by_pod.setdefault(uid, set()).update(its)
        given = _units([*forgotten, *(one for ids in by_pod.values() for one in ids)])
        crowded = {uuid for uuid, units in given.items() if units > self._units_of(node, uuid)}
        runs = {uid for uid, _ in files.running}
        for uid, ids in by_pod.items():
            pod = pods.get(uid)
            if pod is None or "deletionTimestamp" in pod["metadata"]:
                continue
            true = {(node, self._index[node, uuid]): units for uuid, units in _units(ids).items()}
            if uid not in runs and not _annotated(pod) and not crowded.isdisjoint(_units(ids)):
                continue  # it waits, on no card, until what kubelet forgot has ended or somebody deletes one
            if uid in moved and len(true) > 1 and pod["spec"].get("initContainers"):
                continue  # its owner changed what alone told of the card that only its init container had
            if _annotated(pod) != true:
                yield Wrong("annotated card is not the device's", uid)
            elif pod["metadata"]["annotations"].get(ASSIGNED) != "true":
                yield Wrong("not said to be assigned", uid)

    def _units_of(self, node: str, uuid: str) -> int:
        return self._cards[node, self._index[node, uuid]].units

    def _limits_are_right(self, node: str, files: NodeFiles, held: Mapping[ContainerKey, list[str]]) -> None:
        """Each container that runs is limited to what its ids stand for, and no card to more than it has."""
        given: Counter[str] = Counter()
        for key, ids in files.running.items():
            said = self._limits_of(files.containers, ids)
            expected = {}
            for uuid, units in _units(ids).items():
                size = self._cards[node, self._index[node, uuid]]
                expected[uuid] = size.memory_mib * units // size.units << 20
            if not any(each == expected for each in said):
                raise Breach(f"{key} on {node} runs with limits {said}, must be {expected}")
            given.update(expected)
            if key in held and set(held[key]) != set(ids):
                raise Breach(f"{key} on {node} runs with other devices than kubelet gave it")
        for (where, _), size in self._cards.items():
            if where == node and given[size.uuid] > size.memory_mib << 20:
                raise Breach(f"limits of card {size.uuid} on {node} add up to {given[size.uuid]} bytes")

    @staticmethod
    def _limits_of(containers: Path, ids: Iterable[str]) -> list[dict[str, int]]:
        """Of each folder for these ids: there are several where kubelet forgot who lived in one."""
        found = []
        for file in containers.glob(f"{token_of(ids)}*/etc/limits"):
            lines = [line.split() for line in file.read_text().splitlines()[1:-1]]
            found.append({uuid: int(memory.partition("=")[2]) for uuid, memory, *_ in lines})
        return found


def token_of(ids: Iterable[str]) -> str:
    """What the name of a container's folder begins with."""
    return hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()[:32]


def _held(checkpoint: bytes) -> dict[ContainerKey, list[str]]:
    """Device ids by container, as kubelet wrote them down."""
    held: dict[ContainerKey, list[str]] = {}
    for entry in json.loads(checkpoint)["Data"]["PodDeviceEntries"] or ():
        if entry["ResourceName"] == RESOURCE:
            ids = [each for numa in entry["DeviceIDs"].values() for each in numa]
            held.setdefault((entry["PodUID"], entry["ContainerName"]), []).extend(ids)
    return held


def _no_id_twice(node: str, held: Mapping[ContainerKey, list[str]]) -> None:
    """Neither to two pods nor to two containers of one that run at the same time."""
    for among in (
        [(one, uid) for (uid, _), ids in held.items() for one in ids],
        [(one, name) for (_, name), ids in held.items() if name != "init" for one in ids],
    ):
        owners: dict[str, str] = {}
        for one, owner in among:
            if owners.setdefault(one, owner) != owner:
                raise Breach(f"kubelet on {node} gave {one} to {owner} and {owners[one]}")


def _units(ids: Iterable[str]) -> Counter[str]:
    return Counter(each.rpartition("-_-")[0] for each in ids)


def _annotated(pod: Object) -> dict[Card, int]:
    """Units by card that the annotations of a bound pod say."""
    node, annotations = pod["spec"].get("nodeName"), pod["metadata"].get("annotations") or {}
    if not node:
        return {}
    units: Counter[Card] = Counter()
    try:
        if ALLOCATION not in annotations:  # its owner took it away, and the first protocol says it too
            indices = [int(index) for index in annotations[INDEX].split(",")]
            return {(node, index): asked_units(pod) // len(indices) for index in indices}
        for cards in json.loads(annotations[ALLOCATION]).values():
            for index, count in cards.items():
                units[node, int(index)] += count
    except (KeyError, ValueError, AttributeError):
        return {}  # none, or nonsense, which only its owner writes
    return dict(units)


def asked_units(pod: Object) -> int:
    """What a pod's containers hold at most at one time."""

    def units(container: Object) -> int:
        return int((container["resources"].get("limits") or {}).get(RESOURCE, 0))

    sidecars = most = 0
    for each in pod["spec"].get("initContainers") or ():
        if each.get("restartPolicy") == "Always":
            sidecars += units(each)
        else:
            most = max(most, sidecars + units(each))
    return max(most, sidecars + sum(map(units, pod["spec"]["containers"])))


def _waiting_though_they_fit(pods: Iterable[Object], free: Mapping[Card, int]) -> Iterator[Wrong]:
    """Of what waits, what some card has room for. A card that a bound pod is still due is nobody's."""
    pods = list(pods)
    unsettled: Counter[str] = Counter()
    for pod in pods:
        if (node := pod["spec"].get("nodeName")) and not _annotated(pod):
            unsettled[node] += asked_units(pod)
    for pod in pods:
        if pod["spec"].get("nodeName") or "deletionTimestamp" in pod["metadata"]:
            continue
        cards = int((pod["metadata"].get("labels") or {}).get(COUNT, "1"))
        each = asked_units(pod) // cards
        roomy = Counter(node for (node, _), left in free.items() if left - unsettled[node] >= each)
        if any(count >= cards for count in roomy.values()):
            yield Wrong("waits though it fits", pod["metadata"]["uid"])
