"""The names of the contract: resources, annotations, labels, environment, objects.

They are the vendor's, so that existing manifests and tools work unchanged; what is ours starts with
``gpuslice.io/``. A name is written here once and imported everywhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


# -- resources ---------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ResourceNames:
    """One set of names of what is shared. All sets mean the same; a node offers the names of one of them.

    kubelet counts each resource on its own, so a card under two names would be given out twice.
    """

    memory: str  # units, of a node and of a container
    compute: str  # percent of a card's compute, of a node and of a container
    cards: str  # how many, of a node; as a pod *label*: how many cards the pod is spread over


VENDOR_NAMES = ResourceNames("aliyun.com/gpu-mem", "aliyun.com/gpu-core.percentage", "aliyun.com/gpu-count")
NEUTRAL_NAMES = ResourceNames("gpuslice.io/memory", "gpuslice.io/compute", "gpuslice.io/cards")
NAME_SETS: Mapping[str, ResourceNames] = MappingProxyType(
    {"aliyun.com": VENDOR_NAMES, "gpuslice.io": NEUTRAL_NAMES}
)
"""By what a cluster's owner calls the set; the first is what nodes offer unless told otherwise."""
GPU_MEM, GPU_CORE, GPU_COUNT = VENDOR_NAMES.memory, VENDOR_NAMES.compute, VENDOR_NAMES.cards
MEMORY_NAMES = tuple(names.memory for names in NAME_SETS.values())
EITHER_MEMORY = " or ".join(MEMORY_NAMES)  # for sentences that know no pod and no node
AMOUNT_NAMES = tuple(name for names in NAME_SETS.values() for name in (names.memory, names.compute))
CARDS_NAMES = tuple(names.cards for names in NAME_SETS.values())
EXCLUSIVE_GPU = "nvidia.com/gpu"

# -- pod annotations ---------------------------------------------------------------------------------
ANN_INDEX = "ALIYUN_COM_GPU_MEM_IDX"  # card index; "0,2" when a pod is on several cards
ANN_POD_UNITS = "ALIYUN_COM_GPU_MEM_POD"  # units the whole pod holds
ANN_CARD_UNITS = "ALIYUN_COM_GPU_MEM_DEV"  # units of the card
ANN_ASSUME_TIME = "ALIYUN_COM_GPU_MEM_ASSUME_TIME"  # nanoseconds since the epoch, decimal
ANN_ASSIGNED = "ALIYUN_COM_GPU_MEM_ASSIGNED"  # "false" from the extender, "true" from the agent
ANN_ALLOCATION = "scheduler.framework.gpushare.allocation"  # {"<container>": {"<card>": units}}
ANN_CORE = "gpushare.alibabacloud.com/core-percentage"  # {"<container>": {"<card>": percent}}
ANN_VISIBLE = "gpuslice.io/visible-devices"  # the cards' uuids, or indices where those are not known
ANN_LATENCY_CLASS = "gpuslice.io/latency-class"  # of a pod: interactive; anything else is batch
ANN_REQUEST = "gpuslice.io/memory-request"  # of a pod, by its author, while it runs: units it wants
ANN_SHOWN_MEMORY = "gpuslice.io/shown-memory"  # of a pod: request; anything else is its limit
ANN_LIMIT = "gpuslice.io/memory-limit"  # of a pod, by its author: units that it may have if they are free
ANN_ADVICE = "gpuslice.io/advice"  # of a pod or a namespace: apply, what `gpuslice advise --apply` may do
ANN_TIERS = "gpuslice.io/tiers"  # of a pod, by the agent: {"<container>": tier} where it is not the node's
ANN_TRACEPARENT = "gpuslice.io/traceparent"  # W3C trace context of the bind, where traces are collected
ANN_GRANTED = "gpuslice.io/memory-granted"  # {"<container>": units}, where it is not what the spec says
ANN_WHEN_IDLE = "gpuslice.io/when-idle"  # of a pod, by its author: keep (default) or park
ANN_IDLE_AFTER = "gpuslice.io/idle-after"  # of a pod, by its author: how long before that, such as 5m
ANN_PARK = "gpuslice.io/park"  # of a pod that runs: park or wake, which its node's agent does and takes away
ANN_PARKED = "gpuslice.io/parked"  # {"<container>": {"<uuid>": bytes}}, by the agent: what it took off cards
ANN_MEANT = "gpuslice.io/meant-for"  # "0,2" or "": what is kept for a pod that was taken off its card

