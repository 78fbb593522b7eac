"""What is known about the systems that a cluster may come from: nodes, objects, and forms of request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpuslice.adapters.kube.resources import DICT, SERVICES, Resource
from gpuslice.core import hami, kai
from gpuslice.core.contract import AMOUNT_NAMES, EXCLUSIVE_GPU, GPU_MEM, LABEL_SCHEDULE
from gpuslice.core.errors import InvalidRequestError
from gpuslice.core.form import PodForm, limit_field, without
from gpuslice.core.mode import CORE_MEM, SCHEDULES
from gpuslice.core.quantity import whole_number
from gpuslice.core.units import UNIT_MIB

Object = dict[str, Any]

SLICE = "nvidia.com/gpu.shared"  # the name of time slices if NVIDIA's plugin renames the resource
REPLICAS, CARD_MIB = "nvidia.com/gpu.replicas", "nvidia.com/gpu.memory"  # labels of GPU feature discovery
GKE_STRATEGY = (
    "cloud.google.com/gke-gpu-sharing-strategy"  # labels of GKE's node pools with time-sharing or MPS
)
GKE_CLIENTS = "cloud.google.com/gke-max-shared-clients-per-gpu"
PRODUCT, STRATEGY = "nvidia.com/gpu.product", "nvidia.com/gpu.sharing-strategy"
_APPS, _RBAC = "apps/v1", "rbac.authorization.k8s.io/v1"
DAEMON_SETS = Resource(_APPS, "daemonsets", "DaemonSet", DICT)
DEPLOYMENTS = Resource(_APPS, "deployments", "Deployment", DICT)
JOBS = Resource("batch/v1", "jobs", "Job", DICT)
ACCOUNTS = Resource("v1", "serviceaccounts", "ServiceAccount", DICT)
ROLES = Resource(_RBAC, "clusterroles", "ClusterRole", DICT, namespaced=False)
BINDINGS = Resource(_RBAC, "clusterrolebindings", "ClusterRoleBinding", DICT, namespaced=False)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes for requests in parts: units of every card, 0 if cards differ.

    `slice_units`: of one time slice. `slices_alone`: no node offers whole cards, so a card is a slice.
    """

    unit: str = "GiB"
    card_units: int = 0
    slice_units: int = 0
    slices_alone: bool = False
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class System:
    """One system. `labels`: what its nodes must lose (None) or get; `owned`: what it installs.

    `stays`: why a node cannot change over, "" if it can.
    `translate` rewrites a pod with our names, or raises `InvalidRequestError`; `remarks` says what is lost.
    """

    name: str
    is_node: Callable[[Object], bool]
    holds: Callable[[Object], bool]
    labels: Mapping[str, str | None] = field(default_factory=dict)
    owned: Sequence[tuple[Resource[Object], str]] = ()
    chart: str = ""  # by whose name its chart labels what it installs
    stays: Callable[[Object], str] = lambda node: ""
    replaces_ours: bool = False  # its objects have our names: they must be deleted before ours can be created
    translate: Callable[[PodForm, Sizes], PodForm] = lambda pod, sizes: pod
    remarks: Callable[[PodForm, Sizes], Iterable[str]] = lambda pod, sizes: ()
    by_hand: tuple[tuple[str, str], ...] = ()  # where, and what to do
    lost: tuple[str, ...] = ()


