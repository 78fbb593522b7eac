"""What several alerts ask in the same way: who is silent, which faults there were, who is slowed down."""

from __future__ import annotations

from gpuslice.apps.exporter import catalogue as c
from monitoring.selectors import RATE, of_cards


def silent(job: str) -> str:
    """Targets that do not answer, and nodes of which the target is gone, unless the node itself is.

    kube-state-metrics tells that, if it is there. A target that was replaced has another address; a target of
    another scrape configuration may have no node.
    """
    up = f'up{{job=~".*{job}",node'
    seen = f'{up}!=""}} or 0 * last_over_time({up}!=""}}[1d])'
    left = "(last_over_time(kube_node_info[1d]) unless on (cluster, node) kube_node_info)"
    return f'(max by (cluster, job, node) ({seen}) unless on (cluster, node) {left} or {up}=""}}) == 0'


def xids(codes: str, window: str, most: int = 0) -> str:
    """Cards with more faults than `most`. By a counter: the node's clock may differ from Prometheus'."""
    chosen = f'{{xid=~"{codes}"}}'
    return f"{of_cards(c.XID_ERRORS, chosen, f'increase({{}}[{window}])')} > {most}"


def slowed(reason: str) -> str:
    return of_cards(c.GPU_THROTTLED, f'{{reason="{reason}"}}', RATE)


def best_of(series: str) -> str:
    """The maximum over all replicas; 0 for those that existed within a day and no longer do."""
    return f"max({series} or 0 * last_over_time({series}[1d]))"
