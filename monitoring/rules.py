"""Alerts. Each has a case that fires and one that does not in alerts/tests.yaml."""

from __future__ import annotations

from gpuslice.apps.exporter import catalogue as c
from monitoring.alert import Alert
from monitoring.conditions import best_of, silent, slowed, xids
from monitoring.selectors import of_cards, of_containers
from monitoring.series import (
    AGENT_SILENT,
    ASKED,
    ASKED_IN_VAIN,
    BARE_POD,
    BORROWERS_ENDED,
    CARD_HEALTHY,
    CERTIFICATE_EXPIRY,
    EXTENDER_READY,
    EXTENDER_SILENT,
    FORGOTTEN,
    PARKED_WAITING,
    REFUSALS,
    REGISTERED,
    REJECTIONS,
    SAMPLED,
    TOKENS_IN_CLEAR,
    WAITING,
    WATCH_DELAY,
    WATCH_LATE,
    WEBHOOK_UP,
)

CRITICAL_XIDS = "48|62|64|74|79|95|119|120"
_NOT_THE_DRIVERS = '{reason!="driver"}'
UNSEEN = 1.03
"""What drivers load beside what is counted is less than 3 %."""

_NODE = "{{ or $labels.node $labels.instance }}"  # the chart's monitors add the node to each target
_CARD = "GPU {{ $labels.gpu }} of {{ $labels.node }}"
_POD = "{{ $labels.namespace }}/{{ $labels.pod }}"
_WHO = f"{_POD} (container {{{{ $labels.container }}}}) on {_CARD}"
_DELETE = "kubectl -n {{ $labels.namespace }} delete pod {{ $labels.pod }}"
_DRAIN = "kubectl drain {{ $labels.node }} --ignore-daemonsets --delete-emptydir-data"
_PODS_THERE = "kubectl inspect cgpu -d {{ $labels.node }} names the pods on it"


def _on_node(component: str) -> str:
    return (
        f"kubectl -n kube-system get pod -l component={component} -o wide"
        "{{ with $labels.node }} --field-selector spec.nodeName={{ . }}{{ end }}"
    )


_USED, _LIMIT, _HELD = (of_containers(each) for each in (c.MEMORY_USED, c.MEMORY_LIMIT, c.MEMORY_ALLOCATED))

