"""What all tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("here", deadline=None)  # what else the machine does must not fail a test
settings.load_profile("here")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short name: a unix socket's path may have 107 bytes, pytest's own folders leave few."""
    with tempfile.TemporaryDirectory(prefix="gs-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
