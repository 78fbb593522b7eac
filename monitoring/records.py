"""Recording rules: what dashboards and people query often, computed once."""

from __future__ import annotations

from gpuslice.apps.exporter import catalogue as c
from gpuslice.diagnosis.prometheus import CARD_LABELS, one
from monitoring.charges import CHARGES
from monitoring.scaling import of_pod
from monitoring.selectors import of_cards

_USED = c.MEMORY_USED.name


RECORDED = {
    **{
        f"node:gpuslice_memory_{name}:ratio": f"sum by (cluster, node) ({of_cards(amount)}) "
        f"/ sum by (cluster, node) ({of_cards(c.GPU_MEMORY_TOTAL)})"
        for name, amount in (("allocated", c.GPU_MEMORY_ALLOCATED), ("used", c.GPU_MEMORY_USED))
    },
    "namespace_pod:gpuslice_memory_used:bytes": f"sum by (cluster, namespace, pod) ({one(_USED)})",
    "namespace_pod:gpuslice_sm_utilization:ratio": of_pod(one(c.SM_UTILIZATION.name)),
    **{
        # for long ranges: the series of 3,000 containers over 30 days have 250 million samples
        f"namespace:gpuslice_{name}": f"sum by (cluster, namespace) ({one(of_container)})"
        for name, of_container in (
            ("memory_allocated:bytes", c.MEMORY_ALLOCATED.name),
            ("memory_used:bytes", _USED),
            ("sm_seconds:rate5m", f"rate({c.SM_SECONDS.name}[5m])"),
        )
    },
    "gpu:gpuslice_memory_balance:bytes": f"sum by ({CARD_LABELS}) ({one(_USED)} or "
    f"{of_cards(c.UNATTRIBUTED_MEMORY)}) "
    f"- sum by ({CARD_LABELS}) ({of_cards(c.GPU_MEMORY_USED)})",
    **CHARGES,
}
