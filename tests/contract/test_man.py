"""The man pages: one for each command, with all of its options, and clean for roff."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from release.man import ALIASES, pages

from gpuslice import __version__
from gpuslice.apps.cli.main import COMMANDS, Entry, load

ROOT = Path(__file__).parents[2]
PAGES = pages(1_700_000_000)
OWN = [entry for entry in COMMANDS if entry.module]  # the demo comes with another distribution
MACROS = {"TH", "SH", "B", "PP", "TP", "nf", "fi", "ad", "nh"}


def plain(page: str) -> str:
    """The text without roff's escapes."""
    return re.sub(r"\\f[BR]|\\&", "", page).replace("\\-", "-").replace("\\(aq", "'").replace("\\(ga", "`")


@pytest.mark.parametrize("entry", OWN, ids=[entry.name for entry in OWN])
def test_a_command_has_a_page_with_its_line_and_its_options(entry: Entry) -> None:
    found, page = load(entry), plain(PAGES[f"gpuslice-{entry.name}.1"])
    for section in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "SEE ALSO"):
        assert f"\n.SH {section}\n" in page
    line = entry.help[0].lower() + entry.help[1:].rstrip(".")
    assert f"\n.SH NAME\ngpuslice-{entry.name} - {line}\n" in page
    shown = [each for each in found.params if isinstance(each, click.Option) and not each.hidden]
    for name in ("--help", *(name for each in shown for name in (*each.opts, *each.secondary_opts))):
        assert re.search(rf"^\.B .*(?<!\S){re.escape(name)}(?![\w-])", page, re.MULTILINE), name


def test_the_first_page_leads_to_all_others() -> None:
    page = plain(PAGES["gpuslice.1"])
    assert page.startswith(f'.TH "GPUSLICE" 1 "2023-11-14" "gpuslice {__version__}" "gpuslice"\n')
    assert {f"gpuslice-{entry.name}" for entry in OWN} == set(re.findall(r"([\w-]+)\(1\)", page))
    assert "top-node(1)" in plain(PAGES["gpuslice-top.1"]), "commands of a command have pages, too"


def test_the_names_that_kubectl_finds_lead_to_the_same_pages() -> None:
    for name, page in ALIASES.items():
        assert PAGES[f"{name}.1"] == f".so man1/{page}.1\n"
        assert f"{page}.1" in PAGES
        assert f"\n{name} = " in (ROOT / "pyproject.toml").read_text()


def test_examples_keep_their_lines() -> None:
    _, _, examples = PAGES["gpuslice-explain.1"].partition(".SH EXAMPLES\n.PP\n.nf\n")
    lines = plain(examples.partition("\n.fi")[0]).splitlines()
    assert "  gpuslice explain train-0" in lines
    assert len(lines) > 4


def test_no_text_is_taken_for_a_macro() -> None:
    for name, page in PAGES.items():
        controls = {line.split()[0][1:] for line in page.splitlines() if line.startswith((".", "'"))}
        assert controls <= MACROS | ({"so"} if name.removesuffix(".1") in ALIASES else set()), name


@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not installed; the structure is tested above")
def test_roff_has_nothing_to_say_against_them(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "release.man", str(tmp_path / "man1")], cwd=ROOT, check=True)
    files = sorted((tmp_path / "man1").iterdir())
    assert {file.name for file in files} == set(PAGES)
    command = ["groff", "-man", "-ww", "-z", "-Kutf8", "-Tutf8"]
    for file in files:
        done = subprocess.run(
            [*command, file.relative_to(tmp_path)], cwd=tmp_path, capture_output=True, check=True
        )
        assert done.stderr == b"", file.name
