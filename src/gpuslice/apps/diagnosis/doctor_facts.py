"""What ``gpuslice doctor`` reads of a cluster. What may not be read is reported, never guessed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar

from gpuslice.adapters.kube.errors import ForbiddenError, NotFoundError, UnauthorizedError
from gpuslice.adapters.kube.objects import ConfigMap, Node, Pod
from gpuslice.adapters.kube.resources import (
    ACCESS_REVIEWS,
    CONFIG_MAPS,
    DICT,
    LIMIT_RANGES,
    LIVING,
    NODES,
    PODS,
    QUOTAS,
    RESOURCE_CLAIM_TEMPLATES,
    RESOURCE_CLAIMS,
    RESOURCE_SLICES,
    SECRETS,
    SERVICES,
    Resource,
)
from gpuslice.adapters.kube.sync import SyncClient
from gpuslice.apps.diagnosis.claims import Claims, claims_of
from gpuslice.apps.diagnosis.cluster_ledger import ledger_of
from gpuslice.apps.diagnosis.rejections import read_rejections
from gpuslice.apps.diagnosis.rights import Right, excess_rights, missing_rights
from gpuslice.apps.diagnosis.usage import ClusterUsage, ContainerUsage, Source
from gpuslice.core.contract import LABEL_SHARED, SYSTEM_NAMESPACE, ResourceNames
from gpuslice.core.ledger import Ledger
from gpuslice.core.mode import rules_of, wants_agent
from gpuslice.core.quantity import whole_number
from gpuslice.core.rejections import Rejections
from gpuslice.core.views import names_offered

T = TypeVar("T")
Object = dict[str, Any]

EXTENDER, EXPORTER = "gpushare-schd-extender", "gpuslice-exporter"
PLUGIN_LABELS = "name=gpushare-device-plugin-ds"
SCHEDULER_LABELS = "component=kube-scheduler"
MANAGER_LABELS = "component=kube-controller-manager"
TOKENS_SHOWN = "component in (gpuslice-console, gpushare-schd-extender)"
WEBHOOK_DOMAIN = ".gpuslice.io"

_GROUP = "admissionregistration.k8s.io/v1"
SLICES = Resource("discovery.k8s.io/v1", "endpointslices", "EndpointSlice", DICT)
HOOKS = (
    Resource(_GROUP, "mutatingwebhookconfigurations", "MutatingWebhookConfiguration", DICT, False),
    Resource(_GROUP, "validatingwebhookconfigurations", "ValidatingWebhookConfiguration", DICT, False),
)
POLICIES = (
    Resource(_GROUP, "validatingadmissionpolicies", "ValidatingAdmissionPolicy", DICT, False),
    Resource(_GROUP, "validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding", DICT, False),
)
DEVICE_CLASSES = Resource("resource.k8s.io/v1", "deviceclasses", "DeviceClass", DICT, namespaced=False)


class Level(StrEnum):
    ERROR = "error"  # something does not work, or memory is promised twice
    WARNING = "warning"  # it will affect some pods, or all of them some day
    NOTE = "note"  # worth knowing; nothing to do now


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem: what, where, and how to fix it."""

    level: Level
    where: str
    what: str
    fix: str


