"""The tests that a change touches: ``make test-changed``, against the branch main or what BASE names.

Of Python files by the graph of imports; a test that starts a process of ours imports none of it, so the tests
that are named after a process or a noun count, too. Files that are no Python have their tests by folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("src", "simulator/src", "demo/src", "simulator/tests", ".")
PACKAGES = ("gpuslice", "simcluster", "gpuslice_demo", "tests")
ALWAYS = ("tests/test_tidy.py", "tests/test_glossary.py")
BY_FOLDER = {  # of what is no Python: where its tests are
    "charts/": ("tests/contract/test_chart*.py", "tests/integration/test_demo*.py"),
    "native/src/": (
        "tests/integration/test_isolation*.py",
        "tests/unit/test_share*.py",
        "tests/unit/test_native*.py",
    ),
    "native/sim/": ("tests/integration/test_sim_driver*.py", "tests/integration/test_isolation*.py"),
    "native/include/": ("tests/integration/test_isolation*.py", "tests/unit/test_region*.py"),
    "docs/": ("tests/test_questions.py", "tests/unit/test_*docs.py", "tests/contract/test_docs_site.py"),
    "examples/": ("tests/contract/test_examples.py",),
    "monitoring/": ("tests/contract/test_monitoring.py", "tests/contract/test_alert_texts.py"),
    "images/": ("tests/contract/test_image.py",),
}


def changed_files(base: str) -> list[str]:
    """Committed since the branch left `base`, changed since, and new."""
    fork = _git("merge-base", "HEAD", base)[0]
    return sorted({*_git("diff", "--name-only", fork), *_git("ls-files", "--others", "--exclude-standard")})


def _git(*arguments: str) -> list[str]:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.splitlines()


def tests_of(files: Iterable[str]) -> list[str]:
    """Files of tests, relative to the repository."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    found = set(ALWAYS)
    for file in files:
        found.update(_named_alike(file))
        module = _module(file)
        if module in graph.modules:
            for each in {module, *graph.find_downstream_modules(module)}:
                if each.startswith("tests.") and each.rpartition(".")[2].startswith("test_"):
                    found.add(each.replace(".", "/") + ".py")
    if any(file.startswith("simulator/") for file in files):
        found.add("simulator/tests")
    return sorted(each for each in found if (ROOT / each).exists() and not each.startswith("tests/e2e"))


def _module(file: str) -> str:
    for source in SOURCES:
        if file.startswith(f"{source}/") or source == ".":
            name = file.removeprefix(f"{source}/").removesuffix(".py").removesuffix("/__init__")
            return name.replace("/", ".")
    raise AssertionError("the last source is the repository itself")


def _named_alike(file: str) -> Iterator[str]:
    path = Path(file)
    for folder, patterns in BY_FOLDER.items():
        if file.startswith(folder):
            yield from (str(each.relative_to(ROOT)) for one in patterns for each in ROOT.glob(one))
    if file.startswith("src/gpuslice/apps/"):
        words = {path.parts[3], path.stem} - {"main", "command", "__init__"}
        for each in (ROOT / "tests").glob("*/test_*.py"):
            if any(f"_{word}" in each.stem for word in words):
                yield str(each.relative_to(ROOT))


def main() -> None:
    files = changed_files(os.environ.get("BASE", "main"))
    found = tests_of(files)
    print(f"{len(files)} files changed: {len(found)} files of tests", file=sys.stderr)
    print("\n".join(found))


if __name__ == "__main__":
    main()
