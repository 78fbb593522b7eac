"""Names and values that are nearly right, or another system's: what was probably meant, in one sentence.

A misspelt resource is no error of Kubernetes: the pod waits for ever, or runs without a card. A misspelt
label or value is silently no label. So the webhook, `doctor` and `explain` all look for what is nearly right,
and say the same about it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from itertools import islice

from gpuslice.core.contract import (
    AMOUNT_NAMES,
    CARDS_NAMES,
    EITHER_MEMORY,
    EXCLUSIVE_GPU,
    LABEL_MIN_TIER,
    LABEL_MODE,
    LABEL_NO_ISOLATION,
    LABEL_PLACEMENT,
    LABEL_SCHEDULE,
    LABEL_SHARED,
)
from gpuslice.core.hami import CORES, MEMORY, MEMORY_PERCENT, PRIORITY
from gpuslice.core.mode import SCHEDULES
from gpuslice.core.model import NodeMode

MOST_LOOKED_AT = 100  # names of one pod: a look at each takes a tenth of a millisecond
ALIKE = 0.86  # of difflib's ratio: one letter more, less, or another in names of 15 letters and more
POD_LABELS = (*CARDS_NAMES, LABEL_MIN_TIER)
HAMI = (MEMORY, MEMORY_PERCENT, CORES, PRIORITY)
OTHERS = {
    "volcano.sh/vgpu-": "Volcano's",
    "volcano.sh/gpu-": "Volcano's",
    "koordinator.sh/gpu": "Koordinator's",
    "tencent.com/vcuda-": "GPU Manager's",
    "elasticgpu.io/gpu-": "Elastic GPU's",
    "k8s.amazonaws.com/vgpu": "the AWS virtual GPU plugin's",
}
"""Whose names begin like that."""
ACK_WHOLE_CARDS = "aliyun.com/gpu"
_RESOURCES = (*AMOUNT_NAMES, *CARDS_NAMES, EXCLUSIVE_GPU, *HAMI)
_NODE_LABELS: Mapping[str, tuple[str, ...]] = {
    LABEL_SCHEDULE: tuple(sorted(SCHEDULES)),
    LABEL_MODE: tuple(NodeMode),
    LABEL_PLACEMENT: ("binpack", "spread"),
    LABEL_NO_ISOLATION: ("true", "false"),
    LABEL_SHARED: ("true", "false"),
}


def resource_hint(name: str) -> str:
    """What is wrong with asking for the resource `name`; "" where nothing is, or it is none of our affair."""
    if name in {*AMOUNT_NAMES, EXCLUSIVE_GPU}:
        return ""
    if name in CARDS_NAMES:
        return f"{name} is a label of the pod, not a resource: set it under metadata.labels."
    if name in HAMI:
        return (
            f"{name} is HAMi's name, and nothing in this cluster translates it: ask for {EITHER_MEMORY}, "
            "or let the webhook translate it (chart value webhook.hami.enabled)."
        )
    if whose := next((whose for beginning, whose in OTHERS.items() if name.startswith(beginning)), ""):
        return f"{name} is {whose} name, which gpuslice does not know: ask for {EITHER_MEMORY}."
    if name == ACK_WHOLE_CARDS:
        return f"{name} is ACK's name for whole cards, which gpuslice does not know: ask for {EXCLUSIVE_GPU}."
    (near,) = get_close_matches(name, _RESOURCES, n=1, cutoff=ALIKE) or ("",)
    return f"{name} is not a resource of gpuslice or NVIDIA: did you mean {near}?" if near else ""


def resource_hints(names: Iterable[str]) -> tuple[str, ...]:
    """`resource_hint` of each, those without one left out."""
    return tuple(filter(None, map(resource_hint, islice(dict.fromkeys(names), MOST_LOOKED_AT))))


def pod_label_hint(name: str) -> str:
    """What the pod's label `name` was meant to be; "" where it is right, or none of our affair."""
    if name in POD_LABELS:
        return ""
    (near,) = get_close_matches(name, POD_LABELS, n=1, cutoff=ALIKE) or ("",)
    return f"label {name} means nothing; did you mean {near}?" if near else ""


def pod_label_hints(labels: Iterable[str]) -> tuple[str, ...]:
    """`pod_label_hint` of each, those without one left out."""
    return tuple(filter(None, map(pod_label_hint, islice(sorted(labels), MOST_LOOKED_AT))))


def node_label_hints(labels: Mapping[str, str], shared_label: str = LABEL_SHARED) -> Iterator[str]:
    """What is nearly right among a node's labels. `shared_label`: the chart's nodeLabel."""
    known = {**_NODE_LABELS, shared_label: _NODE_LABELS[LABEL_SHARED]}
    for name, value in sorted(labels.items()):
        if name in known:
            if value in known[name]:
                continue
            (near,) = get_close_matches(value, known[name], n=1, cutoff=0.6) or ("",)
            meant = f"; did you mean {near}?" if near else ""
            yield f'label {name} is "{value}", must be one of {", ".join(known[name])}{meant}'
            continue
        (near,) = get_close_matches(name, known, n=1, cutoff=0.88) or ("",)
        if near:
            yield f"label {name} means nothing; did you mean {near}?"
