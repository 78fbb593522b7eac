"""HAMi's way of asking for a part of a card, put into ours: a second front door for existing manifests.

    nvidia.com/gpu N                      N cards (1 when absent), each with the amounts below
    nvidia.com/gpumem M                   MiB of each card, rounded up to whole units
    nvidia.com/gpumem-percentage P        part of each card, rounded down, so that parts that add up to a
                                          card fit on one; needs the size of the cards as a setting
    nvidia.com/gpucores C                 percent of a card's compute, rounded up to steps of 5
    nvidia.com/use-gputype, nouse-gputype parts of model names; needs the models' node labels as a setting

What has no counterpart (cards by uuid, NUMA binding, priority on a card, MIG made on demand) is refused with
a sentence: to start such a pod somewhere else than it asked for would be worse. What makes no difference to
what the pod gets is taken, and its author told: `remarks`. A pod that asks for
``nvidia.com/gpu`` alone wants whole cards and is left to the plugin that gives those out.

Source of the names and their meaning: HAMi's documentation and chart, release 2.x.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpuslice.core.admission import DEFAULT_SCHEDULER
from gpuslice.core.contract import AMOUNT_NAMES, EXCLUSIVE_GPU, GPU_CORE, GPU_COUNT, GPU_MEM
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.form import MIRROR, ContainerForm, PodForm, limit_field, without
from gpuslice.core.quantity import whole_number
from gpuslice.core.request import CORE_STEP_PERCENT
from gpuslice.core.units import UNIT_MIB

MEMORY = "nvidia.com/gpumem"
MEMORY_PERCENT = "nvidia.com/gpumem-percentage"
CORES = "nvidia.com/gpucores"
PRIORITY = "nvidia.com/priority"
USE_TYPE, NO_TYPE = "nvidia.com/use-gputype", "nvidia.com/nouse-gputype"
UNTRANSLATED = {
    "nvidia.com/use-gpuuuid": "cards are chosen by how they fit; choose nodes with a nodeSelector instead",
    "nvidia.com/nouse-gpuuuid": "take a card out of use with ConfigMap unhealthy-gpu-<node> instead",
    "nvidia.com/numa-bind": "cards are not chosen by NUMA node here",
    "nvidia.com/vgpu-mode": "memory is limited by gpuslice's own library here; leave it out or say hami-core",
}
WITHOUT_EFFECT = {
    "hami.io/gpu-scheduler-policy": "cards are chosen by the node's label ack.node.gpu.placement",
    "hami.io/node-scheduler-policy": "nodes are chosen by the placement policy of the extender",
    "hami.io/device-scoring-weights": "cards are chosen by the placement policy of the extender",
}
"""Wishes about where, not about what: a pod runs as well without them, so its author is only told."""
ANNOTATIONS = (USE_TYPE, NO_TYPE, *UNTRANSLATED, *WITHOUT_EFFECT)
FOREIGN = "hami.io/"
SCHEDULER = "hami-scheduler"
OPT_OUT = "hami.io/webhook"
ENVIRONMENT = {
    "CUDA_DISABLE_CONTROL": "CGPU_DISABLE=true switches limits off, where the cluster allows it",
    "CUDA_TASK_PRIORITY": "the containers of a card have no order among them here",
    "GPU_CORE_UTILIZATION_POLICY": "a share of compute holds always",
    "CUDA_OVERSUBSCRIBE": "memory of a card is never promised twice",
    "ACTIVE_OOM_KILLER": "what is over the limit is refused, nobody is killed",
    "CUDA_DEVICE_MEMORY_LIMIT": "the limit follows from what the container asks for",
    "CUDA_DEVICE_SM_LIMIT": "the share follows from what the container asks for",
    "LIBCUDA_LOG_LEVEL": "the library writes nothing into the log of a container",
}
"""What HAMi's library reads from the environment, by the beginning of the name, and what holds here."""
PARTS = (MEMORY, MEMORY_PERCENT, CORES, PRIORITY)
_DOOR = (EXCLUSIVE_GPU, *PARTS)


