"""Two node pools: one enforces limits, the other only shares cards and tells programs their part."""

from __future__ import annotations

from gpuslice_demo.expected import columns, exactly
from gpuslice_demo.nodes import NodePlan
from gpuslice_demo.steps import Step, Story
from gpuslice_demo.stories import smi
from gpuslice_demo.stories.installing import INSTALL, agents_ready

ISOLATED, SHARED_ONLY = "cn-shanghai.192.168.7.157", "cn-shanghai.192.168.7.158"
_SHARED = {"cgpu": "true"}

_LABEL_CHANGE = (
    Step(
        "A change of the isolation label takes effect when the agent restarts, so delete its pod.",
        f"kubectl label node {SHARED_ONLY} cgpu.disable.isolation=false --overwrite",
        exactly(f"node/{SHARED_ONLY} labeled"),
    ),
    Step(
        "",
        "kubectl delete po -n kube-system -l name=gpushare-device-plugin-ds"
        f" --field-selector=spec.nodeName={SHARED_ONLY}",
        columns('pod "gpushare-device-plugin-ds-«id»" deleted«any»'),
    ),
    Step(
        "The DaemonSet creates a new one.",
        "kubectl get po -n kube-system -l name=gpushare-device-plugin-ds"
        f" --field-selector=spec.nodeName={SHARED_ONLY}",
        columns("NAME READY STATUS RESTARTS AGE\ngpushare-device-plugin-ds-«id» 1/1 Running 0 «age»"),
    ),
    Step(
        "The running app is not affected.",
        "kubectl get po cgpu-test-no-isolation-0",
        columns("NAME READY STATUS RESTARTS AGE\ncgpu-test-no-isolation-0 1/1 Running 0 «age»"),
    ),
    Step(
        "The same program now has a limit there.",
        "kubectl apply -f examples/node-pools/cgpu-test.yaml && kubectl scale sts cgpu-test --replicas=2",
        columns("statefulset.apps/cgpu-test «any»\nstatefulset.apps/cgpu-test scaled"),
    ),
    Step("", "kubectl exec cgpu-test-1 -- nvidia-smi", exactly(smi.table(3039, 3226))),
)

STORY = Story(
    "pools",
    "Two node pools: with and without enforced limits",
    (
        NodePlan(
            ISOLATED,
            "192.168.7.157",
            ("V100-SXM2-16GB",),
            labels={**_SHARED, "cgpu.disable.isolation": "false"},
        ),
        NodePlan(
            SHARED_ONLY,
            "192.168.7.158",
            ("V100-SXM2-16GB",),
            labels={**_SHARED, "cgpu.disable.isolation": "true"},
        ),
    ),
    (
        INSTALL,
        agents_ready([ISOLATED, SHARED_ONLY]),
        Step(
            "Each node has a card of 15 units.",
            "kubectl inspect cgpu",
            exactly(
                "NAME                       IPADDRESS      GPU0(Allocated/Total)  GPU Memory(GiB)\n"
                "cn-shanghai.192.168.7.157  192.168.7.157  0/15                   0/15\n"
                "cn-shanghai.192.168.7.158  192.168.7.158  0/15                   0/15\n"
                "----------------------------------------------------------------------\n"
                "Allocated/Total GPU Memory In Cluster:\n"
                "0/30 (0%)"
            ),
        ),
        Step(
            "One agent runs on each node.",
            "kubectl get po -n kube-system -l name=gpushare-device-plugin-ds -o wide"
            " --sort-by=.spec.nodeName",
            columns(
                "NAME READY STATUS RESTARTS AGE IP NODE NOMINATED NODE READINESS GATES\n"
                "gpushare-device-plugin-ds-«id» 1/1 Running 0 «age» 192.168.7.157 "
                "cn-shanghai.192.168.7.157 <none> <none>\n"
                "gpushare-device-plugin-ds-«id» 1/1 Running 0 «age» 192.168.7.158 "
                "cn-shanghai.192.168.7.158 <none> <none>"
            ),
        ),
        Step(
            "A program that takes all the memory it sees goes to the pool with limits.",
            "kubectl apply -f examples/node-pools/cgpu-test.yaml",
            exactly("statefulset.apps/cgpu-test created"),
        ),
        Step(
            "One that limits itself goes to the other.",
            "kubectl apply -f examples/node-pools/cgpu-test-no-isolation.yaml",
            exactly("statefulset.apps/cgpu-test-no-isolation created"),
        ),
        Step(
            "Both run.",
            "kubectl get po",
            columns(
                "NAME READY STATUS RESTARTS AGE\n"
                "cgpu-test-0 1/1 Running 0 «age»\n"
                "cgpu-test-no-isolation-0 1/1 Running 0 «age»"
            ),
        ),
        Step(
            "With limits, TensorFlow sees 3 of 15 units, and takes nearly all of it.",
            "kubectl exec cgpu-test-0 -- nvidia-smi",
            exactly(smi.table(3039, 3226)),
        ),
        Step(
            "Without limits, the program sees the whole card.",
            "kubectl exec cgpu-test-no-isolation-0 -- nvidia-smi",
            exactly(smi.table(1929, 16130)),
        ),
        Step(
            "The environment tells the program its part.",
            "kubectl exec cgpu-test-no-isolation-0 -- env | grep ALIYUN | sort",
            exactly(
                "ALIYUN_COM_GPU_MEM_CONTAINER=3\n"
                "ALIYUN_COM_GPU_MEM_DEV=15\n"
                "ALIYUN_COM_GPU_MEM_IDX=0\n"
                "ALIYUN_COM_GPU_MEM_POD=3"
            ),
        ),
        *_LABEL_CHANGE,
    ),
)
