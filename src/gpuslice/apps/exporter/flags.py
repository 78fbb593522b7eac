"""dcgm-exporter's command line: its short flags, single dashes, and the flags that mean nothing here."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import click

_log = logging.getLogger(__name__)

SHORT = {
    "f": "collectors",
    "a": "address",
    "c": "collect-interval",
    "k": "kubernetes",
    "o": "use-old-namespace",
    "p": "cpu-devices",
    "m": "configmap-data",
    "r": "remote-hostengine-info",
    "d": "devices",
    "n": "no-hostname",
    "s": "switch-devices",
    "x": "xid-count-window-size",
    "rbmn": "replace-blanks-in-model-name",
}
IGNORED_WITH_VALUE = frozenset(
    {
        "cpu-devices",
        "remote-hostengine-info",
        "switch-devices",
        "dcgm-log-level",
        "hpc-job-mapping-dir",
        "dump-directory",
        "dump-retention",
        "gpu-bind-unbind-poll-interval",
        "kubernetes-gpu-id-type",
    }
)
IGNORED_SWITCHES = frozenset(
    {
        "fake-gpus",
        "enable-dcgm-log",
        "kubernetes-virtual-gpus",
        "dump-enabled",
        "dump-compression",
        "kubernetes-enable-dra",
        "disable-startup-validate",
        "enable-gpu-bind-unbind-watch",
        "enable-pprof",
        "web-systemd-socket",
    }
)
SWITCHES = frozenset(
    {
        "kubernetes",
        "use-old-namespace",
        "no-hostname",
        "replace-blanks-in-model-name",
        "debug",
        "kubernetes-enable-pod-labels",
        "kubernetes-enable-pod-uid",
    }
)


class DcgmCommand(click.Command):
    """Takes dcgm-exporter's command lines unchanged, so that existing DaemonSets start it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, list(translated(args)))


def translated(arguments: Sequence[str]) -> Iterator[str]:
    """The same command line in our flags: ``-f=x``, ``-collectors x`` and ``--collectors x`` are one."""
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or argument in {"-", "--", "-h"}:
            yield argument
            continue
        name, separator, value = argument.lstrip("-").partition("=")
        name = SHORT.get(name, name)
        if name in IGNORED_WITH_VALUE:
            if not separator:
                next(rest, None)
            _ignored(name)
        elif name in IGNORED_SWITCHES:
            _ignored(name)
        elif name in SWITCHES and separator:
            yield f"--{'' if _is_true(value) else 'no-'}{name}" if name != "no-hostname" else _hostname(value)
        else:
            yield f"--{name}{separator}{value}"


def _hostname(value: str) -> str:
    return "--no-hostname" if _is_true(value) else "--no-no-hostname"


def _is_true(value: str) -> bool:
    """Go's way to write a boolean flag."""
    return value.lower() in {"1", "t", "true"}


def _ignored(name: str) -> None:
    _log.warning("flag without a meaning here", extra={"flag": f"--{name}"})
