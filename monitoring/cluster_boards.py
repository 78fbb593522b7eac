"""The dashboards of the whole cluster: teams and their costs, and scheduling."""

from __future__ import annotations

from gpuslice.apps.exporter import catalogue as c
from monitoring.panels import Dashboard, Entry, Query, Variable, series, stat, table
from monitoring.selectors import (
    CLUSTER,
    CLUSTERS,
    EXTENDER,
    GIB,
    NAMESPACES,
    RATE,
    TEAM,
    TO_APP,
    TO_TEAM,
    most,
    of_containers,
)
from monitoring.series import EXTENDER_READY, SAMPLED


def teams() -> Dashboard:
    """What each namespace holds, uses and leaves idle, now and over the chosen time range."""

    def by_team(metric: c.Metric) -> str:
        return f"sum by (namespace) ({of_containers(metric, TEAM)})"

    def hours(recorded: str) -> str:
        """Hours over the chosen time range, from one value per minute of a recorded series: others are too
        many for a month.
        """
        return f"sum by (namespace) (sum_over_time(namespace:gpuslice_{recorded}{TEAM}[$__range:1m])) / 60"

    held, used = by_team(c.MEMORY_ALLOCATED), by_team(c.MEMORY_USED)
    held_hours, used_hours = (f"{hours(f'memory_{each}:bytes')} / {GIB}" for each in ("allocated", "used"))
    idle = f"{of_containers(c.MEMORY_ALLOCATED, TEAM)} - {of_containers(c.MEMORY_USED, TEAM)}"
    all_hours = f"sum({held_hours})"
    clock = f"max by (cluster, node) ({c.TIME.name}{{{CLUSTER}}})"  # the node's, as the timestamp is
    since_active = f"{clock} - on (cluster, node) group_right () {of_containers(c.LAST_ACTIVE, TEAM)}"
    return Dashboard(
        "gpuslice-teams",
        "GPU Teams and Cost",
        "What each namespace holds of the cards, what it uses of that, and what it costs.",
        (CLUSTERS, NAMESPACES),
        (
            stat("Held now", "bytes", f"sum({held})", about="Memory given to the chosen namespaces."),
            stat(
                "Used of it",
                "percentunit",
                f"sum({used}) / sum({held})",
                about="Low means that memory is held and left idle.",
                highest=1,
            ),
            stat("GiB-hours", "short", all_hours, about="Memory held times how long, of the chosen time."),
            stat(
                "Cost",
                "short",
                f"{all_hours} * $price",
                about="GiB-hours times the price above, in its currency. What is held is paid, used or not.",
            ),
            table(
                "Teams",
                Query(held, "held now"),
                Query(used, "used now"),
                Query(held_hours, "GiB-hours held"),
                Query(used_hours, "GiB-hours used"),
                Query(hours("sm_seconds:rate5m"), "SM-hours"),
                Query(f"{held_hours} * $price", "cost"),
                about="One row for each namespace; hours and cost are of the chosen time, as far back as the "
                "recording rules beside the alerts reach.",
                units={
                    "held now": "bytes",
                    "used now": "bytes",
                    "GiB-hours held": "short",
                    "GiB-hours used": "short",
                    "SM-hours": "short",
                    "cost": "short",
                },
            ),
            series(
                "Held by namespace",
                "bytes",
                Query(most(held), "{{namespace}}"),
                about="Memory that was given to each namespace.",
                width=8,
                link=TO_TEAM,
            ),
            series(
                "Used by namespace",
                "bytes",
                Query(most(used), "{{namespace}}"),
                about="Memory that each namespace uses of what it holds.",
                width=8,
                link=TO_TEAM,
            ),
            series(
                "GPU time by namespace",
                "short",
                Query(
                    most(f"sum by (namespace) ({of_containers(c.SM_SECONDS, TEAM, RATE)})"), "{{namespace}}"
                ),
                about="Cards that each namespace keeps busy: 1 is one card all the time.",
                width=8,
                link=TO_TEAM,
            ),
            table(
                "Who wastes most",
                Query(most(idle), "held, not used"),
                *(
                    Query(f"{of_containers(metric, TEAM)} and {most(idle)}", heading)
                    for metric, heading in ((c.MEMORY_USED, "used"), (c.MEMORY_PEAK, "peak"))
                ),
                Query(f"{since_active} and {most(idle)}", "idle for"),
                about="The 20 containers that hold most without using it, the most that each used since its "
                "start, and how long it has not computed. `gpuslice waste` says who waits for it.",
                units={"held, not used": "bytes", "used": "bytes", "peak": "bytes", "idle for": "s"},
                link=TO_APP,
            ),
        ),
        (Entry("price", "Price of a GiB-hour", "0.05"),),
    )


def _else_none(label: str, known_by: str) -> str:
    """After a sum by `label`: a line at 0 with the same label, if `known_by` exists and there is nothing to
    sum.
    """
    return f'or on () label_replace(0 * max({known_by}{EXTENDER}), "{label}", "none", "", "")'


