"""How many cards hold pods that request less than their peaks and borrow the rest, on GenTD26's measurements.

    python bench/borrowing.py --seeds 42-61 --data FOLDER [--json]

FOLDER has two tables of cluster-trace-v2026-GenAI (alibaba/clusterdata), pod_gpu_memory_used_bytes_anon.csv
and pod_gpu_duty_cycle_anon.csv. Cards have 80 GiB. Each factor says by how much peaks are divided to be
requests; `lacking_pct` is of the samples of pods that compute. `held_out`: the pods are put by what the first
half of their samples says, and only the second half is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

from gpuslice.core.simulation.borrowing import Sample, Usage, needed, played, spread
from gpuslice.diagnosis.simulate.facts import load_usage

CARD_BYTES = 80 << 30
CARDS = 50
MOST_RATIO = 0.003
FACTORS = (1.0, 1.25, 1.5, 2.0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="42-61")
    parser.add_argument("--data", default=os.environ.get("GPUSLICE_USAGE_DATA", "data/gentd26"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    usage = load_usage(Path(options.data))
    first, last = map(int, options.seeds.split("-"))
    found = [of_factor(usage, factor, range(first, last + 1)) for factor in FACTORS]
    print(json.dumps(found, indent=1) if options.json else "\n".join(map(str, found)))


def of_factor(usage: Usage, factor: float, seeds: range) -> dict[str, Any]:
    fewest = [found.cards for seed in seeds if (found := needed(usage, CARD_BYTES, factor, MOST_RATIO, seed))]
    placed = [spread(usage, CARD_BYTES, factor, CARDS, seed=seed) for seed in seeds]
    lacking = [100 * played(usage, cards, CARD_BYTES).ratio for cards in placed if cards is not None]
    return {
        "factor": factor,
        "cards": statistics.mean(fewest),
        "most_cards": max(fewest),
        "lacking_pct": statistics.mean(lacking) if lacking else None,
        "most_lacking_pct": max(lacking) if lacking else None,
        "held_out_lacking_pct": held_out(usage, factor, seeds),
    }


def held_out(usage: Usage, factor: float, seeds: range) -> float | None:
    before: dict[str, list[Sample]] = {pod: list(each[: (len(each) + 1) // 2]) for pod, each in usage.items()}
    after: dict[str, list[Sample]] = {pod: list(each[len(each) // 2 :]) for pod, each in usage.items()}
    placed = [spread(usage, CARD_BYTES, factor, CARDS, seed=seed, measured=before) for seed in seeds]
    ratios = [100 * played(after, cards, CARD_BYTES).ratio for cards in placed if cards is not None]
    return statistics.mean(ratios) if ratios else None


if __name__ == "__main__":
    main()
