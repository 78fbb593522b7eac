"""Checks of the services: the extender and the webhook."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from datetime import datetime, timedelta

from gpuslice.adapters.kube.resources import SERVICES
from gpuslice.adapters.web.certificate import ends
from gpuslice.core.contract import SYSTEM_NAMESPACE
from gpuslice.diagnosis.doctor.facts import (
    EXTENDER,
    SLICES,
    Facts,
    Finding,
    Level,
    hook_service,
)

SOON = timedelta(days=30)


def extender(facts: Facts) -> Iterator[Finding]:
    """A ready extender must answer kube-scheduler, and only one system of extenders."""
    if not facts.services and facts.knows(SERVICES):
        yield Finding(
            Level.ERROR,
            f"service {EXTENDER}",
            "does not exist: nothing places pods on cards",
            "install the chart, or check whether it was installed under other names",
        )
    places = [(each["metadata"]["namespace"], each["metadata"]["name"]) for each in facts.services]
    for space, name in places:
        if not _ready(facts, space, name):
            yield Finding(
                Level.ERROR,
                f"service {space}/{name}",
                "has no ready endpoint: every pod that shares a card waits",
                f"kubectl -n {space} logs deployment/{name}; its /readyz says what it waits for",
            )
    for space, name in places[1:]:
        yield Finding(
            Level.ERROR,
            f"service {space}/{name}",
            f"is of another installation than {'/'.join(places[0])}: both give out the same cards",
            "keep one release and uninstall the other: helm list --all-namespaces",
        )


def _ready(facts: Facts, namespace: str, name: str) -> bool:
    return not facts.knows(SLICES, namespace) or any(
        (endpoint.get("conditions") or {}).get("ready", True)
        for found in facts.slices_of(namespace, name)
        for endpoint in found.get("endpoints") or []
    )


# -- the webhook -------------------------------------------------------------------------------------------

GUARDS = ("own-node.gpuslice.io", "records.gpuslice.io")
"""Of Kubernetes before 1.30: asked about an agent's writes alone, and what would be refused anyway."""


def webhook(facts: Facts) -> Iterator[Finding]:
    """Does it run, can it lock anybody out, and when do its certificates expire?"""
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
            rules = (each.get("namespaceSelector") or {}).get("matchExpressions") or []
            spared = any(
                rule.get("operator") == "NotIn" and SYSTEM_NAMESPACE in (rule.get("values") or [])
                for rule in rules
            )
            if each.get("failurePolicy") == "Fail" and not spared and each["name"] not in GUARDS:
                yield Finding(
                    Level.ERROR,
                    where,
                    f"failurePolicy is Fail and {SYSTEM_NAMESPACE} is not left out: without the webhook the "
                    "cluster cannot repair itself",
                    f"leave {SYSTEM_NAMESPACE} out by namespaceSelector, or set failurePolicy: Ignore",
                )
            if bundle := (each.get("clientConfig") or {}).get("caBundle"):
                runs_out = ends(base64.b64decode(bundle))
                yield from _ending(where, "certificate authority", runs_out, facts.now)
            else:
                yield Finding(
                    Level.WARNING,
                    where,
                    "has no caBundle: the API server cannot trust the webhook",
                    "see that cert-manager's CA injector runs, or give the chart "
                    "webhook.certificate.caBundle",
                )
    for secret in facts.secrets:
        meta = secret["metadata"]
        shown = ends(base64.b64decode((secret.get("data") or {}).get("tls.crt", "")))
        yield from _ending(f"secret {meta['namespace']}/{meta['name']}", "certificate", shown, facts.now)


def _ending(where: str, what: str, end: datetime | None, now: datetime) -> Iterator[Finding]:
    if end is None:
        yield Finding(Level.WARNING, where, f"its {what} cannot be read", "see that it is PEM, in base64")
    elif end < now:
        yield Finding(Level.ERROR, where, f"its {what} ran out on {end:%Y-%m-%d}", _RENEW)
    elif end - now < SOON:
        yield Finding(Level.WARNING, where, f"its {what} runs out on {end:%Y-%m-%d}", _RENEW)


_RENEW = "delete the Secret and upgrade the release to have it recreated; cert-manager renews its own"
