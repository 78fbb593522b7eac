"""The six tables of the vendor's documents come out of our program.

``documented/`` holds them as they stand in the documents, whose editors lost what cannot be seen: spaces at
line ends, and in one an empty first line and one of two empty lines in a row. ``printed/`` holds what the
program prints, with all of that: the original programs print it so. `test_the_documents_show_what_is_printed`
takes exactly these losses from ``printed/`` and nothing else, and must arrive at ``documented/``.

After a change that is meant: ``GOLDEN=write pytest tests/golden``, then read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuslice.apps.cli import inspect_table, top_table
from tests.golden.clusters import five_nodes, report_of, three_notebooks, two_apps, v100_node

HERE = Path(__file__).parent
RULERS = {
    "inspect": 70,
    "inspect-details": 56,
    "top-node": 96,
    "top-node-shared-empty": 69,
    "top-node-shared": 70,
    "top-node-shared-details": 134,
}


def printed(name: str) -> str:
    match name:
        case "inspect":
            return inspect_table.summary(report_of(v100_node()))
        case "inspect-details":
            return inspect_table.details(report_of(v100_node(), two_apps()))
        case "top-node":
            return top_table.summary(report_of(five_nodes()))
        case "top-node-shared-empty":
            return top_table.shared_summary(report_of(five_nodes()))
        case "top-node-shared":
            return top_table.shared_summary(report_of(five_nodes(), three_notebooks()))
        case _:
            return top_table.shared_details(report_of(five_nodes(), three_notebooks()))


@pytest.mark.parametrize("name", RULERS)
def test_not_a_byte_changes(name: str) -> None:
    path = HERE / "printed" / f"{name}.txt"
    if os.environ.get("GOLDEN") == "write":
        path.write_text(printed(name))
    assert printed(name) == path.read_text()


@pytest.mark.parametrize("name", RULERS)
def test_the_documents_show_what_is_printed(name: str) -> None:
    documented = (HERE / "documented" / f"{name}.txt").read_text()
    visible = "\n".join(line.rstrip() for line in printed(name).split("\n"))
    if name == "inspect-details":
        assert visible.startswith("\n")
        visible = visible.removeprefix("\n").replace("-\n\n\n", "-\n\n")
    assert visible == documented


@pytest.mark.parametrize("name", RULERS)
def test_rulers_are_as_long_as_the_original_draws_them(name: str) -> None:
    rulers = [line for line in printed(name).split("\n") if line and set(line) == {"-"}]
    assert [len(ruler) for ruler in rulers] == [RULERS[name]]


def test_the_last_line_of_the_summary_ends_in_two_spaces() -> None:
    assert printed("inspect").endswith("0/15 (0%)  \n")
