"""What ``gpuslice doctor`` reads of a cluster. What may not be read is reported, never guessed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.kueue import ADMISSION_CHECKS
from gpuslice.adapters.kube.objects import Node, Pod
from gpuslice.adapters.kube.resources import (
    ACCESS_REVIEWS,
    CONFIG_MAPS,
    DICT,
    LIMIT_RANGES,
    PODS,
    QUOTAS,
    RESOURCE_SLICES,
    SECRETS,
    SERVICES,
    Resource,
)
from gpuslice.core.contract import LABEL_SHARED, SYSTEM_NAMESPACE, ResourceNames
from gpuslice.core.ledger import Ledger
from gpuslice.core.mode import rules_of, wants_agent
from gpuslice.core.quantity import whole_number
from gpuslice.core.views import names_offered
from gpuslice.diagnosis.cluster import Cluster, Reader, UsageSource, ledger_of, read_cluster
from gpuslice.diagnosis.doctor.rights import Right, excess_rights, missing_rights

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


@dataclass(frozen=True, kw_only=True)
class Facts(Cluster):
    """The cluster, and what the release consists of."""

    plugins: Sequence[Pod] = ()  # pods of the device plugin
    missing_rights: Mapping[tuple[str, str], Sequence[Right]] = field(default_factory=dict)
    """Of the device plugin's accounts, by their namespace and name."""
    excess_rights: Mapping[tuple[str, str], Sequence[Right]] = field(default_factory=dict)
    """Of all accounts of ours."""
    policies: Sequence[Object] | None = ()  # for admission, and their bindings; None: it knows no such thing
    own_pods: Sequence[Object] = ()  # of console and extender
    admission_checks: Sequence[Object] = ()  # Kueue's, read where an extender answers them
    schedulers: Sequence[Object] = ()  # pods of the cluster's own kube-scheduler
    services: Sequence[Object] = ()  # the extender's
    slices: Sequence[Object] = ()  # endpoint slices of our services
    hooks: Sequence[Object] = ()
    secrets: Sequence[Object] = ()  # certificates of webhooks
    device_slices: Sequence[Object] = ()  # ResourceSlices of all drivers
    classes: Sequence[Object] = ()  # DeviceClasses, read with claims
    managers: Sequence[Object] = ()  # pods of kube-controller-manager, read with claims
    quotas: Sequence[Object] = ()  # ResourceQuotas and LimitRanges
    components: Sequence[Object] = ()  # services of all parts of gpuslice
    node_label: str = LABEL_SHARED
    wants_cards: bool = False  # whether a cluster without a sharing node is a problem

    @cached_property
    def ledger_of_all_cards(self) -> Ledger:
        """Including cards that are out of use."""
        return ledger_of(self.nodes, self.pods)

    def is_to_share(self, node: Node) -> bool:
        """By its labels: an agent should run there, and no other label keeps the cards whole."""
        labels = node.metadata.labels or {}
        return wants_agent(labels, self.node_label) and rules_of(labels).shared

    def is_of_claims(self, node: Node) -> bool:
        """By its labels: an agent should run there and give the cards out by claims."""
        labels = node.metadata.labels or {}
        return wants_agent(labels, self.node_label) and rules_of(labels).claims

    def labelled(self) -> bool:
        """Whether any node should share its cards."""
        return any(self.is_to_share(node) or self.is_of_claims(node) for node in self.nodes)

    def places_of(self, component: str) -> set[tuple[str, str]]:
        """Namespace and name of the service of a part of gpuslice; where it has none, of its pods."""
        found = {
            key_of(each)
            for each in self.components
            if (each["metadata"].get("labels") or {}).get("component") == component
        }
        spaces = {each.metadata.namespace for each in self.pods if component_of(each) == component}
        return found | {(space, component) for space in spaces - {space for space, _ in found}}

    def slices_of(self, namespace: str, service: str) -> list[Object]:
        """The endpoint slices of a service."""
        return [
            each
            for each in self.slices
            if each["metadata"]["namespace"] == namespace
            and (each["metadata"].get("labels") or {}).get("kubernetes.io/service-name") == service
        ]


def key_of(each: Object) -> tuple[str, str]:
    """Namespace and name."""
    return each["metadata"]["namespace"], each["metadata"]["name"]


def component_of(pod: Pod) -> str:
    return (pod.metadata.labels or {}).get("component", "")


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