@dataclass(frozen=True, slots=True)
class HamiRules:
    """What translation needs to know of the cluster.

    `unit`: GiB or MiB, what one `aliyun.com/gpu-mem` is. `card_units`: of every card, 0 when they differ or
    it is not known. `model_label`: the node label with the card's model, `models` the values it has.
    """

    unit: str = "GiB"
    card_units: int = 0
    model_label: str = "nvidia.com/gpu.product"
    models: tuple[str, ...] = ()


def translate(pod: PodForm, rules: HamiRules) -> PodForm:
    """`pod` asking in our names. Raises `InvalidRequestError` for what has no counterpart."""
    asking = [each for each in pod.containers if not set(PARTS).isdisjoint(each.limits)]
    if not asking or MIRROR in pod.annotations:
        return pod
    for name, instead in UNTRANSLATED.items():
        given = pod.annotations.get(name, "")
        if given and given not in ("hami-core", "false"):
            raise InvalidRequestError(f'metadata.annotations["{name}"]', given, f"left out: {instead}")
    counts = {each.name: _amount(each, EXCLUSIVE_GPU, 1, 1, 1024) for each in asking}
    count = counts[asking[0].name]
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name}: {count}" for name, count in counts.items())
        must_be = "the same number in all containers of a pod, since they share their cards"
        raise InvalidRequestError(f'limits["{EXCLUSIVE_GPU}"]', shown, must_be)
    if GPU_COUNT in pod.labels and whole_number(pod.labels[GPU_COUNT]) != count:
        must_be = f'{count}, as limits["{EXCLUSIVE_GPU}"] says'
        raise InvalidRequestError(f'metadata.labels["{GPU_COUNT}"]', pod.labels[GPU_COUNT], must_be)
    labels = {**pod.labels, GPU_COUNT: str(count)} if count > 1 else pod.labels
    containers = tuple(_container(each, count, rules) if each in asking else each for each in pod.containers)
    scheduler = DEFAULT_SCHEDULER if pod.scheduler == SCHEDULER else pod.scheduler
    return replace(
        pod, containers=containers, labels=labels, scheduler=scheduler, affinity=_affinity(pod, rules)
    )


def remarks(pod: PodForm) -> Iterator[str]:
    """What of a pod that asks in HAMi's names is left out without changing what it gets."""
    if all(set(PARTS).isdisjoint(each.limits) for each in pod.containers):
        if any(EXCLUSIVE_GPU in each.limits for each in pod.containers):
            why = f'limits["{EXCLUSIVE_GPU}"] without {MEMORY} asks for whole cards'
            for name in ANNOTATIONS:
                if given := pod.annotations.get(name):
                    yield (
                        f'metadata.annotations["{name}"] "{given}" has no effect: {why}, '
                        "which NVIDIA's plugin chooses"
                    )
        return
    for name, why in WITHOUT_EFFECT.items():
        if given := pod.annotations.get(name):
            yield f'metadata.annotations["{name}"] "{given}" has no effect: {why}'
    foreign = (name for name in pod.annotations if name.startswith(FOREIGN))
    if others := sorted(name for name in foreign if name not in WITHOUT_EFFECT):
        yield f"metadata.annotations of HAMi's own allocations mean nothing here: {', '.join(others)}"
    if pod.scheduler == SCHEDULER:
        yield f'spec.schedulerName "{SCHEDULER}" is replaced: it does not know the cards that are shared here'
    if given := pod.labels.get(OPT_OUT):
        yield (
            f'metadata.labels["{OPT_OUT}"] "{given}" has no effect: '
            "a namespace is left out by its label gpuslice.io/webhook=ignore"
        )
    for container in pod.containers:
        for name in (entry.get("name", "") for entry in container.env):
            if why := next((why for known, why in ENVIRONMENT.items() if name.startswith(known)), ""):
                yield f'container "{container.name}": env {name} has no effect: {why}'