@dataclass(frozen=True, slots=True)
class Facts:
    """The cluster as it was read. `unreadable`: what may not be read, so that nothing is known about it."""

    nodes: Sequence[Node] = ()
    pods: Sequence[Pod] = ()
    plugins: Sequence[Pod] = ()  # pods of the device plugin
    missing_rights: Mapping[tuple[str, str], Sequence[Right]] = field(default_factory=dict)
    """Of the device plugin's accounts, by their namespace and name."""
    excess_rights: Mapping[tuple[str, str], Sequence[Right]] = field(default_factory=dict)
    """Of all accounts of ours."""
    policies: Sequence[Object] | None = ()  # for admission, and their bindings; None: it knows no such thing
    own_pods: Sequence[Object] = ()  # of console and extender
    schedulers: Sequence[Object] = ()  # pods of the cluster's own kube-scheduler
    config_maps: Sequence[ConfigMap] = ()
    services: Sequence[Object] = ()  # the extender's
    slices: Sequence[Object] = ()  # endpoint slices of our services
    hooks: Sequence[Object] = ()
    secrets: Sequence[Object] = ()  # certificates of webhooks
    device_slices: Sequence[Object] = ()  # ResourceSlices of all drivers
    claims: Claims | None = None  # if any node or pod uses claims
    classes: Sequence[Object] = ()  # DeviceClasses, read with claims
    managers: Sequence[Object] = ()  # pods of kube-controller-manager, read with claims
    quotas: Sequence[Object] = ()  # ResourceQuotas and LimitRanges
    components: Sequence[Object] = ()  # services of all parts of gpuslice
    failed: Sequence[Pod] = ()
    usage: Sequence[ContainerUsage] = ()  # as the exporters measure it
    rejections: Rejections = field(default_factory=Rejections)  # of kubelets
    unreadable: Sequence[str] = ()
    node_label: str = LABEL_SHARED
    wants_cards: bool = False  # whether a cluster without a sharing node is a problem
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    def is_to_share(self, node: Node) -> bool:
        """By its labels: an agent should run there, and no other label keeps the cards whole."""
        labels = node.metadata.labels or {}
        return wants_agent(labels, self.node_label) and rules_of(labels).shared

    def ledger(self, *, all_cards: bool = False) -> Ledger:
        """What each pod holds, as the extender sees it; `all_cards`: including cards out of use."""
        return ledger_of(self.nodes, self.pods, () if all_cards else self.config_maps)

    def places_of(self, component: str) -> set[tuple[str, str]]:
        """Namespace and name of the service of a part of gpuslice; where it has none, of its pods."""
        found = {
            (each["metadata"]["namespace"], each["metadata"]["name"])
            for each in self.components
            if (each["metadata"].get("labels") or {}).get("component") == component
        }
        spaces = {
            each.metadata.namespace
            for each in self.pods
            if (each.metadata.labels or {}).get("component") == component
        }
        return found | {(space, component) for space in spaces - {space for space, _ in found}}

    def slices_of(self, namespace: str, service: str) -> list[Object]:
        """The endpoint slices of a service."""
        return [
            each
            for each in self.slices
            if each["metadata"]["namespace"] == namespace
            and (each["metadata"].get("labels") or {}).get("kubernetes.io/service-name") == service
        ]

    def labelled(self) -> bool:
        """Whether any node should share its cards."""
        return any(self.is_to_share(node) or self.is_of_claims(node) for node in self.nodes)

    def is_of_claims(self, node: Node) -> bool:
        """By its labels: an agent should run there and give the cards out by claims."""
        labels = node.metadata.labels or {}
        return wants_agent(labels, self.node_label) and rules_of(labels).claims

    def knows(self, resource: Resource[Any], namespace: str = "") -> bool:
        """Whether absence from the lists means that there is none."""
        return _where(resource, namespace) not in self.unreadable


def names_of(node: Node) -> ResourceNames:
    """The set of names in which it counts its cards; from capacity, since all cards may be out of use."""
    return names_offered(node.status.capacity or {})


def time_of(text: str | None) -> datetime | None:
    """A time in the API server's format, with its zone; None for anything else."""
    try:
        time = datetime.fromisoformat(text or "")
    except ValueError:
        return None
    return time if time.tzinfo is not None else None


def amount(node: Node, resource: str) -> int:
    """How much of a resource pods may use there."""
    return whole_number((node.status.allocatable or {}).get(resource)) or 0


def is_ready(pod: Pod) -> bool:
    """Whether its kubelet says so."""
    return any(each.type == "Ready" and each.status == "True" for each in pod.status.conditions or ())


def option_of(pod: Object, name: str) -> str:
    """The value of ``--name=VALUE`` in the command line of a static pod; "" if it is not there."""
    arguments = (
        argument
        for container in pod["spec"]["containers"]
        for argument in (*(container.get("command") or ()), *(container.get("args") or ()))
    )
    option = f"--{name}="
    return next((str(each).removeprefix(option) for each in arguments if each.startswith(option)), "")


