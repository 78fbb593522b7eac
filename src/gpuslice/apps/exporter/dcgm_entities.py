"""The subject of dcgm-exporter's series: a card, or a GPU instance of a divided card, with its labels.

Labels are in dcgm-exporter's order: the device, the host, then those of label fields by name, then those of
pods and jobs by name. With jobs, or several pods if enabled, one value has several series.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from gpuslice.adapters.gpu.gpm import PROFILING_FIELDS
from gpuslice.adapters.gpu.mig import MigSample
from gpuslice.adapters.gpu.readings import MEMORY_FIELDS, Reading
from gpuslice.adapters.web.exposition import labels
from gpuslice.apps.exporter.card_snapshot import CardSnapshot, ContainerSnapshot
from gpuslice.apps.exporter.counters import Counter
from gpuslice.apps.exporter.device_grants import DeviceGrant
from gpuslice.apps.exporter.node_pods import NodePods
from gpuslice.core.attribution import ContainerKey

_log = logging.getLogger(__name__)
Labels = dict[str, str]
OF_INSTANCE = MEMORY_FIELDS | PROFILING_FIELDS
"""Fields that a GPU instance has itself; all others are the card's."""


@dataclass(frozen=True, slots=True)
class DcgmStyle:
    """The style of the series.

    `pod_labels`: on cards and instances held by one container. `virtual`: one series for each container that
    shares one. `instances`: divided cards are shown by instance, like upstream's "f" and "i".
    """

    hostname: str  # "" omits the label
    hostname_label: str = "hostname"
    old_labels: bool = False
    join_model: bool = False
    upstream_types: bool = False
    pod_labels: bool = False
    virtual: bool = False
    claims: bool = False
    pod_uid: bool = False
    labels_of_pods: tuple[re.Pattern[str], ...] | None = None  # None for none, () for all
    xid_window_ms: int = 300_000
    clock_window_ms: int = 300_000
    cards: bool = True
    instances: bool = True
    chosen_instances: frozenset[int] | None = None


@dataclass(frozen=True, slots=True)
class Entity:
    """One card or instance. `copies`: label sets of pods and jobs; a value has one series for each."""

    card: CardSnapshot
    fields: Mapping[int, Reading]
    device: Labels
    plain: Labels
    copies: tuple[Labels, ...]
    device_text: str
    texts: tuple[str, ...]
    shares: tuple[tuple[ContainerSnapshot, str], ...] = field(default=())

    def texts_with(self, plain: Labels, more: Labels | None = None) -> list[str]:
        """Labels of a series with additional labels."""
        return [_text(self.device, {**self.plain, **plain}, {**copy, **(more or {})}) for copy in self.copies]


def entities(
    card: CardSnapshot,
    label_counters: list[Counter],
    pods: NodePods,
    style: DcgmStyle,
    jobs: Mapping[str, tuple[str, ...]],
) -> Iterator[Entity]:
    """The card itself, or its instances if it is divided and they are enabled."""
    if card.sample.mig and style.instances:
        by_number = {each.gpu_instance: each for each in reversed(card.sample.mig)}  # first of each
        for number in sorted(by_number):
            if style.chosen_instances is None or number in style.chosen_instances:
                yield _entity(card, by_number[number], label_counters, pods, style, jobs)
    elif style.cards:
        yield _entity(card, None, label_counters, pods, style, jobs)


