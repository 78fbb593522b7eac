"""What kube-scheduler asks about a node and a pod, cards aside: its default filters, by their names and in
their order (``pkg/scheduler/framework/plugins``, 1.36). No explanation finds room where it finds none.

Each filter is one function of `_FILTERS`. What is not known of a node's pods keeps nobody out here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpuslice.core.contract import AMOUNT_NAMES
from gpuslice.core.host_resources import HostResources
from gpuslice.core.model import Request
from gpuslice.core.node_affinity import REQUIRED, meets, meets_any, selects, terms_of, unmet
from gpuslice.core.units import MIB
from gpuslice.core.words import counted

Object = Mapping[str, Any]
STARVED = "Insufficient {}"
TOO_MANY_PODS = "Too many pods"
UNSCHEDULABLE = "node.kubernetes.io/unschedulable"
_REPELS = ("NoSchedule", "NoExecute")
_ANY_ADDRESS = ("", "0.0.0.0")
_NAMES = {"cpu": "milli CPU", "memory": "MiB of memory"}
_SHOWN_IN = {"memory": MIB}


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str = ""
    effect: str = "NoSchedule"

    def __str__(self) -> str:
        return f"{self.key}{'=' + self.value if self.value else ''}:{self.effect}"


@dataclass(frozen=True, slots=True)
class Toleration:
    """An empty key with operator Exists tolerates everything; an empty effect means all effects."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def covers(self, taint: Taint) -> bool:
        if self.effect and self.effect != taint.effect:
            return False
        if not self.key:
            return self.operator == "Exists"
        return self.key == taint.key and (self.operator == "Exists" or self.value == taint.value)


class HostPort(NamedTuple):
    """A port of the node that a container takes; `address` "" is all of its addresses."""

    number: int
    protocol: str = "TCP"
    address: str = ""

    def clashes(self, other: HostPort) -> bool:
        same = (self.number, self.protocol) == (other.number, other.protocol)
        everywhere = self.address in _ANY_ADDRESS or other.address in _ANY_ADDRESS
        return same and (everywhere or self.address == other.address)


@dataclass(frozen=True, slots=True)
class Volume:
    """A claim of a pod for a volume. `problem`: why no node will do; `terms`: one of each must be met by a
    node, as in `spec.nodeSelectorTerms`."""

    claim: str
    problem: str = ""
    terms: tuple[Sequence[Object], ...] = ()


@dataclass(frozen=True, slots=True)
class Occupant:
    """A pod as others on its node, or near, find it. `amounts`: its requests; CPU in thousandths."""

    key: str
    labels: Mapping[str, str] = field(default_factory=dict)
    amounts: Mapping[str, int] = field(default_factory=dict)
    ports: frozenset[HostPort] = frozenset()
    affinity: Object | None = None

    @property
    def namespace(self) -> str:
        return self.key.partition("/")[0]

    def terms(self, kind: str) -> Sequence[Object]:
        """What it requires of pods near it; `kind` is podAffinity or podAntiAffinity."""
        return ((self.affinity or {}).get(kind) or {}).get(REQUIRED) or ()

    def is_meant_by(self, term: Object, namespace: str) -> bool:
        """Whether it is one of the pods that a term of a pod in `namespace` speaks of. Labels of namespaces
        are not known: of a selector of namespaces only the one for all of them is followed."""
        spaces, selector = term.get("namespaces") or (), term.get("namespaceSelector")
        own = not spaces and selector is None and self.namespace == namespace
        if not (own or self.namespace in spaces or selector == {}):
            return False
        return selects(term.get("labelSelector"), self.labels)


@dataclass(frozen=True, slots=True)
class Place:
    """What of a node decides, beside its cards. `allocatable` counts like `Occupant.amounts`; `pods` is None
    if nobody knows who is there."""

    name: str
    ready: bool = True
    schedulable: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    allocatable: Mapping[str, int] | None = None
    pods: tuple[Occupant, ...] | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """What a pod wants of a node, beside cards. `claims`: its cards are to come by claims."""

    request: Request
    claims: bool = False
    selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    affinity: Object | None = None
    pod: Occupant = Occupant("")
    volumes: tuple[Volume, ...] = ()
    spread: tuple[Object, ...] = ()  # its topologySpreadConstraints

    def tolerates(self, taint: Taint) -> bool:
        return any(each.covers(taint) for each in self.tolerations)


