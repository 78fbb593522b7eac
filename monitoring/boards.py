"""The dashboards of single objects: applications, nodes, sharing, and dcgm-exporter's well-known one."""

from __future__ import annotations

from typing import Any

from gpuslice.apps.exporter import catalogue as c
from gpuslice.diagnosis.prometheus import CARD_LABELS, one
from monitoring.cluster_boards import scheduling, teams
from monitoring.panels import Dashboard, Panel, Query, Variable, gauge, series, stat
from monitoring.selectors import (
    APP,
    CARD,
    CLUSTER,
    CLUSTERS,
    DCGM,
    IN_CLUSTER,
    NAMESPACES,
    NODES,
    RATE,
    TEAM,
    TO_APP,
    TO_NODE,
    WHERE,
    WHO,
    most,
    of_cards,
    of_containers,
)


def _of_app(metric: c.Metric, of: str = "{}") -> str:
    return of_containers(metric, APP, of)


def _of_card(metric: c.Metric, of: str = "{}") -> str:
    return of_cards(metric, CARD, of)


def _at_card_of_app(metric: c.Metric) -> str:
    """A card's value for each container on it."""
    # counted once, however often it was restarted: each start has another container_id
    of_card = one(metric.name + IN_CLUSTER, labels=CARD_LABELS)
    return f"{_of_app(c.CONTAINER_INFO)} * on ({CARD_LABELS}) group_left () {of_card}"


def _neighbours() -> str:
    """Memory of every container on the cards of the chosen pods."""
    return f"{of_containers(c.MEMORY_USED, IN_CLUSTER)} and on ({CARD_LABELS}) {c.CONTAINER_INFO.name}{APP}"


def app() -> Dashboard:
    used, limit = _of_app(c.MEMORY_USED), _of_app(c.MEMORY_LIMIT)
    return Dashboard(
        "gpuslice-app",
        "GPU APP",
        "What each application uses of its GPU, what it may use, and how its neighbours do.",
        (
            CLUSTERS,
            NAMESPACES,
            Variable("pod", f"label_values({c.CONTAINER_INFO.name}{TEAM}, pod)"),
        ),
        (
            stat(
                "GPU memory used",
                "bytes",
                f"sum({used})",
                about="Memory of the card that the chosen containers hold now, by NVML.",
            ),
            stat("GPU memory limit", "bytes", f"sum({limit})", about="What they may hold at most, together."),
            stat(
                "Used of limit",
                "percentunit",
                f"sum({used} and {limit}) / sum({limit})",
                highest=1,
                warns_at=0.9,
                bad_at=0.98,
                about="Of those containers that have a limit.",
            ),
            stat(
                "Refused allocations",
                "short",
                f"sum({_of_app(c.MEMORY_REFUSED)})",
                bad_at=1,
                about="Allocations beyond the limit that were refused since the containers started. "
                "No data for whole cards, where nothing is limited.",
            ),
            series(
                "GPU memory by application",
                "bytes",
                Query(most(used), f"{WHO} used"),
                Query(f"{limit} and {most(used)}", f"{WHO} limit"),
                about="Used, and how far it may grow. Flat at the limit means refused allocations.",
                link=TO_NODE,
            ),
            series(
                "GPU memory, ratio to limit",
                "percentunit",
                Query(most(f"{used} / {limit}"), WHO),
                highest=1,
                about="1 is full: the next allocation is refused.",
                link=TO_NODE,
            ),
            series(
                "SM share",
                "percentunit",
                Query(most(_of_app(c.SM_UTILIZATION)), WHO),
                highest=1,
                about="Part of the card's multiprocessors that the container kept busy in the last sample.",
                link=TO_NODE,
            ),
            series(
                "GPU time per second",
                "percentunit",
                Query(most(_of_app(c.SM_SECONDS, RATE)), WHO),
                about="The same from a counter: exact over any range.",
            ),
            series(
                "Temperature of the card",
                "celsius",
                Query(most(_at_card_of_app(c.GPU_TEMPERATURE)), WHO),
                about="Of the card that the container is on; neighbours heat it too.",
            ),
            series(
                "Power of the card",
                "watt",
                Query(most(_at_card_of_app(c.GPU_POWER)), WHO),
                about="Of the card that the container is on, all of its containers together.",
            ),
            series(
                "Everybody on these cards",
                "bytes",
                Query(most(_neighbours()), WHO),
                width=24,
                about="Memory of all containers on the cards of the chosen pods.",
                link=TO_APP,
            ),
        ),
    )


