"""The JSON between kube-scheduler and an extender (k8s.io/kube-scheduler/extender/v1, 1.36).

The Go types have no JSON tags: the outer keys are Go field names, which Go matches regardless of case.
kube-scheduler writes them as declared, so they are decoded that way first, and in any case only if something
is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from gpuslice.adapters.limits import Limits
from gpuslice.adapters.wire.errors import UNREADABLE, MalformedError
from gpuslice.adapters.wire.names import Json, Pieces

_NULL = b"null"
_NAMES_KEY = b'"NodeNames":'


class _Wire(msgspec.Struct, gc=False, rename="camel", kw_only=True):
    pass


class Resources(_Wire):
    limits: dict[str, str | int | float] | None = None
    requests: dict[str, str | int | float] | None = None


class Container(_Wire):
    name: str = ""
    resources: Resources | None = None
    restart_policy: str | None = None


class Preferences(_Wire):
    preferred: list[msgspec.Raw] | None = msgspec.field(
        default=None, name="preferredDuringSchedulingIgnoredDuringExecution"
    )


class Affinity(_Wire):
    node_affinity: Preferences | None = None
    pod_affinity: Preferences | None = None
    pod_anti_affinity: Preferences | None = None


class Spread(_Wire):
    when_unsatisfiable: str = ""


class SchedulingGroup(_Wire):
    pod_group_name: str = ""


class PodSpec(_Wire):
    containers: list[Container] = []
    init_containers: list[Container] | None = None
    resources: Resources | None = None
    overhead: dict[str, str | int | float] | None = None
    priority: int | None = None
    affinity: Affinity | None = None
    topology_spread_constraints: list[Spread] | None = None
    scheduling_group: SchedulingGroup | None = None

    @property
    def pod_group(self) -> str:
        """The name of the pod group that is scheduled as one, "" if the pod is in none."""
        return self.scheduling_group.pod_group_name if self.scheduling_group is not None else ""

    @property
    def prefers(self) -> bool:
        """Whether the owner prefers some of the feasible nodes."""
        spread = self.topology_spread_constraints or ()
        affinity = self.affinity or Affinity()
        kinds = (affinity.node_affinity, affinity.pod_affinity, affinity.pod_anti_affinity)
        return any(each is not None and each.preferred for each in kinds) or any(
            each.when_unsatisfiable == "ScheduleAnyway" for each in spread
        )


class Metadata(_Wire):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None


class Pod(_Wire):
    """The part of the pod that concerns GPUs."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)
    spec: PodSpec = msgspec.field(default_factory=PodSpec)


class _Named(_Wire):
    """Of a node or a victim, which one it is."""

    metadata: Metadata = msgspec.field(default_factory=Metadata)


class NodeList(_Wire):
    metadata: dict[str, Any] | None = msgspec.field(default_factory=dict)
    items: list[msgspec.Raw] | None = None


class _Args(msgspec.Struct, gc=False, rename="pascal"):
    pod: Pod | None = None
    nodes: NodeList | None = None
    node_names: msgspec.Raw = msgspec.Raw(_NULL)

    @property
    def incomplete(self) -> bool:
        return self.pod is None or (self.nodes is None and self.node_names == _NULL)


@dataclass(frozen=True, slots=True)
class ExtenderArgs:
    """The body of filter and prioritize: `names`, as JSON, only if the extender is ``nodeCacheCapable``."""

    pod: Pod | None = None
    nodes: NodeList | None = None
    names: Json | None = None

    def names_json(self) -> Json | None:
        """The nodes in question as a JSON list of names; None if the caller named none."""
        if self.names is not None:
            return self.names
        if self.nodes is None or self.nodes.items is None:
            return None
        return msgspec.json.encode([_decode(_NODE, item).metadata.name for item in self.nodes.items])

    @property
    def whole_nodes(self) -> list[msgspec.Raw] | None:
        """The node objects, if the caller sent them instead of names."""
        return self.nodes.items if self.nodes is not None and self.names is None else None


@dataclass(slots=True)
class FilterResult:
    """`failed_nodes` may be helped by preemption, `failed_and_unresolvable_nodes` not. As JSON."""

    nodes: NodeList | None = None
    node_names: Json = _NULL
    failed_nodes: Pieces = (_NULL,)
    failed_and_unresolvable_nodes: Pieces = (_NULL,)
    error: str = ""

    def pieces(self) -> Pieces:
        """As JSON. Written by hand: the lists are JSON already, and so large that each copy matters."""
        return (
            b'{"Nodes":',
            msgspec.json.encode(self.nodes),
            b',"NodeNames":',
            self.node_names,
            b',"FailedNodes":',
            *self.failed_nodes,
            b',"FailedAndUnresolvableNodes":',
            *self.failed_and_unresolvable_nodes,
            b',"Error":',
            msgspec.json.encode(self.error),
            b"}",
        )


class BindingArgs(msgspec.Struct, gc=False, frozen=True, rename="pascal"):
    """The body of bind: which pod goes to which node; the pod itself is not included."""

    pod_name: str = ""
    pod_namespace: str = ""
    pod_uid: str = msgspec.field(default="", name="PodUID")
    node: str = ""


class BindingResult(msgspec.Struct, rename="pascal"):
    error: str = ""


class PodIdentifier(msgspec.Struct, gc=False, frozen=True):
    """A victim by uid."""

    uid: str = msgspec.field(default="", name="UID")


