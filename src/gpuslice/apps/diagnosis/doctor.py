"""All checks of a cluster, as one list of findings."""

from __future__ import annotations

from gpuslice.apps.diagnosis import (
    doctor_claims,
    doctor_nodes,
    doctor_plugins,
    doctor_pods,
    doctor_quotas,
    doctor_rejections,
    doctor_release,
    doctor_rights,
    doctor_scheduler,
    doctor_services,
    doctor_usage,
)
from gpuslice.apps.diagnosis.doctor_facts import Facts, Finding, Level

WATCHED_CHECKS = (
    doctor_plugins.somewhere,
    doctor_nodes.shared_nodes,
    doctor_nodes.unwell,
    doctor_plugins.updates,
    doctor_nodes.one_unit,
    doctor_nodes.one_set_of_names,
    doctor_rejections.rejecting,
    doctor_rejections.orphans,
    doctor_pods.pods_and_cards,
    doctor_pods.running_without_devices,
    doctor_pods.misspelt,
    doctor_pods.waiting,
    doctor_pods.falling_over,
    doctor_nodes.promised_twice,
    doctor_nodes.cards_out_of_use,
    doctor_claims.nodes_of_claims,
    doctor_claims.both_kinds,
    doctor_usage.past_request,
    doctor_services.extender,
    doctor_services.webhook,
)
"""What a process can look at that watches: neither Secrets nor kube-scheduler's own pods. Each check is one
function from facts to findings.
"""
CHECKS = (
    *WATCHED_CHECKS,
    doctor_plugins.rights,
    doctor_release.webhook_configurations,
    doctor_release.exporters,
    doctor_release.versions,
    doctor_release.console,
    doctor_release.failed,
    doctor_rights.policies,
    doctor_rights.excess,
    doctor_rights.in_the_clear,
    doctor_claims.drivers_of_others,
    doctor_claims.device_class,
    doctor_claims.claims_made_slowly,
    doctor_scheduler.scheduler_configuration,
    doctor_scheduler.second_scheduler,
    doctor_quotas.quotas,
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