def _entity(  # noqa: PLR0917 — the loop above alone calls it
    card: CardSnapshot,
    instance: MigSample | None,
    label_counters: list[Counter],
    pods: NodePods,
    style: DcgmStyle,
    jobs: Mapping[str, tuple[str, ...]],
) -> Entity:
    sample = card.sample
    fields = sample.fields
    if instance is not None:
        fields = {n: value for n, value in fields.items() if n not in OF_INSTANCE} | dict(instance.fields)
    device = {
        "gpu": str(sample.index),
        "uuid" if style.old_labels else "UUID": sample.uuid,
        "pci_bus_id": sample.pci_bus_id,
        "device": f"nvidia{sample.index}",
        "modelName": "-".join(sample.model.split()) if style.join_model else sample.model,
    }
    if instance is not None:
        device |= {"GPU_I_PROFILE": instance.profile, "GPU_I_ID": str(instance.gpu_instance)}
    if style.hostname:
        device[style.hostname_label] = style.hostname
    plain = {}
    for counter in label_counters:
        value = fields.get(counter.field.id) if counter.field is not None else None
        if value is not None:
            plain[counter.name] = value if isinstance(value, str) else f"{value:g}"
    holders = _holders(card, instance, style)
    of_pods = [_pod_labels(key, each.grant, instance, pods, style) for key, each in holders]
    only = pods.pod(holders[0][0].namespace, holders[0][0].pod) if len(holders) == 1 else None
    if only is not None and style.labels_of_pods is not None:  # its own labels, under valid names
        own = only.shown_labels(style.labels_of_pods)
        plain |= {name: value for name, value in own.items() if name not in device and name not in plain}
    named = jobs.get(str(sample.index) if instance is None else f"{sample.index}.{instance.gpu_instance}", ())
    of_jobs: list[Labels] = [{"hpc_job": job} for job in named] or [{}]
    copies = tuple({**pod, **job} for pod in of_pods or [{}] for job in of_jobs)
    shares = [(each, _text(device, plain, pod)) for (_, each), pod in zip(holders, of_pods, strict=True)]
    return Entity(
        card,
        fields,
        device,
        plain,
        copies,
        _text(device, plain, {}),
        tuple(_text(device, plain, copy) for copy in copies),
        tuple(shares) if len(holders) > 1 else (),
    )


def _text(device: Labels, plain: Labels, attributes: Labels) -> str:
    return labels({**device, **dict(sorted(plain.items())), **dict(sorted(attributes.items()))})


def _holders(
    card: CardSnapshot, instance: MigSample | None, style: DcgmStyle
) -> list[tuple[ContainerKey, ContainerSnapshot]]:
    """Whose labels the series get: the only holder's; with `virtual`, those of each holder."""
    if not style.pod_labels and not style.virtual:
        return []
    number = instance.gpu_instance if instance is not None else None
    devices = {each.uuid for each in card.sample.mig if each.gpu_instance == number}
    found = [
        (key, each)
        for key, each in card.containers.items()
        if each.grant is not None and (instance is None or devices.intersection(each.grant.mig))
    ]
    return found if style.virtual or (len(found) == 1 and style.pod_labels) else []


def _pod_labels(
    key: ContainerKey,
    grant: DeviceGrant | None,
    instance: MigSample | None,
    pods: NodePods,
    style: DcgmStyle,
) -> Labels:
    names = (
        ("pod_name", "pod_namespace", "container_name")
        if style.old_labels
        else ("pod", "namespace", "container")
    )
    found = dict(zip(names, (key.pod, key.namespace, key.container), strict=True))
    if style.pod_uid:
        pod = pods.pod(key.namespace, key.pod)
        found["pod_uid"] = pod.uid if pod is not None else ""
    if grant is not None and grant.replica and style.virtual:
        found["vgpu"] = grant.replica
    claim = grant.claim if grant is not None and style.claims else None
    if claim is not None:
        found |= {
            "dra_claim_name": claim.claim,
            "dra_claim_namespace": claim.claim_namespace,
            "dra_driver_name": claim.driver,
            "dra_pool_name": claim.pool,
            "dra_device_name": claim.device,
        }
        if instance is not None:
            found |= {"dra_mig_profile": instance.profile, "dra_mig_device_uuid": instance.uuid}
    return found


def patterns_of(texts: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    """The valid expressions; an invalid one is logged and left out, as upstream does."""
    found = []
    for text in texts:
        try:
            found.append(re.compile(text))
        except re.error as error:
            extra = {"expression": text, "error": str(error)}
            _log.warning("pod label expression left out", extra=extra)
    return tuple(found)
