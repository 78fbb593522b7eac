"""The glossary of ARCHITECTURE.md is the code's: each term names one thing, and retired words stay away."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ROOT / "src" / "gpuslice"
ROW = re.compile(r"^\| (?P<term>[^|]+) \| (?P<meaning>[^|]+) \| (?P<where>[^|]*`[^|]+) \|", re.MULTILINE)
RETIRED = {
    "NodeBook",
    "DeviceBook",
    "KubeletBook",
    "Bookkeeper",
    "Holding",
    "Feed",
    "Fed",
    "eaten",
    "Desk",
    "Want",
    "Wants",
    "Guess",
    "Guide",
    "Ahead",
    "Ground",
    "Asked",
    "Onlooker",
    "Witness",
    "Teller",
    "Told",
    "Keeping",
    "Promises",
    "Promise",
    "Settler",
    "Turn",
    "LearnedMix",
    "Alike",
    "Market",
    "Worth",
    "Picture",
    "Drawer",
    "Answer",
    "Gpu",
    "core_percent",
}


def glossary() -> list[tuple[str, str]]:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    section = page.partition("## Glossary")[2]
    return [(row["term"], row["where"]) for row in ROW.finditer(section)]


def definitions() -> dict[str, list[str]]:
    """Class name → files that define it, of the product."""
    found: dict[str, list[str]] = {}
    for path in sorted(PRODUCT.rglob("*.py")):
        if "_pb2" not in path.name:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(str(path.relative_to(PRODUCT)))
    return found


def test_the_glossary_is_read() -> None:
    terms = [term for term, _ in glossary()]
    assert len(terms) > 20
    assert len(set(terms)) == len(terms)


@pytest.mark.parametrize(("term", "where"), glossary(), ids=lambda value: value.split("`")[0].strip() or "-")
def test_a_term_stands_where_the_glossary_says(term: str, where: str) -> None:
    names = re.findall(r"`([^`]+)`", where)
    files = [name for name in names if "/" in name]
    missing = [name for name in files if not ((PRODUCT / name).exists() or (ROOT / name).exists())]
    assert files
    assert missing == [], term
    for name in names:
        if "/" not in name:
            assert definitions().get(name, []) == [files[-1]], (
                f"{term}: {name} names one class, in {files[-1]}"
            )


def test_retired_words_name_nothing_any_more() -> None:
    back = {
        f"{path.relative_to(ROOT)}: {token}"
        for path in PRODUCT.rglob("*.py")
        if "_pb2" not in path.name
        for token in set(re.findall(r"(?<![\w\"'-])\w+(?![\w\"'-])", code_of(path))) & RETIRED
    }
    assert sorted(back) == []


def code_of(path: Path) -> str:
    """The file's names alone: no strings, no comments."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name():
                names.append(node.id)
            case ast.Attribute():
                names.append(node.attr)
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                names.append(node.name)
            case ast.arg():
                names.append(node.arg)
            case ast.keyword() if node.arg:
                names.append(node.arg)
            case _:
                pass
    return " ".join(names)
