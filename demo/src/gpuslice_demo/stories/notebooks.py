"""Three notebooks on one T4: with whole cards the second one waits, with parts of a card it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from gpuslice_demo.expected import columns, containing, exactly
from gpuslice_demo.nodes import NodePlan
from gpuslice_demo.steps import Step, Story
from gpuslice_demo.stories.installing import INSTALL, agents_ready

if TYPE_CHECKING:
    from gpuslice_demo.world import World

SHARED, EXCLUSIVE = "cn-zhangjiakou.192.168.3.184", "cn-zhangjiakou.192.168.3.189"
_MASTER = {"node-role.kubernetes.io/master": ""}


async def _remove_exclusive_node(world: World) -> None:
    await world.switch_off(EXCLUSIVE)


def _node(address: str, *, labels: Mapping[str, str], cards: tuple[str, ...] = ()) -> NodePlan:
    name = f"cn-zhangjiakou.{address}"
    return NodePlan(
        name, address, cards, labels, exclusive=name == EXCLUSIVE,
        subnet=f"172.20.{64 + int(address.rpartition('.')[2]) % 100}",
    )  # fmt: skip


def _apply(number: str) -> Step:
    name = f"tf-notebook{number}"
    return Step(
        "",
        f"kubectl apply -f examples/notebooks/mem_deployment{number}.yaml",
        exactly(f"deployment.apps/{name} created\nservice/{name} created"),
    )


_WHOLE_CARDS = (
    Step(
        "Two notebooks that each request a whole card.",
        "kubectl apply -f examples/notebooks/gpu_deployment.yaml",
        exactly("deployment.apps/tf-notebook-gpu created\nservice/tf-notebook-gpu created"),
    ),
    Step(
        "There is only one card: one notebook runs, the other waits.",
        "kubectl get pod --sort-by=.status.phase",
        columns(
            "NAME READY STATUS RESTARTS AGE\n"
            "tf-notebook-gpu-«id» 0/1 Pending 0 «age»\n"
            "tf-notebook-gpu-«id» 1/1 Running 0 «age»"
        ),
    ),
    Step(
        "The event says why.",
        "kubectl get events --field-selector reason=FailedScheduling"
        " -o jsonpath='{.items[0].reason}  {.items[0].message}'",
        containing("FailedScheduling  0/6 nodes are available: 6 Insufficient nvidia.com/gpu."),
    ),
    Step(
        "Delete them.",
        "kubectl delete -f examples/notebooks/gpu_deployment.yaml",
        columns('deployment.apps "tf-notebook-gpu" deleted«any»\nservice "tf-notebook-gpu" deleted«any»'),
    ),
    Step("", "kubectl get pod", exactly("No resources found in default namespace.")),
)


_SHARED_CARD = (
    replace(
        INSTALL,
        say="Remove the node with the whole card, and install gpuslice on the others.",
        before=_remove_exclusive_node,
    ),
    agents_ready([SHARED]),
    Step(
        "All nodes, and which of them share their cards.",
        "gpuslice top node",
        exactly(
            "NAME                          IPADDRESS      ROLE    STATUS  GPU(Total)  GPU(Allocated)"
            "  GPU(Shareable)\n"
            "cn-zhangjiakou.192.168.0.138  192.168.0.138  master  ready   0           0               No\n"
            "cn-zhangjiakou.192.168.1.112  192.168.1.112  master  ready   0           0               No\n"
            "cn-zhangjiakou.192.168.1.113  192.168.1.113  <none>  ready   0           0               No\n"
            "cn-zhangjiakou.192.168.3.115  192.168.3.115  master  ready   0           0               No\n"
            "cn-zhangjiakou.192.168.3.184  192.168.3.184  <none>  ready   1           0               Yes\n"
            "------------------------------------------------------------------------------------------------\n"
            "Allocated/Total GPUs In Cluster:\n"
            "0/1 (0%)  "
        ),
    ),
    Step(
        "The shared card has 14 units of memory.",
        "gpuslice top node -s",
        exactly(
            "NAME                          IPADDRESS      GPU0(Allocated/Total)\n"
            "cn-zhangjiakou.192.168.3.184  192.168.3.184  0/14\n"
            "---------------------------------------------------------------------\n"
            "Allocated/Total GPU Memory In GPUShare Node:\n"
            "0/14 (GiB) (0%)"
        ),
    ),
    Step(
        "Three notebooks, each with 4 GiB of the card and a Service of its own.",
        "kubectl apply -f examples/notebooks/mem_deployment.yaml",
        exactly("deployment.apps/tf-notebook created\nservice/tf-notebook created"),
    ),
    _apply("-2"),
    _apply("-3"),
    Step(
        "All three run on the same node.",
        "kubectl get pod -o wide",
        columns(
            "NAME READY STATUS RESTARTS AGE IP NODE NOMINATED NODE READINESS GATES\n"
            + "\n".join(
                f"tf-notebook-«id» 1/1 Running 0 «age» «address» {SHARED} <none> <none>" for _ in range(3)
            )
        ),
    ),
    Step(
        "",
        "kubectl get svc",
        columns(
            "NAME TYPE CLUSTER-IP EXTERNAL-IP PORT(S) AGE\n"
            "kubernetes ClusterIP «address» <none> 443/TCP «age»\n"
            "tf-notebook LoadBalancer «address» «any» 80:«n»/TCP «age»\n"
            "tf-notebook-2 LoadBalancer «address» «any» 80:«n»/TCP «age»\n"
            "tf-notebook-3 LoadBalancer «address» «any» 80:«n»/TCP «age»"
        ),
    ),
    Step(
        "12 of the card's 14 units are allocated.",
        "gpuslice top node -s",
        exactly(
            "NAME                          IPADDRESS      GPU0(Allocated/Total)\n"
            "cn-zhangjiakou.192.168.3.184  192.168.3.184  12/14\n"
            "----------------------------------------------------------------------\n"
            "Allocated/Total GPU Memory In GPUShare Node:\n"
            "12/14 (GiB) (85%)"
        ),
    ),
    Step(
        "By pod.",
        "gpuslice top node -s -d",
        columns(
            "\nNAME: cn-zhangjiakou.192.168.3.184\n"
            "IPADDRESS: 192.168.3.184\n"
            "\n"
            "NAME NAMESPACE GPU0(Allocated)\n"
            "tf-notebook-«id» default 4\n"
            "tf-notebook-«id» default 4\n"
            "tf-notebook-«id» default 4\n"
            "Allocated : 12 (85%)\n"
            "Total : 14\n"
            "----------------------------------------------------------------------------------------------------"
            "----------------------------------\n"
            "\n"
            "\n"
            "Allocated/Total GPU Memory In GPUShare Node:\n"
            "12/14 (GiB) (85%)"
        ),
    ),
    Step(
        "Each sees only its own 4308 MiB.",
        "for name in tf-notebook tf-notebook-2 tf-notebook-3; do kubectl exec deploy/$name --"
        " nvidia-smi --query-gpu=name,memory.total --format=csv,noheader; done",
        exactly("\n".join(["Tesla T4, 4308 MiB"] * 3)),
    ),
)

STORY = Story(
    "notebooks",
    "Three notebooks on one T4",
    (
        _node("192.168.0.138", labels=_MASTER),
        _node("192.168.1.112", labels=_MASTER),
        _node("192.168.1.113", labels={}),
        _node("192.168.3.115", labels=_MASTER),
        _node("192.168.3.184", labels={"cgpu": "true"}, cards=("T4",)),
        _node("192.168.3.189", labels={}, cards=("T4",)),
    ),
    _WHOLE_CARDS + _SHARED_CARD,
)
