"""Checks of what runs around the cards: the extender, the scheduler's configuration, the webhook."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from gpuslice.adapters.kube.objects import Pod
from gpuslice.adapters.kube.resources import CONFIG_MAPS, PODS, SERVICES
from gpuslice.adapters.kube.views import pod_view
from gpuslice.apps.cli.certificate import ends
from gpuslice.apps.cli.doctor_facts import (
    EXTENDER,
    SLICES,
    Facts,
    Finding,
    Level,
    Object,
    hook_service,
    is_ready,
)
from gpuslice.core.contract import GPU_MEM, SYSTEM_NAMESPACE

SOON = timedelta(days=30)
_DEFAULT = "default-scheduler"
_EVERYBODY_BELOW = 100  # nodes; kube-scheduler looks at all of so few


def extender(facts: Facts) -> Iterator[Finding]:
    """Somebody must be there to answer kube-scheduler, and be ready."""
    if not facts.services and facts.knows(SERVICES):
        yield Finding(
            Level.ERROR,
            f"service {EXTENDER}",
            "is not there: nobody places pods on cards",
            "install the chart, or see that it was not installed under other names",
        )
    for service in facts.services:
        space = service["metadata"]["namespace"]
        if not _ready(facts, space, EXTENDER):
            yield Finding(
                Level.ERROR,
                f"service {space}/{EXTENDER}",
                "has no ready endpoint: every pod that shares a card waits",
                f"kubectl -n {space} logs deployment/{EXTENDER}; its /readyz says what it waits for",
            )


def _ready(facts: Facts, namespace: str, name: str) -> bool:
    return not facts.knows(SLICES, namespace) or any(
        (endpoint.get("conditions") or {}).get("ready", True)
        for found in facts.slices
        if found["metadata"]["namespace"] == namespace
        and (found["metadata"].get("labels") or {}).get("kubernetes.io/service-name") == name
        for endpoint in found.get("endpoints") or []
    )


# -- kube-scheduler ----------------------------------------------------------------------------------------


def scheduler_configuration(facts: Facts) -> Iterator[Finding]:
    """Every configuration that can be read and calls an extender for GPU memory; and whether there is one."""
    found = list(_configurations(facts))
    for where, configuration, section in found:
        yield from _section(where, section)
        yield from _sampling(where, configuration, len(facts.nodes))
    files = sorted({file for pod in facts.schedulers if (file := _config_file(pod))})
    if found:
        yield from ([] if files else _elsewhere(facts, _profiles(found)))
    elif files:
        yield Finding(
            Level.NOTE,
            "kube-scheduler",
            f"is configured by {files[0]} on its host, which cannot be read from here",
            f"see there that an extender manages {GPU_MEM}, and percentageOfNodesToScore is 100",
        )
    elif facts.services and _all_read(facts):
        yield Finding(
            Level.ERROR,
            "kube-scheduler",
            f"no configuration was found in which an extender manages {GPU_MEM}",
            "enable the chart's second scheduler, or give kube-scheduler the extender section with --config",
        )


def second_scheduler(facts: Facts) -> Iterator[Finding]:
    """Ours must run: while it is away nobody looks at the pods that name it, and no event tells them."""
    for each in facts.config_maps:
        meta = each.metadata
        ours = (meta.labels or {}).get("app.kubernetes.io/name") == "gpuslice"
        if not ours or not any("KubeSchedulerConfiguration" in text for text in (each.data or {}).values()):
            continue
        if facts.knows(PODS) and not any(_runs(pod, meta.namespace, meta.name) for pod in facts.pods):
            yield Finding(
                Level.ERROR,
                f"scheduler {meta.namespace}/{meta.name}",
                "has no ready pod: pods that name it wait, and no event says why",
                f"kubectl -n {meta.namespace} describe deployment {meta.name}; kubectl -n {meta.namespace} "
                f"logs deployment/{meta.name}",
            )


def _runs(pod: Pod, namespace: str, component: str) -> bool:
    labels = pod.metadata.labels or {}
    return pod.metadata.namespace == namespace and labels.get("component") == component and is_ready(pod)


def _all_read(facts: Facts) -> bool:
    """Whether we saw every place where a configuration is looked for."""
    spaces = {SYSTEM_NAMESPACE, *(each["metadata"]["namespace"] for each in facts.services)}
    return facts.knows(PODS, SYSTEM_NAMESPACE) and all(facts.knows(CONFIG_MAPS, space) for space in spaces)


def _configurations(facts: Facts) -> Iterator[tuple[str, Object, Object]]:
    import yaml

    for config_map in facts.config_maps:
        for key, text in (config_map.data or {}).items():
            if "KubeSchedulerConfiguration" not in text:
                continue
            try:
                configuration = yaml.safe_load(text)
            except yaml.YAMLError:
                continue
            for section in _extenders(configuration):
                name = f"{config_map.metadata.namespace}/{config_map.metadata.name}"
                yield f"ConfigMap {name}, {key}", configuration, section


def _extenders(configuration: Any) -> Iterator[Object]:
    if not isinstance(configuration, dict):
        return
    for section in configuration.get("extenders") or []:
        if not isinstance(section, dict):
            continue
        if any(each.get("name") == GPU_MEM for each in section.get("managedResources") or []):
            yield section


def _profiles(found: list[tuple[str, Object, Object]]) -> set[str]:
    """The scheduler names that the configurations answer to."""
    return {
        profile.get("schedulerName") or _DEFAULT
        for _, configuration, _ in found
        for profile in configuration.get("profiles") or [{}]
    }


def _elsewhere(facts: Facts, known: set[str]) -> Iterator[Finding]:
    """Pods without a card whose scheduler never asks for one."""
    astray: dict[str, list[str]] = {}
    for found in facts.pods:
        pod, scheduler = pod_view(found), found.spec.scheduler_name or _DEFAULT
        if pod.request is not None and pod.placement is None and scheduler not in known:
            astray.setdefault(scheduler, []).append(pod.key)
    for scheduler, pods in sorted(astray.items()):
        yield Finding(
            Level.ERROR,
            f"scheduler {scheduler}",
            f"calls no extender that can be found, and {len(pods)} pods without a card name it: {pods[0]} …",
            f"give them schedulerName {sorted(known)[0]}; the webhook does it for pods that left it open",
        )


def _section(where: str, section: Object) -> Iterator[Finding]:
    if not section.get("bindVerb"):
        yield Finding(
            Level.ERROR,
            where,
            "the extender has no bindVerb: pods are bound without a card",
            "set bindVerb: bind, and take it from any other extender: only one may bind",
        )
    if section.get("ignorable"):
        yield Finding(
            Level.ERROR,
            where,
            "the extender is ignorable: while it is away, pods are placed on cards that are full",
            "set ignorable: false",
        )
    if not section.get("nodeCacheCapable"):
        yield Finding(
            Level.WARNING,
            where,
            "nodeCacheCapable is not set: kube-scheduler sends whole nodes, 10 to 20 KB each, for every pod",
            "set nodeCacheCapable: true",
        )
    if any(each.get("ignoredByScheduler") for each in section["managedResources"]):
        yield Finding(
            Level.WARNING,
            where,
            f"{GPU_MEM} is ignoredByScheduler: nodes without cards fill what the extender is shown",
            "set ignoredByScheduler: false",
        )
    if not section.get("preemptVerb"):
        yield Finding(
            Level.NOTE,
            where,
            "the extender has no preemptVerb: victims are picked by the node's sum, not by card",
            "set preemptVerb: preempt",
        )


def _sampling(where: str, configuration: Object, nodes: int) -> Iterator[Finding]:
    """kube-scheduler shows an extender only as many fitting nodes as it wants to score."""
    percentage = configuration.get("percentageOfNodesToScore") or 0
    shown = sample_size(nodes, percentage if isinstance(percentage, int) else 0)
    if shown < nodes:
        yield Finding(
            Level.WARNING,
            where,
            f"the extender sees {shown} of {nodes} nodes: pods wait while cards on the others are free",
            "set percentageOfNodesToScore: 100",
        )


def sample_size(nodes: int, percentage: int) -> int:
    """How many feasible nodes kube-scheduler looks for (``numFeasibleNodesToFind`` of 1.36)."""
    if nodes < _EVERYBODY_BELOW or percentage >= 100:
        return nodes
    percentage = percentage or max(5, 50 - nodes // 125)
    return max(_EVERYBODY_BELOW, nodes * percentage // 100)


def _config_file(pod: Object) -> str:
    for container in pod["spec"]["containers"]:
        for word in [*(container.get("command") or []), *(container.get("args") or [])]:
            if word.startswith("--config="):
                return str(word.removeprefix("--config="))
    return ""


# -- the webhook -------------------------------------------------------------------------------------------


def webhook(facts: Facts) -> Iterator[Finding]:
    """Is it there, may it lock anybody out, and when do its certificates run out?"""
    for hook in facts.hooks:
        where = f"{hook['kind']} {hook['metadata']['name']}"
        service = hook_service(hook)
        if service is not None and not _ready(facts, *service):
            yield Finding(
                Level.WARNING,
                where,
                f"service {service[0]}/{service[1]} has no ready endpoint: pods are stored unchecked",
                f"kubectl -n {service[0]} logs deployment/{service[1]}",
            )
        for each in hook.get("webhooks") or []:
            yield from _lockout(where, each)
            yield from _bundle(facts, where, each)
    for secret in facts.secrets:
        meta = secret["metadata"]
        shown = ends(base64.b64decode((secret.get("data") or {}).get("tls.crt", "")))
        yield from _ending(f"secret {meta['namespace']}/{meta['name']}", "certificate", shown, facts.now)


def _lockout(where: str, hook: Object) -> Iterator[Finding]:
    rules = (hook.get("namespaceSelector") or {}).get("matchExpressions") or []
    spared = any(
        rule.get("operator") == "NotIn" and SYSTEM_NAMESPACE in (rule.get("values") or []) for rule in rules
    )
    if hook.get("failurePolicy") == "Fail" and not spared:
        yield Finding(
            Level.ERROR,
            where,
            f"failurePolicy is Fail and {SYSTEM_NAMESPACE} is not left out: without the webhook the cluster "
            "cannot mend itself",
            f"leave {SYSTEM_NAMESPACE} out by namespaceSelector, or set failurePolicy: Ignore",
        )


def _bundle(facts: Facts, where: str, hook: Object) -> Iterator[Finding]:
    bundle = (hook.get("clientConfig") or {}).get("caBundle")
    if not bundle:
        yield Finding(
            Level.WARNING,
            where,
            "has no caBundle: the API server cannot trust the webhook",
            "see that cert-manager's CA injector runs, or give the chart webhook.certificate.caBundle",
        )
        return
    yield from _ending(where, "certificate authority", ends(base64.b64decode(bundle)), facts.now)


def _ending(where: str, what: str, end: datetime | None, now: datetime) -> Iterator[Finding]:
    if end is None:
        yield Finding(Level.WARNING, where, f"its {what} cannot be read", "see that it is PEM, in base64")
    elif end < now:
        yield Finding(Level.ERROR, where, f"its {what} ran out on {end:%Y-%m-%d}", _RENEW)
    elif end - now < SOON:
        yield Finding(Level.WARNING, where, f"its {what} runs out on {end:%Y-%m-%d}", _RENEW)


_RENEW = "delete the Secret and upgrade the release to have it made anew; cert-manager renews its own"
