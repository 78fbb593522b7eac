"""House rules that no linter knows. Each test says what to do when it fails."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

import gpuslice

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FILE_LINES = 420
LONGEST_FUNCTION_LINES = 60
LARGEST_FILE_BYTES = 500_000


def tracked(*suffixes: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    return [path for path in paths if path.is_file() and (not suffixes or path.suffix in suffixes)]


SOURCES = ("src", "simulator/src", "demo/src")


def sources() -> list[Path]:
    """What the three distributions consist of."""
    folders = [ROOT / name for name in SOURCES]
    return [
        path
        for path in tracked(".py")
        if "_pb2" not in path.name and any(path.is_relative_to(folder) for folder in folders)
    ]


def names(paths: list[Path]) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def test_the_rules_see_the_sources() -> None:
    assert len(sources()) > 20


def test_every_module_says_what_it_is_for() -> None:
    silent = [path for path in sources() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert names(silent) == []


def test_files_hold_one_noun() -> None:
    """Past the bound, look for the second noun in the file."""
    code = [path for path in tracked(".py") if "_pb2" not in path.name]
    long = [path for path in code if len(path.read_text().splitlines()) > LONGEST_FILE_LINES]
    assert names(long) == []


def test_functions_fit_on_a_screen() -> None:
    """The caller decides, the helper computes: split by that."""
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= LONGEST_FUNCTION_LINES
    ]
    assert long == []


def test_names_say_more_than_helper() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}
    assert [name for name in names(sources()) if Path(name).stem in vague] == []


def test_nothing_large_is_tracked() -> None:
    assert names([path for path in tracked() if path.stat().st_size > LARGEST_FILE_BYTES]) == []


def test_nothing_is_left_for_later_in_the_code() -> None:
    left = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    assert names([path for path in sources() if left.search(path.read_text())]) == []


def test_nothing_is_read_before_what_is_added_to_it_is_awaited() -> None:
    """``count += await …`` reads the count first: what other tasks add meanwhile is lost."""
    lost = [
        f"{path}:{node.lineno}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Attribute)
        if any(isinstance(each, ast.Await) for each in ast.walk(node.value))
    ]
    assert lost == []


def test_the_tests_do_not_replace_our_own_modules() -> None:
    """Needing to patch means that a seam is missing: fake the wire instead."""
    patching = re.compile(r"monkeypatch\.setattr\(|mock\.patch|MagicMock|AsyncMock")
    folders = ROOT / "tests", ROOT / "simulator/tests"
    tests = [path for path in tracked(".py") if any(map(path.is_relative_to, folders))]
    tests.remove(Path(__file__))
    assert names([path for path in tests if patching.search(path.read_text())]) == []


@pytest.mark.parametrize(
    "name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"]
)
def test_the_papers_are_there(name: str) -> None:
    assert (ROOT / name).read_text().strip()


def test_every_make_target_explains_itself() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    explained = set(re.findall(r"^([a-z0-9-]+):.*## ", makefile, re.MULTILINE))
    assert targets - explained == set()


LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_relative_links_in_the_papers_lead_somewhere() -> None:
    broken = []
    for path in tracked(".md"):
        for target, anchor in LINK.findall(path.read_text()):
            place = path.parent / target if target else path
            if not place.exists() or (anchor and anchor not in anchors(place)):
                broken.append(f"{path.relative_to(ROOT)} -> {target}#{anchor}")
    assert broken == []


def test_every_page_is_in_the_index_of_its_folder() -> None:
    """A page that nobody can find from `docs/README.md` is not read."""
    docs = ROOT / "docs"
    listed = {
        (index.parent / target).resolve()
        for index in (docs / "README.md", docs / "adr" / "README.md", docs / "results" / "README.md")
        for target, _ in LINK.findall(index.read_text())
    }
    assert names([page for page in docs.rglob("*.md") if page not in listed | {docs / "README.md"}]) == []


def test_the_map_names_what_is_there() -> None:
    """ARCHITECTURE.md is the map that code follows: a folder, or a module of core, that it lacks is news."""
    tree = (ROOT / "ARCHITECTURE.md").read_text().partition("## The tree")[2].partition("## ")[0]
    packages = [package for name in SOURCES for package in (ROOT / name).iterdir() if package.is_dir()]
    folders = {
        path.parent.name
        for package in packages
        for path in sources()
        if path.is_relative_to(package) and len(path.relative_to(package).parts) <= 3
    }
    modules = {path.stem for path in sources() if path.parent == ROOT / "src/gpuslice/core"}
    assert (folders | modules) - set(re.findall(r"\w+", tree)) - {"gpuslice", "__init__"} == set()


def test_the_map_leads_to_files_that_are_there() -> None:
    """Who searches ARCHITECTURE.md for a word is sent to a file: it must not have moved."""
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("## Where to look")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w./*]+(?:/|\.\w+))`", table)
    bases = (ROOT, ROOT / "src/gpuslice", ROOT / "src/gpuslice/apps/extender", ROOT / "native/src/policy")
    assert len(named) > 20
    assert [name for name in named if not any(any(base.glob(name)) for base in bases)] == []


def test_one_version_is_told_everywhere() -> None:
    chart = re.findall(
        r'(?m)^(?:version|appVersion): "?([^"\s]+)', (ROOT / "charts/gpuslice/Chart.yaml").read_text()
    )
    package = [
        version
        for name in ("pyproject.toml", "simulator/pyproject.toml", "demo/pyproject.toml")
        for version in re.findall(r'(?m)^version = "(.+)"', (ROOT / name).read_text())
    ]
    assert {*chart, *package} == {gpuslice.__version__}
