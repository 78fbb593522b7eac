"""The dashboards: applications, nodes, what sharing saves and wastes, and dcgm-exporter's well-known one."""

from __future__ import annotations

from typing import Any

from gpuslice.apps.exporter import catalogue as c
from monitoring.panels import Dashboard, Panel, Query, Variable, gauge, series, stat

_APP = '{namespace=~"$namespace",pod=~"$pod"}'
_CARD = '{node=~"$node",gpu=~"$gpu"}'
_DCGM = '{instance=~"$instance",gpu=~"$gpu"}'
_WHO = "{{namespace}}/{{pod}} {{container}}"
_WHERE = "{{node}} GPU {{gpu}}"


def _of_app(metric: c.Metric) -> str:
    return f"{metric.name}{_APP}"


def _of_card(metric: c.Metric) -> str:
    return f"{metric.name}{_CARD}"


def _at_card_of_app(metric: c.Metric) -> str:
    """A card's figure beside each container on it."""
    joined = f"{c.CONTAINER_INFO.name}{_APP}"
    return f"{joined} * on (node, gpu_uuid) group_left () {metric.name}"


def _neighbours() -> str:
    """Memory of every container on the cards where the chosen pods are."""
    cards = f"group by (node, gpu_uuid) ({c.CONTAINER_INFO.name}{_APP})"
    return f"{c.MEMORY_USED.name} and on (node, gpu_uuid) {cards}"


def app() -> Dashboard:
    used, limit = _of_app(c.MEMORY_USED), _of_app(c.MEMORY_LIMIT)
    return Dashboard(
        "gpuslice-app",
        "GPU APP",
        "What each application uses of its GPU, what it may use, and how its neighbours do.",
        (
            Variable("namespace", f"label_values({c.CONTAINER_INFO.name}, namespace)"),
            Variable("pod", f'label_values({c.CONTAINER_INFO.name}{{namespace=~"$namespace"}}, pod)'),
        ),
        (
            stat("GPU memory used", "bytes", f"sum({used})"),
            stat("GPU memory limit", "bytes", f"sum({limit})"),
            stat(
                "Used of limit",
                "percentunit",
                f"sum({used} and {limit}) / sum({limit})",
                highest=1,
                warns_at=0.9,
                bad_at=0.98,
            ),
            stat("Refused allocations", "short", f"sum({_of_app(c.MEMORY_REFUSED)})", bad_at=1),
            series(
                "GPU memory by application",
                "bytes",
                Query(used, f"{_WHO} used"),
                Query(limit, f"{_WHO} limit"),
            ),
            series("GPU memory, ratio to limit", "percentunit", Query(f"{used} / {limit}", _WHO), highest=1),
            series("SM share", "percentunit", Query(_of_app(c.SM_UTILIZATION), _WHO), highest=1),
            series("GPU time per second", "percentunit", Query(f"rate({_of_app(c.SM_SECONDS)}[5m])", _WHO)),
            series("Temperature of the card", "celsius", Query(_at_card_of_app(c.GPU_TEMPERATURE), _WHO)),
            series("Power of the card", "watt", Query(_at_card_of_app(c.GPU_POWER), _WHO)),
            series("Everybody on these cards", "bytes", Query(_neighbours(), _WHO), width=24),
        ),
    )


def node() -> Dashboard:
    used, total = _of_card(c.GPU_MEMORY_USED), _of_card(c.GPU_MEMORY_TOTAL)
    given = _of_card(c.GPU_MEMORY_ALLOCATED)
    mode, of_app = _of_card(c.GPU_ALLOCATE_MODE), _of_card(c.MEMORY_USED)
    return Dashboard(
        "gpuslice-node",
        "GPU Node",
        "Each card of each node: memory used, given out and total, and how it is.",
        (
            Variable("node", f"label_values({c.GPU_UP.name}, node)"),
            Variable("gpu", f'label_values({c.GPU_UP.name}{{node=~"$node"}}, gpu)'),
        ),
        (
            stat("GPUs", "short", f"count({_of_card(c.GPU_UP)})", width=4),
            stat("GPUs given out", "short", f"count({mode} > 0) or vector(0)", width=4),
            stat("Memory used", "bytes", f"sum({used})", width=4),
            stat("Memory given out", "bytes", f"sum({given})", width=4),
            stat("Memory total", "bytes", f"sum({total})", width=4),
            stat("Power", "watt", f"sum({_of_card(c.GPU_POWER)})", width=4),
            series(
                "Memory by card",
                "bytes",
                Query(used, f"{_WHERE} used"),
                Query(given, f"{_WHERE} given out"),
                Query(total, f"{_WHERE} total"),
            ),
            series("Memory used, ratio", "percentunit", Query(f"{used} / {total}", _WHERE), highest=1),
            series("Utilization", "percentunit", Query(_of_card(c.GPU_UTILIZATION), _WHERE), highest=1),
            series("Temperature", "celsius", Query(_of_card(c.GPU_TEMPERATURE), _WHERE)),
            series("Power", "watt", Query(_of_card(c.GPU_POWER), _WHERE)),
            series(
                "PCIe traffic", "Bps", Query(f"rate({_of_card(c.GPU_PCIE)}[5m])", _WHERE + " {{direction}}")
            ),
            series(
                "Clocks held down",
                "percentunit",
                Query(f"rate({_of_card(c.GPU_THROTTLED)}[5m])", _WHERE + " {{reason}}"),
            ),
            series(
                "Xid faults",
                "short",
                Query(f"sum by (node, gpu) ({_of_card(c.XID_ERRORS)})", f"{_WHERE} all"),
                Query(f"{_of_card(c.XID_ERRORS)} > 0", _WHERE + " Xid {{xid}}"),
                about="Since the exporter started, by code as far as there were any.",
            ),
            series("Memory by container", "bytes", Query(of_app, f"{_WHERE} {_WHO}")),
            series(
                "Memory of nobody",
                "bytes",
                Query(_of_card(c.UNATTRIBUTED_MEMORY), _WHERE + " {{reason}}"),
            ),
        ),
    )


