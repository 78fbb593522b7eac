"""``gpuslice load``: a known load, in dcgmproftester's terms, and how an exporter reports it."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import click

from gpuslice.adapters.gpu import cuda
from gpuslice.adapters.gpu.cuda import Cuda, CudaError, CudaMissingError
from gpuslice.adapters.web.scrape import ScrapeError, fetch
from gpuslice.apps.load.engine import CannotGenerateError, Engine, Interval
from gpuslice.apps.load.fields import BETWEEN_CARDS, MOVING, Work
from gpuslice.apps.load.judge import (
    Verdict,
    Who,
    judge_memory,
    judge_refusal,
    judge_traffic,
    judge_work,
)
from gpuslice.apps.load.order import LENGTH, PERCENT, STEP, Order, order_of
from gpuslice.core.units import MIB

_ATTRIBUTES = {
    "MAX_THREADS_PER_MULTIPROCESSOR": cuda.MAX_THREADS,
    "MULTIPROCESSOR_COUNT": cuda.MULTIPROCESSORS,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": cuda.MAX_SHARED,
    "COMPUTE_CAPABILITY_MAJOR": cuda.MAJOR,
    "COMPUTE_CAPABILITY_MINOR": cuda.MINOR,
    "GLOBAL_MEMORY_BUS_WIDTH": cuda.BUS_WIDTH,
    "MEMORY_CLOCK_RATE": cuda.MEMORY_CLOCK,
}
STOPPED = 130  # as shells report a program ended by Ctrl-C
SETTLE_S = 3.0
"""How long an exporter that samples once a second may take to show a change."""


@dataclass(slots=True)
class Report:
    """Everything that was done and found."""

    card: str = ""
    uuid: str = ""
    intervals: list[dict[str, Any]] = field(default_factory=list)
    held_bytes: int = 0
    refused_at_bytes: int | None = None
    refusal: str = ""
    stopped: bool = False  # ended early by a signal
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return all(verdict.agrees for verdict in self.verdicts)


@click.command("load")
@click.option(
    "-t",
    "--fieldId",
    "fields",
    default="",
    metavar="IDS",
    help="Field ids, e.g. 1004, or all: copies between cards (1011, 1012) only where -i names two.",
)
@click.option(
    "-d", "--duration", type=LENGTH, default=30.0, show_default=True, help="Seconds for each field."
)
@click.option("-r", "--report", type=STEP, default=1.0, show_default=True, help="Seconds between two lines.")
@click.option(
    "-i",
    "--gpuIds",
    "cards",
    default="0",
    show_default=True,
    metavar="N[,M]",
    help="Which visible card; for copies between cards also the other [default: the first that it reaches].",
)
@click.option("--level", default=100.0, show_default=True, help="Percent of the time that the card is busy.")
@click.option("--hold", default="", metavar="SIZE", help="Memory to hold while running, e.g. 4GiB.")
@click.option(
    "--grow", default="", metavar="SIZE", help="Allocate memory in steps of this size until it is refused."
)
@click.option("--validate", "url", default="", metavar="URL", help="An exporter's /metrics to compare with.")
@click.option(
    "--namespace", default="", help="Namespace of the pod that this runs in [default: $POD_NAMESPACE]."
)
@click.option("--pod", default="", help="Name of that pod [default: $POD_NAME].")
@click.option("--container", default="", help="Name of the container, if the pod has several.")
@click.option(
    "--tolerance", type=PERCENT, default=10.0, show_default=True, help="Percent by which the two may differ."
)
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option("--no-dcgm-validation", is_flag=True, help="Accepted: nothing here needs DCGM.")
@click.option("--target-max-value", is_flag=True, help="The same as --level 100.")
@click.option("--mode", default="", help="Accepted and ignored.")
def command(**given: Any) -> None:
    """Put a known load on a card, and compare it with what an exporter says.

    \b
    Examples:
      gpuslice load -t 1004 -d 45                        tensor cores for 45 s, as dcgmproftester does
      gpuslice load -t 1001 --level 30 --hold 4GiB       30 % busy, holding 4 GiB
      gpuslice load --grow 512MiB                        take memory until it is refused
      gpuslice load -t 1002 --validate http://ADDRESS:9400/metrics
      gpuslice load -t 1011 -i 0,1                       copies from card 0 to card 1

    Ends with 1 when the exporter says something else than was done, with 130 after Ctrl-C.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a deleted pod ends as with Ctrl-C
    order, report = order_of(given), Report()
    try:
        _run(order, _card(order.cards[0]), report)
    except (CudaError, CudaMissingError, CannotGenerateError, ScrapeError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:  # the driver frees what is held when the process ends
        report.stopped = True
        order.say("Stopped.")
    if order.as_json:
        click.echo(json.dumps({**asdict(report), "agrees": report.agrees}))
    if report.stopped:
        raise SystemExit(STOPPED)
    if not report.agrees:
        raise SystemExit(1)


def _run(order: Order, card: Cuda, report: Report) -> None:
    report.card, report.uuid = card.name, card.uuid
    who = Who(card.uuid, order.who.namespace, order.who.pod, order.who.container)
    order.say("Skipping CreateDcgmGroups() since DCGM validation is disabled")
    values = {name: card.attribute(number) for name, number in _ATTRIBUTES.items()}
    for name, value in values.items():
        order.say(f"CU_DEVICE_ATTRIBUTE_{name}: {value}")
    bandwidth = values["GLOBAL_MEMORY_BUS_WIDTH"] // 8 * values["MEMORY_CLOCK_RATE"] * 1000 * 2
    order.say(f"Max Memory bandwidth: {bandwidth} bytes ({bandwidth / 1e9:.2f} GiB)")
    order.say("CudaInit completed successfully.")
    order.say()
    order.say("Skipping WatchFields() since DCGM validation is disabled")
    if order.hold_bytes:
        try:
            card.fill(card.allocate(order.hold_bytes), order.hold_bytes)
        except CudaError as error:
            held_mib = order.hold_bytes / MIB
            raise CannotGenerateError(f"{held_mib:.0f} MiB cannot be held: {error}") from error
        report.held_bytes = order.hold_bytes
        order.say(f"Holding {order.hold_bytes / MIB:.0f} MiB")
    while order.grow_bytes:
        try:
            card.fill(card.allocate(order.grow_bytes), order.grow_bytes)
        except CudaError as error:
            if error.code != cuda.OUT_OF_MEMORY:
                raise
            report.refused_at_bytes = report.held_bytes + order.grow_bytes
            report.refusal = str(error)
            step, held = order.grow_bytes / MIB, report.held_bytes / MIB
            order.say(f"Refused: {step:.0f} MiB more than {held:.0f} MiB: {error}")
            break
        report.held_bytes += order.grow_bytes
        order.say(f"Holding {report.held_bytes / MIB:.0f} MiB")
    for work in order.works:
        _generate(order, card, work, report, who)
    if not order.works and (order.hold_bytes or order.grow_bytes):
        time.sleep(max(order.duration_s, SETTLE_S if order.url else 0.0))
    if order.url and report.held_bytes:
        free, total = card.memory()
        page = fetch(order.url)
        found = judge_memory(page, who, report.held_bytes, total - free, order.tolerance)
        if report.refused_at_bytes is not None:
            found += judge_refusal(page, who)
        _add_verdicts(order, report, found)


def _generate(order: Order, card: Cuda, work: Work, report: Report, who: Who) -> None:
    peer = None
    if work.kind in BETWEEN_CARDS and len(order.cards) > 1:
        peer = _beside(card, order.cards[1])
    elif work.kind in BETWEEN_CARDS:  # the first that the card can reach, otherwise any other
        others = [_beside(card, ordinal) for ordinal in range(card.count()) if ordinal != card.ordinal]
        peer = next((other for other in others if card.reaches(other)), others[0] if others else None)
    engine = Engine(card, work, peer)
    before = fetch(order.url) if order.url and work.kind in MOVING else None
    began, moved_bytes = time.monotonic(), 0
    while (passed := time.monotonic() - began) < order.duration_s:
        interval = engine.run(order.level, min(order.report_s, order.duration_s - passed))
        moved_bytes += interval.bytes_moved
        series = fetch(order.url).find(work.field, UUID=who.uuid) if order.url else []
        measured = series[0].value if series else None
        # 0 is what dcgmproftester prints where it asks nobody
        order.say(line(work, interval, measured if order.url else 0.0))
        report.intervals.append(
            {"field": work.number, "title": work.title, "measured": measured, **asdict(interval)}
        )
    if order.url:
        settled = engine.run(order.level, SETTLE_S)
        moved_bytes += settled.bytes_moved
        page = fetch(order.url)  # its last sample is from this time
        verdicts = judge_work(page, who, work, settled.busy_ratio, order.tolerance)
        if before is not None:
            time.sleep(SETTLE_S)  # and this one covers all of it
            after = fetch(order.url)
            verdicts += judge_traffic(before, after, who, work, moved_bytes, tolerance=order.tolerance)
        _add_verdicts(order, report, verdicts)


def _card(ordinal: int) -> Cuda:
    try:
        return Cuda(ordinal)
    except CudaError as error:
        raise CannotGenerateError(f"card {ordinal}: {error}") from error


def _beside(card: Cuda, ordinal: int) -> Cuda:
    try:
        return _card(ordinal)
    finally:
        card.make_current()


def line(work: Work, interval: Interval, measured: float | None) -> str:
    """One report in the format of dcgmproftester's lines. `measured`: None if the page has no such series."""
    generated = f"{interval.busy_ratio:.3f}" if work.exact else "???"
    if interval.bytes_per_s:
        shown = "" if measured is None else f", dcgm {measured / MIB:.1f}"
        return f"{work.title}: generated {interval.bytes_per_s / MIB:.1f}{shown} MiB/sec"
    shown = "" if measured is None else f", dcgm {measured:.3f}"
    flops = f" ({interval.gflops:.1f} gflops)" if interval.gflops else ""
    return f"{work.title}: generated {generated}{shown}{flops}"


def _add_verdicts(order: Order, report: Report, verdicts: list[Verdict]) -> None:
    for verdict in verdicts:
        report.verdicts.append(verdict)
        seen = "absent" if verdict.measured is None else f"{verdict.measured:g}"
        word = "agrees" if verdict.agrees else "PARTS"
        order.say(f"{verdict.series}: generated {verdict.generated:g}, exporter {seen}: {word}")