def node() -> Dashboard:
    used, total = _of_card(c.GPU_MEMORY_USED), _of_card(c.GPU_MEMORY_TOTAL)
    given = _of_card(c.GPU_MEMORY_ALLOCATED)
    mode, of_app = _of_card(c.GPU_ALLOCATE_MODE), of_containers(c.MEMORY_USED, CARD)
    return Dashboard(
        "gpuslice-node",
        "GPU Node",
        "Each card of each node: memory used, given out and total, and how it is.",
        (
            CLUSTERS,
            NODES,
            Variable("gpu", f'label_values({c.GPU_UP.name}{{{CLUSTER},node=~"$node"}}, gpu)'),
        ),
        (
            stat(
                "GPUs",
                "short",
                f"count({_of_card(c.GPU_UP)})",
                width=4,
                about="Cards that are known, those that do not answer included.",
            ),
            stat(
                "GPUs given out",
                "short",
                f"sum({mode} > bool 0)",
                width=4,
                about="Cards of which at least a part is given to a container.",
            ),
            stat("Memory used", "bytes", f"sum({used})", width=4, about="By NVML, no matter who uses it."),
            stat(
                "Memory given out",
                "bytes",
                f"sum({given})",
                width=4,
                about="What containers were given, used or not.",
            ),
            stat("Memory total", "bytes", f"sum({total})", width=4, about="Of all cards that answer."),
            stat(
                "Power", "watt", f"sum({_of_card(c.GPU_POWER)})", width=4, about="Of all chosen cards, now."
            ),
            series(
                "Memory by card",
                "bytes",
                Query(most(used), f"{WHERE} used"),
                Query(f"{given} and {most(used)}", f"{WHERE} given out"),
                Query(f"{total} and {most(used)}", f"{WHERE} total"),
                about="Used, given out, and all there is.",
            ),
            series(
                "Memory used, ratio",
                "percentunit",
                Query(most(f"{used} / {total}"), WHERE),
                highest=1,
                about="Of all memory of the card.",
            ),
            series(
                "Utilization",
                "percentunit",
                Query(most(_of_card(c.GPU_UTILIZATION)), WHERE),
                highest=1,
                about="Part of the time in which the card ran any kernel.",
            ),
            series(
                "Temperature",
                "celsius",
                Query(most(_of_card(c.GPU_TEMPERATURE)), WHERE),
                about="Of the chip.",
            ),
            series("Power", "watt", Query(most(_of_card(c.GPU_POWER)), WHERE), about="Of each card."),
            series(
                "PCIe traffic",
                "Bps",
                Query(most(_of_card(c.GPU_PCIE, RATE)), WHERE + " {{direction}}"),
                about="Sent and received by the card.",
            ),
            series(
                "Clocks held down",
                "percentunit",
                Query(most(_of_card(c.GPU_THROTTLED, RATE)), WHERE + " {{reason}}"),
                about="Part of the time in which the driver held the clocks down, by reason.",
            ),
            series(
                "Xid faults",
                "short",
                Query(most(f"sum by (node, gpu) ({_of_card(c.XID_ERRORS)})"), f"{WHERE} all"),
                Query(most(f"{_of_card(c.XID_ERRORS)} > 0"), WHERE + " Xid {{xid}}"),
                about="Since the exporter started, by code as far as there were any.",
            ),
            series(
                "Memory by container",
                "bytes",
                Query(most(of_app), f"{WHERE} {WHO}"),
                about="Who uses how much of each card.",
                link=TO_APP,
            ),
            series(
                "Memory of nobody",
                "bytes",
                Query(most(_of_card(c.UNATTRIBUTED_MEMORY)), WHERE + " {{reason}}"),
                about="Memory of the driver, of the host, and of containers without a grant.",
            ),
        ),
    )


