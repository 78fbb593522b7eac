"""Recording rules: what dashboards and people query often, computed once."""

from __future__ import annotations

from gpuslice.apps.exporter import catalogue as c

_USED = c.MEMORY_USED.name
RECORDED = {
    "node:gpuslice_memory_allocated:ratio": f"sum by (node) ({c.GPU_MEMORY_ALLOCATED.name}) "
    f"/ sum by (node) ({c.GPU_MEMORY_TOTAL.name})",
    "node:gpuslice_memory_used:ratio": f"sum by (node) ({c.GPU_MEMORY_USED.name}) "
    f"/ sum by (node) ({c.GPU_MEMORY_TOTAL.name})",
    "namespace_pod:gpuslice_memory_used:bytes": f"sum by (namespace, pod) ({_USED})",
    "namespace_pod:gpuslice_sm_utilization:ratio": f"avg by (namespace, pod) ({c.SM_UTILIZATION.name})",
    **{
        # for long ranges: the series of 3,000 containers over 30 days have 250 million samples
        f"namespace:gpuslice_{name}": f"sum by (cluster, namespace) ({of_container})"
        for name, of_container in (
            ("memory_allocated:bytes", c.MEMORY_ALLOCATED.name),
            ("memory_used:bytes", _USED),
            ("sm_seconds:rate5m", f"rate({c.SM_SECONDS.name}[5m])"),
        )
    },
    "gpu:gpuslice_memory_balance:bytes": f"sum by (node, gpu_uuid) ({_USED} or {c.UNATTRIBUTED_MEMORY.name}) "
    f"- sum by (node, gpu_uuid) ({c.GPU_MEMORY_USED.name})",
}
