"""Streams, contexts and threads of an innocent program come and go while a share is in force, under a driver
whose destroyed handles end whoever uses them (native/tests/comings.c).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.isolation_rig import BUILD, Container, container

PROGRAM = BUILD / "tests/comings"


def launches(box: Container, what: str, rounds: int) -> int:
    """How many launches went through."""
    done = box.run(str(PROGRAM), what, str(rounds))
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    return int(done.stdout.split()[1])


@pytest.mark.parametrize("what", ["stream", "context", "reset", "capture"])
def test_what_is_timed_outlives_no_stream_context_or_recording(tmp_path: Path, what: str) -> None:
    """Its events were asked after when they were gone, and marked on streams that were; a capture that began
    on a stream that had launched was spoilt.
    """
    with container(tmp_path, memory_mib=8192, share=50) as box:
        assert launches(box, what, 20) >= 100


def test_work_on_a_stream_of_another_context_is_charged(tmp_path: Path) -> None:
    """The events came from the current context and could not be recorded there: 20 ms were charged as one."""
    with container(tmp_path, memory_mib=8192, share=50) as box:
        assert launches(box, "elsewhere", 20) == 20
        assert box.card().throttled_ns >= 0.25e9


def test_threads_do_not_wait_for_each_others_default_streams(tmp_path: Path) -> None:
    """They go by one handle. While they were taken for one stream, 22 kernels of 500 us came to their end in
    three seconds beside another thread's of a second each, of 4,500 without a library.
    """
    with container(tmp_path, share=90) as box:
        assert launches(box, "threads", 2) >= 200


def test_work_queued_behind_a_host_function_holds_up_no_thread_for_good(tmp_path: Path) -> None:
    """The function ends when its thread has launched all, which waited for what is behind it to finish."""
    with container(tmp_path, share=50) as box:
        assert launches(box, "gate", 100) == 101
