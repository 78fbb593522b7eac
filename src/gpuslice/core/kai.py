"""KAI-Scheduler's and Run:ai's ways of asking for a part of a card, put into ours: a third front door.

    annotation gpu-memory: "M"                  MiB of a card, rounded up to whole units
    annotation gpu-fraction: "0.5"              part of a card, rounded down, so that two halves fit on a
                                                card of 79 units; needs the cards' size as a setting
    annotation gpu-memory-limit, gpu-fraction-limit
                                                Run:ai's dynamic fractions: what the container may grow to
    annotation gpu-fraction-num-devices: "N"    N cards, each with that amount
    annotation gpu-fraction-container-name: C   the container that gets it, an init container too; without,
                                                the first app container

KAI from 0.18 and Run:ai from 3.0 write NVIDIA's names instead, for each container by itself:

    nvidia.com/container.C.gpu-memory.request, .limit   quantities; one that is missing is the other
    nvidia.com/container.C.gpu-compute.mode             time-slicing is what is done here; of sm-sharing and
                                                        .portion the author is told what is done instead
    nvidia.com/container.C.gpus.devices                 what their scheduler chose: it has no say here

Where nodes lend (`KaiRules.lends`) the request is kept for the container and the limit is what it may borrow;
elsewhere all of the limit is kept. The annotations are taken off the pod, so that nobody translates it twice,
and it leaves KAI's scheduler. What of KAI's a pod goes
without (queues) its author is told: `remarks`. A pod that asks KAI for whole cards (``nvidia.com/gpu``) is
left alone.

Source of the names and their meaning: KAI-Scheduler's documentation of GPU sharing, v0.17 and v0.18; kai
gpu-fractioning's README; Run:ai 2.x and 3.0. Read on `READ`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from gpuslice.core.admission import DEFAULT_SCHEDULER
from gpuslice.core.contract import AMOUNT_NAMES, ANN_LIMIT, EXCLUSIVE_GPU, GPU_COUNT, GPU_MEM
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.form import MIRROR, ContainerForm, PodForm, limit_field, without
from gpuslice.core.quantity import scaled, whole_number
from gpuslice.core.units import UNIT_MIB

READ = "2026-11-28"  # when the names were last compared with theirs: they changed twice in 2026
MEMORY, FRACTION = "gpu-memory", "gpu-fraction"
MEMORY_LIMIT, FRACTION_LIMIT = "gpu-memory-limit", "gpu-fraction-limit"
CARDS, CONTAINER = "gpu-fraction-num-devices", "gpu-fraction-container-name"
ANNOTATIONS = (MEMORY, FRACTION, MEMORY_LIMIT, FRACTION_LIMIT, CARDS, CONTAINER)
SCHEDULERS = ("kai-scheduler", "runai-scheduler")
QUEUES = ("kai.scheduler/queue", "runai/queue")
MOST_CARDS = 1024
REQUEST, LIMIT, MODE = "gpu-memory.request", "gpu-memory.limit", "gpu-compute.mode"
PORTION, DEVICES = "gpu-compute.portion", "gpus.devices"
_BY_CONTAINER = re.compile(
    rf"nvidia\.com/container\.(.+)\.({'|'.join(map(re.escape, (REQUEST, LIMIT, MODE, PORTION, DEVICES)))})"
)
_FRACTION = re.compile(r"[0-9]{0,3}\.[0-9]{1,9}|[0-9]{1,3}")  # no exponent: 1e999999999 would be worked out


@dataclass(frozen=True, slots=True)
class KaiRules:
    """`unit`: GiB or MiB, what one `aliyun.com/gpu-mem` is. `card_units`: of every card, else 0.

    `lends`: whether the cluster's nodes lend what nobody requested (`core.lending`).
    """

    unit: str = "GiB"
    card_units: int = 0
    lends: bool = False


def annotations_of(names: Iterable[str]) -> list[str]:
    """Those of these annotations that ask for a part of a card in KAI's, Run:ai's or NVIDIA's words."""
    return [name for name in names if name in ANNOTATIONS or _BY_CONTAINER.fullmatch(name)]


def asks(pod: PodForm) -> bool:
    """Whether a pod asks for a part of a card in KAI's way."""
    return MIRROR not in pod.annotations and bool(
        {MEMORY, FRACTION, MEMORY_LIMIT, FRACTION_LIMIT} & pod.annotations.keys() or _by_container(pod)
    )


def translate(pod: PodForm, rules: KaiRules) -> PodForm:
    """`pod` asking in our names. Raises `InvalidRequestError` for what has no counterpart."""
    if not asks(pod):
        return pod
    asked = _by_container(pod)
    count = 1
    if asked and (old := next((name for name in ANNOTATIONS if name in pod.annotations), "")):
        raise InvalidRequestError(_field(old), pod.annotations[old], "left out beside nvidia.com/container.…")
    if asked:
        amounts = {name: _quantity_units(name, own, rules) for name, own in asked.items()}
    else:
        count = _whole(pod, CARDS, MOST_CARDS) if CARDS in pod.annotations else 1
        least, most = (_units(pod, rules, first=each) for each in (0, 1))
        amounts = {_chosen(pod): (count * min(least, most), count * most)}
    units = {name: least if rules.lends else most for name, (least, most) in amounts.items()}
    limits = ",".join(f"{name}={most}" for name, (_, most) in amounts.items() if most > units[name])
    given = {each.name: each for each in pod.containers}
    for name in units:
        if name not in given:
            field = _field(CONTAINER) if not asked else _field(f"nvidia.com/container.{name}.…")
            must_be = f"the name of a container of the pod: {', '.join(given)}"
            raise InvalidRequestError(field, name, must_be)
        for resource in (*AMOUNT_NAMES, EXCLUSIVE_GPU):
            if resource in given[name].limits:
                theirs = annotations_of(pod.annotations)[0]
                must_be, amount = f"left out beside annotation {theirs}", given[name].limits[resource]
                raise InvalidRequestError(limit_field(given[name], resource), amount, must_be)
    return replace(
        pod,
        containers=tuple(_asking(each, units.get(each.name, 0)) for each in pod.containers),
        labels={**pod.labels, GPU_COUNT: str(count)} if count > 1 else pod.labels,
        annotations={
            **without(pod.annotations, annotations_of(pod.annotations)),
            **({ANN_LIMIT: limits} if limits else {}),
        },
        scheduler=DEFAULT_SCHEDULER if pod.scheduler in SCHEDULERS else pod.scheduler,
    )


