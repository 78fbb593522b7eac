"""Checks of what a stolen token is worth: policies, needless rights, TLS where tokens are shown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuslice.core.contract import of_our_chart
from gpuslice.diagnosis.doctor.facts import Facts, Finding, Level

POLICIES = {
    "agent-own-node": "whoever has the token of one node's agent may write all nodes and their pods",
    "annotations": "who makes pods may write what gpuslice records of them",
}
"""By the end of their names: before it a release may have its own."""
CLAIM_POLICIES = {
    "dra-own-node": "whoever has the token of one node's agent may write claims and cards of all nodes",
    "shared-claims": "a pod that comes to share a claim may hide what enforces the limit",
}
TOKENS_SHOWN = {"gpuslice-console": "--access=token", "gpushare-schd-extender": "--debug-tokens"}


def policies(facts: Facts) -> Iterator[Finding]:
    """Of an API server that knows policies, which of the chart's are absent or not enforced."""
    if facts.policies is None or not facts.plugins:
        return
    wanted = POLICIES | (CLAIM_POLICIES if facts.claims is not None else {})
    enforced = {
        each["spec"]["policyName"]
        for each in facts.policies
        if each["kind"].endswith("Binding")
        and "Deny" in (each["spec"].get("validationActions") or ())
        and not each["spec"].get("paramRef")
        and not _narrows(each["spec"].get("matchResources") or {})
    }
    made = [each for each in facts.policies if not each["kind"].endswith("Binding")]
    for name, risk in wanted.items():
        found = [
            each
            for each in made
            if each["metadata"]["name"].endswith(f"-{name}") and of_our_chart(each["metadata"].get("labels"))
        ]
        if not any(
            each["metadata"]["name"] in enforced
            and each["spec"].get("failurePolicy", "Fail") == "Fail"
            and not _narrows(each["spec"].get("matchConstraints") or {})
            for each in found
        ):
            yield Finding(
                Level.WARNING,
                f"ValidatingAdmissionPolicy gpuslice-{name}",
                f"{'is not enforced' if found else 'does not exist'}: {risk}",
                "upgrade the release on this version of Kubernetes, with devicePlugin.ownNodeOnly and "
                "webhook.protectAnnotations as they are by default",
            )


def _narrows(match: Mapping[str, Any]) -> bool:
    """Whether it leaves out objects by their labels or namespaces, or rules: ours leave out none."""
    named = ("namespaceSelector", "objectSelector", "excludeResourceRules")
    return any(match.get(each) for each in named)


def excess(facts: Facts) -> Iterator[Finding]:
    """Accounts with rights that no process of ours uses: another role is bound to them."""
    for (namespace, account), rights in facts.excess_rights.items():
        yield Finding(
            Level.WARNING,
            f"account {namespace}/{account}",
            f"may also {', '.join(map(str, rights))}: more than the chart grants",
            f"kubectl get clusterrolebindings,rolebindings -A -o wide | grep {account}",
        )


def in_the_clear(facts: Facts) -> Iterator[Finding]:
    """Servers that are shown bearer tokens without TLS."""
    seen = set()
    for pod in facts.own_pods:
        component = (pod["metadata"].get("labels") or {}).get("component", "")
        arguments = [each for container in pod["spec"]["containers"] for each in container.get("args") or ()]
        is_plain = not any(each.startswith("--tls-certificate=") for each in arguments)
        if TOKENS_SHOWN.get(component) in arguments and is_plain and component not in seen:
            seen.add(component)
            where = f"deployment {pod['metadata']['namespace']}/{component}"
            yield Finding(
                Level.WARNING,
                where,
                "is shown bearer tokens over plain HTTP: who can listen on the network can use them",
                "set console.tlsSecret or extender.certificate.source, or reach it by port-forward alone",
            )
