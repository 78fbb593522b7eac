"""KAI-Scheduler's way of asking for a part of a card, put into ours: a third front door.

    annotation gpu-memory: "M"                  MiB of a card, rounded up to whole units
    annotation gpu-fraction: "0.5"              part of a card, rounded down, so that two halves fit on a
                                                card of 79 units; needs the cards' size as a setting
    annotation gpu-fraction-num-devices: "N"    N cards, each with that amount
    annotation gpu-fraction-container-name: C   the container that gets it, an init container too; without,
                                                the first app container

The annotations are taken off the pod, so that nobody translates it twice, and it leaves KAI's scheduler. What
of KAI's a pod goes without (queues) its author is told: `remarks`. A pod that asks KAI for whole cards
(``nvidia.com/gpu``) is left alone.

Source of the names and their meaning: KAI-Scheduler's documentation of GPU sharing, v0.17; Run:ai, from which
KAI comes, has the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from gpuslice.core.admission import DEFAULT_SCHEDULER
from gpuslice.core.contract import AMOUNT_NAMES, EXCLUSIVE_GPU, GPU_COUNT, GPU_MEM
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.form import MIRROR, PodForm, limit_field, without
from gpuslice.core.quantity import whole_number
from gpuslice.core.units import UNIT_MIB

MEMORY, FRACTION = "gpu-memory", "gpu-fraction"
CARDS, CONTAINER = "gpu-fraction-num-devices", "gpu-fraction-container-name"
ANNOTATIONS = (MEMORY, FRACTION, CARDS, CONTAINER)
SCHEDULERS = ("kai-scheduler", "runai-scheduler")
QUEUES = ("kai.scheduler/queue", "runai/queue")
MOST_CARDS = 1024
_FRACTION = re.compile(r"[0-9]{0,3}\.[0-9]{1,9}|[0-9]{1,3}")  # no exponent: 1e999999999 would be worked out


@dataclass(frozen=True, slots=True)
class KaiRules:
    """`unit`: GiB or MiB, what one `aliyun.com/gpu-mem` is. `card_units`: of every card, else 0."""

    unit: str = "GiB"
    card_units: int = 0


def asks(pod: PodForm) -> bool:
    """Whether a pod asks for a part of a card in KAI's way."""
    return MIRROR not in pod.annotations and (MEMORY in pod.annotations or FRACTION in pod.annotations)


def translate(pod: PodForm, rules: KaiRules) -> PodForm:
    """`pod` asking in our names. Raises `InvalidRequestError` for what has no counterpart."""
    if not asks(pod):
        return pod
    chosen = pod.annotations.get(CONTAINER, "")
    named = (each for each in pod.containers if each.name == chosen)
    container = next(
        named if chosen else (each for each in pod.containers if each.shelf == "containers"), None
    )
    if container is None:
        must_be = f"the name of a container of the pod: {', '.join(each.name for each in pod.containers)}"
        raise InvalidRequestError(f'metadata.annotations["{CONTAINER}"]', chosen, must_be)
    for name in (*AMOUNT_NAMES, EXCLUSIVE_GPU):
        if name in container.limits:
            must_be = f"left out beside annotation {MEMORY if MEMORY in pod.annotations else FRACTION}"
            raise InvalidRequestError(limit_field(container, name), container.limits[name], must_be)
    count = _whole(pod, CARDS, MOST_CARDS) if CARDS in pod.annotations else 1
    amount = {GPU_MEM: str(count * _units(pod, rules))}
    asking = replace(
        container, limits={**container.limits, **amount}, requests={**container.requests, **amount}
    )
    return replace(
        pod,
        containers=tuple(asking if each is container else each for each in pod.containers),
        labels={**pod.labels, GPU_COUNT: str(count)} if count > 1 else pod.labels,
        annotations=without(pod.annotations, ANNOTATIONS),
        scheduler=DEFAULT_SCHEDULER if pod.scheduler in SCHEDULERS else pod.scheduler,
    )


def remarks(pod: PodForm) -> Iterator[str]:
    """What a pod that asks in KAI's way goes without here."""
    if not asks(pod):
        return
    if (name := pod.scheduler) in SCHEDULERS:
        yield f'spec.schedulerName "{name}" is replaced: it does not know the cards that are shared here'
    for label in QUEUES:
        if label in pod.labels:
            field = f'metadata.labels["{label}"] "{pod.labels[label]}"'
            yield f"{field} has no effect: a ResourceQuota or Kueue bounds teams here"


def _units(pod: PodForm, rules: KaiRules) -> int:
    if MEMORY in pod.annotations and FRACTION in pod.annotations:
        field = f'metadata.annotations["{FRACTION}"]'
        raise InvalidRequestError(field, pod.annotations[FRACTION], f"left out beside {MEMORY}")
    if MEMORY in pod.annotations:
        return -(-_whole(pod, MEMORY, 100_000_000) // UNIT_MIB[rules.unit])
    field, text = f'metadata.annotations["{FRACTION}"]', pod.annotations[FRACTION]
    fraction = Fraction(text) if _FRACTION.fullmatch(text) else Fraction(0)
    if not 0 < fraction <= 1:
        raise InvalidRequestError(field, text, "a part of a card, more than 0 and at most 1, such as 0.5")
    if not rules.card_units:
        must_be = f"given as {MEMORY} in MiB: a fraction needs cards of one size, and none is set"
        raise InvalidRequestError(field, text, must_be)
    return max(1, int(fraction * rules.card_units))


def _whole(pod: PodForm, name: str, most: int) -> int:
    amount = whole_number(pod.annotations[name])
    if amount is None or not 1 <= amount <= most:
        must_be = f"a whole number from 1 to {most}"
        raise InvalidRequestError(f'metadata.annotations["{name}"]', pod.annotations[name], must_be)
    return amount