def remarks(pod: PodForm, rules: KaiRules) -> Iterator[str]:
    """What a pod that asks in KAI's way goes without here."""
    if not asks(pod):
        return
    if (name := pod.scheduler) in SCHEDULERS:
        yield f'spec.schedulerName "{name}" is replaced: it does not know the cards that are shared here'
    for label in QUEUES:
        if label in pod.labels:
            field = f'metadata.labels["{label}"] "{pod.labels[label]}"'
            yield f"{field} has no effect: a ResourceQuota or Kueue bounds teams here"
    requests = {MEMORY: MEMORY_LIMIT, FRACTION: FRACTION_LIMIT}
    for name in annotations_of(pod.annotations):
        what, given = name.removeprefix("nvidia.com/container."), pod.annotations[name]
        limit = requests.get(name) or name.replace(REQUEST, LIMIT)
        if limit != name and pod.annotations.get(limit, given) != given and not rules.lends:
            why = f"all of {limit} is kept for the container, since nothing is lent beyond a request here"
        elif what.endswith(MODE) and given != "time-slicing":
            why = "containers take turns; limits of aliyun.com/gpu-core.percentage divide the compute"
        elif what.endswith(PORTION):
            why = "limits of aliyun.com/gpu-core.percentage divide the compute of nodes that do that"
        elif what.endswith(DEVICES):
            why = "another scheduler chose these cards"
        else:
            continue
        yield f'{_field(name)} "{given}" has no effect: {why}'


def _by_container(pod: PodForm) -> dict[str, dict[str, str]]:
    """What each container asks for in NVIDIA's names; those that ask for no memory are left out."""
    found: dict[str, dict[str, str]] = {}
    for name, value in pod.annotations.items():
        if match := _BY_CONTAINER.fullmatch(name):
            found.setdefault(match[1], {})[match[2]] = value
    return {container: own for container, own in found.items() if REQUEST in own or LIMIT in own}


def _quantity_units(container: str, own: Mapping[str, str], rules: KaiRules) -> tuple[int, int]:
    """Units of the request and of the limit of a container in NVIDIA's names; one of them may be missing."""

    def wrong(name: str, must_be: str) -> InvalidRequestError:
        return InvalidRequestError(_field(f"nvidia.com/container.{container}.{name}"), own[name], must_be)

    amounts = {name: scaled(own[name], 1) or 0 for name in (REQUEST, LIMIT) if name in own}
    for name, amount in amounts.items():
        if not 0 < amount < 1 << 50:
            raise wrong(name, "an amount of memory, such as 4Gi or 4096Mi")
    most = amounts.get(LIMIT) or amounts[REQUEST]
    if amounts.get(REQUEST, 0) > most:
        raise wrong(REQUEST, f"at most the limit, {own[LIMIT]}")
    if own.get(MODE, "time-slicing") not in ("time-slicing", "sm-sharing"):
        raise wrong(MODE, "time-slicing or sm-sharing")
    least, unit_bytes = amounts.get(REQUEST, most), UNIT_MIB[rules.unit] << 20
    return -(-least // unit_bytes), -(-most // unit_bytes)


def _chosen(pod: PodForm) -> str:
    """The container that the older annotations are about."""
    apps = (each.name for each in pod.containers if each.shelf == "containers")
    return pod.annotations.get(CONTAINER) or next(apps, "")


def _asking(container: ContainerForm, units: int) -> ContainerForm:
    if not units:
        return container
    amount = {GPU_MEM: str(units)}
    return replace(
        container, limits={**container.limits, **amount}, requests={**container.requests, **amount}
    )


def _field(annotation: str) -> str:
    return f'metadata.annotations["{annotation}"]'


def _units(pod: PodForm, rules: KaiRules, *, first: int) -> int:
    """Units on each card, by the older annotations: of the request if `first` is 0, else of the limit.

    One that is missing is the other.
    """
    step = -1 if first else 1
    memory = next((name for name in (MEMORY, MEMORY_LIMIT)[::step] if name in pod.annotations), "")
    name = next((name for name in (FRACTION, FRACTION_LIMIT)[::step] if name in pod.annotations), "")
    if memory and name:
        raise InvalidRequestError(_field(name), pod.annotations[name], f"left out beside {memory}")
    if memory:
        return -(-_whole(pod, memory, 100_000_000) // UNIT_MIB[rules.unit])
    field, text = _field(name), pod.annotations[name]
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
        raise InvalidRequestError(_field(name), pod.annotations[name], f"a whole number from 1 to {most}")
    return amount
