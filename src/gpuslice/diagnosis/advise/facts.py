"""What advice rests on: the peaks of pods as they were measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpuslice.core.advice import Advice, Peak, advise, card_of
from gpuslice.core.ledger import Ledger
from gpuslice.core.model import Pod
from gpuslice.core.sizing import Suggestion, suggested_size
from gpuslice.core.units import MIB
from gpuslice.diagnosis.cluster import Cluster
from gpuslice.diagnosis.places import may_run
from gpuslice.diagnosis.usage import ContainerUsage


def peaks_of(pods: Iterable[Pod], usage: Mapping[str, Sequence[ContainerUsage]]) -> dict[str, Peak]:
    """By uid, for pods with one container on cards: with more, it is unknown which part is too large."""
    return {
        pod.uid: peak
        for pod in pods
        if pod.node and not pod.finished and (peak := _peak(usage.get(pod.key, ()))) is not None
    }


def advice_of(cluster: Cluster, usage: Mapping[str, Sequence[ContainerUsage]]) -> Advice:
    """For a whole cluster, as far as `usage` goes."""
    ledger, claims = cluster.ledger, cluster.ledger_of_claims
    peaks = peaks_of([*ledger.pods.values(), *claims.pods.values()], usage)
    own = may_run(cluster.pods, cluster.nodes)
    return advise(ledger, peaks, claims, now_s=cluster.now.timestamp(), may_run=own)


def _peak(rows: Sequence[ContainerUsage]) -> Peak | None:
    """On whichever card it was most; None if it is unknown on one, or there are several containers."""
    peaks = [each.peak_bytes for each in rows if each.peak_bytes is not None]
    if not rows or len({each.container for each in rows}) != 1 or len(peaks) < len(rows):
        return None
    return Peak(max(peaks) / MIB, any(each.refused for each in rows))


def suggestion_of(ledger: Ledger, pod: Pod, usage: Sequence[ContainerUsage]) -> Suggestion | None:
    """A better size of its part of each card, for a pod with one container of which the peak is known."""
    card, peak = card_of(ledger, pod), _peak(usage)
    if card is None or pod.placement is None or peak is None:
        return None
    return suggested_size(
        units=pod.placement.slices[0].units,
        card_units=card.units,
        card_mib=card.memory_mib,
        peak_mib=peak.peak_mib,
        refused=peak.refused,
    )
