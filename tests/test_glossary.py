"""The glossary of ARCHITECTURE.md is the code's: each term names one thing, and retired words stay away."""

from __future__ import annotations

import ast
import functools
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
    "share_percent",
    "book",
    "books",
    "desk",
    "feed",
    "told",
}
"""Names of code, in Python and in C."""
PLAIN = {
    r"\bbooks?\b": "node allocations, device assignments, accounts or ledger",
    r"\bdesk\b": "the user's machine, or allocation state",
    r"\bfeeds?\b": "host resources",
    r"\b(share|core)_percent\b": "compute_percent",
    r"\b(onlookers?|tellers?|doings)\b": "listener, activity, or what Kubernetes calls it",
    r", wants (a|an|the|to|one|at|whole)\b": "must be",
    r"\bunasked data\b|\bspoke unasked\b": "unexpected data",
    r"\bspeaks? against\b": "rules out, or why not",
    r"\bworth speaking of\b|\bwithout a word\b|\bbeside whom\b": "what a native reader would say",
    r"\b[Aa]s things stand\b|\bwaits now\b|\bevery fate\b|\bthings on\b": "what a native reader says",
}
"""What private words of sentences became: these are not to come back in code, comments, help or pages."""
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
IDIOMS = {
    r"\banew\b": "again, or re-: recreated, restarted, rewritten",
    r"\bin place of\b": "instead of",
    r"\b(is|are|was|were) told of\b|\btells? of\b": "learns of, reports, shows",
    r"\bcome again\b": "run it again",
    r"\ball the while\b|\bby what came of\b": "during that time; by result",
    r"\bwho has what\b": "what each pod holds or uses",
    r"\blets? go of\b": "releases",
    r", but for\b": "except for",
    r"\bmend(s|ed|ing)?\b": "fix, repair, correct",
    r"\btake-over\b": "takeover, or failover",
    r"\bunder way\b": "in progress, in flight",
    r"(^|\. )So (?!far\b)[a-z]": "a sentence that begins with its subject; therefore, if it must be",
}
"""Word for word from other languages: the pages that a stranger reads first do without them."""
FIRST_PAGES = (
    *PAGES,
    "CHANGELOG.md",
    "docs/README.md",
    "docs/compare.md",
    "docs/faq.md",
    "docs/glossary.md",
    *(f"docs/start/{name}.md" for name in ("data-scientist", "platform-team", "at-3-am")),
    *(
        f"docs/operate/{name}.md"
        for name in (
            "install",
            "modes",
            "upgrade",
            "troubleshooting",
            "platforms",
            "migrate",
            "alerts",
            "release",
            "console",
            "webhook",
            "capacity",
            "autoscaling",
            "end-to-end",
        )
    ),
    *(f"docs/user/{name}.md" for name in ("requests", "one-machine", "security")),
    *(f"docs/reference/{path.name}" for path in (ROOT / "docs/reference").glob("*.md")),
    *(f"docs/adr/{path.name}" for path in (ROOT / "docs/adr").glob("*.md")),
    *(
        f"docs/results/{name}.md"
        for name in (
            "conformance",
            "exporter",
            "extender",
            "faults",
            "frameworks",
            "gpu-isolation",
            "gpu-kubernetes",
            "interposer",
            "kubernetes",
            "peers",
            "placement",
        )
    ),
    "examples/README.md",
    "charts/gpuslice/README.md",
    "charts/gpuslice/values.yaml",
    "charts/gpuslice/templates/NOTES.txt",
)
COMMENTED = (
    "src/gpuslice",
    "simulator",
    "demo",
    "monitoring",
    "bench",
    "native/include",
    *(f"native/src/{folder}" for folder in ("system", "driver", "accounts", "entry", "hooks", "policy")),
)
"""Where comments, too, must be as idiomatic."""
ORDINARY = ("line feed", "what feeds them")
"""Where a word has its ordinary meaning, or is a library's."""
FOLDERS = (
    "src",
    "simulator",
    "demo",
    "native/include",
    "native/src",
    "native/sim",
    "charts",
    "docs",
    "monitoring",
)
TEXT = {".py", ".c", ".h", ".def", ".md", ".yaml", ".txt", ".tpl", ".css", ".js", ".html"}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def glossary() -> list[tuple[str, str]]:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    section = page.partition("## Glossary")[2]
    return [(row["term"], row["where"]) for row in ROW.finditer(section)]


