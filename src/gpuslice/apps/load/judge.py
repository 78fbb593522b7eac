"""Compares the generated load with what an exporter's page reports."""

from __future__ import annotations

from dataclasses import dataclass

from gpuslice.adapters.web.scrape import Page
from gpuslice.apps.load.fields import MOVING, Work
from gpuslice.core.units import MIB

USED = "gpuslice_container_memory_used_bytes"
REFUSED = "gpuslice_container_memory_refused_total"
SM = "gpuslice_container_sm_utilization_ratio"
CARD_MEMORY = "gpuslice_gpu_memory_used_bytes"
OVERHEAD = 0.25  # at most: headers on the wire
CARD_BUSY = "gpuslice_gpu_utilization_ratio"


@dataclass(frozen=True, slots=True)
class Who:
    """Which container and which card to look for on the page. Without a pod, only the card."""

    uuid: str
    namespace: str = ""
    pod: str = ""
    container: str = ""

    def labels(self) -> dict[str, str]:
        found = {"namespace": self.namespace, "pod": self.pod, "container": self.container}
        return {"gpu_uuid": self.uuid, **{name: value for name, value in found.items() if value}}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One comparison. `measured` is None if the page has no such series: then nothing was proven."""

    series: str
    generated: float
    measured: float | None
    agrees: bool


def judge_work(page: Page, who: Who, work: Work, busy_ratio: float, tolerance: float) -> list[Verdict]:
    """Compares the field's own series, if the card has it, and the busy time of the container or card."""
    found = []
    field = value_of(page, work.field, UUID=who.uuid)
    if field is not None:
        agrees = _near(busy_ratio, field, tolerance) if work.exact else field > 0 or busy_ratio == 0
        found.append(Verdict(work.field, busy_ratio, field, agrees))
    if work.kind in MOVING:
        return found
    name = SM if who.pod else CARD_BUSY
    busy = value_of(page, name, **who.labels())
    if who.pod or busy is not None:
        measured_agrees = busy is not None and _near(busy_ratio, busy, tolerance)
        found.append(Verdict(name, busy_ratio, busy, measured_agrees))
    return found


def judge_traffic(
    before: Page, after: Page, who: Who, work: Work, moved_bytes: int, *, tolerance: float
) -> list[Verdict]:
    """The card's own byte counter must have grown by what was moved; no verdict if there is none.

    The counter also includes headers, which the payload does not, and traffic of others: the tolerance is
    larger upwards.
    """
    at = {"gpu_uuid": who.uuid, "direction": work.direction}
    first, last = value_of(before, work.moved, **at), value_of(after, work.moved, **at)
    if first is None or last is None:
        return []
    grown = last - first
    agrees = moved_bytes * (1 - tolerance) <= grown <= moved_bytes * (1 + OVERHEAD + tolerance) + MIB
    return [Verdict(f'{work.moved}{{direction="{work.direction}"}}', moved_bytes, grown, agrees)]


def judge_memory(page: Page, who: Who, held_bytes: int, seen_bytes: int, tolerance: float) -> list[Verdict]:
    """`held_bytes` were allocated; `seen_bytes` are in use according to the driver, including the context.

    Under a limit both sides must agree exactly; without one, `seen_bytes` is the whole card's usage.
    """
    name = USED if who.pod else CARD_MEMORY
    used = value_of(page, name, **who.labels())
    if used is None:
        return [Verdict(name, seen_bytes, None, agrees=False)]
    room = max(32 * MIB, seen_bytes * tolerance)
    return [Verdict(name, seen_bytes, used, agrees=held_bytes <= used <= seen_bytes + room)]


def judge_refusal(page: Page, who: Who) -> list[Verdict]:
    """A refusal by the interposer must have been counted."""
    refused = value_of(page, REFUSED, **who.labels())
    if not who.pod or refused is None:
        return []
    return [Verdict(REFUSED, 1, refused, agrees=refused >= 1)]


def value_of(page: Page, name: str, **labels: str) -> float | None:
    """The value for these labels; None if there is none, the sum over containers if there are several."""
    found = page.find(name, **labels)
    return sum(one.value for one in found) if found else None


def _near(generated: float, measured: float, tolerance: float) -> bool:
    return abs(generated - measured) <= tolerance