def _container(container: ContainerForm, count: int, rules: HamiRules) -> ContainerForm:
    for name in AMOUNT_NAMES:
        if name in container.limits:
            must_be = f"left out beside {MEMORY} in a container"
            raise InvalidRequestError(limit_field(container, name), container.limits[name], must_be)
    if PRIORITY in container.limits:
        must_be = "left out: the containers of a card have no order among them here"
        raise InvalidRequestError(limit_field(container, PRIORITY), container.limits[PRIORITY], must_be)
    units = _units(container, rules)
    ours = {GPU_MEM: str(count * units)}
    percent = _amount(container, CORES, 0, 0, 100)
    alone = units == rules.card_units  # nobody else fits on these cards, so all of their compute is its own
    if percent and not (alone and percent == 100 and count > 1):
        if count > 1:
            must_be = f'left out beside limits["{EXCLUSIVE_GPU}"] {count}: a share of compute is of one card'
            raise InvalidRequestError(limit_field(container, CORES), percent, must_be)
        ours[GPU_CORE] = str(-(-percent // CORE_STEP_PERCENT) * CORE_STEP_PERCENT)
    return replace(
        container,
        limits={**without(container.limits, _DOOR), **ours},
        requests={**without(container.requests, _DOOR), **ours},
    )


def _units(container: ContainerForm, rules: HamiRules) -> int:
    if MEMORY in container.limits and MEMORY_PERCENT in container.limits:
        must_be = f"left out beside {MEMORY}"
        raise InvalidRequestError(
            limit_field(container, MEMORY_PERCENT), container.limits[MEMORY_PERCENT], must_be
        )
    if MEMORY in container.limits:
        mib = _amount(container, MEMORY, 0, 1, 100_000_000)
        return -(-mib // UNIT_MIB[rules.unit])
    percent = _amount(container, MEMORY_PERCENT, 100, 1, 100)
    if not rules.card_units:
        must_be = f"given as {MEMORY} in MiB: a percentage needs cards of one size, and none is set"
        raise InvalidRequestError(
            limit_field(container, MEMORY_PERCENT), container.limits.get(MEMORY_PERCENT, "absent"), must_be
        )
    return max(1, rules.card_units * percent // 100)


def _amount(container: ContainerForm, name: str, default: int, least: int, most: int) -> int:
    if name not in container.limits:
        return default
    amount = whole_number(container.limits[name])
    if amount is None or not least <= amount <= most:
        must_be = f"a whole number from {least} to {most}"
        raise InvalidRequestError(limit_field(container, name), container.limits[name], must_be)
    return amount


# -- models ----------------------------------------------------------------------------------------------


_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def _affinity(pod: PodForm, rules: HamiRules) -> Mapping[str, Any]:
    """The pod's affinity, narrowed to nodes whose model is wanted."""
    wanted = []
    for name, operator in ((USE_TYPE, "In"), (NO_TYPE, "NotIn")):
        if given := pod.annotations.get(name):
            # HAMi compares parts of the model's name without regard to case; labels are compared whole
            parts = [part.strip().lower() for part in given.split(",") if part.strip()]
            found = sorted(model for model in rules.models if any(part in model.lower() for part in parts))
            if not found and (operator == "In" or not rules.models):
                known = f'label "{rules.model_label}": {", ".join(rules.models) or "none"}'
                must_be = f"part of a model that the webhook knows as a value of {known}"
                raise InvalidRequestError(f'metadata.annotations["{name}"]', given, must_be)
            wanted.append({"key": rules.model_label, "operator": operator, "values": found})
    node = pod.affinity.get("nodeAffinity") or {}
    terms: list[dict[str, Any]] = list((node.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [])

    def has(expression: Mapping[str, Any]) -> bool:
        return bool(terms) and all(expression in (term.get("matchExpressions") or []) for term in terms)

    missing = [each for each in wanted if each["values"] and not has(each)]
    if not missing:
        return pod.affinity
    narrowed = [  # terms are alternatives, so each of them gets the expressions
        {**term, "matchExpressions": [*(term.get("matchExpressions") or []), *missing]}
        for term in terms or [{}]
    ]
    return {**pod.affinity, "nodeAffinity": {**node, _REQUIRED: {"nodeSelectorTerms": narrowed}}}
