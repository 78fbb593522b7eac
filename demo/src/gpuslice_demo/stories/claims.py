"""The first story again, with unchanged manifests, on a node whose cards are given out by claims.

A policy of the API server turns requests into claims (Kubernetes 1.36; before it, gpuslice's webhook does).
"""

from __future__ import annotations

from gpuslice_demo.expected import columns, containing, exactly
from gpuslice_demo.nodes import NodePlan
from gpuslice_demo.steps import Step, Story
from gpuslice_demo.stories.cgpu import NODE, OVER_LIMIT, TWO_APPS, WHO_USES_WHAT
from gpuslice_demo.stories.installing import install

_CLAIMS_READY = (
    Step(
        "Two labels make the node give out its cards through claims.",
        f"kubectl label node {NODE} cgpu=true gpuslice.io/mode=claims",
        exactly(f"node/{NODE} labeled"),
    ),
    install("dra.enabled=true"),
    Step(
        "The agent is now a DRA driver and offers the node's card.",
        "kubectl get resourceslices",
        columns(f"NAME NODE DRIVER POOL AGE\n{NODE}-gpu.gpuslice.io-0 {NODE} gpu.gpuslice.io {NODE} «age»"),
    ),
    Step(
        "This label selects the namespace whose pods use claims.",
        "kubectl label namespace default gpuslice.io/claims=true",
        exactly("namespace/default labeled"),
    ),
)

_CLAIMED = (
    Step(
        "Nobody wrote a claim, but each pod has one, and kube-scheduler itself chose the card.",
        "kubectl get resourceclaims",
        columns(
            "NAME STATE AGE\n"
            "app-3g-v1-0-gpuslice-«id» allocated,reserved «age»\n"
            "app-3g-v1-1-gpuslice-«id» allocated,reserved «age»"
        ),
    ),
    Step(
        "The claim's status shows the limit that is enforced: 4 of 15 units, which are 4301 MiB.",
        "kubectl get resourceclaims -o jsonpath='{.items[0].status.devices[0].data}'",
        exactly('{"computePercent":0,"memoryLimitBytes":4509925376,"tier":"library","units":4}'),
    ),
)

_FULL = (
    Step(
        "12 of 15 units are allocated, so a fourth pod of 4 units does not fit.",
        "kubectl scale statefulset app-3g-v1 --replicas=3",
        exactly("statefulset.apps/app-3g-v1 scaled"),
    ),
    Step(
        "kube-scheduler says little about the reason …",
        "kubectl get events --field-selector reason=FailedScheduling",
        containing(
            "0/1 nodes are available: 1 cannot allocate all claims. still not schedulable, preemption: 0/1"
            " nodes are available: 1 Preemption is not helpful for scheduling."
        ),
    ),
    Step(
        "… and gpuslice says more.",
        "gpuslice explain app-3g-v1-2",
        containing("Free in all: 3 units, but no node has 4 of them."),
    ),
)

_FREE = (
    Step(
        "Deleting the apps deletes their claims.",
        "kubectl delete statefulset app-3g-v1 app-6g-v1",
        containing('statefulset.apps "app-6g-v1" deleted'),
    ),
    Step("", "kubectl get resourceclaims", exactly("No resources found in default namespace.")),
    Step("", "kubectl inspect cgpu", containing("0/15 (0%)")),
)

STORY = Story(
    "claims",
    "The same two apps, unchanged, with claims (dynamic resource allocation)",
    (NodePlan(NODE, "192.168.2.167", ("V100-SXM2-16GB",)),),
    _CLAIMS_READY + TWO_APPS + _CLAIMED + OVER_LIMIT + WHO_USES_WHAT + _FULL + _FREE,
)
