"""Checks of what ought to be there: an installed part of the release names what it cannot do without."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta

from gpuslice.adapters.kube.resources import PODS
from gpuslice.adapters.kube.views import pod_view
from gpuslice.core.errors import printable
from gpuslice.core.words import counted
from gpuslice.diagnosis.doctor.facts import (
    EXPORTER,
    HOOKS,
    Facts,
    Finding,
    Level,
    component_of,
    hook_service,
    is_ready,
    time_of,
)

WEBHOOK, CONSOLE = "gpuslice-webhook", "gpuslice-console"
UPGRADE = (
    "helm upgrade RELEASE CHART --reset-then-reuse-values makes it again (helm list -A names the release)"
)
RECENT = timedelta(hours=1)
"""What failed earlier, and has not since, is over."""
MANY = 3
"""So many failed pods on one node, for one reason, are no accident."""


def webhook_configurations(facts: Facts) -> Iterator[Finding]:
    """A webhook that nobody calls: pods without a scheduler then go to the default one, and get no card."""
    for namespace, name in sorted(facts.places_of(WEBHOOK)):
        for resource in HOOKS:
            called = any(
                hook["kind"] == resource.kind and (hook_service(hook) or (namespace,))[0] == namespace
                for hook in facts.hooks
            )
            if not called and facts.knows(resource):
                yield Finding(
                    Level.ERROR,
                    f"service {namespace}/{name}",
                    f"is called by no {resource.kind}: new GPU pods are stored as written, go to the default "
                    "scheduler, and get no card",
                    UPGRADE,
                )


def exporters(facts: Facts) -> Iterator[Finding]:
    """Each node that shares cards is measured, if any is."""
    if not facts.places_of(EXPORTER) or not facts.knows(PODS):
        return
    found = [pod for pod in facts.pods if component_of(pod) == EXPORTER]
    for node in facts.nodes:
        name = node.metadata.name
        if not (facts.is_to_share(node) or facts.is_of_claims(node)):
            continue
        here = [pod for pod in found if pod.spec.node_name == name]
        if any(map(is_ready, here)):
            continue
        what = f"exporter {here[0].metadata.name} is not ready there" if here else "has no exporter"
        fix = (
            f"kubectl -n {here[0].metadata.namespace} describe pod {here[0].metadata.name}"
            if here
            else f"kubectl describe ds -A -l component={EXPORTER}: its node selector, taints, image"
        )
        what = f"{what}: what its cards and pods use is not known, and no alert covers it"
        yield Finding(Level.WARNING, f"node {name}", what, fix)


def versions(facts: Facts) -> Iterator[Finding]:
    """Parts of different versions, as an upgrade that stopped half way leaves them."""
    images: dict[str, set[str]] = {}
    for pod in facts.pods:
        labels = pod.metadata.labels or {}
        version = labels.get("app.kubernetes.io/version")
        if labels.get("app") == "gpushare" and version and "component" in labels:
            images.setdefault(version, set()).add(labels["component"])
    if len(images) > 1:
        parts = "; ".join(f"{version}: {', '.join(sorted(of))}" for version, of in sorted(images.items()))
        yield Finding(
            Level.WARNING,
            "cluster",
            f"parts of gpuslice have different versions ({parts})",
            "kubectl rollout status of each; helm upgrade or helm rollback brings them to one",
        )


def console(facts: Facts) -> Iterator[Finding]:
    """A console that is reachable from outside without TLS: bearer tokens pass in the clear."""
    for each in facts.components:
        meta, spec = each["metadata"], each.get("spec") or {}
        outside = spec.get("type") in {"LoadBalancer", "NodePort"}
        secure = any(
            port.get("name") == "https" or port.get("port") == 443 for port in spec.get("ports") or ()
        )
        if (meta.get("labels") or {}).get("component") == CONSOLE and outside and not secure:
            yield Finding(
                Level.WARNING,
                f"service {meta['namespace']}/{meta['name']}",
                f"is reachable from outside ({spec['type']}) without TLS: its users' tokens can be read",
                "put an Ingress or Gateway with TLS before it and make the Service ClusterIP",
            )


def failed(facts: Facts) -> Iterator[Finding]:
    """Pods that failed in numbers: one that fails is its owner's affair, many of one node are ours."""
    found: Counter[tuple[str, str]] = Counter()
    for each in facts.failed:
        states = [status.state or {} for status in each.status.container_statuses or ()]
        ends = (time_of((state.get("terminated") or {}).get("finishedAt")) for state in states)
        ended = max(filter(None, ends), default=time_of(each.metadata.creation_timestamp))
        recent = ended is None or facts.now - ended < RECENT
        if recent and pod_view(each).request is not None:
            found[each.spec.node_name or "no node", each.status.reason or "Error"] += 1
    for (node, reason), number in found.items():
        if number >= MANY:
            yield Finding(
                Level.WARNING,
                f"node {node}",
                f"{counted(number, 'pod')} that asked for part of a card failed there ({printable(reason)})",
                f"gpuslice explain says why of each: kubectl get pod -A --field-selector "
                f"status.phase=Failed,spec.nodeName={node}. kubectl delete with the same clears them",
            )
