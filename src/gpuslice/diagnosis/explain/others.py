"""Explains pods that ask for no part of a card: who offers what they ask for, if anybody does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpuslice.adapters.kube import objects
from gpuslice.core import kai
from gpuslice.core.contract import EITHER_MEMORY, EXCLUSIVE_GPU
from gpuslice.core.ledger import Ledger
from gpuslice.core.lookalikes import pod_label_hints, resource_hint, resource_hints
from gpuslice.core.mode import rules_of


def of_others(pod: objects.Pod, ledger: Ledger, nodes: Mapping[str, objects.Node]) -> Iterator[str]:
    """What a pod that asks for no part of a card waits for, as far as the nodes show it."""
    yield from none_of_ours(pod)
    yield from label_hints(pod)
    yield from about_scheduler(pod)
    offered = [node.status.allocatable or {} for node in nodes.values()]
    for name in of_nvidia(pod):
        if any(each.get(name, "0") != "0" for each in offered):
            continue
        if name != EXCLUSIVE_GPU or not any(_shares_cards(ledger, node) for node in nodes.values()):
            yield f"No node offers {name}: see that NVIDIA's device plugin runs on the nodes with cards."
            continue
        yield (
            "No node offers whole cards, because those with cards share them: ask for a part of one "
            f"({EITHER_MEMORY}), or label a node cgpu=false."
        )


def _shares_cards(ledger: Ledger, node: objects.Node) -> bool:
    state = ledger.state(node.metadata.name)
    return (state is not None and state.node.divides_cards) or rules_of(node.metadata.labels or {}).claims


def about_scheduler(pod: objects.Pod) -> Iterator[str]:
    """A scheduler that has said nothing about the pod, and may not exist."""
    seen = any(each.type == "PodScheduled" and each.reason for each in pod.status.conditions or ())
    if pod.spec.scheduler_name not in ("", "default-scheduler") and not seen:
        yield (
            f"It waits for scheduler {pod.spec.scheduler_name}: make sure that a scheduler of that name runs."
        )


def none_of_ours(pod: objects.Pod) -> Sequence[str]:
    """Who is responsible for it; or what was meant, if a name is nearly ours."""
    if hints := resource_hints(resources_of(pod)):
        return hints
    asked = of_nvidia(pod)
    if EXCLUSIVE_GPU in asked:
        return [f"It asks for whole cards ({EXCLUSIVE_GPU}), so gpuslice does not decide where it goes."]
    if asked:
        return [
            f"It asks for {asked[0]} of NVIDIA's device plugin, so gpuslice does not decide where it goes."
        ]
    if theirs := _of_kai(pod):
        return [
            f"Its annotation {theirs[0]} is KAI-Scheduler's, which gpuslice leaves alone unless the "
            "webhook translates it (chart value webhook.kai.enabled)."
        ]
    return ["It asks for no part of a card, so gpuslice does not decide where it goes."]


def means_a_part(pod: objects.Pod) -> bool:
    """Whether it asks for a part of a card with a name that is nearly ours, or another system's."""
    return bool(resource_hints(resources_of(pod)) or _of_kai(pod))


def _of_kai(pod: objects.Pod) -> list[str]:
    return kai.annotations_of(pod.metadata.annotations or {})


def label_hints(pod: objects.Pod) -> list[str]:
    """Labels of the pod that are nearly ours."""
    return [f"Its {hint}" for hint in pod_label_hints(pod.metadata.labels or {})]


def resources_of(pod: objects.Pod) -> list[str]:
    """Names of resources that its containers limit or request."""
    containers = [*pod.spec.containers, *(pod.spec.init_containers or ())]
    given = [each.resources for each in containers if each.resources is not None]
    return [name for each in given for name in {**(each.limits or {}), **(each.requests or {})}]


def of_nvidia(pod: objects.Pod) -> list[str]:
    """What it asks of NVIDIA's device plugin: whole cards, MIG devices, renamed time slices."""
    containers = [*pod.spec.containers, *(pod.spec.init_containers or ())]
    limits = [each.resources.limits or {} for each in containers if each.resources]
    asked = dict.fromkeys(name for each in limits for name, amount in each.items() if amount != "0")
    return [name for name in asked if name.startswith("nvidia.com/") and not resource_hint(name)]
