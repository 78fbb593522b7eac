"""The pages of results show what the benchmarks printed: bench/pages.py."""

from __future__ import annotations

import json

from bench.pages import COMMANDS, PAGES, RECORDED, TABLES, as_markdown, filled

TEXTS = {page.name: page.read_text() for page in PAGES.glob("*.md")}


def test_every_table_is_as_its_benchmark_printed_it() -> None:
    assert {name: filled(text) for name, text in TEXTS.items()} == TEXTS, "make results"


def test_every_table_stands_on_one_page() -> None:
    for name in TABLES:
        assert sum(f"<!-- table: {name} -->" in text for text in TEXTS.values()) == 1, name


def test_every_record_says_how_it_was_made() -> None:
    assert {path.stem for path in RECORDED.glob("*.json")} == set(COMMANDS)
    for name, command in COMMANDS.items():
        about = json.loads((RECORDED / f"{name}.json").read_text())
        assert about["command"] == f"python bench/{' '.join(command)} --json"
        assert all(about[key] for key in ("commit", "day", "printed"))


def test_another_figure_makes_another_page() -> None:
    page = "# Cost\n\n<!-- table: decisions -->\n| stale |\n<!-- end -->\nafter\n"
    made = filled(page)
    assert as_markdown(TABLES["decisions"]()) in made
    assert "stale" not in made
    assert made.endswith("<!-- end -->\nafter\n")