def limits_of(pod: Object) -> set[str]:
    """The names of all resources for which a pod's containers have limits."""
    spec = pod.get("spec") or {}
    containers = [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    return {
        name
        for each in containers
        for name, amount in ((each.get("resources") or {}).get("limits") or {}).items()
        if whole_number(amount)
    }


def _asks(*names: str) -> Callable[[Object], bool]:
    return lambda pod: not limits_of(pod).isdisjoint(names)


def _labels(node: Object) -> Mapping[str, str]:
    return node["metadata"].get("labels") or {}


def _labelled(name: str, *values: str) -> Callable[[Object], bool]:
    return lambda node: _labels(node).get(name) in values


def time_sliced(node: Object) -> bool:
    """According to the labels of GPU feature discovery or GKE, or NVIDIA's name for slices."""
    labels, capacity = _labels(node), (node.get("status") or {}).get("capacity") or {}
    return (
        labels.get(STRATEGY) == "time-slicing"
        or GKE_STRATEGY in labels
        or _replicas(labels) > 1
        or bool(whole_number(capacity.get(SLICE)))
    )


def _replicas(labels: Mapping[str, str]) -> int:
    """Slices of a card; 1 if it is not shared."""
    return whole_number(labels.get(REPLICAS) or labels.get(GKE_CLIENTS)) or 1


def _slice_names(sizes: Sizes) -> list[str]:
    """The resources that mean a slice in this cluster."""
    return [SLICE, EXCLUSIVE_GPU] if sizes.slices_alone else [SLICE]


def _of_gke(node: Object) -> str:
    where = "create a node pool as docs/operate/platforms.md says, and delete this one at the end"
    return f"Google's device plugin cannot be kept off it: {where}" if GKE_STRATEGY in _labels(node) else ""


def _of_slices(pod: PodForm, sizes: Sizes) -> PodForm:
    names = _slice_names(sizes)
    containers = []
    for each in pod.containers:
        name = next((name for name in names if each.limits.get(name)), "")
        count = whole_number(each.limits.get(name)) if name else 0
        if not count:
            containers.append(each)
            continue
        for other in (SLICE, EXCLUSIVE_GPU, *AMOUNT_NAMES, *hami.PARTS):
            if other != name and other in each.limits:
                must_be = f"left out beside {name} in a container"
                raise InvalidRequestError(limit_field(each, other), each.limits[other], must_be)
        if not sizes.slice_units:
            unknown = "how large a slice is cannot be told from the nodes, say --slice-units"
            must_be = f"replaced by {GPU_MEM}: {unknown}"
            raise InvalidRequestError(limit_field(each, name), each.limits[name], must_be)
        amount = {GPU_MEM: str(count * sizes.slice_units)}
        limits = {**without(each.limits, [name]), **amount}
        requests = {**without(each.requests, [name]), **amount}
        containers.append(replace(each, limits=limits, requests=requests))
    return replace(pod, containers=tuple(containers))


def _slices_lost(pod: PodForm, sizes: Sizes) -> Iterable[str]:
    for each in pod.containers:
        for name in _slice_names(sizes):
            if (whole_number(each.limits.get(name)) or 0) > 1:
                yield (
                    f'container "{each.name}" asks for several slices, which gave it no larger share, '
                    "perhaps of one card: here it gets that much memory of one card"
                )


def _hami_remarks(pod: PodForm, sizes: Sizes) -> Iterable[str]:
    yield from hami.remarks(pod)
    parts = {hami.MEMORY, hami.MEMORY_PERCENT, hami.CORES}
    for each in pod.containers:
        if EXCLUSIVE_GPU in each.limits and parts.isdisjoint(each.limits):
            yield (
                f'container "{each.name}" asks for {EXCLUSIVE_GPU} alone: HAMi gave it a slice as large as '
                "the card, here it is a whole card, on a node that is not shared"
            )


_GPUSHARE_OWNED = (
    (DAEMON_SETS, "gpushare-device-plugin-ds"),
    *((DAEMON_SETS, f"device-plugin-{verb}-ds") for verb in ("evict", "recover")),  # from gpushare's chart
    (JOBS, "gpushare-installer"),
    (DEPLOYMENTS, "gpushare-schd-extender"),
    (SERVICES, "gpushare-schd-extender"),
    *((ACCOUNTS, name) for name in ("gpushare-schd-extender", "gpushare-device-plugin")),
    *((BINDINGS, name) for name in ("gpushare-schd-extender", "gpushare-device-plugin")),
    *((ROLES, name) for name in ("gpushare-schd-extender", "gpushare-device-plugin")),
)
_PARTS = tuple(name for name in AMOUNT_NAMES)
SYSTEMS = {
    each.name: each
    for each in (
        System(
            "gpushare",
            is_node=_labelled("gpushare", "true"),
            holds=_asks(*_PARTS),
            labels={"gpushare": None},
            owned=_GPUSHARE_OWNED,
            replaces_ours=True,
            by_hand=(
                (
                    "kube-scheduler",
                    "its extender section may stay, with `--set scheduler.enabled=false`; add prioritizeVerb "
                    "and preemptVerb. Or take it out, and the chart's second scheduler serves",
                ),
            ),
            lost=(
                "programs that take more memory than they asked for are refused it: gpushare limits nothing",
            ),
        ),
        System(
            "ack",
            is_node=lambda node: _labels(node).get("cgpu") == "true" or LABEL_SCHEDULE in _labels(node),
            holds=_asks(*_PARTS),
            owned=(
                *_GPUSHARE_OWNED,
                (DAEMON_SETS, "cgpu-installer"),
            ),
            replaces_ours=True,
            by_hand=(
                (
                    "kube-scheduler",
                    "where the Job gpushare-installer has changed its manifest: restore the backup "
                    "kube-scheduler.ori.yaml, or install with `--set scheduler.enabled=false`",
                ),
                (
                    "nodes",
                    "cGPU's kernel module, where loaded, stays until a reboot, and limits nothing of ours",
                ),
            ),
        ),
        System(
            "hami",
            is_node=_labelled("gpu", "on"),
            holds=_asks(EXCLUSIVE_GPU, *hami.PARTS),
            labels={"gpu": None},
            chart="hami",
            translate=lambda pod, sizes: hami.translate(
                pod, hami.HamiRules(sizes.unit, sizes.card_units, PRODUCT, sizes.models)
            ),
            remarks=_hami_remarks,
            by_hand=(
                ("nodes", f"those for pods with {hami.CORES} also need label {LABEL_SCHEDULE}={CORE_MEM}"),
                ("HAMi", "helm uninstall it at the end"),
                ("quotas", f"those on limits.nvidia.com/gpumem become quotas on requests.{GPU_MEM}"),
            ),
            lost=("memory is never promised twice: deviceMemoryScaling has no counterpart",),
        ),
        System(
            "time-slicing",
            is_node=time_sliced,
            holds=_asks(EXCLUSIVE_GPU, SLICE),
            labels={GKE_STRATEGY: None, GKE_CLIENTS: None},
            stays=_of_gke,
            translate=_of_slices,
            remarks=_slices_lost,
            by_hand=(
                (
                    "NVIDIA's plugin",
                    "leaves a shared node where it is a static pod or the GPU operator's; a DaemonSet of its "
                    "own must be kept away (docs/operate/modes.md)",
                ),
            ),
            lost=(
                "a program that takes more memory than its slice is refused it: time slices limit nothing",
            ),
        ),
        System(
            "kai",
            is_node=lambda node: False,
            holds=lambda pod: bool(kai.annotations_of(pod["metadata"].get("annotations") or {})),
            translate=lambda pod, sizes: kai.translate(pod, kai.KaiRules(sizes.unit, sizes.card_units)),
            remarks=lambda pod, sizes: kai.remarks(pod, kai.KaiRules(sizes.unit, sizes.card_units)),
            by_hand=(
                ("nodes", "KAI marks none: drain those that shall share cards, and label them cgpu=true"),
                ("KAI", "helm uninstall it once nothing names its scheduler"),
            ),
        ),
    )
}
SYSTEMS["run-ai"] = replace(SYSTEMS["kai"], name="run-ai")  # which is made of KAI, and has the same names


def sizes_of(nodes: Iterable[Object], unit: str, card_units: int, slice_units: int) -> Sizes:
    """What the nodes report about their cards, unless it was given."""
    cards, slices, models, whole = set[int](), set[int](), set[str](), False
    for node in nodes:
        labels, capacity = _labels(node), (node.get("status") or {}).get("capacity") or {}
        if labels.get(PRODUCT):
            models.add(labels[PRODUCT])
        if units := (whole_number(labels.get(CARD_MIB)) or 0) // UNIT_MIB[unit]:
            cards.add(units)
            if time_sliced(node):
                slices.add(units // _replicas(labels))
        whole |= bool(whole_number(capacity.get(EXCLUSIVE_GPU))) and not time_sliced(node)
    return Sizes(
        unit,
        card_units or (cards.pop() if len(cards) == 1 else 0),
        slice_units or (min(slices) if slices else 0),
        slices_alone=not whole,
        models=tuple(sorted(models)),
    )


def lost_on(system: System, node: Object) -> str:
    """Which of a node's labels have no counterpart; "" if all have one."""
    schedule = _labels(node).get(LABEL_SCHEDULE, "") if system.name == "ack" else ""
    known = not schedule or schedule in SCHEDULES
    return "" if known else f"label {LABEL_SCHEDULE}={schedule} has no counterpart here"
