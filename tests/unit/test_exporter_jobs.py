"""Files that say which jobs run on a card: one who may write there does not hold the exporter up."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from gpuslice.apps.exporter.jobs import LARGEST_FILE_BYTES, MOST_JOBS, Jobs


def test_what_is_no_plain_file_is_told_once_and_the_rest_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "0").write_bytes(b"101\n\n 102 \n101\n\xff\n")
    (tmp_path / "1").mkdir()
    os.mkfifo(tmp_path / "2")
    (tmp_path / "3").symlink_to("/etc/passwd")
    (tmp_path / "notes").write_text("nothing\n")
    jobs = Jobs(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        assert jobs.read() == {"0": ("101", "102", "\ufffd")} == jobs.read()
    assert sorted(record.path for record in caplog.records) == [  # type: ignore[attr-defined]
        str(tmp_path / name) for name in "123"
    ]


def test_of_a_file_without_end_the_beginning_is_read(tmp_path: Path) -> None:
    with (tmp_path / "0").open("wb") as file:
        file.write(b"101\n")
        file.truncate(1 << 40)
    (found,) = Jobs(str(tmp_path)).read().values()
    assert found[0] == "101"
    assert len(found[1]) <= LARGEST_FILE_BYTES


def test_a_file_of_many_jobs_does_not_multiply_the_page(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("".join(f"{number}\n" for number in range(10_000)))
    (found,) = Jobs(str(tmp_path)).read().values()
    assert found == tuple(map(str, range(MOST_JOBS)))
