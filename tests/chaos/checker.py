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
    running: Mapping[str, frozenset[str]]


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
        wrong = set(_waiting_though_they_fit(living, free))
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
            wrong |= set(self._annotated_otherwise(node, files, held, by_uid))
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

    def _free_by_annotations(self, pods: Iterable[Object]) -> dict[Card, int]:
        promised: Counter[Card] = Counter()
        for pod in pods:
            promised.update(_annotated(pod))
        return {card: size.units - promised[card] for card, size in self._cards.items()}

    def _annotated_otherwise(
        self, node: str, files: NodeFiles, held: Mapping[str, list[str]], pods: Mapping[str, Object]
    ) -> Iterator[Wrong]:
        forgotten = [one for uid, ids in files.running.items() if uid not in held for one in ids]
        given = _units([*forgotten, *(one for ids in held.values() for one in ids)])
        crowded = {uuid for uuid, units in given.items() if units > self._units_of(node, uuid)}
        for uid, ids in held.items():
            pod = pods.get(uid)
            if pod is None or "deletionTimestamp" in pod["metadata"]:
                continue
            true = {(node, self._index[node, uuid]): units for uuid, units in _units(ids).items()}
            if uid not in files.running and not _annotated(pod) and not crowded.isdisjoint(_units(ids)):
                continue  # it waits, on no card, until what kubelet forgot has ended or somebody deletes one
            if _annotated(pod) != true:
                yield Wrong("annotated card is not the device's", uid)
            elif pod["metadata"]["annotations"].get(ASSIGNED) != "true":
                yield Wrong("not said to be assigned", uid)

    def _units_of(self, node: str, uuid: str) -> int:
        return self._cards[node, self._index[node, uuid]].units

    def _limits_are_right(self, node: str, files: NodeFiles, held: Mapping[str, list[str]]) -> None:
        """Each container that runs is limited to what its ids stand for, and no card to more than it has."""
        given: Counter[str] = Counter()
        for uid, ids in files.running.items():
            said = self._limits_of(files.containers, ids)
            expected = {}
            for uuid, units in _units(ids).items():
                size = self._cards[node, self._index[node, uuid]]
                expected[uuid] = size.memory_mib * units // size.units << 20
            if not any(each == expected for each in said):
                raise Breach(f"pod {uid} on {node} runs with limits {said}, must be {expected}")
            given.update(expected)
            if uid in held and set(held[uid]) != set(ids):
                raise Breach(f"pod {uid} on {node} runs with other devices than kubelet gave it")
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


def _held(checkpoint: bytes) -> dict[str, list[str]]:
    """Device ids by pod, as kubelet wrote them down."""
    held: dict[str, list[str]] = {}
    for entry in json.loads(checkpoint)["Data"]["PodDeviceEntries"] or ():
        if entry["ResourceName"] == RESOURCE:
            ids = [each for numa in entry["DeviceIDs"].values() for each in numa]
            held.setdefault(entry["PodUID"], []).extend(ids)
    return held


def _no_id_twice(node: str, held: Mapping[str, list[str]]) -> None:
    twice = [
        each for each, count in Counter(each for ids in held.values() for each in ids).items() if count > 1
    ]
    if twice:
        raise Breach(f"kubelet on {node} gave {sorted(twice)[0]} to two pods")


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
            return {(node, index): _asked(pod) // len(indices) for index in indices}
        for cards in json.loads(annotations[ALLOCATION]).values():
            for index, count in cards.items():
                units[node, int(index)] += count
    except (KeyError, ValueError, AttributeError):
        return {}  # none, or nonsense, which only its owner writes
    return dict(units)


def _asked(pod: Object) -> int:
    return sum(int(each["resources"]["limits"][RESOURCE]) for each in pod["spec"]["containers"])


def _waiting_though_they_fit(pods: Iterable[Object], free: Mapping[Card, int]) -> Iterator[Wrong]:
    """Of what waits, what some card has room for. A card that a bound pod is still due is nobody's."""
    pods = list(pods)
    unsettled: Counter[str] = Counter()
    for pod in pods:
        if (node := pod["spec"].get("nodeName")) and not _annotated(pod):
            unsettled[node] += _asked(pod)
    for pod in pods:
        if pod["spec"].get("nodeName") or "deletionTimestamp" in pod["metadata"]:
            continue
        cards = int((pod["metadata"].get("labels") or {}).get(COUNT, "1"))
        each = _asked(pod) // cards
        roomy = Counter(node for (node, _), left in free.items() if left - unsettled[node] >= each)
        if any(count >= cards for count in roomy.values()):
            yield Wrong("waits though it fits", pod["metadata"]["uid"])
