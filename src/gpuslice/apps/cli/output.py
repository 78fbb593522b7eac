"""Printing: tables as they are, documents as JSON or YAML."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any, TypeVar

import click

from gpuslice.core.errors import printable

DOCUMENTS = ("json", "yaml")
WATCH_S = 5.0
F = TypeVar("F", bound=Callable[..., Any])


def output_flag(command: F) -> F:
    """Add ``-o table|json|yaml`` to a command."""
    return _forms("table", *DOCUMENTS)(command)


def listing_flags(command: F) -> F:
    """Add kubectl's flags of lists: ``-o table|wide|name|json|yaml`` and ``--no-headers``."""
    command = click.option("-w", "--watch", is_flag=True, help="Print again whenever it changes.")(command)
    command = click.option("--no-headers", is_flag=True, help="Print rows alone, for scripts.")(command)
    return _forms("table", "wide", "name", *DOCUMENTS)(command)


def _forms(first: str, *others: str) -> Callable[[F], F]:
    choice = click.Choice([first, *others])
    return click.option("-o", "--output", type=choice, default=first, show_default=True, help="How to print.")


def print_repeatedly(show: Callable[[], str], form: str, *, watch: bool) -> None:
    """Print what `show` returns in this form, with `watch` again and again where it is another text."""
    before = None
    while True:
        now = show()
        if now != before:
            shown = f"\n{now}" if before is not None else now
            click.echo(shown, nl=False) if form in DOCUMENTS else tell(shown)
            sys.stdout.flush()
        if not watch:
            return
        before = now
        time.sleep(WATCH_S)


def as_document(document: Any, form: str) -> str:
    """JSON or YAML."""
    if form == "yaml":
        import yaml

        return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    import json

    return json.dumps(document, indent=4, ensure_ascii=False) + "\n"


def print_document(document: Any, form: str) -> None:
    click.echo(as_document(document, form), nl=False)


def wrapped(line: str, indent: str) -> str:
    """`line` wrapped to the terminal's width, with continuation lines indented; unchanged into a pipe or
    file.
    """
    if not sys.stdout.isatty():
        return line
    import shutil  # not for who writes into a pipe

    width = shutil.get_terminal_size().columns
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def tell(text: str, *, err: bool = False) -> None:
    """Print for people. Names, addresses and reasons in `text` may be made up by a node, or by the server of
    somebody's kubeconfig, so control characters are removed before they reach the terminal.
    """
    click.echo("\n".join(map(printable, text.split("\n"))), nl=False, err=err)


def complain(sentence: str) -> None:
    """Print to standard error something that is not part of the answer."""
    tell(f"{sentence}\n", err=True)