ALERTS = (
    Alert(
        "GpuExporterDown",
        silent("gpuslice-exporter"),
        "critical",
        f"The GPU exporter of {_NODE} does not answer.",
        "Programs keep running, but this node's cards have no metrics, and no other alert covers them. "
        f"Look at the pod's events and log: {_on_node('gpuslice-exporter')}.",
        "5m",
    ),
    Alert(
        "GpuExporterCollectorFailing",
        f"max by (cluster, node, collector) ({c.COLLECTOR_SUCCESS.name}) == 0",
        "warning",
        "The exporter of {{ $labels.node }} cannot read {{ $labels.collector }}.",
        f"The reason is in its log and under /debug/state: {_on_node('gpuslice-exporter')}.",
        "10m",
    ),
    Alert(
        "GpuSamplesStale",
        f"min by (cluster, node) ({c.SAMPLE_AGE.name}) > 60",
        "warning",
        "The driver of {{ $labels.node }} has not answered for {{ $value | humanizeDuration }}.",
        "On the node: timeout 10 nvidia-smi; dmesg | grep -i xid. If nvidia-smi hangs too, drain the node "
        f"and restart it: {_DRAIN}.",
    ),
    Alert(
        "GpuAttributionUnavailable",
        f"max by (cluster, node) ({c.ATTRIBUTION.name}) == 0",
        "warning",
        "Processes on {{ $labels.node }} cannot be assigned to containers.",
        f'{c.UNAVAILABLE.name}{{node="{{{{ $labels.node }}}}"}} names the reason; mostly hostPID or the '
        "permission to watch pods is missing.",
        "15m",
    ),
    Alert(
        "GpuLost",
        f"{of_cards(c.GPU_UP)} == 0",
        "critical",
        f"{_CARD} does not answer.",
        f"Nothing new is placed on it. Delete the pods that are on it ({_PODS_THERE}), then drain "
        f"the node and reset (nvidia-smi -r) or replace the card: {_DRAIN}.",
        "2m",
    ),
    Alert(
        "GpuMissing",
        # a restart of the node, which this alert asks for, resets what the exporter has seen
        f"max by (cluster, node) ({c.DEVICES.name}) < max by (cluster, node) "
        f"(max_over_time({c.DEVICES_EXPECTED.name}[1d]))",
        "critical",
        "{{ $labels.node }} shows fewer cards than within the last day: {{ $value }}.",
        "On the node compare nvidia-smi -L with lspci | grep -i nvidia. A card that has fallen off the bus "
        f"needs a restart of the node: {_DRAIN}.",
        "5m",
    ),
    Alert(
        "GpuXidCritical",
        xids(CRITICAL_XIDS, "10m"),
        "critical",
        f"{_CARD} reported Xid {{{{ $labels.xid }}}} within the last ten minutes.",
        "The agent has taken the card out of use. Look the code up in NVIDIA's Xid catalogue; 79 and 95 need "
        f"a reset or restart: {_DRAIN}.",
    ),
    Alert(
        "GpuXidContained",
        xids("94", "10m"),
        "warning",
        f"{_CARD} had a contained memory error (Xid 94).",
        "One program was terminated, the others keep running. Reset the card when it is free: "
        f"{_PODS_THERE}.",
    ),
    Alert(
        "GpuXidByApplication",
        xids("13|31|43|45", "15m", 3),
        "info",
        f"Programs on {_CARD} keep failing with Xid {{{{ $labels.xid }}}}.",
        f"{_PODS_THERE}: find the one that restarts or logs CUDA errors and tell its owner.",
    ),
    Alert(
        "GpuOutOfUse",
        f"{CARD_HEALTHY} == 0",
        "warning",
        f"{_CARD} has been out of use for half an hour: no new pod gets a part of it.",
        "The reason: kubectl -n kube-system get cm unhealthy-gpu-{{ $labels.node }} -o yaml. Pods that hold "
        f"part of it keep running: {_PODS_THERE}.",
        "30m",
    ),
    Alert(
        "GpuRecoveryNeeded",
        f"{of_cards(c.GPU_RECOVERY)} > 0",
        "critical",
        f"The driver asks for action {{{{ $value }}}} to recover {_CARD}.",
        "1 is to reset the card, 2 to restart the node, 3 to drain peers, 4 to drain and reset. "
        f"Drain the node first: {_DRAIN}.",
    ),
    Alert(
        "GpuUncorrectableMemoryErrors",
        f"{of_cards(c.GPU_UNCORRECTED)} > 0",
        "critical",
        f"{_CARD} had memory errors that could not be corrected: {{{{ $value }}}}.",
        "Results of programs on it may be wrong. Drain the node and reset the card (nvidia-smi -r); replace "
        f"it if the errors return: {_DRAIN}.",
    ),
    Alert(
        "GpuRowRemapFailed",
        f"{of_cards(c.GPU_REMAP_FAILED)} == 1",
        "critical",
        f"{_CARD} has no spare memory rows left.",
        "The next bad row stays bad. Take the card out of use (ConfigMap unhealthy-gpu-{{ $labels.node }} "
        "in kube-system) and replace it.",
    ),
    Alert(
        "GpuThermalSlowdown",
        f"{slowed('hw_thermal')} > 0.1",
        "warning",
        f"{_CARD} is too hot and slows down.",
        "All programs on it run slower. Check fans, airflow and the room's temperature.",
        "5m",
    ),
    Alert(
        "GpuPowerBrake",
        f"{slowed('hw_power_brake')} > 0.1",
        "warning",
        f"{_CARD} is slowed down by the power supply.",
        "All programs on it run slower. Check the node's power supplies and what feeds them.",
        "5m",
    ),
    Alert(
        "GpuNearSlowdownTemperature",
        f"{of_cards(c.GPU_TEMPERATURE_MARGIN)} < 3",
        "warning",
        f"{_CARD} is {{{{ $value }}}} degrees from slowing down.",
        "Nothing is slowed down yet. Check fans, airflow and the room's temperature.",
        "5m",
    ),
    Alert(
        "GpuMemoryNearlyFull",
        f"{of_cards(c.GPU_MEMORY_USED)} / {of_cards(c.GPU_MEMORY_TOTAL)} > 0.95 "
        f"and on (cluster, node, gpu_uuid) ({_USED} unless {_LIMIT})",
        "warning",
        f"{{{{ $value | humanizePercentage }}}} of the memory of {_CARD} is in use, by containers "
        "without a limit.",
        "The next allocation on the card fails, no matter who makes it: run fewer pods there, or enable "
        f"isolation. {_PODS_THERE}.",
        "10m",
    ),
    Alert(
        "GpuContainerPastMemoryLimit",
        f"{_USED} > {UNSEEN} * {_LIMIT}",
        "critical",
        f"{_WHO} holds {{{{ $value | humanize1024 }}}}B, more GPU memory than its limit.",
        "libgpuslice does not control a program in it: linked statically, or evading it deliberately. Its "
        f"neighbours lack that memory. Stop it: {_DELETE}.",
        "1m",
    ),
    Alert(
        "GpuContainerPastMemoryRequest",
        f"{_USED} > {UNSEEN} * {_HELD} unless {_LIMIT}",
        "warning",
        f"{_WHO} holds {{{{ $value | humanize1024 }}}}B of GPU memory, more than it asked for.",
        "Its node has no isolation, so nothing stops it, and its neighbours fail when they ask for what they "
        "were promised. Raise its request, have the program limit itself, or enable isolation. "
        f"To stop it: {_DELETE}.",
        "1m",
    ),
    Alert(
        "GpuContainerPastComputeShare",
        f"{of_containers(c.SM_UTILIZATION, of='avg_over_time({}[10m])')} "
        f"> 1.25 * {of_containers(c.COMPUTE_SHARE)} + 0.05",
        "warning",
        f"{_WHO} computes {{{{ $value | humanizePercentage }}}} of the time, more than a quarter "
        "over its share.",
        "libgpuslice does not control a program in it: linked statically, or evading it deliberately; or "
        "its kernels take seconds. See what it runs (gpuslice top) and stop it if it evades the library.",
        "10m",
    ),
    Alert(
        "GpuContainerMemoryRefused",
        # a series that starts with its first refusal has no increase
        f"{of_containers(c.MEMORY_REFUSED, of='increase({}[5m])')} > 0 "
        f"or ({of_containers(c.MEMORY_REFUSED)} > 0 "
        f"unless {of_containers(c.MEMORY_REFUSED, of='last_over_time({}[1h] offset 5m)')})",
        "warning",
        f"{_WHO} asked for more GPU memory than its limit.",
        "If its program fails, raise the pod's request; its neighbours are not affected.",
    ),
    Alert(
        "GpuOverCommitted",
        f"{of_cards(c.GPU_MEMORY_ALLOCATED)} > {of_cards(c.GPU_MEMORY_TOTAL)}",
        "critical",
        f"More memory of {_CARD} is given out than it has: {{{{ $value | humanize1024 }}}}B.",
        "gpuslice top names the containers on the card; gpuslice doctor says if another device plugin gives "
        "the node's cards out, too: take it off the node. Then delete the pods of one of the two.",
        "5m",
    ),
    Alert(
        "GpuHeldIdle",
        f"{of_containers(c.SM_UTILIZATION, of='max_over_time({}[2h])')} == 0 and {_HELD} > 0 "
        # it is as old as that
        f"and {of_containers(c.SM_UTILIZATION, of='last_over_time({}[10m] offset 2h)')}",
        "info",
        f"{_WHO} has not computed for two hours.",
        "Ask its owner whether it is still needed: others may wait for the room.",
        "1m",
    ),
    Alert(
        "GpuMemoryNotRequested",
        f"({_USED} > 500e6 unless {_HELD}) and on (cluster, node) "
        f'{c.COLLECTOR_SUCCESS.name}{{collector="pod_resources"}} == 1',  # else nobody's grant is known
        "critical",
        f"{_WHO} holds {{{{ $value | humanize1024 }}}}B of GPU memory and was given none.",
        f"Others were promised that memory. Stop it: {_DELETE}, and look for NVIDIA_VISIBLE_DEVICES in it.",
        "5m",
    ),
    Alert(
        "GpuMemoryOfNobody",
        f"sum by (cluster, node, gpu, gpu_uuid) "
        f"({of_cards(c.UNATTRIBUTED_MEMORY, _NOT_THE_DRIVERS)}) > 500e6",
        "warning",
        f"{{{{ $value | humanize1024 }}}}B of {_CARD} are held by processes outside any allocation.",
        f'{c.UNATTRIBUTED_MEMORY.name}{{node="{{{{ $labels.node }}}}"}} says of what kind they '
        "are; on the node nvidia-smi and cat /proc/PID/cgroup say which.",
        "15m",
    ),
    Alert(
        "GpuAgentNotRegistered",
        f"{REGISTERED} == 0 or {silent('gpuslice-agents')}",
        "critical",
        f"{_NODE} gives out no GPU memory: its agent is not registered with kubelet, or does not answer.",
        "Running pods are not affected. What it waits for: curl http://{{ $labels.instance }}/readyz; why it "
        f"does not run: {_on_node('gpushare-device-plugin')}.",
        "10m",
    ),
    Alert(
        "GpuPodWithoutDevices",
        f"{BARE_POD} == 1",
        "critical",
        f"{_POD} on {_NODE} runs without the devices and the limit it asks for.",
        f"kubelet started it while it knew no device plugin. Delete it, so that it is recreated: {_DELETE}.",
        "1m",
    ),
    Alert(
        "GpuContainerForgotten",
        f"{FORGOTTEN} == 1",
        "warning",
        f"kubelet of {_NODE} has lost its record of {_POD} (container {{{{ $labels.container }}}}), which "
        "runs on its cards.",
        "It keeps running, with its limit, but cannot be started again in this pod. Delete the pod when "
        f"convenient, so that it is recreated: {_DELETE}.",
        "10m",
    ),
    Alert(
        "GpuParkedMemoryWaits",
        f"{PARKED_WAITING} > 0",
        "critical",
        f'{{{{ printf "%.0f" $value }}}} parked containers of {_NODE} wait for their own memory.',
        "Borrowers give it back within seconds: nvidia-smi on the node names who else holds the card.",
        "2m",
    ),
    Alert(
        "GpuGrantsRefused",
        f"max by (cluster, node, reason) (increase({REFUSALS}[15m])) > 3",
        "warning",
        'The agent of {{ $labels.node }} refused {{ printf "%.0f" $value }} requests of kubelet: '
        "{{ $labels.reason }}.",
        "Each is a pod that failed. gpuslice doctor says where kubelet and the annotations disagree; the "
        f"agent's log has each refusal: {_on_node('gpushare-device-plugin')}.",
    ),
    Alert(
        "GpuBorrowersEnded",
        f"max by (cluster, node) (increase({BORROWERS_ENDED}[15m])) > 0",
        "info",
        '{{ printf "%.0f" $value }} containers of {{ $labels.node }} lost programs that kept what was lent.',
        "Others requested it: the event GPUMemoryCalledBack on both pods says who. Request it, or free it.",
    ),
    Alert(
        "GpuExtenderSilent",
        f"{best_of(EXTENDER_READY)} == 0",
        "critical",
        "No extender answers: pods that request part of a card wait.",
        "Running pods are not affected. kubectl -n kube-system get pod -l component=gpushare-schd-extender "
        "-L gpuslice.io/leader; the log says what it waits for, usually the API server.",
        "2m",
    ),
    Alert(
        "GpuWebhookSilent",
        f"{best_of(WEBHOOK_UP)} == 0",
        "critical",
        "No webhook answers: GPU pods are stored as they were written, or refused (failurePolicy Fail).",
        "Pods that name no scheduler wait or get no card. Look at its events and log: kubectl -n "
        "kube-system get pod -l component=gpuslice-webhook.",
        "5m",
    ),
    Alert(
        "GpuCertificateExpires",
        f"{CERTIFICATE_EXPIRY} - time() < 14 * 86400",
        "warning",
        "The certificate {{ $labels.file }} of {{ or $labels.node $labels.pod $labels.instance }} "
        "{{ if lt $value 0.0 }}has expired{{ else }}expires in {{ $value | humanizeDuration }}{{ end }}.",
        "After that clients refuse it: without the extender's no pod gets a part of a card. helm upgrade "
        "renews the chart's own, cert-manager its own: see why it did not (kubectl describe certificate -A).",
        "10m",
    ),
    Alert(
        "GpuTokensInClear",
        f"{TOKENS_IN_CLEAR} > 0",
        "warning",
        "Clients show {{ or $labels.node $labels.pod $labels.instance }} tokens or passwords without TLS.",
        "Who can listen on the network can use them: give it a certificate (console.tlsSecret, "
        "extender.certificate.source, the exporter's web-config file).",
        "10m",
    ),
    Alert(
        "GpuExtenderSampled",
        f"sum(increase({SAMPLED}[1h])) > 0",
        "warning",
        "Pods wait although they would fit on a node that kube-scheduler did not ask about.",
        "Set percentageOfNodesToScore: 100 in the profile that schedules them; gpuslice doctor says how "
        "many nodes are asked about.",
    ),
    Alert(
        "GpuKubeletRejectsPods",
        f"sum by (node) (increase({REJECTIONS}[30m])) > 1",
        "warning",
        "kubelet on {{ $labels.node }} rejects pods that were placed there: they fail and never ran.",
        "gpuslice doctor and kubectl describe node {{ $labels.node }} name the reason; others go elsewhere.",
    ),
    Alert(
        "GpuSchedulerSilent",
        # it retries each waiting pod within five minutes; a series begins with its first call
        f"max({WAITING}) > 0 and (sum(increase({ASKED}[15m])) or vector(0)) == 0",
        "warning",
        "kube-scheduler has asked about no pod for a quarter of an hour, and {{ $value }} wait.",
        "Look at the events of one that waits: kube-scheduler may have its own reason (a taint, a volume). "
        "Without any, is it running? kubectl -n kube-system get pod -l component=gpuslice-scheduler.",
        "5m",
    ),
    Alert(
        "GpuExtenderAskedInVain",
        f"sum(increase({ASKED_IN_VAIN}[10m])) > 20",
        "warning",
        "kube-scheduler calls an extender that is not the leader: its pods are retried again and again.",
        "Does the Service select the leader? kubectl -n kube-system get pod -L gpuslice.io/leader; a "
        "kube-scheduler on the host network must call the Service or a node port, not a pod.",
        "10m",
    ),
    Alert(
        "GpuWatchLate",
        f"max by (node, pod, instance) ({WATCH_LATE}) > 5 or max by (node, pod, instance) "
        f"({EXTENDER_SILENT} or {AGENT_SILENT}) > 180 or histogram_quantile(0.9, sum by (le) "
        f"(rate({WATCH_DELAY}[10m]))) > 1",
        "warning",
        "Changes from the API server arrive {{ $value | humanizeDuration }} late, or not at "
        "all{{ with or $labels.node $labels.pod $labels.instance }}, at {{ . }}{{ end }}.",
        "Decisions use outdated information: pods wait though they fit, or are tried twice. Look for an API "
        "server or etcd that is slow (apiserver_watch_events_total, etcd_disk_wal_fsync_duration_seconds), "
        "for a proxy in between, and for CPU throttling (gpuslice_process_event_loop_lag_seconds).",
        "5m",
    ),
)