CONDITION_PARKED = "gpuslice.io/Parked"  # of a pod, by the agent

# -- node annotations and labels ---------------------------------------------------------------------
NODE_GPUS = "gpuslice.io/gpus"  # JSON list of cards, written by the agent: the true size of each
NODE_TIER = "gpuslice.io/tier"  # driver, library, watchdog or none, by the agent: what holds the limits
NODE_LINKS = "gpuslice.io/links"  # "311,11,3", by the agent: how near its cards are, where it differs
NODE_KUBELET_AWAY = "gpuslice.io/kubelet-away"  # "true", by the agent: nothing is to be placed there now
NODE_ORPHANS = "gpuslice.io/orphans"  # JSON list, by the agent: what containers hold whose pods are gone
NODE_OUT_OF_USE = "gpuslice.io/out-of-use"  # "0,2", by the extender: what the ConfigMap takes away
NODE_KEPT = "gpuslice.io/kept-from-scale-down"  # "true", by the extender: it wrote `SCALE_DOWN_MARKS` too
SCALE_DOWN_MARKS = ("cluster-autoscaler.kubernetes.io/scale-down-disabled", "karpenter.sh/do-not-disrupt")
LABEL_SHARED = "cgpu"  # "true": the node's cards are shared
LABEL_NO_ISOLATION = "cgpu.disable.isolation"  # "true": shared, limits not enforced
LABEL_PLACEMENT = "ack.node.gpu.placement"  # binpack (default) or spread
LABEL_MIN_TIER = "gpuslice.io/min-tier"  # of a pod: the weakest tier that it runs under
LABEL_GROUP_NAME = "pod-group.scheduling.sigs.k8s.io/name"  # of pods that start together or not at all
LABEL_GROUP_MIN = "pod-group.scheduling.sigs.k8s.io/min-available"  # so many of them
CARD_FIT = "gpuslice.io/card-fit"  # controller of the admission checks of Kueue that the extender answers
GATE_POD_GROUP = "gpuslice.io/pod-group"  # scheduling gate: until cards are held for the pod's whole group
LABEL_PLACEHOLDER = "gpuslice.io/placeholder"  # "true": what asks an autoscaler for a node, by the extender
PLACEHOLDER_SCHEDULER = "gpuslice.io/nobody"  # of placeholders that are pods: they never run
LABEL_LEADER = "gpuslice.io/leader"  # on the pod of the extender that answers; the Service selects by it
LABEL_MODE = "gpuslice.io/mode"  # exclusive, shared, shared-without-isolation, claims; wins over the vendor's
LABEL_COMPUTE_POLICY = "gpuslice.io/compute-policy"  # of a node: cap (default), fair or off
ANN_MIGRATION = "gpuslice.io/migration"  # of a node or workload: how `gpuslice migrate` undoes its change
LABEL_ZONE = "topology.kubernetes.io/zone"
LABEL_SCHEDULE = "ack.node.gpu.schedule"  # the vendor's newer switch: cgpu, share, core_mem, default

# -- who writes them ------------------------------------------------------------------------------------
EXTENDER, AGENT = "extender", "agent"
POD_ANNOTATION_WRITERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys((ANN_INDEX, ANN_POD_UNITS, ANN_CARD_UNITS, ANN_ASSUME_TIME), (EXTENDER, AGENT)),
        **dict.fromkeys((ANN_ASSIGNED, ANN_ALLOCATION, ANN_CORE, ANN_VISIBLE, ANN_MEANT), (EXTENDER, AGENT)),
        ANN_GRANTED: (EXTENDER, AGENT),
        ANN_TIERS: (AGENT,),
        ANN_PARKED: (AGENT,),
        ANN_TRACEPARENT: (EXTENDER,),
    }
)
"""What is said of a pod and not by its author: at no time of its life, and in no way in which it is written.

The chart's policies and the webhook are held to this list. The author's own are latency class, minimum tier,
group and (at creation alone) number of cards.
"""
NODE_ANNOTATION_WRITERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys((NODE_GPUS, NODE_TIER, NODE_LINKS, NODE_KUBELET_AWAY, NODE_ORPHANS), (AGENT,)),
        **dict.fromkeys((NODE_OUT_OF_USE, NODE_KEPT), (EXTENDER,)),
    }
)
"""The agent writes those of its own node. Nodes are written by nobody else without rights to the cluster."""
NODE_AMOUNTS_OF_AGENT = (*CARDS_NAMES, *(names.compute for names in NAME_SETS.values()))
"""What kubelet does not count; the rest of what an agent offers are its device plugin's devices."""
LABEL_OTHER_PLUGIN = (
    "nvidia.com/gpu.deploy.device-plugin"  # of a node: "true" where NVIDIA's operator runs its own
)
AGENT_COMPONENT = "gpushare-device-plugin"  # of the agent's events

