"""Recording rules and alerts. Each alert has a case that fires and one that does not in alerts/tests.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpuslice.apps.exporter import catalogue as c

CRITICAL_XIDS = "48|62|64|74|79|95|119|120"
_USED, _LIMIT = c.MEMORY_USED.name, c.MEMORY_LIMIT.name


@dataclass(frozen=True, slots=True)
class Alert:
    """`summary` and `action` may name labels: {{ $labels.pod }}."""

    name: str
    expression: str
    severity: str
    summary: str
    action: str
    lasting: str = "0s"

    def rule(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.lasting,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "action": self.action},
        }


_CARD = "GPU {{ $labels.gpu }} of {{ $labels.node }}"
_WHO = "{{ $labels.namespace }}/{{ $labels.pod }}"

ALERTS = (
    Alert(
        "GpuExporterDown",
        'up{job=~".*gpuslice-exporter.*"} == 0',
        "critical",
        "The GPU exporter at {{ $labels.instance }} does not answer.",
        "Look at the pod's log; without it nothing is known of this node's cards.",
        "5m",
    ),
    Alert(
        "GpuExporterCollectorFailing",
        f"{c.COLLECTOR_SUCCESS.name} == 0",
        "warning",
        "The exporter of {{ $labels.node }} cannot read {{ $labels.collector }}.",
        "The reason is in the exporter's log and under /debug/state.",
        "10m",
    ),
    Alert(
        "GpuSamplesStale",
        f"{c.SAMPLE_AGE.name} > 60",
        "warning",
        "The cards of {{ $labels.node }} were read {{ $value | humanizeDuration }} ago.",
        "The driver does not answer: look for Xid lines in the kernel log.",
    ),
    Alert(
        "GpuAttributionUnavailable",
        f"{c.ATTRIBUTION.name} == 0",
        "warning",
        "Processes on {{ $labels.node }} cannot be given to containers.",
        "gpuslice_unavailable names the reason; mostly hostPID or the permission to watch pods is missing.",
        "15m",
    ),
    Alert(
        "GpuLost",
        f"{c.GPU_UP.name} == 0",
        "critical",
        f"{_CARD} does not answer.",
        "Drain the node and reset or replace the card.",
        "2m",
    ),
    Alert(
        "GpuMissing",
        f"{c.DEVICES.name} < {c.DEVICES_EXPECTED.name}",
        "critical",
        "{{ $labels.node }} shows fewer cards than before.",
        "Compare nvidia-smi -L with lspci; the card may have fallen off the bus.",
        "5m",
    ),
    Alert(
        "GpuXidCritical",
        f'time() - {c.XID_LAST.name}{{xid=~"{CRITICAL_XIDS}"}} < 600',
        "critical",
        f"{_CARD} reported Xid {{{{ $labels.xid }}}}.",
        "Drain the node; look the code up in NVIDIA's Xid catalogue.",
    ),
    Alert(
        "GpuXidContained",
        f'time() - {c.XID_LAST.name}{{xid="94"}} < 600',
        "warning",
        f"{_CARD} had a contained memory error.",
        "One application was ended; reset the card when it is free.",
    ),
    Alert(
        "GpuXidByApplication",
        f'increase({c.XID_ERRORS.name}{{xid=~"13|31|43|45"}}[15m]) > 3',
        "info",
        f"Applications on {_CARD} keep failing with Xid {{{{ $labels.xid }}}}.",
        "Find the application on the GPU Node dashboard and look at its log.",
    ),
    Alert(
        "GpuRecoveryNeeded",
        f"{c.GPU_RECOVERY.name} > 0",
        "critical",
        f"The driver asks for a recovery of {_CARD}.",
        "1 reset, 2 reboot, 3 drain peers, 4 drain and reset.",
    ),
    Alert(
        "GpuUncorrectableMemoryErrors",
        "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL > 0",
        "critical",
        "GPU {{ $labels.gpu }} of {{ $labels.hostname }} has uncorrectable memory errors.",
        "Reset the card; replace it when they come back.",
    ),
    Alert(
        "GpuRowRemapFailed",
        "DCGM_FI_DEV_ROW_REMAP_FAILURE == 1",
        "critical",
        "GPU {{ $labels.gpu }} of {{ $labels.hostname }} has no spare memory rows left.",
        "Replace the card.",
    ),
    Alert(
        "GpuThermalSlowdown",
        f'rate({c.GPU_THROTTLED.name}{{reason="hw_thermal"}}[5m]) > 0.1',
        "warning",
        f"{_CARD} is too hot and slows down.",
        "Check the node's cooling.",
        "5m",
    ),
    Alert(
        "GpuPowerBrake",
        f'rate({c.GPU_THROTTLED.name}{{reason="hw_power_brake"}}[5m]) > 0.1',
        "warning",
        f"{_CARD} is held down by the power supply.",
        "Check the node's power supplies.",
        "5m",
    ),
    Alert(
        "GpuNearSlowdownTemperature",
        f"{c.GPU_TEMPERATURE_MARGIN.name} < 3",
        "warning",
        f"{_CARD} is within 3 degrees of slowing down.",
        "Check the node's cooling.",
        "5m",
    ),
    Alert(
        "GpuMemoryNearlyFull",
        f"{c.GPU_MEMORY_USED.name} / {c.GPU_MEMORY_TOTAL.name} > 0.95",
        "warning",
        f"Memory of {_CARD} is nearly full.",
        "Without isolation the next allocation on the card fails, whoever makes it.",
        "10m",
    ),
    Alert(
        "GpuContainerNearMemoryLimit",
        f"{_USED} / {_LIMIT} > 0.95",
        "warning",
        f"{_WHO} uses more than 95 % of its GPU memory limit.",
        "Raise aliyun.com/gpu-mem of the pod, or make it use less.",
        "5m",
    ),
    Alert(
        "GpuContainerPastMemoryLimit",
        f"{_USED} > {_LIMIT}",
        "critical",
        f"{_WHO} holds more GPU memory than its limit.",
        "A program in it is not held by libgpuslice: linked statically, or kept out on purpose. Stop it.",
        "1m",
    ),
    Alert(
        "GpuContainerMemoryRefused",
        f"increase({c.MEMORY_REFUSED.name}[5m]) > 0",
        "warning",
        f"{_WHO} asked for more GPU memory than its limit.",
        "Raise aliyun.com/gpu-mem of the pod; its neighbours are not affected.",
    ),
    Alert(
        "GpuOverCommitted",
        f"{c.GPU_MEMORY_ALLOCATED.name} > {c.GPU_MEMORY_TOTAL.name}",
        "critical",
        f"More memory of {_CARD} is given out than it has.",
        "Compare kubectl inspect cgpu with kubelet's pod-resources; this must never happen.",
        "5m",
    ),
    Alert(
        "GpuHeldIdle",
        f"max_over_time({c.SM_UTILIZATION.name}[2h]) == 0 and {c.MEMORY_ALLOCATED.name} > 0",
        "info",
        f"{_WHO} holds a GPU and has not used it.",
        "Ask its owner whether it is still needed.",
        "2h",
    ),
    Alert(
        "GpuMemoryOfNobody",
        f'sum by (node, gpu, gpu_uuid) ({c.UNATTRIBUTED_MEMORY.name}{{reason!="driver"}}) > 500e6',
        "warning",
        f"Memory of {_CARD} is held by processes outside any allocation.",
        "gpuslice_unattributed_memory_bytes says of what kind they are.",
        "15m",
    ),
)

RECORDED = {
    "node:gpuslice_memory_allocated:ratio": f"sum by (node) ({c.GPU_MEMORY_ALLOCATED.name}) "
    f"/ sum by (node) ({c.GPU_MEMORY_TOTAL.name})",
    "node:gpuslice_memory_used:ratio": f"sum by (node) ({c.GPU_MEMORY_USED.name}) "
    f"/ sum by (node) ({c.GPU_MEMORY_TOTAL.name})",
    "namespace_pod:gpuslice_memory_used:bytes": f"sum by (namespace, pod) ({_USED})",
    "namespace_pod:gpuslice_sm_utilization:ratio": f"avg by (namespace, pod) ({c.SM_UTILIZATION.name})",
    "gpu:gpuslice_memory_balance:bytes": f"sum by (node, gpu_uuid) ({_USED} or {c.UNATTRIBUTED_MEMORY.name}) "
    f"- sum by (node, gpu_uuid) ({c.GPU_MEMORY_USED.name})",
}


def rule_groups() -> dict[str, Any]:
    """A Prometheus rule file."""
    recorded = [{"record": name, "expr": expression} for name, expression in RECORDED.items()]
    return {
        "groups": [
            {"name": "gpuslice.records", "rules": recorded},
            {"name": "gpuslice.alerts", "rules": [alert.rule() for alert in ALERTS]},
        ]
    }
