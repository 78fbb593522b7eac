"""native/src is in layers: what a source includes and calls is of its own layer or of those below it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "native"
SOURCES = NATIVE / "src"
LAYERS = ("system", "driver", "accounts", "policy", "hooks", "entry")
ONLY_HEADERS = {"accounts/state", "driver/driver_abi", "system/text"}
"""Structures and a few inline functions."""


def layer_of(source: str) -> int:
    return LAYERS.index(source.partition("/")[0])


def sources() -> list[str]:
    return sorted(str(path.relative_to(SOURCES).with_suffix("")) for path in SOURCES.rglob("*.c"))


def calls() -> dict[str, set[str]]:
    """Which sources each source needs, as the linker sees it."""
    defined: dict[str, str] = {}
    needed: dict[str, set[str]] = {}
    for source in sources():
        listing = subprocess.run(
            ["nm", NATIVE / "build" / "obj" / "src" / f"{source}.o"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        defined |= dict.fromkeys(re.findall(r" [A-TV-Z] (\S+)$", listing, re.MULTILINE), source)
        needed[source] = set(re.findall(r" U (\S+)$", listing, re.MULTILINE))
    return {
        source: {defined[symbol] for symbol in symbols if symbol in defined} - {source}
        for source, symbols in needed.items()
    }


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    left = [start]
    while left:
        for other in graph[left.pop()] - seen:
            seen.add(other)
            left.append(other)
    return seen


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The largest sets of sources that all need each other."""
    to = {source: reachable(graph, source) for source in graph}
    found = {frozenset(other for other in to[source] if source in to[other]) for source in graph}
    return [set(circle) for circle in found if circle]


def test_every_include_leads_down() -> None:
    upward = [
        (str(path.relative_to(SOURCES)), name)
        for path in sorted(SOURCES.rglob("*.[ch]"))
        for name in re.findall(r'#include "(\w+/[\w.]+)"', path.read_text())
        if layer_of(name) > layer_of(str(path.relative_to(SOURCES)))
    ]
    assert upward == []
    assert {source.partition("/")[0] for source in sources()} == set(LAYERS)


def test_every_call_leads_down() -> None:
    graph = calls()
    assert [
        (source, other) for source in graph for other in graph[source] if layer_of(other) > layer_of(source)
    ] == []
    assert len(graph) > 30


def includes() -> dict[str, set[str]]:
    """Which files, each a source with its header, each one includes."""
    found: dict[str, set[str]] = {}
    for path in SOURCES.rglob("*.[ch]"):
        name = str(path.relative_to(SOURCES).with_suffix(""))
        found.setdefault(name, set()).update(re.findall(r'#include "(\w+/\w+)\.h"', path.read_text()))
    return {name: {other for other in others if other in found} - {name} for name, others in found.items()}


@pytest.mark.parametrize("graph", [calls, includes])
def test_no_files_need_each_other(graph: Callable[[], dict[str, set[str]]]) -> None:
    assert [sorted(circle) for circle in circles(graph())] == []


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert circles(graph) == [{"a", "b", "c"}]


def test_every_header_is_a_sources_own() -> None:
    headers = {str(path.relative_to(SOURCES).with_suffix("")) for path in SOURCES.rglob("*.h")}
    assert headers - set(sources()) == ONLY_HEADERS