class _Reader:
    def __init__(self, client: SyncClient) -> None:
        self._client = client
        self.unreadable: list[str] = []

    def list(self, resource: Resource[T], namespace: str = "", **selectors: str) -> list[T]:
        return self.asked(
            _where(resource, namespace), lambda: self._client.list(resource, namespace, **selectors), []
        )

    def get(self, resource: Resource[T], name: str, namespace: str) -> T | None:
        return self.asked(
            f"{resource.kind} {namespace}/{name}", lambda: self._client.get(resource, name, namespace), None
        )

    def asked(self, what: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except UnauthorizedError:
            raise  # nothing at all may be read
        except ForbiddenError:
            self.unreadable.append(what)
        except NotFoundError:
            pass
        return otherwise


def _where(resource: Resource[Any], namespace: str) -> str:
    return f"{resource.plural} of {namespace}" if namespace else resource.plural


def read_facts(
    client: SyncClient,
    *,
    node_label: str = LABEL_SHARED,
    wants_cards: bool = False,
    places: Sequence[tuple[str, str]] = (),
    source: Source | None = None,
) -> Facts:
    """Read everything from the API server once. KubeError if it does not answer, or shows no node.

    `places`: namespace and name of services whose endpoints are needed besides ours. `source`: of usage.
    """
    reader, nodes = _Reader(client), client.list(NODES)
    pods = reader.list(PODS, fields=LIVING)
    claiming = {node.metadata.name for node in nodes if rules_of(node.metadata.labels or {}).claims}
    by_claims = bool(claiming) or any(pod.claims for pod in pods)
    services = _services(reader)
    hooks = [hook for hook in _with_kinds(reader, HOOKS) if is_own_hook(hook)]
    called = {service for hook in hooks if (service := hook_service(hook)) is not None}
    wanted = {*places, *called}
    wanted |= {(each["metadata"]["namespace"], each["metadata"]["name"]) for each in services}
    secrets = [reader.get(SECRETS, f"{name}-tls", space) for space, name in sorted(called)]
    spaces = sorted({SYSTEM_NAMESPACE, *(each["metadata"]["namespace"] for each in services)})
    plugins, device_slices = reader.list(PODS, labels=PLUGIN_LABELS), reader.list(RESOURCE_SLICES)
    return Facts(
        nodes=nodes,
        pods=pods,
        plugins=plugins,
        **_about_rights(reader, client, pods, plugins, claiming),
        schedulers=reader.list(PODS.as_dict(), SYSTEM_NAMESPACE, labels=SCHEDULER_LABELS),
        config_maps=[each for space in spaces for each in reader.list(CONFIG_MAPS, space)],
        services=services,
        slices=[
            found
            for space, name in sorted(wanted)
            for found in reader.list(SLICES, space, labels=f"kubernetes.io/service-name={name}")
        ],
        hooks=hooks,
        secrets=[each for each in secrets if each is not None],
        device_slices=device_slices,
        claims=_claims(reader, nodes, pods, device_slices) if by_claims else None,
        classes=reader.list(DEVICE_CLASSES) if by_claims else (),
        managers=reader.list(PODS.as_dict(), SYSTEM_NAMESPACE, labels=MANAGER_LABELS) if by_claims else (),
        quotas=_with_kinds(reader, (QUOTAS, LIMIT_RANGES)),
        components=reader.list(SERVICES, labels="app=gpushare"),
        failed=reader.list(PODS, fields="status.phase=Failed"),
        usage=_usage(reader, source, pods).containers,
        rejections=read_rejections(client, pods),
        unreadable=tuple(reader.unreadable),
        node_label=node_label,
        wants_cards=wants_cards,
    )


def _with_kinds(reader: _Reader, resources: Sequence[Resource[Object]]) -> list[Object]:
    """Items of a list lack their kind."""
    return [item | {"kind": each.kind} for each in resources for item in reader.list(each)]


def _services(reader: _Reader) -> list[Object]:
    """The extender's: the vendor's by name, ours under another name by label."""
    found = {
        (each["metadata"]["namespace"], each["metadata"]["name"]): each
        for which in ({"fields": f"metadata.name={EXTENDER}"}, {"labels": f"component={EXTENDER}"})
        for each in reader.list(SERVICES, **which)
    }
    return list(found.values())


def _usage(reader: _Reader, source: Source | None, pods: Sequence[Pod]) -> ClusterUsage:
    nothing = ClusterUsage((), ())
    usage = reader.asked("exporters", source.read, nothing) if source is not None else nothing
    if usage.problems and not usage.cards and any(is_exporter(pod) for pod in pods):
        reader.unreadable.append("exporters")
    return usage


def _about_rights(
    reader: _Reader, client: SyncClient, pods: Sequence[Pod], plugins: Sequence[Pod], claiming: Set[str]
) -> dict[str, Any]:
    reviews = ACCESS_REVIEWS.plural
    none: Mapping[tuple[str, str], Sequence[Right]] = {}
    found = [reader.asked(kind.plural, partial(client.list, kind), None) for kind in POLICIES]
    policies = [
        each | {"kind": kind.kind}
        for kind, listed in zip(POLICIES, found, strict=True)
        for each in listed or ()
    ]
    return {
        "missing_rights": reader.asked(reviews, lambda: missing_rights(client, plugins, claiming), none),
        "excess_rights": reader.asked(reviews, lambda: excess_rights(client, pods), none),
        "policies": None if None in found else policies,
        "own_pods": reader.list(PODS.as_dict(), labels=TOKENS_SHOWN),
    }


def _claims(reader: _Reader, nodes: Sequence[Node], pods: Sequence[Pod], slices: Sequence[Object]) -> Claims:
    claims = reader.list(RESOURCE_CLAIMS)
    templates = reader.list(RESOURCE_CLAIM_TEMPLATES)
    known = RESOURCE_CLAIM_TEMPLATES.plural not in reader.unreadable
    return claims_of(nodes, pods, claims, slices, templates if known else None)


def is_exporter(pod: Pod) -> bool:
    return (pod.metadata.labels or {}).get("component") == EXPORTER


def is_own_hook(hook: Object) -> bool:
    """Whether a webhook configuration is for gpuslice's webhook, whatever the release is called."""
    return any(each["name"].endswith(WEBHOOK_DOMAIN) for each in hook.get("webhooks") or ())


def hook_service(hook: Object) -> tuple[str, str] | None:
    """Namespace and name of the service that a webhook configuration calls."""
    for each in hook.get("webhooks") or []:
        service = each.get("clientConfig", {}).get("service")
        if service:
            return service["namespace"], service["name"]
    return None
