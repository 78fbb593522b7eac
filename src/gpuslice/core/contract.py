"""The names of the contract: resources, annotations, labels, environment, objects.

They are the vendor's, so that existing manifests and tools work unchanged; what is ours starts with
``gpuslice.io/``. A name is written here once and imported everywhere else.
"""

# -- resources ---------------------------------------------------------------------------------------
GPU_MEM = "aliyun.com/gpu-mem"
GPU_COUNT = "aliyun.com/gpu-count"  # node status; as a pod *label*: how many cards the pod is spread over
GPU_CORE = "aliyun.com/gpu-core.percentage"
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
ANN_MEANT = "gpuslice.io/meant-for"  # "0,2" or "": what is kept for a pod that was taken off its card

# -- node annotations and labels ---------------------------------------------------------------------
NODE_GPUS = "gpuslice.io/gpus"  # JSON list of cards, written by the agent: the true size of each
NODE_OUT_OF_USE = "gpuslice.io/out-of-use"  # "0,2", by the extender: what the ConfigMap takes away
LABEL_SHARED = "cgpu"  # "true": the node's cards are shared
LABEL_NO_ISOLATION = "cgpu.disable.isolation"  # "true": shared, limits not enforced
LABEL_PLACEMENT = "ack.node.gpu.placement"  # binpack (default) or spread
LABEL_LEADER = "gpuslice.io/leader"  # on the pod of the extender that answers; the Service selects by it
LABEL_MODE = "gpuslice.io/mode"  # exclusive, shared or shared-without-isolation; wins over the vendor's
LABEL_COMPUTE_POLICY = "gpuslice.io/compute-policy"  # of a node: cap (default), fair or off
LABEL_ZONE = "topology.kubernetes.io/zone"
LABEL_SCHEDULE = "ack.node.gpu.schedule"  # the vendor's newer switch: cgpu, share, core_mem, default

# -- environment of a container ----------------------------------------------------------------------
ENV_VISIBLE = "NVIDIA_VISIBLE_DEVICES"
ENV_INDEX = "ALIYUN_COM_GPU_MEM_IDX"
ENV_POD_UNITS = "ALIYUN_COM_GPU_MEM_POD"
ENV_CONTAINER_UNITS = "ALIYUN_COM_GPU_MEM_CONTAINER"
ENV_CARD_UNITS = "ALIYUN_COM_GPU_MEM_DEV"
ENV_NO_ISOLATION = "CGPU_DISABLE"

# -- objects -----------------------------------------------------------------------------------------
SYSTEM_NAMESPACE = "kube-system"
UNHEALTHY_CONFIGMAP_PREFIX = "unhealthy-gpu-"  # + node name; data.gpus: "0,2"
PLUGIN_ENDPOINT = "aliyungpushare.sock"
DEVICE_ID_SEPARATOR = "-_-"  # <card uuid>-_-<unit>


def device_id(uuid: str, unit: int) -> str:
    """The kubelet device id of one unit of a card."""
    return f"{uuid}{DEVICE_ID_SEPARATOR}{unit}"


def card_of_device_id(identifier: str) -> str:
    """The uuid of the card that a device id belongs to; ValueError when it is not one of ours."""
    uuid, separator, unit = identifier.rpartition(DEVICE_ID_SEPARATOR)
    if not separator or not uuid or not unit.isdecimal():
        raise ValueError(f'device id "{identifier}" is not <uuid>{DEVICE_ID_SEPARATOR}<n>')
    return uuid
