"""Two apps of 3 GiB share one 16 GiB card; a third, which requests 4 and takes 6, does not affect them."""

from __future__ import annotations

from gpuslice_demo.expected import columns, containing, exactly
from gpuslice_demo.nodes import NodePlan
from gpuslice_demo.steps import Step, Story
from gpuslice_demo.stories import smi
from gpuslice_demo.stories.installing import EXPORTER, INSTALL, agents_ready

NODE = "cn-hangzhou.192.168.2.167"


_REFUSED = (
    "CUDA error at cgpu_cuda_malloc.cu:119 code=2(cudaErrorMemoryAllocation) "
    '"cudaMalloc( (void**)&dev_c, malloc_size)"'
)

_RESOURCES = (
    f"kubectl get node {NODE} -o jsonpath='{{.status.allocatable.nvidia\\.com/gpu}} whole cards,"
    " {.status.allocatable.aliyun\\.com/gpu-mem} units'"
)

_EXCLUSIVE = (
    Step(
        "Without sharing: one app that needs 3 GiB gets a whole card.",
        "kubectl apply -f examples/sharing/app-3g-v1-exclusive.yaml",
        exactly("statefulset.apps/app-3g-v1 created"),
    ),
    Step(
        "It runs, and nobody else can use the other 13 GiB.",
        "kubectl get po",
        columns("NAME READY STATUS RESTARTS AGE\napp-3g-v1-0 1/1 Running 0 «age»"),
    ),
    Step(
        "Delete it.",
        "kubectl delete statefulset app-3g-v1",
        containing('statefulset.apps "app-3g-v1" deleted'),
    ),
)

_SHARING = (
    Step(
        "Share the node's cards by setting its label: from now on it offers memory instead of cards.",
        f"kubectl label node {NODE} cgpu=true",
        exactly(f"node/{NODE} labeled"),
    ),
    INSTALL,
    agents_ready([NODE]),
    Step(
        "The node now offers 15 units of memory and no whole card.",
        _RESOURCES,
        exactly("0 whole cards, 15 units"),
    ),
    Step(
        "The card of 16 GB counts as 15 units.",
        "kubectl inspect cgpu",
        exactly(
            "NAME                       IPADDRESS      GPU0(Allocated/Total)  GPU Memory(GiB)\n"
            "cn-hangzhou.192.168.2.167  192.168.2.167  0/15                   0/15\n"
            "----------------------------------------------------------------------\n"
            "Allocated/Total GPU Memory In Cluster:\n"
            "0/15 (0%)  "
        ),
    ),
)

TWO_APPS = (
    Step(
        "Two replicas of the app, each requesting 4 GiB of memory instead of a card.",
        "kubectl apply -f examples/sharing/app-3g-v1.yaml",
        exactly("statefulset.apps/app-3g-v1 created"),
    ),
    Step(
        "Both run on the same card.",
        "kubectl inspect cgpu -d",
        exactly(
            "NAME:       cn-hangzhou.192.168.2.167\n"
            "IPADDRESS:  192.168.2.167\n"
            "\n"
            "NAME         NAMESPACE  GPU0(Allocated)\n"
            "app-3g-v1-0  default    4\n"
            "app-3g-v1-1  default    4\n"
            "Allocated :  8 (53%)\n"
            "Total :      15\n"
            "--------------------------------------------------------\n"
            "\n"
            "Allocated/Total GPU Memory In Cluster:  8/15 (53%)"
        ),
    ),
    Step(
        "Each sees 4301 MiB instead of the card's 16130.",
        "kubectl exec -it app-3g-v1-0 -- nvidia-smi",
        exactly(smi.table(3193, 4301)),
        terminal=True,
    ),
    Step("", "kubectl exec -it app-3g-v1-1 -- nvidia-smi", exactly(smi.table(3193, 4301)), terminal=True),
    Step(
        "On the node, nvidia-smi shows the sum of both, plus the 10 MiB of an idle card.",
        "nvidia-smi",
        containing(smi.table_of_node(6396, 16130)),
        on_node=NODE,
    ),
    Step(
        "In one of them, try to allocate another 1024 MiB: refused, and the app keeps running.",
        "kubectl exec -it app-3g-v1-1 -- bash",
        containing(
            "gpu_cuda_malloc starting...\n"
            "Detected 1 CUDA Capable device(s)\n"
            "\n"
            'Device 0: "Tesla V100-SXM2-16GB"\n'
            "  CUDA Driver Version / Runtime Version          10.1 / 10.1\n"
            "  Total amount of global memory:                 4301 MBytes (4509925376 bytes)\n"
            "Try to malloc 1024 MBytes memory on GPU 0\n" + _REFUSED
        ),
        terminal=True,
        typed="cuda_malloc -size=1024\nexit\n",
    ),
)

