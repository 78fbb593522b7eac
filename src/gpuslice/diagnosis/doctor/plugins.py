"""Checks of the device plugin's pods: why does a node share nothing?"""

from __future__ import annotations

from collections.abc import Iterator

from gpuslice.adapters.kube.objects import Node, Pod
from gpuslice.adapters.kube.resources import PODS
from gpuslice.core.contract import EXCLUSIVE_GPU, LABEL_SCHEDULE
from gpuslice.core.quantity import whole_number
from gpuslice.diagnosis.doctor.facts import Facts, Finding, Level, amount, is_ready, names_of

_ON_ITS_WAY = ("", "ContainerCreating", "PodInitializing")  # reasons for which a container may wait a while


def somewhere(facts: Facts) -> Iterator[Finding]:
    """Without any node that should share its cards, no node is wrong, but nobody gets a card either."""
    offered = any(amount(node, names_of(node).memory) for node in facts.nodes)
    if offered or facts.labelled():
        return
    # the command names a node with whole cards if there is one
    whole = [node for node in facts.nodes if (node.status.capacity or {}).get(EXCLUSIVE_GPU, "0") != "0"]
    name = whole[0].metadata.name if whole else "NODE"
    which = "which has cards" if whole else "where NODE is one with cards"
    fix = f"kubectl label node {name} --overwrite {facts.node_label}=true, {which}"
    if facts.wants_cards:
        fix += "; to pass without any, leave --want-cards out (of `helm test`: test.wantCards=false)"
    what = f"no node is labelled {facts.node_label}=true, so none offers parts of its cards"
    yield Finding(Level.ERROR if facts.wants_cards else Level.NOTE, "cluster", what, fix)


def not_offered(facts: Facts, node: Node) -> Finding:
    """What is wrong with a node that should share cards and does not."""
    name = node.metadata.name
    if found := problem_of_plugin(facts, node):
        what, fix = f"is labelled {_switch(facts, node)} and {found[0]}", found[1]
    elif whole_number((node.status.capacity or {}).get(names_of(node).memory)):
        what = f"has {names_of(node).memory} but none of it is allocatable: all of its cards are out of use"
        fix = f"see ConfigMap unhealthy-gpu-{name} in kube-system and the log of the device plugin there"
    else:
        what = "offers no part of its cards though a device plugin is ready there"
        fix = "kubelet has not registered it: see its log for kubelet.sock, and kubelet's log for the plugin"
    return Finding(Level.ERROR, f"node {name}", what, fix)


def _switch(facts: Facts, node: Node) -> str:
    """The label, with its value, by which an agent should run there."""
    labels = node.metadata.labels or {}
    label = facts.node_label if labels.get(facts.node_label) == "true" else LABEL_SCHEDULE
    return f"{label}={labels.get(label)}"


def problem_of_plugin(facts: Facts, node: Node) -> tuple[str, str] | None:
    """Why a node's agent cannot work, and what to do; None if a ready one runs there."""
    plugins = [pod for pod in facts.plugins if pod.spec.node_name == node.metadata.name]
    plugin = next((pod for pod in sorted(plugins, key=is_ready, reverse=True)), None)
    if plugin is None and not facts.knows(PODS):
        fix = "see the log of the device plugin there; its pods may not be read from here"
        return "offers no part of its cards", fix
    if plugin is None:
        # by label: the chart's fullnameOverride changes the name
        causes = "pod security, quota, taints, image"
        if _switch(facts, node).startswith(LABEL_SCHEDULE):
            causes = "taints, image, node affinity; the chart leaves it out with ackNodeLabel: false"
        fix = f"kubectl describe ds -A -l component=gpushare-device-plugin, its events: {causes}"
        return "no device plugin runs there", fix
    if not is_ready(plugin):
        what = f"device plugin {plugin.metadata.name} is not ready there{_reason(plugin)}"
        return what, _look(plugin)
    return None


def updates(facts: Facts) -> Iterator[Finding]:
    """The next agent is started next to the serving one: does it start?"""
    serving = {pod.spec.node_name: pod for pod in facts.plugins if is_ready(pod)}
    for pod in facts.plugins:
        before = serving.get(pod.spec.node_name)
        if before is not None and not is_ready(pod) and _waiting(pod)[0] not in _ON_ITS_WAY:
            yield Finding(
                Level.WARNING,
                f"pod {pod.metadata.namespace}/{pod.metadata.name}",
                f"does not start beside {before.metadata.name}, which goes on serving {pod.spec.node_name}"
                f"{_reason(pod)}",
                _look(pod),
            )


def rights(facts: Facts) -> Iterator[Finding]:
    """A plugin without them runs, but neither its node nor its pods learn about problems."""
    for (namespace, name), missing in facts.missing_rights.items():
        yield Finding(
            Level.ERROR,
            f"account {namespace}/{name}",
            f"runs the device plugin and may not {', '.join(map(str, missing))}",
            "have the chart grant it (rbac.create=true), or grant the same yourself",
        )


def _reason(pod: Pod) -> str:
    """`: ImagePullBackOff: …`, or "" if kubelet gives no reason."""
    return "".join(f": {text}" for text in _waiting(pod) if text)


def _waiting(pod: Pod) -> tuple[str, str]:
    """Reason and message of the container that kubelet cannot start, "" if there is none."""
    for each in pod.status.container_statuses or ():
        if waiting := (each.state or {}).get("waiting"):
            return str(waiting.get("reason", "")), str(waiting.get("message", ""))
    return "", ""


def _look(pod: Pod) -> str:
    """Where to read on: a container that never ran has no log, and one that crashed has a previous one."""
    head, name = f"kubectl -n {pod.metadata.namespace}", pod.metadata.name
    if any(each.restart_count for each in pod.status.container_statuses or ()):
        return f"{head} logs {name} --previous"
    return f"{head} describe pod {name}" if _waiting(pod)[0] else f"{head} logs {name}"