class Shortage(NamedTuple):
    """What a node has too little of. `never`: it would not suffice on an empty node either."""

    reason: str
    detail: str
    never: bool


class NodeFilters:
    """The filters for one pod. What needs all nodes at once is computed once."""

    def __init__(self, places: Iterable[Place], wish: Wish) -> None:
        self.wish = wish
        self.places = tuple(places)
        known = all(place.pods is not None for place in self.places)
        near = wish.pod.terms("podAffinity") if known else ()
        self.kept_away = dict(self._kept_away())
        self.near = [(str(term.get("topologyKey")), self._values(term)) for term in near]
        # the first of pods that want to be near each other may be anywhere
        self.is_first = not any(values for _, values in self.near) and all(
            wish.pod.is_meant_by(term, wish.pod.namespace) for term in near
        )
        self._hard = [each for each in wish.spread if each.get("whenUnsatisfiable") != "ScheduleAnyway"]
        self.crowded = [self._crowded(each) for each in self._hard] if known else []

    def obstacle(self, place: Place) -> str:
        """What keeps the pod from the node whatever it has left, "" if nothing does."""
        return next(filter(None, (check(self, place) for check in _FILTERS.values())), "")

    def shortage(self, place: Place, host_used: HostResources) -> Shortage | None:
        """NodeResourcesFit: what the node has too little of. `host_used` counts if its pods are not known."""
        most = place.allocatable or {}
        if place.pods is not None and "pods" in most and len(place.pods) + 1 > most["pods"]:
            detail = f"{place.name} takes {most['pods']} pods and has {len(place.pods)}"
            return Shortage(TOO_MANY_PODS, detail, most["pods"] < 1)
        for name, wanted in self.wish.pod.amounts.items():
            if not wanted or name in AMOUNT_NAMES or place.allocatable is None:
                continue
            known_used = {"cpu": host_used.cpu_milli, "memory": host_used.memory_mib * MIB}.get(name, 0)
            if place.pods is not None:
                known_used = sum(each.amounts.get(name, 0) for each in place.pods)
            all_of_it, unit = most.get(name, 0), _SHOWN_IN.get(name, 1)
            if wanted > all_of_it - known_used:
                left = max(0, all_of_it - known_used)
                what = _NAMES.get(name, name)
                detail = (
                    f"{-(-wanted // unit)} {what} are wanted, {place.name} has {left // unit} of "
                    f"{all_of_it // unit} left"
                )
                return Shortage(STARVED.format(name), detail, wanted > all_of_it)
        return None

    # -- what needs all nodes ------------------------------------------------------------------------------

    def _kept_away(self) -> Iterator[tuple[tuple[str, str], str]]:
        """By topology key and value, the pod that this one must not be with, and whose rule that is."""
        wish = self.wish.pod
        for place in self.places:
            for other in place.pods or ():
                for term in wish.terms("podAntiAffinity"):
                    if other.is_meant_by(term, wish.namespace):
                        yield from _domain(
                            place, term, f"Is near {other.key}, which its anti-affinity avoids"
                        )
                for term in other.terms("podAntiAffinity"):
                    if wish.is_meant_by(term, other.namespace):
                        yield from _domain(place, term, f"Is near {other.key}, whose anti-affinity avoids it")

    def _values(self, term: Object) -> frozenset[str]:
        """Of a term's topology key, where the pods are that it speaks of."""
        key, wish = term.get("topologyKey", ""), self.wish.pod
        return frozenset(
            place.labels[key]
            for place in self.places
            if key in place.labels
            and any(each.is_meant_by(term, wish.namespace) for each in place.pods or ())
        )

    def _crowded(self, constraint: Object) -> tuple[str, frozenset[str]]:
        """The values of the constraint's topology key that can take none of these pods."""
        key, wish = str(constraint.get("topologyKey")), self.wish
        counts: Counter[str] = Counter()
        for place in self.places:
            if not all(each.get("topologyKey") in place.labels for each in self._hard):
                continue
            if constraint.get("nodeAffinityPolicy") != "Ignore" and _node_affinity(self, place):
                continue
            if constraint.get("nodeTaintsPolicy") == "Honor" and _taints(self, place):
                continue
            counts[place.labels[key]] += sum(
                each.namespace == wish.pod.namespace and _is_spread(constraint, each, wish.pod)
                for each in place.pods or ()
            )
        least = min(counts.values(), default=0) if len(counts) >= (constraint.get("minDomains") or 1) else 0
        own = _is_spread(constraint, wish.pod, wish.pod)
        most = int(constraint.get("maxSkew", 1))
        return key, frozenset(value for value, count in counts.items() if count + own - least > most)