def scheduling() -> Dashboard:
    """How the extender performs: its requests, its latency, and what is left to give out."""

    def of(name: str, by: str = "", of_rate: bool = False) -> str:
        figure = f"gpuslice_extender_{name}{EXTENDER}"
        figure = f"rate({figure}[5m])" if of_rate else figure
        return f"sum by ({by}) ({figure})" if by else f"sum({figure})"

    asked = "gpuslice_extender_requests_total"
    buckets = of("request_seconds_bucket", "verb, le", of_rate=True)
    api = of("api_request_seconds_bucket", "method, le", of_rate=True)
    units, free = (f"max(gpuslice_extender_{name}{EXTENDER})" for name in ("units", "free_units"))
    return Dashboard(
        "gpuslice-scheduling",
        "GPU Scheduling",
        "The scheduler extender: room, decisions and how long they take, preemption, the API server.",
        (Variable("cluster", f"label_values({EXTENDER_READY}, cluster)"),),
        (
            stat("Units", "short", units, about="Of all usable cards, by the extender's ledger.", width=5),
            stat(
                "Free units",
                "short",
                free,
                about="Units that nobody holds.",
                width=5,
            ),
            stat(
                "Pods",
                "short",
                f"max(gpuslice_extender_pods{EXTENDER})",
                about="Living pods that ask for a part of a card, those that wait included.",
                width=5,
            ),
            stat(
                "Waiting pods",
                "short",
                f"max(gpuslice_extender_waiting_pods{EXTENDER})",
                about="Pods that ask for a part of a card, hold none and have no scheduling gate. "
                "`gpuslice explain` says why.",
                warns_at=1,
                width=5,
            ),
            stat(
                "Ready replicas",
                "short",
                of("ready"),
                about="Replicas of the extender that answer; the leader is one of them.",
                width=4,
            ),
            series(
                "The queue",
                "short",
                Query(f"max(gpuslice_extender_waiting_pods{EXTENDER})", "waiting"),
                Query(f"max(gpuslice_extender_gated_pods{EXTENDER})", "behind a scheduling gate"),
                about="Pods that hold nothing yet, over time.",
            ),
            series(
                "Why pods wait",
                "short",
                Query(
                    f"sum by (why) (gpuslice_console_waiting_pods{EXTENDER}) "
                    f"{_else_none('why', 'gpuslice_console_pods')}",
                    "{{why}}",
                ),
                about="As the console finds it: never fits, no room now, or has its card and does not start. "
                "No data where no console runs.",
            ),
            series(
                "Given out",
                "percentunit",
                Query(f"1 - {free} / {units}", "given out"),
                about="Part of all units that pods hold. Pods may wait before 1: the rest is in pieces.",
                highest=1,
            ),
            series(
                "Decisions",
                "reqps",
                Query(of("requests_total", "verb, result", of_rate=True), "{{verb}} {{result}}"),
                about="Calls a second by verb and result; no means an error, or that no node fits.",
            ),
            series(
                "Time of a call",
                "s",
                Query(f"histogram_quantile(0.5, {buckets})", "{{verb}} median"),
                Query(f"histogram_quantile(0.99, {buckets})", "{{verb}} 99 %"),
                about="Half of the calls take less than the median; bind waits for the API server.",
            ),
            series(
                "Filters that find no node",
                "percentunit",
                Query(
                    f'sum(rate({asked}{{{CLUSTER},verb="filter",result="no"}}[5m])) / '
                    f'sum(rate({asked}{{{CLUSTER},verb="filter"}}[5m]))',
                    "no node fits",
                ),
                about="Near 1 where pods wait: kube-scheduler asks for them again and again.",
                highest=1,
            ),
            series(
                "Time of a request to the API server",
                "s",
                Query(f"histogram_quantile(0.5, {api})", "median {{method}}"),
                Query(f"histogram_quantile(0.99, {api})", "99 % {{method}}"),
                about="Of all requests but watches. A slow API server makes slow binds.",
            ),
            series(
                "Preemption attempts",
                "short",
                Query(
                    f"{of('preemptions_total', 'result', of_rate=True)} "
                    f"{_else_none('result', 'gpuslice_extender_ready')}",
                    "{{result}}",
                ),
                about="A second, by result.",
            ),
            series(
                "Placements in progress",
                "short",
                Query(of("assumed_pods"), "assumed"),
                Query(of("nominated_pods"), "cards kept for a waiting pod"),
                about="Placements that the API server has not shown yet; waiting pods that have cards kept.",
            ),
            series(
                "Pods refused for want of a look",
                "short",
                Query(f"sum(rate({SAMPLED}{EXTENDER}[5m])) or vector(0)", "sampled away"),
                about="Above 0, percentageOfNodesToScore is not 100 and pods wait beside free cards.",
                bad_at=0.001,
            ),
        ),
    )
