"""What every process reports about itself: resources, the lag of its event loop, what its threads do.

Names and meanings of ``process_…`` and ``python_gc_…`` are those of Prometheus' own client libraries.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from gpuslice.adapters.web.certificate import ends
from gpuslice.adapters.web.exposition import Family, MetricKind, labels
from gpuslice.adapters.web.histogram import WORK_S, Histogram

LOOK_EVERY_S = 0.25
_RSS_PAGES, _START_TICKS = 21, 19  # fields of /proc/PID/stat after the name of the program


class ProcessMetrics:
    """Metrics of this process; one instance, while `measured`.

    `certificates`: the PEM files that it serves with and checks clients with, "" for none. They are read at
    each scrape, so a renewed one is reported immediately. `tokens_in_clear`: clients show it tokens or
    passwords, without TLS.
    """

    def __init__(self, *certificates: str, proc: Path = Path("/proc")) -> None:
        self.certificates = certificates
        self.tokens_in_clear = False
        self._proc = proc
        self.scrape = Histogram("gpuslice_process_scrape_seconds", "Time to render this page.", bounds=WORK_S)
        self._lag = Histogram(
            "gpuslice_process_event_loop_lag_seconds",
            "Delay of the event loop in running what was due.",
            bounds=WORK_S,
        )
        self._collecting = Histogram(
            "gpuslice_process_gc_pause_seconds", "Time of a garbage collection.", ("generation",), WORK_S
        )
        self._collection_began = 0.0

    @contextlib.asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        """Measure the loop's lag and garbage collection inside the block."""
        gc.callbacks.append(self._collected)
        task = asyncio.create_task(self._follow_loop(), name="event loop lag")
        try:
            yield
        finally:
            gc.callbacks.remove(self._collected)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LOOK_EVERY_S
            await asyncio.sleep(LOOK_EVERY_S)
            self._lag.observe(max(0.0, loop.time() - due_s))

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collection_began = time.perf_counter()
        else:
            took_s = time.perf_counter() - self._collection_began
            self._collecting.observe(took_s, str(info["generation"]))

    def families(self) -> Iterator[Family]:
        """All metrics, as of now."""
        yield from self._of_kernel()
        expiry = Family(
            "gpuslice_process_certificate_expiry_timestamp_seconds",
            MetricKind.GAUGE,
            "When the certificate in this file expires, seconds since the epoch.",
        )
        for file in filter(None, self.certificates):
            with contextlib.suppress(OSError):  # one that cannot be read is left out: unknown is absent
                if (end := ends(Path(file).read_bytes())) is not None:
                    expiry.add(end.timestamp(), labels({"file": file}))
        yield expiry
        in_clear = Family(
            "gpuslice_process_tokens_in_clear",
            MetricKind.GAUGE,
            "1 if clients show tokens or passwords to this process over plain HTTP.",
        )
        if self.tokens_in_clear:
            in_clear.add(1.0)
        yield in_clear
        for name, key, about in (
            ("python_gc_collections_total", "collections", "Times this generation was collected."),
            ("python_gc_objects_collected_total", "collected", "Objects collected."),
            ("python_gc_objects_uncollectable_total", "uncollectable", "Objects that could not be freed."),
        ):
            family = Family(name, MetricKind.COUNTER, about)
            for generation, counts in enumerate(gc.get_stats()):
                family.add(counts[key], labels({"generation": str(generation)}))
            yield family
        yield from (each.family() for each in (self._collecting, self._lag, self.scrape))

    def _of_kernel(self) -> Iterator[Family]:
        """From /proc; without one (on a laptop's system), what the C library knows."""

        def one(name: str, kind: MetricKind, about: str, value: float) -> Family:
            return Family(name, kind, about, [("", value)])

        gauge = MetricKind.GAUGE
        about = "User and system CPU time spent."
        yield one("process_cpu_seconds_total", MetricKind.COUNTER, about, time.process_time())
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (self._proc / "self/stat").read_text().rpartition(") ")[2].split()
            rss = int(fields[_RSS_PAGES]) * os.sysconf("SC_PAGE_SIZE")
            yield one("process_resident_memory_bytes", gauge, "Resident memory.", rss)
            up_s = float((self._proc / "uptime").read_text().split()[0])
            age_s = up_s - int(fields[_START_TICKS]) / os.sysconf("SC_CLK_TCK")
            started_s = round(time.time() - age_s, 2)
            yield one("process_start_time_seconds", gauge, "Start time, seconds since the epoch.", started_s)
            open_files = len(os.listdir(self._proc / "self/fd"))
            yield one("process_open_fds", gauge, "Open file descriptors.", open_files)
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        yield one("process_max_fds", gauge, "Maximum number of open file descriptors.", limit)


def stacks() -> str:
    """Where each thread and each task of the running loop is, innermost line last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for number, frame in sys._current_frames().items():
        lines = "".join(traceback.format_stack(frame))
        parts.append(f"thread {names.get(number, number)}\n{lines}")
    for task in sorted(asyncio.all_tasks(), key=asyncio.Task.get_name):
        lines = "".join(traceback.format_list(list(_where(task.get_coro()))))
        parts.append(f"task {task.get_name()}\n{lines}")
    return "\n".join(parts)


def _where(waiting: object) -> Iterator[traceback.FrameSummary]:
    """Where a coroutine, and each that it waits for, is suspended. A task's own stack has one line."""
    while waiting is not None:
        for kind in ("cr", "ag", "gi"):
            if (frame := getattr(waiting, f"{kind}_frame", None)) is not None:
                code = frame.f_code
                yield traceback.FrameSummary(code.co_filename, frame.f_lineno, code.co_qualname)
                break
        waiting = next(
            (
                inner
                for kind in ("cr_await", "ag_await", "gi_yieldfrom")
                if (inner := getattr(waiting, kind, None))
            ),
            None,
        )