@functools.cache
def definitions() -> dict[str, list[str]]:
    """Class name → files that define it, of the product."""
    found: dict[str, list[str]] = {}
    for path in sorted(PRODUCT.rglob("*.py")):
        if "_pb2" not in path.name:
            for node in ast.walk(parsed(path)):
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
        for path in (
            *PRODUCT.rglob("*.py"),
            *(ROOT / "simulator/src").rglob("*.py"),
            *(ROOT / "demo/src").rglob("*.py"),
        )
        if "_pb2" not in path.name
        for token in set(re.findall(r"(?<![\w\"'-])\w+(?![\w\"'-])", code_of(path))) & RETIRED
    }
    assert sorted(back) == []


def texts() -> list[Path]:
    below = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    pages = (ROOT / page for page in PAGES)
    generated = ("_pb2.py", "_pb2.pyi")
    return [
        path
        for path in (*below, *pages)
        if path.is_file() and path.suffix in TEXT and not path.name.endswith(generated)
    ]


def test_private_words_do_not_come_back_in_sentences() -> None:
    back = []
    for path in texts():
        name, text = str(path.relative_to(ROOT)), path.read_text()
        there = {word: better for word, better in PLAIN.items() if re.search(word, text)}
        for number, line in enumerate(text.splitlines() if there else (), 1):
            for word, better in there.items():
                found = re.search(word, line)
                if found and not any(fine in line for fine in ORDINARY):
                    back.append(f"{name}:{number}: {found[0]!r}; rather: {better}")
    assert back == []


def test_the_pages_read_first_are_idiomatic() -> None:
    back = [
        f"{name}:{number}: {found[0]!r}; rather: {better}"
        for name in FIRST_PAGES
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1)
        for idiom, better in IDIOMS.items()
        if (found := re.search(idiom, line))
    ]
    assert back == []


def test_comments_are_idiomatic() -> None:
    """What pages do without, code does too; but a sentence may begin with "So"."""
    idioms = {idiom: better for idiom, better in IDIOMS.items() if "So " not in idiom}
    back = [
        f"{path.relative_to(ROOT)}:{number}: {found[0]!r}; rather: {better}"
        for folder in COMMENTED
        for path in sorted((ROOT / folder).rglob("*.*"))
        if path.suffix in {".py", ".c", ".h", ".def"} and "_pb2" not in path.name
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for idiom, better in idioms.items()
        if (found := re.search(idiom, line))
    ]
    assert back == []


def test_retired_words_name_nothing_in_c() -> None:
    back = []
    for path in (ROOT / "native").glob("[is]*/**/*.[ch]"):
        code = re.sub(r'/\*.*?\*/|"(?:\\.|[^"\\])*"', " ", path.read_text(), flags=re.DOTALL)
        back += [
            f"{path.relative_to(ROOT)}: {name}"
            for name in set(re.findall(r"\b[A-Za-z]\w*\b", code)) & RETIRED
        ]
    assert sorted(back) == []


def code_of(path: Path) -> str:
    """The file's names alone: no strings, no comments."""
    names = []
    for node in ast.walk(parsed(path)):
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


SOURCES = (PRODUCT, ROOT / "simulator" / "src", ROOT / "demo" / "src")
FIELD = re.compile(r"(?<!`)`([a-z]+(?:_[a-z0-9]+)+)(?:\(\))?`(?!`)")


@functools.cache
def _identifiers() -> frozenset[str]:
    """All names of the code: variables, attributes, parameters, functions, modules, fields of documents."""
    found: set[str] = set()
    for path in (file for source in SOURCES for file in source.rglob("*.py")):
        found.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                    found.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    found.add(name)
                case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                    found.add(name)
    return frozenset(found)


def test_docstrings_name_fields_that_exist() -> None:
    missing = []
    for path in (file for source in SOURCES for file in source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                where = f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'the module')}"
                missing += [f"{where}: {name}" for name in FIELD.findall(text) if name not in _identifiers()]
    assert missing == []