OVER_LIMIT = (
    Step(
        "A third app requests 4 GiB and allocates 6.",
        "kubectl apply -f examples/sharing/app-6g-v1.yaml",
        exactly("statefulset.apps/app-6g-v1 created"),
    ),
    Step(
        "It keeps crashing; its neighbours have not been restarted once.",
        "kubectl get pod",
        columns(
            "NAME READY STATUS RESTARTS AGE\n"
            "app-3g-v1-0 1/1 Running 0 «age»\n"
            "app-3g-v1-1 1/1 Running 0 «age»\n"
            "app-6g-v1-0 0/1 CrashLoopBackOff «n» («ago») «age»"
        ),
    ),
    Step("Its log says why.", "kubectl logs app-6g-v1-0", exactly(_REFUSED)),
)

WHO_USES_WHAT = (
    EXPORTER,
    Step(
        "The card, and each app with its limit: the greedy one was refused, the others keep their memory.",
        "gpuslice top --once",
        columns(
            "NODE GPU MODEL UTIL MEMORY GIVEN OUT TEMP POWER HISTORY\n"
            f"{NODE} 0 Tesla V100-SXM2-16GB 0% 6.2G/15.8G 80% 37C 57W ▁\n"
            "NAMESPACE POD CONTAINER NODE GPU MEMORY OF LIMIT SM IDLE REFUSED HISTORY\n"
            f"default app-3g-v1-0 app-3g-v1 {NODE} 0 3.1G/4.2G 74% 0% «idle» 0 ▆\n"
            f"default app-3g-v1-1 app-3g-v1 {NODE} 0 3.1G/4.2G 74% 0% «idle» «n» ▆\n"
            f"default app-6g-v1-0 app-6g-v1 {NODE} 0 0.0G/4.2G 0% 0% «idle» «n» ▁"
        ),
    ),
)

_BACK = (
    Step(
        "Stop sharing: once no pod uses the card, the label is all it takes.",
        "kubectl delete statefulset app-3g-v1 app-6g-v1",
        containing('statefulset.apps "app-6g-v1" deleted'),
    ),
    Step(
        "",
        f"kubectl label node {NODE} cgpu=false --overwrite",
        exactly(f"node/{NODE} labeled"),
    ),
    Step("The node offers a whole card again.", _RESOURCES, exactly("1 whole cards, 0 units")),
    Step(
        "ACK's newer label works too, on nodes without the old one. It shares memory and compute …",
        f"kubectl label node {NODE} cgpu- ack.node.gpu.schedule=core_mem",
        exactly(f"node/{NODE} modified"),
    ),
    Step("", _RESOURCES, exactly("0 whole cards, 15 units")),
    Step(
        "… and switches back.",
        f"kubectl label node {NODE} ack.node.gpu.schedule=default --overwrite",
        exactly(f"node/{NODE} labeled"),
    ),
    Step("", _RESOURCES, exactly("1 whole cards, 0 units")),
)

STORY = Story(
    "cgpu",
    "Two apps share one card, and a third is held to its limit",
    (NodePlan(NODE, "192.168.2.167", ("V100-SXM2-16GB",), exclusive=True),),
    _EXCLUSIVE + _SHARING + TWO_APPS + OVER_LIMIT + WHO_USES_WHAT + _BACK,
)