def _domain(place: Place, term: Object, why: str) -> Iterator[tuple[tuple[str, str], str]]:
    key = term.get("topologyKey", "")
    if key in place.labels:
        yield (key, place.labels[key]), why


def _is_spread(constraint: Object, pod: Occupant, like: Occupant) -> bool:
    same = all(pod.labels.get(key) == like.labels.get(key) for key in constraint.get("matchLabelKeys") or ())
    return same and selects(constraint.get("labelSelector"), pod.labels)


# -- the filters -------------------------------------------------------------------------------------------


def _unschedulable(filters: NodeFilters, place: Place) -> str:
    if not place.ready:
        return "Not ready"
    tolerated = filters.wish.tolerates(Taint(UNSCHEDULABLE))
    return "" if place.schedulable or tolerated else "Cordoned"


def _taints(filters: NodeFilters, place: Place) -> str:
    hard = (taint for taint in place.taints if taint.effect in _REPELS)
    found = next((taint for taint in hard if not filters.wish.tolerates(taint)), None)
    return "" if found is None else f"Taint {found} is not tolerated"


def _node_affinity(filters: NodeFilters, place: Place) -> str:
    wish = filters.wish
    for key, value in sorted(wish.selector.items()):
        if place.labels.get(key) != value:
            return f"Is not {key}={value}, as the pod's nodeSelector requires"
    if meets(wish.affinity, place.name, place.labels):
        return ""
    terms = terms_of(wish.affinity) or ()
    if len(terms) == 1:
        return f"Is not {unmet(terms[0], place.name, place.labels)}, as the pod's node affinity requires"
    return f"Meets none of the {len(terms)} terms of the pod's node affinity"


def _ports(filters: NodeFilters, place: Place) -> str:
    for wanted in sorted(filters.wish.pod.ports):
        for other in place.pods or ():
            if any(wanted.clashes(port) for port in other.ports):
                return f"Host port {wanted.number} ({wanted.protocol}) is taken by {other.key}"
    return ""


def _volumes(filters: NodeFilters, place: Place) -> str:
    for volume in filters.wish.volumes:
        if volume.problem:
            return f'PersistentVolumeClaim "{volume.claim}" {volume.problem}'
        for terms in volume.terms:
            if not meets_any(terms, place.name, place.labels):
                lacks = [unmet(term, place.name, place.labels) for term in terms]
                where = lacks[0] if len(lacks) == 1 else f"any of {counted(len(lacks), 'place')} where it is"
                return f'Is not {where}, as the volume of PersistentVolumeClaim "{volume.claim}" requires'
    return ""


def _spread(filters: NodeFilters, place: Place) -> str:
    for key, crowded in filters.crowded:
        if key not in place.labels:
            return f"Has no label {key}, by which the pod's topology spread counts"
        if place.labels[key] in crowded:
            return f"Is {key}={place.labels[key]}, where the pod's topology spread allows no more"
    return ""


def _pod_affinity(filters: NodeFilters, place: Place) -> str:
    for key, value in place.labels.items():
        if why := filters.kept_away.get((key, value)):
            return f"{why} ({key}={value})"
    for key, values in filters.near:
        if key not in place.labels or not (filters.is_first or place.labels[key] in values):
            return f"Has no pod near (by {key}) that the pod's affinity requires"
    return ""


_FILTERS: Mapping[str, Callable[[NodeFilters, Place], str]] = {
    "NodeUnschedulable": _unschedulable,
    "TaintToleration": _taints,
    "NodeAffinity": _node_affinity,
    "NodePorts": _ports,
    "VolumeBinding, VolumeZone": _volumes,
    "PodTopologySpread": _spread,
    "InterPodAffinity": _pod_affinity,
}
"""NodeResourcesFit is `NodeFilters.shortage`: preemption may help there, and cards come first here."""
