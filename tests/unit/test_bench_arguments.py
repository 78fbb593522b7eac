"""A benchmark that reads an argument that it does not take fails only when somebody wants its figures."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).resolve().parents[2] / "bench").glob("*.py"))
TAKEN = re.compile(r'"(?:--)?([a-z][a-z0-9-]*)"')
READ = re.compile(r"\b(?:options|arguments)\.([a-z_]+)\b(?!\()")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_benchmark_reads_only_arguments_that_it_takes(script: Path) -> None:
    text = script.read_text()
    taken = {name.replace("-", "_") for name in TAKEN.findall(text)}
    if "add_argument(" in text:
        assert set(READ.findall(text)) <= taken


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_benchmark_can_print_its_help(script: Path) -> None:
    """argparse puts values in where there is a percent sign."""
    values = defaultdict[str, str](str)
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            assert str(node.value.value) % values
