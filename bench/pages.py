"""Fills the tables of docs/results/ with what the benchmarks printed: `make results`.

    python -m bench.pages                        # rewrite every table from the JSON in bench/recorded/
    python -m bench.pages --measure interposer   # run that benchmark first, and keep what it prints

A table stands between `<!-- table: NAME -->` and `<!-- end -->` on its page. What is recorded is what a
benchmark printed, with its command, the commit, the day and the load of the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "results"
RECORDED = Path(__file__).resolve().parent / "recorded"
TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
TRACES = [
    *("default", "cpu050", "cpu100", "cpu200", "gpushare20", "gpushare40", "gpushare100"),
    *("gpuspec10", "gpuspec25", "multigpu20", "multigpu40"),
]
CHURNED = ["default"]
PUBLISHED: dict[str, dict[str, float]] = {
    "default": {"binpack": 92.00, "bestfit": 93.08, "fgd": 95.39},
    "cpu050": {"binpack": 93.72, "bestfit": 93.79, "fgd": 95.21},
    "cpu100": {"binpack": 92.72, "bestfit": 93.44, "fgd": 95.35},
    "cpu200": {"binpack": 90.22, "bestfit": 92.40, "fgd": 95.05},
    "gpushare40": {"binpack": 90.03, "bestfit": 91.69, "fgd": 94.15},
    "gpushare100": {"binpack": 82.57, "bestfit": 85.01, "fgd": 86.90},
    "gpuspec10": {"binpack": 92.46, "bestfit": 93.31, "fgd": 94.95},
    "gpuspec25": {"binpack": 92.98, "bestfit": 93.23, "fgd": 94.74},
    "multigpu20": {"binpack": 93.71, "bestfit": 93.93, "fgd": 95.65},
    "multigpu40": {"binpack": 95.74, "bestfit": 95.23, "fgd": 96.99},
}
"""The means that the authors of the traces publish, % at 130 % arrived."""
REPLAY = ["placement.py", "--trace"]
LEARNED = ["--policy", "fgd,opportunity-cost"]
COMMANDS: dict[str, list[str]] = {
    "interposer": ["interposer.py", "--rounds", "8"],
    "extender": ["extender.py", "--nodes", "500", "--nodes", "5000", "--nodes", "20000"],
    "exporter": ["exporter.py", "--gpus", "8", "--containers-per-gpu", "20"],
    "exporter-25000": ["exporter.py", "--series", "25000"],
    "parking": ["parking.py"],
    **{f"decisions-{nodes}": ["decisions.py", "--nodes", str(nodes)] for nodes in (500, 5000, 20000)},
    **{f"full-{nodes}": ["full_cluster.py", "--nodes", str(nodes), "--seconds", "20"] for nodes in (60, 300)},
    "borrowing": ["borrowing.py", "--seeds", "42-61"],
    **{f"fill-{trace}": [*REPLAY, trace, "--policy", "all", "--seeds", "42-51"] for trace in TRACES},
    **{
        f"churn-{trace}-{load}": [*REPLAY, trace, *LEARNED, "--seeds", "42-44", "--churn", load]
        for trace in CHURNED
        for load in ("0.95", "1")
    },
}
"""What is recorded under a name: the benchmark and its options."""

Rows = Iterator[list[str]]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--measure",
        action="append",
        default=[],
        metavar="NAME",
        help=f"a benchmark to run, or the beginning of several names: {', '.join(COMMANDS)}",
    )
    options = parser.parse_args()
    for beginning in options.measure:
        names = [name for name in COMMANDS if name.startswith(beginning)]
        if not names:
            parser.error(
                f'--measure names "{beginning}", must be the beginning of one of {", ".join(COMMANDS)}'
            )
        for name in names:
            measure(name)
    for page in sorted(PAGES.glob("*.md")):
        page.write_text(filled(page.read_text()))
    return 0


def measure(name: str) -> None:
    command = COMMANDS[name]
    print(f"bench/{' '.join(command)}", file=sys.stderr)
    done = subprocess.run(
        [sys.executable, f"bench/{command[0]}", *command[1:], "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    record(name, json.loads(done.stdout), commit(), os.getloadavg()[1])


def record(name: str, printed: Any, commit: str, load: float) -> None:
    RECORDED.mkdir(exist_ok=True)
    about = {
        "command": f"python bench/{' '.join(COMMANDS[name])} --json",
        "commit": commit,
        "day": time.strftime("%Y-%m-%d", time.gmtime()),
        "cores": os.cpu_count(),
        "load": round(load, 1),
    }
    (RECORDED / f"{name}.json").write_text(json.dumps({**about, "printed": printed}, indent=1) + "\n")


def commit() -> str:
    described = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(described, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def filled(page: str) -> str:
    """The page with its tables rewritten. KeyError: a table that nobody makes."""
    return TABLE.sub(lambda match: match[1] + as_markdown(TABLES[match[2]]()) + match[3], page)


def as_markdown(rows: Rows) -> str:
    head, *rest = rows
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rest))


def printed(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())["printed"]


def runs() -> Rows:
    """What was recorded, when and where: one row for all runs of one benchmark."""
    yield ["benchmark", "commit", "day", "cores, load"]
    found: dict[str, set[tuple[str, str, str]]] = {}
    for name, (script, *_) in COMMANDS.items():
        about = json.loads((RECORDED / f"{name}.json").read_text())
        where = about["commit"], about["day"], f"{about['cores']}, {about['load']}"
        found.setdefault(script, set()).add(where)
    for script, places in found.items():
        yield [f"`bench/{script}`", *(", ".join(sorted(set(each))) for each in zip(*places, strict=True))]


def interposer() -> Rows:
    found = printed("interposer")
    calls = {
        "launch": "launch",
        "memgetinfo": "memory info",
        "alloc_free": "alloc + free",
        "alloc_free_async": "asynchronous",
        "alloc_free_2000_live": "with 2,000 live",
    }
    yield ["callers", *calls.values()]
    yield ["one thread, ns added", *(f"{found[f'{call}_added_ns']:.1f}" for call in calls)]
    yield ["aim", *(str(found["aims_added_ns"].get(call, "")) for call in calls)]
    for mode, by in found["ratio_to_raw"].items():
        number = mode.split("_")[1]
        callers = f"{number} {mode.split('_')[0]}".replace("1 threads", "one thread")
        yield [f"{callers}, times raw", *(f"{by['gpuslice'][call]:.2f}" for call in calls)]


def extender() -> Rows:
    found = printed("extender")
    yield ["nodes", *(f"{row['nodes']:,}" for row in found)]
    for key, label in EXTENDER.items():
        yield [label, *(f"{row[key]:g}" for row in found)]


EXTENDER = {
    "filter_p50_ms": "filter, p50 ms",
    "filter_p99_ms": "filter, p99 ms",
    "prioritize_p99_ms": "prioritize, p99 ms",
    "bind_p50_ms": "bind, p50 ms, with its call to the API server",
    "bind_own_ms": "bind, own ms",
    "cpu_ms_per_pod": "CPU ms per pod",
    "rss_mib": "resident MiB",
    "start_to_ready_s": "start to ready, s",
}


def exporter() -> Rows:
    small, large = printed("exporter"), printed("exporter-25000")
    yield ["", f"8 × 20 containers, {small['series']:,} series", f"{large['series']:,} series"]
    for label, text in {
        "scrape p50 / p99, ms": "{scrape_p50_ms:.1f} / {scrape_p99_ms:.1f}",
        "of it waiting for a core, mean ms": "{waited_ms:.1f}",
        "CPU with a scrape every 15 s, percent of a core": "{cpu_pct:.1f}",
        "memory, MiB; of it the simulated driver's": "{rss_mib:.0f}; {simulated_mib:.0f}",
        "prometheus-client rendering the same series, ms": "{client_p50_ms:.0f}",
        "page, KiB, plain / gzip": "{page_kib:,} / {gzip_kib}",
    }.items():
        yield [label, text.format(**small), text.format(**large)]


def decisions() -> Rows:
    yield ["nodes", "p50", "p99", "first", "piece", "memory, MiB"]
    for nodes in (500, 5000, 20000):
        (found,) = printed(f"decisions-{nodes}")
        times = (found[f"{key}_us"] for key in ("p50", "p99", "first", "piece"))
        yield [f"{nodes:,}", *(f"{time_us:,.0f}" for time_us in times), f"{found['rss_mib']:.0f}"]


def full() -> Rows:
    costs = ["attempts", "events", "writes", "CPU ms"]
    yield ["nodes", "way", *costs, "p50 ms, low", "p99 ms, high", "evictions, in vain"]
    for nodes in (60, 300):
        for way in printed(f"full-{nodes}")["ways"]:
            attempts, writes = (sum(way[key].values()) for key in ("attempts", "writes"))
            waits = f"{way['wait_ms']['low']['p50']:.0f}", f"{way['wait_ms']['high']['p99']:,.0f}"
            costs = [
                f"{attempts:.1f}",
                f"{way['events']:.1f}",
                f"{writes:.1f}",
                f"{way['cpu_ms']['all']:.0f}",
            ]
            evicted = f"{way['evictions']}, {way['in_vain']}"
            yield [str(nodes), FULL[way["way"]], *costs, *waits, evicted]


FULL = {"whole": "whole cards", "empty": "whole cards, empty extender", "gpuslice": "gpuslice"}


def parking() -> Rows:
    yield ["idle for, s", "of all GiB-hours held, % lent", "wakes a pod-hour"]
    for found in printed("parking"):
        yield [f"{found['idle_after_s']:g}", f"{found['lent_pct']:.1f}", f"{found['wakes_per_pod_hour']:.2f}"]


def filling() -> Rows:
    policies = ["binpack", "bestfit", "fgd", "opportunity-cost"]
    yield ["trace", *policies, "over fgd at 130 %", "at 100 %"]
    for trace in TRACES:
        found = printed(f"fill-{trace}")
        means = [found[policy]["allocation_pct_at_130"]["mean"] for policy in policies]
        shown = [
            _published(mean, PUBLISHED.get(trace, {}).get(policy))
            for mean, policy in zip(means, policies, strict=True)
        ]
        yield [
            trace,
            *shown[:-1],
            f"**{shown[-1]}**",
            _gain(found, "allocation_pct_at_130"),
            _gain(found, "allocation_pct_at_100"),
        ]


def _published(mean: float, published: float | None) -> str:
    return f"{mean:.2f}" if published is None else f"{mean:.2f} ({published:.2f})"


def borrowing() -> Rows:
    yield ["request", "cards for at most 0.3 %", "busy samples without room on 50 cards", "held out"]
    for row in printed("borrowing"):
        least, most, lacking = row["cards"], row["most_cards"], row["lacking_pct"]
        yield [
            "peak" if row["factor"] == 1 else f"peak / {row['factor']:g}",
            f"{least:.1f}, at most {most}",
            "do not fit" if lacking is None else f"{lacking:.2f} %, at most {row['most_lacking_pct']:.2f} %",
            "" if lacking is None else f"{row['held_out_lacking_pct']:.2f} %",
        ]


def churn() -> Rows:
    yield [
        "trace",
        "load 95 %: allocated / refused",
        "over fgd",
        "load 100 %: allocated / refused",
        "over fgd",
    ]
    for trace in CHURNED:
        cells = [trace]
        for load in ("0.95", "1"):
            found = printed(f"churn-{trace}-{load}")
            ours = found["opportunity-cost"]
            cells.append(" / ".join(f"{ours[key]['mean']:.2f}" for key in CHURN))
            cells.append(" / ".join(_gain(found, key) for key in CHURN))
        yield cells


CHURN = ("allocation_pct", "refused_pct")


def _gain(found: dict[str, Any], key: str) -> str:
    """Of opportunity-cost over fgd, seed by seed, with its standard error."""
    ours, theirs = (found[policy][key]["seeds"] for policy in ("opportunity-cost", "fgd"))
    differences = [our - their for our, their in zip(ours, theirs, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return f"{statistics.mean(differences):+.2f} ± {error:.2f}".replace("-", "−")


TABLES: dict[str, Callable[[], Rows]] = {
    "runs": runs,
    "interposer": interposer,
    "extender": extender,
    "exporter": exporter,
    "decisions": decisions,
    "full": full,
    "parking": parking,
    "filling": filling,
    "churn": churn,
    "borrowing": borrowing,
}

if __name__ == "__main__":
    sys.exit(main())
