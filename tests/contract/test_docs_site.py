"""The documentation as a site: built strictly, so that a broken link fails, and complete."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"


@pytest.mark.skipif(
    not (ROOT / ".venv-docs" / ".installed").exists(), reason="the site's tools are not here: run `make docs`"
)
def test_the_site_is_built_without_a_warning_and_finds_every_page() -> None:
    subprocess.run(["make", "docs"], cwd=ROOT, check=True, capture_output=True, env=dict(os.environ))
    pages = [page.relative_to(ROOT).with_suffix("") for page in (ROOT / "docs").rglob("*.md")]
    missing = [page for page in pages if page.name != "README" and not (SITE / page / "index.html").exists()]
    assert missing == []
    index = str(json.loads((SITE / "search" / "search_index.json").read_text()))
    for words in ("It is 3 am and something is broken", "gpuslice.io/memory", "从原来的系统迁移"):
        assert words in index
