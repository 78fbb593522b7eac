"""What kubelets have rejected, as the pods of a cluster show it: for ``explain``, ``doctor`` and the console.

The extender knows the same, and a little more of what has changed since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gpuslice.adapters.kube import objects
from gpuslice.adapters.kube.rejected_pod import refusal_in
from gpuslice.adapters.kube.views import pod_view
from gpuslice.core.model import Pod
from gpuslice.core.rejections import KubeletRefusal, Rejections, rejection_of, words_of

FAILED = "status.phase=Failed"


def rejections_of(
    refused: Iterable[tuple[Pod, KubeletRefusal]], living: Iterable[Pod], now_s: float
) -> Rejections:
    """`living`: pods on nodes; those that have their devices disprove what was rejected before."""
    known = Rejections()
    for pod, refusal in refused:
        rejection = rejection_of(pod, refusal, now_s, is_news=False)
        if rejection is not None:
            known.add(rejection)
    known.forget_old(now_s)
    for pod in living if known else ():
        if pod.assigned:
            known.admitted(pod, min(now_s, pod.assume_time_ns / 1e9))
    return known


def refused_among(pods: Iterable[objects.Pod]) -> Iterator[tuple[Pod, KubeletRefusal]]:
    """Those that kubelet did not let start, with its words."""
    for each in pods:
        refusal = refusal_in(each) if each.spec.node_name else None
        if refusal is not None:
            yield pod_view(each), refusal


def why_kept_off(rejections: Rejections, pod: Pod, now_s: float) -> Iterator[str]:
    """Sentences about what a waiting pod is kept from."""
    for each in rejections.backoffs(pod, pod.request, now_s) if pod.request is not None else ():
        if each.closed or each.closed_cards:
            yield f"{words_of(each)}."