def sharing() -> Dashboard:
    def at(metric: c.Metric, of: str = "{}") -> str:
        make = of_containers if "container" in metric.labels else of_cards
        return make(metric, f'{{{CLUSTER},node=~"$node"}}', of)

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
        (CLUSTERS, NODES),
        (
            stat(
                "Given out",
                "percentunit",
                f"{given} / {total}",
                highest=1,
                about="Part of all memory that containers were given.",
            ),
            stat(
                "Used of what is given out",
                "percentunit",
                f"{used} / {given}",
                highest=1,
                about="Low means that containers ask for much more than they use.",
            ),
            stat("Wasted", "bytes", f"{given} - {used}", about="Given out and not used."),
            stat(
                "Fragmentation",
                "percentunit",
                f"1 - max({free} and {shared}) / (sum({free} and {shared}) > 0)",
                about="The part of free memory that is not on the card with the most of it.",
                highest=1,
            ),
            series(
                "Memory of the cluster",
                "bytes",
                Query(total, "total"),
                Query(given, "given out"),
                Query(used, "used by containers"),
                about="All there is, what is given out, and what is used of it.",
            ),
            series(
                "Given out and not used",
                "bytes",
                Query(most(unused), WHO),
                about="What containers hold without using it.",
                link=TO_APP,
            ),
            series(
                "Containers by card",
                "short",
                Query(most(f"count by (node, gpu) ({at(c.CONTAINER_INFO)})"), WHERE),
                about="How many share each card.",
                link=TO_NODE,
            ),
            series(
                "Free by card",
                "bytes",
                Query(most(free), WHERE),
                about="What could still be given out.",
                link=TO_NODE,
            ),
            series(
                "Launches held back",
                "percentunit",
                Query(most(at(c.THROTTLED, RATE)), WHO),
                about="Seconds per second that launches waited for the share. No data for whole cards.",
                link=TO_APP,
            ),
            series(
                "Refused allocations",
                "short",
                Query(most(at(c.MEMORY_REFUSED, "increase({}[5m])")), WHO),
                about="Allocations beyond the limit refused in five minutes. No data for whole cards.",
            ),
        ),
    )


def dcgm() -> Dashboard:
    """The panels of dashboard 12239, with its titles and order, and its errors corrected."""

    def card(title: str, field: str, unit: str, scale: str = "", *, about: str, **more: Any) -> Panel:
        query = Query(f"{most(field + DCGM)}{scale}", "{{hostname}}{{Hostname}} GPU {{gpu}}")
        return series(title, unit, query, about=about, **more)

    return Dashboard(
        "gpuslice-dcgm",
        "NVIDIA DCGM Exporter Dashboard",
        "The cards by dcgm-exporter's names.",
        (
            Variable("instance", "label_values(DCGM_FI_DEV_FB_USED, instance)"),
            Variable("gpu", 'label_values(DCGM_FI_DEV_FB_USED{instance=~"$instance"}, gpu)'),
        ),
        (
            card("GPU Temperature", "DCGM_FI_DEV_GPU_TEMP", "celsius", width=18, about="Of the chip."),
            gauge(
                "GPU Avg. Temp",
                "celsius",
                f"avg(DCGM_FI_DEV_GPU_TEMP{DCGM})",
                highest=100,
                warns_at=80,
                bad_at=90,
                about="Mean of the chosen cards.",
            ),
            card("GPU Power Usage", "DCGM_FI_DEV_POWER_USAGE", "watt", width=18, about="Of each card."),
            gauge(
                "GPU Power Total", "watt", f"sum(DCGM_FI_DEV_POWER_USAGE{DCGM})", about="Of all chosen cards."
            ),
            card(
                "GPU SM Clocks",
                "DCGM_FI_DEV_SM_CLOCK",
                "hertz",
                " * 1e6",
                about="Clock of the multiprocessors.",
            ),
            card(
                "GPU Utilization",
                "DCGM_FI_DEV_GPU_UTIL",
                "percent",
                highest=100,
                about="Part of the time in which the card ran any kernel.",
            ),
            card(
                "Tensor Core Utilization",
                "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
                "percentunit",
                highest=1,
                about="Part of the time in which tensor cores were busy; reported by Hopper and later cards.",
            ),
            card("GPU Framebuffer Mem Used", "DCGM_FI_DEV_FB_USED", "mbytes", about="Memory in use."),
        ),
    )


def dashboards() -> dict[str, Dashboard]:
    """By file name."""
    return {
        "gpu-app": app(),
        "gpu-node": node(),
        "gpu-sharing": sharing(),
        "gpu-teams": teams(),
        "gpu-scheduling": scheduling(),
        "nvidia-dcgm": dcgm(),
    }