def sharing() -> Dashboard:
    def at(metric: c.Metric) -> str:
        return f'{metric.name}{{node=~"$node"}}'

    used, given, total = (
        f"sum({at(metric)})" for metric in (c.MEMORY_USED, c.GPU_MEMORY_ALLOCATED, c.GPU_MEMORY_TOTAL)
    )
    shared = f"({at(c.GPU_ALLOCATE_MODE)} != 1)"
    free = f"({at(c.GPU_MEMORY_TOTAL)} - {at(c.GPU_MEMORY_ALLOCATED)})"
    unused = f"{at(c.MEMORY_ALLOCATED)} - {at(c.MEMORY_USED)}"
    return Dashboard(
        "gpuslice-sharing",
        "GPU Sharing",
        "What is given out, what is used of it, what is wasted, and who is held back.",
        (Variable("node", f"label_values({c.GPU_UP.name}, node)"),),
        (
            stat("Given out", "percentunit", f"{given} / {total}", highest=1),
            stat("Used of what is given out", "percentunit", f"{used} / {given}", highest=1),
            stat("Wasted", "bytes", f"{given} - {used}", about="Given out and not used."),
            stat(
                "Fragmentation",
                "percentunit",
                f"1 - max({free} and {shared}) / sum({free} and {shared} > 0)",
                about="The part of free memory that is not on the card with the most of it.",
                highest=1,
            ),
            series(
                "Memory of the cluster",
                "bytes",
                Query(total, "total"),
                Query(given, "given out"),
                Query(used, "used by containers"),
            ),
            series(
                "Given out and not used",
                "bytes",
                Query(f"topk(20, {unused})", _WHO),
            ),
            series(
                "Containers by card",
                "short",
                Query(f'count by (node, gpu) ({c.CONTAINER_INFO.name}{{node=~"$node"}})', _WHERE),
            ),
            series("Free by card", "bytes", Query(free, _WHERE)),
            series(
                "Launches held back",
                "percentunit",
                Query(f'rate({c.THROTTLED.name}{{node=~"$node"}}[5m])', _WHO),
                about="Seconds per second that launches waited for the compute share.",
            ),
            series(
                "Refused allocations",
                "short",
                Query(f'increase({c.MEMORY_REFUSED.name}{{node=~"$node"}}[5m])', _WHO),
            ),
        ),
    )


def dcgm() -> Dashboard:
    """The panels of dashboard 12239, titles and order, with what is wrong in it put right."""

    def card(title: str, field: str, unit: str, scale: str = "", **more: Any) -> Panel:
        return series(title, unit, Query(f"{field}{_DCGM}{scale}", "{{hostname}} GPU {{gpu}}"), **more)

    return Dashboard(
        "gpuslice-dcgm",
        "NVIDIA DCGM Exporter Dashboard",
        "The cards by dcgm-exporter's names.",
        (
            Variable("instance", "label_values(DCGM_FI_DEV_FB_USED, instance)"),
            Variable("gpu", 'label_values(DCGM_FI_DEV_FB_USED{instance=~"$instance"}, gpu)'),
        ),
        (
            card("GPU Temperature", "DCGM_FI_DEV_GPU_TEMP", "celsius", width=18),
            gauge(
                "GPU Avg. Temp",
                "celsius",
                f"avg(DCGM_FI_DEV_GPU_TEMP{_DCGM})",
                highest=100,
                warns_at=80,
                bad_at=90,
            ),
            card("GPU Power Usage", "DCGM_FI_DEV_POWER_USAGE", "watt", width=18),
            gauge("GPU Power Total", "watt", f"sum(DCGM_FI_DEV_POWER_USAGE{_DCGM})"),
            card("GPU SM Clocks", "DCGM_FI_DEV_SM_CLOCK", "hertz", " * 1e6"),
            card("GPU Utilization", "DCGM_FI_DEV_GPU_UTIL", "percent", highest=100),
            card("Tensor Core Utilization", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "percentunit", highest=1),
            card("GPU Framebuffer Mem Used", "DCGM_FI_DEV_FB_USED", "mbytes"),
        ),
    )


def dashboards() -> dict[str, Dashboard]:
    """By file name."""
    return {"gpu-app": app(), "gpu-node": node(), "gpu-sharing": sharing(), "nvidia-dcgm": dcgm()}
