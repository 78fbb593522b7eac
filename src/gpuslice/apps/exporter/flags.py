"""dcgm-exporter's command line, environment and settings file, so that existing DaemonSets start this one.

Every flag of its releases from 2.4 to 4.8 is known, with short forms and single dashes. A flag that cannot
have its effect without DCGM is accepted and logged once, with what it does not do; none prevents the start.

Version 1 of its settings file (``--config-file``, its releases from 4.8.3 on) is read. It names the counters,
by a file or one by one, and how often they are read. Flags and variables take precedence.
"""

from __future__ import annotations

import csv
import io
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgspec

from gpuslice.adapters.web.logs import configure_logs
from gpuslice.apps.exporter.settings import ExporterSettings
from gpuslice.apps.settings import describe
from gpuslice.core.nesting import checked_depth

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


@dataclass(frozen=True, slots=True)
class Idle:
    """A flag without an effect here. `why`: what it does not do, and what there is instead."""

    environment: str
    why: str
    switch: bool = False
    harmless: str = ""  # the value that asks for nothing


_DUMPS = "no debug dumps are written; /debug/state shows what they would hold"
_NVML_ONLY = "cards are read through NVML; there is no DCGM here"
IDLE: Mapping[str, Idle] = {
    "cpu-devices": Idle(
        "DCGM_EXPORTER_CPU_DEVICES_STR", "NVML knows no CPUs: no series of them", harmless="f"
    ),
    "switch-devices": Idle(
        "DCGM_EXPORTER_OTHER_DEVICES_STR", "NVML knows no NVSwitches: no series of them", harmless="f"
    ),
    "remote-hostengine-info": Idle("DCGM_REMOTE_HOSTENGINE_INFO", f"no host engine is asked: {_NVML_ONLY}"),
    "fake-gpus": Idle(
        "DCGM_EXPORTER_USE_FAKE_GPUS", f"no injected cards are shown: {_NVML_ONLY}", switch=True
    ),
    "enable-dcgm-log": Idle("DCGM_EXPORTER_ENABLE_DCGM_LOG", f"no DCGM log: {_NVML_ONLY}", switch=True),
    "dcgm-log-level": Idle("DCGM_EXPORTER_DCGM_LOG_LEVEL", f"no DCGM log: {_NVML_ONLY}", harmless="NONE"),
    "kubernetes-gpu-id-type": Idle(
        "DCGM_EXPORTER_KUBERNETES_GPU_ID_TYPE", "device ids by uuid and by name are both understood always"
    ),
    "dump-enabled": Idle("DCGM_EXPORTER_DUMP_ENABLED", _DUMPS, switch=True),
    "dump-directory": Idle("DCGM_EXPORTER_DUMP_DIRECTORY", _DUMPS),
    "dump-retention": Idle("DCGM_EXPORTER_DUMP_RETENTION", _DUMPS),
    "dump-compression": Idle("DCGM_EXPORTER_DUMP_COMPRESSION", _DUMPS, switch=True),
    "disable-startup-validate": Idle(
        "DISABLE_STARTUP_VALIDATE", "nothing is checked at the start that could stop it", switch=True
    ),
    "enable-gpu-bind-unbind-watch": Idle(
        "DCGM_EXPORTER_ENABLE_GPU_BIND_UNBIND_WATCH",
        "cards that come and go are followed always",
        switch=True,
    ),
    "gpu-bind-unbind-poll-interval": Idle(
        "DCGM_EXPORTER_GPU_BIND_UNBIND_POLL_INTERVAL",
        "cards that come and go are looked for each 10 s",
        harmless="1s",
    ),
    "enable-pprof": Idle("DCGM_EXPORTER_ENABLE_PPROF", "no /debug/pprof: this is no Go program", switch=True),
    "enable-exporter-metrics": Idle(
        "DCGM_EXPORTER_ENABLE_EXPORTER_METRICS",
        "no metrics of a Go runtime; gpuslice_exporter_* are shown always",
        switch=True,
    ),
    "web-read-timeout": Idle("DCGM_EXPORTER_WEB_READ_TIMEOUT", "scrapes are answered from memory at once"),
    "web-write-timeout": Idle("DCGM_EXPORTER_WEB_WRITE_TIMEOUT", "scrapes are answered from memory at once"),
    "container-labels": Idle(
        "DCGM_EXPORTER_CONTAINER_LABELS",
        "labels of plain Docker containers are not looked up",
        switch=True,
    ),
    "container-runtime-socket": Idle("DCGM_CONTAINER_RUNTIME_SOCKET", "the container runtime is not asked"),
    "max-concurrent-scrapes": Idle(
        "DCGM_EXPORTER_MAX_CONCURRENT_SCRAPES", "scrapes are answered from memory at once"
    ),
    "watch-max-keep-age": Idle("DCGM_EXPORTER_WATCH_MAX_KEEP_AGE", "only the newest sample is kept"),
    "watch-max-keep-samples": Idle("DCGM_EXPORTER_WATCH_MAX_KEEP_SAMPLES", "only the newest sample is kept"),
    "health-require-gpus": Idle(
        "DCGM_EXPORTER_HEALTH_REQUIRE_GPUS",
        "/health answers without a card too: one that comes is found without a restart",
        switch=True,
    ),
}
SWITCHES = frozenset(
    {
        "kubernetes",
        "use-old-namespace",
        "no-hostname",
        "replace-blanks-in-model-name",
        "debug",
        "kubernetes-enable-pod-labels",
        "kubernetes-enable-pod-uid",
        "kubernetes-virtual-gpus",
        "kubernetes-enable-dra",
        "web-systemd-socket",
    }
)
_GO_WORDS = {"t": "true", "T": "true", "f": "false", "F": "false"}
IDLE_GIVEN = f"{__name__}.idle"
KUBERNETES = "DCGM_EXPORTER_KUBERNETES"
POD_LABELS = "GPUSLICE_COMPAT_POD_LABELS"


