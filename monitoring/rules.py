"""Recording rules and alerts. Each alert has a case that fires and one that does not in alerts/tests.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpuslice.apps.exporter import catalogue as c

CRITICAL_XIDS = "48|62|64|74|79|95|119|120"
_USED, _LIMIT = c.MEMORY_USED.name, c.MEMORY_LIMIT.name
REGISTERED = "gpuslice_agent_registered"
BARE_PODS = "gpuslice_agent_pods_without_devices"
FORGOTTEN = "gpuslice_agent_forgotten_containers"
REFUSALS = "gpuslice_agent_refusals_total"
EXTENDER_READY = "gpuslice_extender_ready"
SAMPLED = "gpuslice_extender_sampled_pods_total"
OF_OTHERS = frozenset({REGISTERED, BARE_PODS, FORGOTTEN, REFUSALS, EXTENDER_READY, SAMPLED})
"""Metrics of the agent and the extender; the rest is the exporter's catalogue."""
RUNBOOK = "docs/operate/alerts.md"


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
            "annotations": {
                "summary": self.summary,
                "description": self.action,
                "runbook_url": self.runbook,
            },
        }

    @property
    def runbook(self) -> str:
        """Its section of the page for whoever is called; the chart puts an address before it."""
        return f"{RUNBOOK}#{self.name.lower()}"


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
        f"{_USED} > 1.03 * {_LIMIT}",  # what drivers load unseen is less
        "critical",
        f"{_WHO} holds more GPU memory than its limit.",
        "A program in it is not held by libgpuslice: linked statically, or kept out on purpose. Stop it.",
        "1m",
    ),
    Alert(
        "GpuContainerPastComputeShare",
        f"avg_over_time({c.SM_UTILIZATION.name}[10m]) > 1.25 * {c.COMPUTE_SHARE.name} + 0.05",
        "warning",
        f"{_WHO} computes for a quarter longer than its share.",
        "A program in it is not held by libgpuslice: linked statically, or kept out on purpose. Stop it.",
        "10m",
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
    Alert(
        "GpuAgentNotRegistered",
        f"{REGISTERED} == 0",
        "critical",
        "kubelet of {{ $labels.node }} does not know the agent: the node gives out no GPU memory.",
        "The agent's /readyz says what it waits for.",
        "10m",
    ),
    Alert(
        "GpuPodsWithoutDevices",
        f"{BARE_PODS} > 0",
        "critical",
        "{{ $value }} pods of {{ $labels.node }} run without the devices and limits they ask for.",
        "Event RunsWithoutDevices names them: delete them, so that they are made anew.",
        "1m",
    ),
    Alert(
        "GpuContainersForgotten",
        f"{FORGOTTEN} > 0",
        "warning",
        "kubelet of {{ $labels.node }} has forgotten {{ $value }} containers that run on its cards.",
        "They cannot be started again in their pods: delete these when it suits.",
        "10m",
    ),
    Alert(
        "GpuGrantsRefused",
        f"sum by (node, reason) (increase({REFUSALS}[15m])) > 3",
        "warning",
        "The agent of {{ $labels.node }} keeps refusing what kubelet asks for: {{ $labels.reason }}.",
        "gpuslice doctor, and the agent's log: each refusal is a pod that failed.",
    ),
    Alert(
        "GpuExtenderSilent",
        f"max({EXTENDER_READY}) == 0",
        "critical",
        "No extender answers: pods that ask for a part of a card wait.",
        "Look at the extenders' /readyz and log.",
        "2m",
    ),
    Alert(
        "GpuExtenderSampled",
        f"sum(increase({SAMPLED}[1h])) > 0",
        "warning",
        "Pods wait although a node that kube-scheduler did not ask about would hold them.",
        "Set percentageOfNodesToScore: 100 in the profile that schedules them.",
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
