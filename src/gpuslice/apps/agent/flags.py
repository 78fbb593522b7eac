"""Flags as the vendor's plugin takes them: with one dash, and some that mean nothing here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

WITH_VALUE = frozenset(
    {
        "kubelet-address",
        "kubelet-port",
        "client-cert",
        "client-key",
        "token",
        "timeout",
        "v",
        "vmodule",
        "log_dir",
        "log_backtrace_at",
        "stderrthreshold",
    }
)
SWITCHES = frozenset({"mps", "query-kubelet", "logtostderr", "alsologtostderr"})
OWN_SWITCHES = frozenset({"health-check"})


class VendorCommand(click.Command):
    """Takes the vendor's command lines unchanged, so that existing DaemonSets start it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(translated(args)))


def translated(arguments: Sequence[str]) -> Iterator[str]:
    """The same command line with two dashes and without what has no meaning here."""
    rest = iter(arguments)
    for argument in rest:
        name, separator, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or (len(name) == 1 and name != "v"):
            yield argument
        elif name in WITH_VALUE:
            if not separator:
                next(rest, None)
        elif name in SWITCHES:
            continue
        elif name in OWN_SWITCHES and separator:
            yield f"--{'' if _is_true(value) else 'no-'}{name}"
        else:
            yield f"--{name}{separator}{value}"


def _is_true(value: str) -> bool:
    """Go's way to write a boolean flag."""
    return value.lower() in {"1", "t", "true"}