def answers_kueue(pod: Object) -> bool:
    return any("--card-fit" in (container.get("args") or ()) for container in pod["spec"]["containers"])


async def read_facts(
    client: KubeClient,
    *,
    node_label: str = LABEL_SHARED,
    wants_cards: bool = False,
    places: Sequence[tuple[str, str]] = (),
    source: UsageSource | None = None,
) -> Facts:
    """Read everything from the API server once. KubeError if it does not answer, or shows no node.

    `places`: namespace and name of services whose endpoints are needed besides ours. `source`: of usage.
    """
    reader = Reader(client)
    cluster = await read_cluster(client, source, reader=reader)
    if cluster.problems and not any(cluster.usage) and EXPORTER in map(component_of, cluster.pods):
        reader.unreadable.append("exporters")
    services, hooks, plugins, device_slices, quotas, components = await asyncio.gather(
        _services(reader),
        with_kinds(reader, HOOKS),
        reader.list(PODS, labels=PLUGIN_LABELS),
        reader.list(RESOURCE_SLICES),
        with_kinds(reader, LIMITS),
        reader.list(SERVICES, labels="app=gpushare"),
    )
    hooks = [hook for hook in hooks if is_own_hook(hook)]
    called = {service for hook in hooks if (service := hook_service(hook)) is not None}
    own = set(map(key_of, services))
    others = sorted({space for space, _ in own} - {SYSTEM_NAMESPACE})
    secrets, config_maps, slices = await asyncio.gather(
        _each(reader.one(SECRETS, f"{name}-tls", space) for space, name in sorted(called)),
        _each(reader.list(CONFIG_MAPS, space) for space in others),
        _each(
            reader.list(SLICES, space, labels=f"kubernetes.io/service-name={name}")
            for space, name in sorted({*places, *called, *own})
        ),
    )
    known = cluster.fields() | {"config_maps": [*cluster.config_maps, *chain(*config_maps)]}
    return Facts(
        **known,
        plugins=plugins,
        **await _about_rights(reader, cluster, plugins),
        schedulers=await reader.list(PODS.as_dict(), SYSTEM_NAMESPACE, labels=SCHEDULER_LABELS),
        services=services,
        slices=[*chain(*slices)],
        hooks=hooks,
        secrets=[*chain(*secrets)],
        device_slices=device_slices,
        classes=await reader.list(DEVICE_CLASSES) if cluster.claims else (),
        managers=await reader.list(PODS.as_dict(), SYSTEM_NAMESPACE, labels=MANAGER_LABELS)
        if cluster.claims
        else (),
        quotas=quotas,
        components=components,
        node_label=node_label,
        wants_cards=wants_cards,
    )


async def _each(answers: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    return list(await asyncio.gather(*answers))


LIMITS = (QUOTAS, LIMIT_RANGES)


async def with_kinds(
    reader: Reader, resources: Sequence[Resource[Object]], namespace: str = ""
) -> list[Object]:
    """Items of a list lack their kind."""
    return [item | {"kind": each.kind} for each in resources for item in await reader.list(each, namespace)]


async def _services(reader: Reader) -> list[Object]:
    """The extender's: the vendor's by name, ours under another name by label."""
    named = await reader.list(SERVICES, fields=f"metadata.name={EXTENDER}")
    labelled = await reader.list(SERVICES, labels=f"component={EXTENDER}")
    return list({key_of(each): each for each in (*named, *labelled)}.values())


async def _about_rights(reader: Reader, cluster: Cluster, plugins: Sequence[Pod]) -> dict[str, Any]:
    reviews, client = ACCESS_REVIEWS.plural, reader.client
    claiming = {name for name, node in cluster.by_name.items() if rules_of(node.metadata.labels or {}).claims}
    found = [await reader.asked(kind.plural, client.all(kind), None) for kind in POLICIES]
    policies = [
        each | {"kind": kind.kind}
        for kind, listed in zip(POLICIES, found, strict=True)
        for each in listed or ()
    ]
    own_pods = await reader.list(PODS.as_dict(), labels=TOKENS_SHOWN)
    return {
        "missing_rights": await reader.asked(reviews, missing_rights(client, plugins, claiming), {}),
        "excess_rights": await reader.asked(reviews, excess_rights(client, cluster.pods), {}),
        "policies": None if None in found else policies,
        "own_pods": own_pods,
        "admission_checks": await reader.list(ADMISSION_CHECKS.as_dict())
        if any(map(answers_kueue, own_pods))
        else (),
    }


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
