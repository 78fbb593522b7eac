"""Checks of kubelets: do they reject pods that were sent there, and does something run without its pod?"""

from __future__ import annotations

from collections.abc import Iterator

from gpuslice.adapters.kube.views import node_view
from gpuslice.core.contract import NODE_ORPHANS
from gpuslice.core.rejections import NODE_REASONS
from gpuslice.core.words import counted
from gpuslice.diagnosis.doctor.facts import PLUGIN_LABELS, Facts, Finding, Level


def rejecting(facts: Facts) -> Iterator[Finding]:
    """Nodes whose kubelet rejected pods in the last half hour and has let none start since."""
    for name, opens_s, rejections in facts.rejections.by_node():
        last, is_closed = rejections[-1], opens_s > facts.now.timestamp()
        who = counted(len(rejections), "pod")
        fix = f"kubectl describe node {name}, and the log of kubelet there, name the cause"
        if last.reason not in NODE_REASONS:
            fix = (
                f"kubectl -n kube-system delete pod -l {PLUGIN_LABELS} --field-selector "
                f"spec.nodeName={name}; if it rejects pods after that too, see the log of kubelet there"
            )
        yield Finding(
            Level.ERROR if is_closed else Level.WARNING,
            f"node {name}",
            f"kubelet rejected {who} that asked for cards, the last one with {last.reason} ({last.message}); "
            f"new ones are sent there {'later' if is_closed else 'last'}",
            fix,
        )


def orphans(facts: Facts) -> Iterator[Finding]:
    """Containers that hold cards though their pod is gone."""
    for node in facts.nodes:
        for each in node_view(node).orphans:
            cards = ", ".join(f"{counted(part.units, 'unit')} of card {part.card}" for part in each.slices)
            yield Finding(
                Level.WARNING,
                f"node {node.metadata.name}",
                f"pod {each.pod} is gone and its containers still hold {cards}: nothing is placed there",
                f"end its processes on the machine, or restart the machine if they cannot be killed; if no "
                f"device plugin of gpuslice runs there any more: kubectl annotate node {node.metadata.name} "
                f"{NODE_ORPHANS}-",
            )