class DcgmCommand(click.Command):
    """Takes dcgm-exporter's command lines unchanged, so that existing DaemonSets start it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        found, ctx.meta[IDLE_GIVEN] = translated(args)  # these are logged once logs are set up
        return super().parse_args(ctx, found)

    def invoke(self, ctx: click.Context) -> Any:
        configure_logs()
        for name, value in ctx.meta[IDLE_GIVEN].items():
            _log_idle(f"--{name}", IDLE[name], value)
        return super().invoke(ctx)


def translated(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The same command line in our flags (``-f=x``, ``-collectors x`` and ``--collectors x`` are one).

    Flags without an effect here are returned apart, with their values. An explicit ``--kubernetes`` implies
    pod labels on the series of cards, as upstream; our own flag for that wins, wherever it is.
    """
    rest = iter(arguments)
    found: list[str] = []
    idle: dict[str, str] = {}
    for argument in rest:
        if not argument.startswith("-") or argument in {"-", "--", "-h"} or argument[1:2].isdigit():
            found.append(argument)
            continue
        name, separator, value = argument.lstrip("-").partition("=")
        name = SHORT.get(name, name)
        if name in IDLE:
            if not separator and not IDLE[name].switch:
                value = next(rest, "")
            idle[name] = value
        elif name in SWITCHES:
            is_on = not separator or is_true(value)
            found.append(f"--{name}" if is_on else f"--no-{name}")
        else:
            found.append(f"--{name}{separator}{value}")
    if "--kubernetes" in found:
        found.insert(0, "--compat-pod-labels=exclusive")
    return found, idle


