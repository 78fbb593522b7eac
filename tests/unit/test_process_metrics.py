"""What each process tells about itself, and where a duration falls in a histogram."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import trustme

from gpuslice.adapters.kube.followed_pod import PodNews
from gpuslice.adapters.kube.transport import resource_of
from gpuslice.adapters.web.certificate import ends
from gpuslice.adapters.web.exposition import Family
from gpuslice.adapters.web.histogram import Histogram
from gpuslice.adapters.web.process import ProcessMetrics, stacks
from gpuslice.apps.extender.metrics import REMEMBERED, PodTimes
from gpuslice.apps.extender.subscriber import BindResult, FilterVerdict
from tests.builders import make_pod


def samples(family: Family) -> dict[str, float]:
    return dict(family.samples)


def of(process: ProcessMetrics) -> dict[str, dict[str, float]]:
    return {family.name: samples(family) for family in process.families()}


def test_a_duration_at_a_bound_counts_below_it_and_a_longer_one_above() -> None:
    times = Histogram("call_seconds", "Time.", ("verb",), (0.1, 1.0))
    for seconds in (0.1, 0.11, 30.0):
        times.observe(seconds, "bind")
    assert samples(times.family()) == {
        '_bucket{verb="bind",le="0.1"}': 1,
        '_bucket{verb="bind",le="1.0"}': 2,
        '_bucket{verb="bind",le="+Inf"}': 3,
        '_sum{verb="bind"}': 30.21,
        '_count{verb="bind"}': 3,
    }


def test_a_block_that_fails_is_timed_too() -> None:
    times = Histogram("call_seconds", "Time.")
    with pytest.raises(ZeroDivisionError), times.timed():
        _ = 1 / 0
    assert samples(times.family())["_count"] == 1


@pytest.mark.parametrize("end", [datetime(2031, 5, 6, 7, 8, 9, tzinfo=UTC), datetime(2055, 1, 2, tzinfo=UTC)])
def test_the_end_of_a_certificate_is_read(end: datetime) -> None:
    """Before and after 2050 X.509 writes times differently."""
    issued = trustme.CA().issue_cert("x", not_after=end)
    assert ends(issued.cert_chain_pems[0].bytes()) == end


@pytest.mark.parametrize("text", [b"", b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----", b"x"])
def test_what_is_no_certificate_has_no_end(text: bytes) -> None:
    assert ends(text) is None


def test_a_process_tells_when_its_certificates_expire_and_nothing_of_what_it_cannot_read(
    tmp_path: Path,
) -> None:
    end, later = datetime(2031, 5, 6, tzinfo=UTC), datetime(2032, 5, 6, tzinfo=UTC)
    authority, file, broken = trustme.CA(), tmp_path / "tls.crt", tmp_path / "ca.crt"
    authority.issue_cert("x", not_after=end).cert_chain_pems[0].write_to_path(str(file))
    broken.write_text("no certificate")
    process = ProcessMetrics(str(file), str(broken), str(tmp_path / "missing"), "")
    name, labels = "gpuslice_process_certificate_expiry_timestamp_seconds", f'{{file="{file}"}}'
    assert of(process)[name] == {labels: end.timestamp()}
    authority.issue_cert("x", not_after=later).cert_chain_pems[0].write_to_path(str(file))
    assert of(process)[name] == {labels: later.timestamp()}, "renewed"
    assert of(ProcessMetrics())[name] == {}


def test_a_process_tells_its_cpu_memory_files_and_start() -> None:
    ballast = bytes(20 << 20)
    found = of(ProcessMetrics())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    assert len(ballast) < found["process_resident_memory_bytes"][""] <= peak
    assert 0 < found["process_cpu_seconds_total"][""] <= time.process_time()
    before = found["process_open_fds"][""]
    with open(os.devnull, "rb"):
        assert of(ProcessMetrics())["process_open_fds"][""] == before + 1
    assert found["process_open_fds"][""] < found["process_max_fds"][""]
    created = os.stat(f"/proc/{os.getpid()}").st_ctime
    assert found["process_start_time_seconds"][""] == pytest.approx(created, abs=60)
    assert found["process_start_time_seconds"][""] < time.time()


async def test_a_loop_that_is_held_up_shows_how_long() -> None:
    process = ProcessMetrics()
    async with process.measured():
        await asyncio.sleep(0)  # it begins to wait
        time.sleep(0.6)  # noqa: ASYNC251
        while not (lag := of(process)["gpuslice_process_event_loop_lag_seconds"])["_count"]:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert lag["_sum"] >= 0.3
    assert lag['_bucket{le="0.25"}'] == 0


async def test_collections_are_timed_while_measured_and_not_after() -> None:
    process = ProcessMetrics()
    async with process.measured():
        gc.collect()
    gc.collect()
    assert of(process)["gpuslice_process_gc_pause_seconds"]['_count{generation="2"}'] == 1
    assert not any(each is process for each in (getattr(call, "__self__", None) for call in gc.callbacks))


async def test_stacks_name_the_line_of_each_thread_and_of_each_coroutine_in_a_task() -> None:
    release = threading.Event()

    def waits_in_a_thread() -> None:
        release.wait()

    async def innermost() -> None:
        await asyncio.Event().wait()

    async def outermost() -> None:
        await innermost()

    thread = threading.Thread(target=waits_in_a_thread, name="a thread of ours")
    thread.start()
    task = asyncio.create_task(outermost(), name="a task of ours")
    await asyncio.sleep(0)
    try:
        text = stacks()
    finally:
        release.set()
        thread.join()
        task.cancel()
    threads, tasks = text.split("task a task of ours\n")
    assert "waits_in_a_thread" in threads.partition("thread a thread of ours\n")[2]
    ours = tasks.partition("\ntask ")[0]
    assert ours.index("outermost") < ours.index("innermost") < ours.index("Event.wait")
    assert "await innermost()" in ours


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/api/v1/pods", "pods"),
        ("/api/v1/namespaces/a/pods/b/binding", "pods/binding"),
        ("/api/v1/namespaces/a/events", "events"),
        ("/api/v1/namespaces/a", "namespaces"),
        ("/api/v1/nodes/n/status", "nodes/status"),
        ("/apis/coordination.k8s.io/v1/namespaces/a/leases/b", "leases"),
        ("/version", ""),
    ],
)
def test_a_request_is_counted_by_what_a_role_would_call_it(path: str, resource: str) -> None:
    assert resource_of(path) == resource


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def asked(times: PodTimes, uid: str) -> None:
    nowhere = np.empty(0, dtype=np.int64)
    times.decided(FilterVerdict(make_pod(uid=uid), nowhere, nowhere, is_known=True))


def bound(times: PodTimes, uid: str, *, shown: bool) -> None:
    pod = make_pod(uid=uid, node="n1" if shown else "")
    times.bound(BindResult(uid, pod.key, "n1", pod, (), 1, 0.0, ""))


def test_a_pod_queues_from_the_first_question_until_it_is_bound() -> None:
    times = PodTimes(clock := Clock())
    asked(times, "a")
    clock.now_s += 40
    asked(times, "a")  # again
    clock.now_s += 2
    bound(times, "a", shown=False)
    bound(times, "a", shown=False)  # kube-scheduler did not hear the answer
    assert samples(times.queue.family())["_sum"] == 42
    assert samples(times.queue.family())["_count"] == 1


def test_how_late_the_watch_is_counts_from_the_binding() -> None:
    times = PodTimes(clock := Clock())
    for uid in ("a", "b", "c"):
        asked(times, uid)
    bound(times, "a", shown=True)  # the watch was faster than the answer
    bound(times, "b", shown=False)
    clock.now_s += 3
    bound(times, "c", shown=False)
    clock.now_s += 4
    assert times.longest_unshown_s() == 7
    times.pod_changed(PodNews(make_pod(uid="b", node="n1"), None, None, succeeded=False), None)
    assert times.longest_unshown_s() == 4
    times.pod_gone("c", None)
    assert times.longest_unshown_s() == 0
    assert samples(times.watch_delay.family())["_sum"] == 7
    assert samples(times.watch_delay.family())["_count"] == 2


def test_pods_that_nobody_binds_are_forgotten_at_last() -> None:
    times = PodTimes(clock := Clock())
    asked(times, "first")
    for number in range(REMEMBERED):
        asked(times, str(number))
    clock.now_s += 1
    bound(times, "first", shown=True)
    assert samples(times.queue.family())["_count"] == 0
