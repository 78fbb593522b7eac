"""All checks of a cluster, as one list of findings."""

from __future__ import annotations

from gpuslice.diagnosis.doctor import (
    claims,
    nodes,
    plugins,
    pods,
    queues,
    quotas,
    rejections,
    release,
    scheduler,
    services,
    trust,
    usage,
)
from gpuslice.diagnosis.doctor.facts import Facts, Finding, Level

WATCHED_CHECKS = (
    plugins.somewhere,
    nodes.shared_nodes,
    nodes.unwell,
    plugins.updates,
    nodes.one_unit,
    nodes.one_set_of_names,
    rejections.rejecting,
    rejections.orphans,
    pods.pods_and_cards,
    pods.running_without_devices,
    pods.misspelt,
    pods.waiting,
    pods.falling_over,
    nodes.promised_twice,
    nodes.cards_out_of_use,
    claims.nodes_of_claims,
    claims.both_kinds,
    usage.past_request,
    services.extender,
    services.webhook,
)
"""What a process can look at that watches: neither Secrets nor kube-scheduler's own pods. Each check is one
function from facts to findings.
"""
CHECKS = (
    *WATCHED_CHECKS,
    plugins.rights,
    release.webhook_configurations,
    release.exporters,
    release.versions,
    release.console,
    release.failed,
    trust.policies,
    trust.excess,
    trust.in_the_clear,
    claims.drivers_of_others,
    claims.device_class,
    claims.claims_made_slowly,
    scheduler.scheduler_configuration,
    scheduler.second_scheduler,
    quotas.quotas,
    queues.card_fit,
)


def examine(facts: Facts) -> list[Finding]:
    """What the checks find, and what could not be checked."""
    found = [finding for check in CHECKS for finding in check(facts)]
    found += [
        Finding(
            Level.NOTE,
            what,
            "may not be read, so what depends on it was not checked",
            "run gpuslice doctor as somebody who may, or ask for the right",
        )
        for what in facts.unreadable
    ]
    return found


def worst_first(findings: list[Finding]) -> list[Finding]:
    order = list(Level)
    return sorted(findings, key=lambda each: order.index(each.level))