def translated_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The same for variables; those without an effect here are logged."""
    for idle in IDLE.values():
        if value := environ.get(idle.environment):
            _log_idle(idle.environment, idle, value)
    found = dict(environ)
    for info in describe(ExporterSettings):
        for name in info.environment:
            if isinstance(info.default, bool) and name in found:
                found[name] = _GO_WORDS.get(found[name], found[name])
    if is_true(environ.get(KUBERNETES, "")) and not environ.get(POD_LABELS):
        found[POD_LABELS] = "exclusive"
    return found


def is_true(value: str) -> bool:
    """Go's way to write a boolean flag."""
    return value.lower() in {"1", "t", "true"}


def _log_idle(name: str, idle: Idle, value: str) -> None:
    asked = value != idle.harmless if idle.harmless else not idle.switch or not value or is_true(value)
    if asked:
        _log.warning("setting without an effect here", extra={"setting": name, "instead": idle.why})


# -- the settings file -------------------------------------------------------------------------------------

_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?(?:h|ms|us|µs|ns|m|s))+")
_PART = re.compile(r"(\d+(?:\.\d+)?)(h|ms|us|µs|ns|m|s)")


class _Counter(msgspec.Struct, frozen=True):
    name: str
    prometheusType: str = "gauge"
    help: str = ""


class _Metrics(msgspec.Struct, frozen=True):
    file: str = ""
    fields: list[_Counter] = []


class _Group(msgspec.Struct, frozen=True):
    name: str = ""
    interval: str = ""
    fields: list[str] = []


class _Collection(msgspec.Struct, frozen=True):
    interval: str = ""
    watchGroups: list[_Group] = []


class _File(msgspec.Struct, frozen=True):
    version: int
    metrics: _Metrics = _Metrics()
    collection: _Collection = _Collection()


@dataclass(frozen=True, slots=True)
class UpstreamFile:
    """What the file sets: as variables of dcgm-exporter, and counters as a file of them; "" without any."""

    environment: Mapping[str, str] = field(default_factory=dict)
    counters: str = ""
    problems: tuple[str, ...] = ()


def read_upstream_file(path: str) -> UpstreamFile:
    """The file now. What in it cannot be understood is a problem, in one sentence each; never raises."""
    try:
        document = msgspec.yaml.decode(checked_depth(Path(path).read_bytes()))
        if not isinstance(document, dict) or document.get("version") != 1:
            version = document.get("version") if isinstance(document, dict) else None
            return UpstreamFile(problems=(f"version is {version}, only 1 is understood",))
        file = msgspec.convert(document, _File)
        intervals = [file.collection.interval, *(group.interval for group in file.collection.watchGroups)]
        seconds = []
        for text in filter(None, intervals):  # durations as Go writes them
            if not _DURATION.fullmatch(text):
                return UpstreamFile(problems=(f'interval is "{text}", must be e.g. 30s or 500ms',))
            seconds.append(sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text)))
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        return UpstreamFile(problems=(str(error),))
    environment = {}
    if file.metrics.file:
        environment["DCGM_EXPORTER_COLLECTORS"] = file.metrics.file
    if seconds:  # all fields are read at the same time here, at the shortest interval
        environment["DCGM_EXPORTER_INTERVAL"] = str(max(100, round(min(seconds) * 1000)))
    counters = io.StringIO()
    csv.writer(counters).writerows(
        (each.name, each.prometheusType, " ".join(each.help.split())) for each in file.metrics.fields
    )
    unknown = [
        f"{place + '.' if place else ''}{name} is not understood"
        for place, known in (("", _File), ("metrics", _Metrics), ("collection", _Collection))
        for name in (document.get(place) if place else document) or ()
        if name not in known.__struct_fields__
    ]
    return UpstreamFile(environment, counters.getvalue(), tuple(unknown))


def with_upstream_file(flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """The environment, on top of the settings in dcgm-exporter's own file if one is named."""
    path = flags.get("config_file") or environ.get("DCGM_EXPORTER_CONFIG_FILE")
    if not path:
        return dict(environ)
    found = read_upstream_file(path)
    for problem in found.problems:
        _log.warning("setting of a file left out", extra={"file": path, "problem": problem})
    return {**found.environment, **environ}