class MetaVictims(msgspec.Struct, gc=False, rename="pascal"):
    pods: list[PodIdentifier] | None = None
    num_pdb_violations: int = msgspec.field(default=0, name="NumPDBViolations")


class _Victims(msgspec.Struct, gc=False, rename="pascal"):
    pods: list[_Named] | None = None
    num_pdb_violations: int = msgspec.field(default=0, name="NumPDBViolations")


class PreemptionArgs(msgspec.Struct, gc=False, rename="pascal"):
    """The body of preempt: per node the pods that kube-scheduler would evict."""

    pod: Pod | None = None
    node_name_to_victims: dict[str, _Victims] | None = None
    node_name_to_meta_victims: dict[str, MetaVictims] | None = None

    def victims(self) -> dict[str, MetaVictims]:
        """The victims of each node by uid, whichever form was sent."""
        if self.node_name_to_meta_victims is not None:
            return self.node_name_to_meta_victims
        return {
            name: MetaVictims(
                [PodIdentifier(pod.metadata.uid) for pod in each.pods or ()], each.num_pdb_violations
            )
            for name, each in (self.node_name_to_victims or {}).items()
        }


class PreemptionResult(msgspec.Struct, rename="pascal"):
    node_name_to_meta_victims: dict[str, MetaVictims] = {}


T = TypeVar("T")

_ARGS = msgspec.json.Decoder(_Args)
_BINDING = msgspec.json.Decoder(BindingArgs)
_PREEMPTION = msgspec.json.Decoder(PreemptionArgs)
_NODE = msgspec.json.Decoder(_Named)
_ANY_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Questions:
    """Reads the bodies of filter, prioritize and preempt.

    The list of names is most of a body and is read by `names` anyway. If it is at the end, as kube-scheduler
    writes it, it is cut off here unread, and may still turn out not to be a list of strings. What precedes
    it, the pod, is the same in the two questions about a pod, and is decoded once.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._before = b""
        self._last = _Args()

    def decode(self, body: bytes) -> ExtenderArgs:
        """Raises `MalformedError`."""
        check_size(body, self._limits)
        names_at = body.rfind(b"[")
        if not (body.startswith(_NAMES_KEY, names_at - len(_NAMES_KEY)) and body.endswith(b'"]}')):
            return self._decode_whole(body)
        before = body[:names_at]
        if before != self._before:
            self._before, self._last = b"", _decode(_ARGS, before + b"null}")
            self._before = before
        if self._last.pod is None:
            return self._decode_whole(body)
        self._check_nodes("NodeNames", body.count(b",", names_at) + 1)
        return ExtenderArgs(self._last.pod, self._last.nodes, memoryview(body)[names_at:-1])

    def _decode_whole(self, body: bytes) -> ExtenderArgs:
        args = _decode(_ARGS, body)
        if args.incomplete:
            args = _in_any_case(_ARGS, body)
        names = bytes(args.node_names)
        self._check_nodes("NodeNames", names.count(b",") + 1)
        self._check_nodes("Nodes", len(args.nodes.items or ()) if args.nodes is not None else 0)
        return ExtenderArgs(args.pod, args.nodes, None if names == _NULL else names)

    def decode_preemption(self, body: bytes) -> PreemptionArgs:
        """The body of preempt. Raises `MalformedError`."""
        check_size(body, self._limits)
        args = _decode(_PREEMPTION, body)
        if args.pod is None or (args.node_name_to_victims is None and args.node_name_to_meta_victims is None):
            args = _in_any_case(_PREEMPTION, body)
        self._check_nodes("NodeNameToMetaVictims", len(args.node_name_to_meta_victims or ()))
        self._check_nodes("NodeNameToVictims", len(args.node_name_to_victims or ()))
        return args

    def _check_nodes(self, field: str, count: int) -> None:
        """Whatever a list of names holds, it has a comma for each but the first. Raises `MalformedError`."""
        if count > self._limits.names:
            raise MalformedError(f"{field} has more than {self._limits.names} names")


def check_size(body: bytes, limits: Limits) -> None:
    """A value needs a comma before it, so counting commas bounds the cost of decoding.

    Raises `MalformedError`.
    """
    if len(body) > limits.values and body.count(b",") >= limits.values:
        raise MalformedError(
            f"the request body has more than {limits.values} values; set nodeCacheCapable: true in the "
            f"extender's section of kube-scheduler's configuration, so that it sends names of nodes alone"
        )


def decode_binding(body: bytes) -> BindingArgs:
    """The body of bind. Raises `MalformedError`, also if a name is missing."""
    args = _decode(_BINDING, body)
    if not (args.pod_name and args.pod_namespace and args.node):
        args = _in_any_case(_BINDING, body)
    if not args.pod_uid:
        raise MalformedError("PodUID is empty, must be the uid of the pod to bind")
    for name, value in (
        ("PodName", args.pod_name),
        ("PodNamespace", args.pod_namespace),
        ("Node", args.node),
    ):
        if not value:
            raise MalformedError(f"{name} is empty, must be a name")
    return args


def _decode(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw) -> T:
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        raise MalformedError(f"the request body cannot be read: {error}") from error


def _in_any_case(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode again with the outer keys as declared, whatever their case was."""
    struct: Any = decoder.type
    spelling = {field.encode_name.lower(): field.encode_name for field in msgspec.structs.fields(struct)}
    given = _decode(_ANY_KEYS, body)
    respelt = {spelling[key.lower()]: value for key, value in given.items() if key.lower() in spelling}
    return _decode(decoder, msgspec.json.encode(respelt))
