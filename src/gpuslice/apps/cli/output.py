"""Printing: tables as they are, documents as JSON or YAML."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

import click

from gpuslice.core.errors import printable

F = TypeVar("F", bound=Callable[..., Any])


def output_flag(command: F) -> F:
    """Add ``-o table|json|yaml`` to a command."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json", "yaml"]),
        default="table",
        show_default=True,
        help="How to print.",
    )(command)


def listing_flags(command: F) -> F:
    """Add kubectl's flags of lists: ``-o table|wide|name|json|yaml`` and ``--no-headers``."""
    command = click.option("--no-headers", is_flag=True, help="Print rows alone, for scripts.")(command)
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "wide", "name", "json", "yaml"]),
        default="table",
        show_default=True,
        help="How to print.",
    )(command)


def print_document(document: Any, form: str) -> None:
    if form == "yaml":
        import yaml

        click.echo(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), nl=False)
    else:
        import json

        click.echo(json.dumps(document, indent=4, ensure_ascii=False))


def wrapped(line: str, indent: str) -> str:
    """`line` wrapped to the terminal's width, with continuation lines indented; unchanged into a pipe or
    file.
    """
    if not sys.stdout.isatty():
        return line
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
