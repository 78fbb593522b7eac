"""What the agent counts of its own work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gpuslice.adapters.web.exposition import Family, MetricKind, labels


class Counters:
    """Counts since the start; one instance a process, handed to whoever counts."""

    def __init__(self) -> None:
        self._granted = 0
        self._answering_s = 0.0
        self._refused: Counter[str] = Counter()
        self._repairs: Counter[str] = Counter()
        self._starts: Counter[str] = Counter()

    def granted(self) -> None:
        self._granted += 1

    def answered(self, seconds: float) -> None:
        """How long one Allocate took: kubelet admits nothing else meanwhile."""
        self._answering_s += seconds

    def refused(self, reason: str) -> None:
        self._refused[reason] += 1

    def repaired(self, result: str) -> None:
        self._repairs[result] += 1

    def started(self, identified: str) -> None:
        self._starts[identified] += 1

    def families(self) -> Iterator[Family]:
        yield _one("gpuslice_agent_grants_total", "Containers that were granted devices.", self._granted)
        yield _one("gpuslice_agent_allocate_seconds_total", "Time spent in Allocate.", self._answering_s)
        yield _by("gpuslice_agent_refusals_total", "Requests of kubelet refused.", "reason", self._refused)
        yield _by("gpuslice_agent_repairs_total", "Pod annotations written.", "result", self._repairs)
        yield _by(
            "gpuslice_agent_starts_total",
            "Container starts prepared, by how the container was told.",
            "identified",
            self._starts,
        )


def _one(name: str, about: str, value: float) -> Family:
    return Family(name, MetricKind.COUNTER, about, [("", value)])


def _by(name: str, about: str, label: str, counts: Counter[str]) -> Family:
    samples = [(labels({label: key}), float(value)) for key, value in sorted(counts.items())]
    return Family(name, MetricKind.COUNTER, about, samples)
