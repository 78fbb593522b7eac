"""The man pages of the commands, made from their own help.

``python -m release.man`` writes them to build/man/man1, or to the folder that it is given. A release's
wheels carry them in share/man/man1, where pip puts them beside the programs.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from gpuslice import __version__
from gpuslice.apps.cli.main import COMMANDS, command, load

HELP = ["-h", "--help"]
VERBATIM = "\b\n"
EXAMPLES = f"{VERBATIM}Examples:\n"
ALIASES = {
    "kubectl-gpuslice": "gpuslice",
    "kubectl-inspect-cgpu": "gpuslice-inspect",
    "kubectl-inspect-gpushare": "gpuslice-inspect",
}
"""Other names of the programs, by the page that describes them."""


def pages(epoch: int) -> dict[str, str]:
    """Every page by its file name. `epoch`: the date on them, in seconds."""
    date = time.strftime("%Y-%m-%d", time.gmtime(epoch))
    own = [(entry.name, entry.help, load(entry)) for entry in COMMANDS if entry.module]
    made = {"gpuslice.1": _page("gpuslice", command, "", [(name, line) for name, line, _ in own], date)}
    for name, line, found in own:
        made |= _with_its_own("gpuslice " + name, found, line, date)
    return made | {f"{name}.1": f".so man1/{page}.1\n" for name, page in ALIASES.items()}


def _with_its_own(path: str, found: click.Command, line: str, date: str) -> dict[str, str]:
    """The page of a command, and those of its commands."""
    below = found.commands if isinstance(found, click.Group) else {}
    lines = [(name, each.get_short_help_str(limit=200)) for name, each in below.items()]
    made = {f"{path.replace(' ', '-')}.1": _page(path, found, line, lines, date)}
    for (name, about), each in zip(lines, below.values(), strict=True):
        made |= _with_its_own(f"{path} {name}", each, about, date)
    return made


def _page(path: str, found: click.Command, line: str, commands: list[tuple[str, str]], date: str) -> str:
    name, context = path.replace(" ", "-"), click.Context(found, info_name=path, help_option_names=HELP)
    paragraphs = [each for each in inspect.cleandoc(found.help or "").split("\n\n") if each]
    first = line or " ".join(paragraphs[0].split())
    examples = [each for each in paragraphs if each.startswith(EXAMPLES)]
    usage = " ".join(found.collect_usage_pieces(context))
    parts = [
        f'.TH "{_text(name.upper())}" 1 "{date}" "gpuslice {__version__}" "gpuslice"',
        f".SH NAME\n{_text(name)} \\- {_text(first[0].lower() + first[1:].rstrip('.'))}",
        f".SH SYNOPSIS\n.B {_text(path)}\n{_text(usage)}",
        ".ad l\n.nh",  # names of options and variables stay whole
        ".SH DESCRIPTION",
        *(_paragraph(each) for each in paragraphs if not each.startswith(EXAMPLES)),
        ".SH OPTIONS",
        *_items(list(_options(found, context))),
        *([".SH COMMANDS", *_items(commands)] if commands else []),
        *(f".SH EXAMPLES\n{_paragraph(VERBATIM + each.removeprefix(EXAMPLES))}" for each in examples),
    ]
    also = [f"{name}-{each}" for each, _ in commands] or [path.rpartition(" ")[0].replace(" ", "-")]
    parts.append(".SH SEE ALSO\n" + ", ".join(f"\\fB{_text(each)}\\fR(1)" for each in also))
    return "\n".join(parts) + "\n"


def _options(found: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    for each in found.get_params(context):
        record = each.get_help_record(context)  # none of a hidden option
        if record is not None and (record[1] or not isinstance(each, click.Argument)):
            yield record


def _items(items: list[tuple[str, str]]) -> Iterator[str]:
    return (f".TP\n.B {_text(names)}\n{_text(about)}" for names, about in items)


def _paragraph(paragraph: str) -> str:
    """One that click leaves as it is stays so here."""
    if not paragraph.startswith(VERBATIM):
        return f".PP\n{_text(' '.join(paragraph.split()))}"
    return "\n".join([".PP", ".nf", *map(_text, paragraph.removeprefix(VERBATIM).splitlines()), ".fi"])


def _text(text: str) -> str:
    """A line of text for roff, which sees control characters in some."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return f"\\&{escaped}" if escaped.startswith(".") else escaped


def main(folder: Path) -> None:
    """Write all pages."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in pages(int(os.environ.get("SOURCE_DATE_EPOCH") or time.time())).items():
        (folder / name).write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).resolve().parent.parent / "build/man/man1")