# -- claims of dynamic resource allocation ------------------------------------------------------------
CLAIM_DRIVER = "gpu.gpuslice.io"  # of ResourceSlices and allocated claims
CLAIM_CLASS = "gpuslice.io"  # the DeviceClass of shared cards
CLAIM_CDI_KIND = "gpuslice.io/claim"  # what a prepared claim is to the container runtime
LIMITS_CDI_KIND = "gpuslice.io/limits"  # a container whose limits the driver enforces
CLAIM_MEMORY = "memory"  # capacities of a card in a ResourceSlice
CLAIM_COMPUTE = "compute"
CLAIM_SLOTS = "slots"
CLAIM_TAINT = "gpu.gpuslice.io/unhealthy"  # on a card that must not be given out
LABEL_CLAIMS = "gpuslice.io/claims"  # "true" on a namespace or pod: its requests are turned into claims
LABEL_CLAIMED = "gpuslice.io/claimed"  # "true" on a pod of which they were
LABEL_CLAIM_MEMORY = "gpuslice.io/claim-memory"  # of a namespace: the most that one claim may ask for
LABEL_CLAIM_COMPUTE = "gpuslice.io/claim-compute"

# -- environment of a container ----------------------------------------------------------------------
ENV_VISIBLE = "NVIDIA_VISIBLE_DEVICES"
ENV_INDEX = "ALIYUN_COM_GPU_MEM_IDX"
ENV_POD_UNITS = "ALIYUN_COM_GPU_MEM_POD"
ENV_CONTAINER_UNITS = "ALIYUN_COM_GPU_MEM_CONTAINER"
ENV_CARD_UNITS = "ALIYUN_COM_GPU_MEM_DEV"
ENV_NO_ISOLATION = "CGPU_DISABLE"
ENV_DRIVER_REQUEST = "NVIDIA_GPU_MEMORY_REQUEST"  # MiB on each card, which the hook of NVIDIA's toolkit sets
ENV_DRIVER_LIMIT = "NVIDIA_GPU_MEMORY_LIMIT"

# -- objects -----------------------------------------------------------------------------------------
SYSTEM_NAMESPACE = "kube-system"
UNHEALTHY_CONFIGMAP_PREFIX = "unhealthy-gpu-"  # + node name; data.gpus: "0,2"
PLUGIN_ENDPOINT = "aliyungpushare.sock"
DEVICE_ID_SEPARATOR = "-_-"  # <card uuid>-_-<unit>


def of_our_chart(labels: Mapping[str, str] | None) -> bool:
    """Whether an object is one of the chart's. Its value `nameOverride` changes the first label alone."""
    found = labels or {}
    named = found.get("app.kubernetes.io/name") == "gpuslice"
    return named or found.get("helm.sh/chart", "").startswith("gpuslice-")


def device_id(uuid: str, unit: int) -> str:
    """The kubelet device id of one unit of a card."""
    return f"{uuid}{DEVICE_ID_SEPARATOR}{unit}"


def card_of_device_id(identifier: str) -> str:
    """The uuid of the card that a device id belongs to; ValueError when it is not one of ours."""
    uuid, separator, unit = identifier.rpartition(DEVICE_ID_SEPARATOR)
    if not separator or not uuid or not unit.isdecimal():
        raise ValueError(f'device id "{identifier}" is not <uuid>{DEVICE_ID_SEPARATOR}<n>')
    return uuid
