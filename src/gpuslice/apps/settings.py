"""Settings of a process: one frozen struct, read from flags over environment over file.

A process writes its settings down once::

    class ExtenderSettings(Settings, frozen=True, kw_only=True):
        port: Annotated[int, about("TCP port of the HTTP server.", env=("PORT",), ge=0, le=65535)] = 12345

    @click.command("extender")
    @options(ExtenderSettings)
    def command(**flags: object) -> None:
        settings = load(ExtenderSettings, flags, os.environ)

and gets a flag (``--port``), environment variables (``PORT``, ``GPUSLICE_PORT``), a key of the settings
file (``--config FILE``, YAML or JSON), `--help` and a row of the documentation from it. A value that cannot
be read stops the start with a sentence that names the setting and where its value came from.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import click
import msgspec

from gpuslice.core.errors import GpusliceError, without_login, words_of
from gpuslice.core.errors import shown as printable_value
from gpuslice.core.nesting import checked_depth
from gpuslice.core.words import nearest

ENVIRONMENT_PREFIX = "GPUSLICE_"
CONFIG_FLAG = "config"
CONFIG_ENVIRONMENT = "GPUSLICE_CONFIG"


class SettingsError(GpusliceError):
    """The process cannot start with these settings; the message names the field and what would be right."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of each process's settings. Check combinations in ``__post_init__`` and raise `SettingsError`."""


S = TypeVar("S", bound=Settings)
Command = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One row of the documentation of a process's settings."""

    name: str
    type: Any
    default: Any
    required: bool
    meaning: str
    unit: str
    short: str
    environment: tuple[str, ...]
    secret: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")


def about(
    meaning: str,
    *,
    unit: str = "",
    short: str = "",
    env: tuple[str, ...] = (),
    secret: bool = False,
    ge: float | None = None,
    le: float | None = None,
    pattern: str | None = None,
) -> msgspec.Meta:
    """What a setting means, its unit, a short flag, more environment names, and the range of a legal value.

    `env` names come before ``GPUSLICE_<NAME>``; `secret` values are never shown by ``/debug/state``.
    """
    extra = {"unit": unit, "short": short, "env": env, "secret": secret}
    if pattern is not None:  # of text; a range is of numbers
        return msgspec.Meta(description=meaning, extra=extra, pattern=pattern)
    return msgspec.Meta(description=meaning, extra=extra, ge=ge, le=le)


# -- settings that several processes have -----------------------------------------------------------------
Kubeconfig = Annotated[  # $KUBECONFIG is no value of this: it may list several files
    str, about("kubeconfig file. Else $KUBECONFIG, ~/.kube/config, or the pod's service account.")
]
Host = Annotated[str, about("Address to listen on; :: is every address, also of IPv4.")]
NamesSetting = Annotated[
    Literal["aliyun.com", "gpuslice.io"],
    about(
        "Names in which nodes offer their cards: aliyun.com/gpu-mem and gpu-core.percentage, or "
        "gpuslice.io/memory and compute. The same in device plugin and webhook, which translates. "
        "Changing it needs the GPU pods drained."
    ),
]
Port = Annotated[
    int, about("TCP port to listen on; 0 lets the system choose.", env=("PORT",), ge=0, le=65535)
]
OtlpEndpoint = Annotated[
    str,
    about(
        "OpenTelemetry collector that gets traces by OTLP over HTTP, such as http://collector:4318.",
        env=("OTEL_EXPORTER_OTLP_ENDPOINT",),
        pattern="^(https?://[^/@]+(/.*)?)?$",  # who we are stands in a header
    ),
]
OtlpHeaders = Annotated[
    str,
    about(
        "Headers for the collector, as name=value,name=value.",
        env=("OTEL_EXPORTER_OTLP_HEADERS",),
        secret=True,
    ),
]
LogLevel = Annotated[str, about("How much to log: debug, info, warn or error.", env=("LOG_LEVEL",))]


def describe(settings: type[Settings]) -> list[SettingInfo]:
    """Every setting of a process in the order it was written down."""
    hints = typing.get_type_hints(settings, include_extras=True)
    found = []
    for field in msgspec.structs.fields(settings):
        meta = _meta(hints[field.name])
        extra = (meta.extra if meta else None) or {}
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        info = SettingInfo(
            name=field.name,
            type=hints[field.name],
            default=default,
            required=field.required,
            meaning=(meta.description if meta else None) or "",
            unit=extra.get("unit", ""),
            short=extra.get("short", ""),
            environment=(*extra.get("env", ()), ENVIRONMENT_PREFIX + field.name.upper()),
            secret=extra.get("secret", False),
        )
        found.append(info)
    return found


def shown(settings: Settings) -> dict[str, Any]:
    """The settings in force, for ``/debug/state``: secrets hidden."""
    in_force = {info.name: (info.secret, getattr(settings, info.name)) for info in describe(type(settings))}
    return {
        name: "…" if secret and value else without_login(value) if isinstance(value, str) else value
        for name, (secret, value) in in_force.items()
    }


def options(settings: type[Settings]) -> Callable[[Command], Command]:
    """Give a click command one flag for each setting, and ``--config``."""

    def decorate(command: Command) -> Command:
        for info in reversed(describe(settings)):
            command = _option(info)(command)
        return click.option(
            f"--{CONFIG_FLAG}",
            CONFIG_FLAG,
            metavar="FILE",
            help=f"YAML or JSON file with settings; flags and environment win. [env: {CONFIG_ENVIRONMENT}]",
        )(command)

    return decorate


def load(settings: type[S], flags: Mapping[str, Any], environ: Mapping[str, str]) -> S:
    """The settings of this start. Raises `SettingsError` naming the first field that cannot be honoured.

    `flags` are a click command's parameters: None means not given. `config` names the settings file.
    """
    file = flags.get(CONFIG_FLAG) or environ.get(CONFIG_ENVIRONMENT)
    from_file = _read_file(Path(str(file))) if file else {}
    known = describe(settings)
    names = sorted(info.name for info in known)
    for key in from_file:
        if key not in names:
            hint = nearest(key, names) or f"there are {', '.join(names)}"
            raise SettingsError(f'settings file {file}: there is no setting "{key}"; {hint}')
    values = {}
    for info in known:
        found = _find(info, flags, environ, from_file, str(file))
        if found is not None:
            values[info.name] = _convert(info, *found)
        elif info.required:
            variables = " or ".join(info.environment)
            raise SettingsError(f"{info.flag} must be set: {info.meaning} (also: {variables})")
    try:
        return settings(**values)
    except (ValueError, TypeError) as error:
        raise SettingsError(str(error)) from error


def _find(
    info: SettingInfo,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    from_file: Mapping[str, Any],
    file: str,
) -> tuple[Any, str] | None:
    """The raw value that wins and where it came from; None when nobody gave one."""
    if flags.get(info.name) is not None:
        return flags[info.name], info.flag
    for name in info.environment:
        if environ.get(name):  # set but empty is how manifests say "not set"
            return environ[name], f"environment {name}"
    if info.name in from_file:
        return from_file[info.name], f"{file}: {info.name}"
    return None


def _convert(info: SettingInfo, value: Any, source: str) -> Any:
    if isinstance(value, str) and typing.get_origin(_bare(info.type)) in {tuple, list}:
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return msgspec.convert(value, info.type, strict=not isinstance(value, (str, list, tuple)))
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter of bytes that are no text
        shown_value = "…" if info.secret else printable_value(value)
        bare, meta = _bare(info.type), _meta(info.type)
        low, high = (meta.ge, meta.le) if meta else (None, None)
        allowed = {int: "a whole number", float: "a number", bool: "true or false"}.get(bare, "")
        if typing.get_origin(bare) is typing.Literal:
            allowed = f"one of {', '.join(map(str, typing.get_args(bare)))}"
        elif allowed and low is not None:
            allowed += f" from {low:g} to {high:g}" if high is not None else f", at least {low:g}"
        # where there is no plain word for what would be right, msgspec says it
        words = f"must be {allowed}" if allowed else str(error).removesuffix(" - at `$`")
        raise SettingsError(f'{source} is "{shown_value}", {words}: {info.meaning}') from error


def _meta(hint: Any) -> msgspec.Meta | None:
    return next((each for each in getattr(hint, "__metadata__", ()) if isinstance(each, msgspec.Meta)), None)


def _bare(hint: Any) -> Any:
    return typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint


def _option(info: SettingInfo) -> Callable[[Command], Command]:
    bare, unit = _bare(info.type), f" Unit: {info.unit}." if info.unit else ""
    default = "" if info.required or info.default in ("", None, ()) else f" [default: {info.default}]"
    text = f"{info.meaning}{unit}{default} [env: {', '.join(info.environment)}]"
    if bare is bool:
        names = f"{info.flag}/--no-{info.flag.removeprefix('--')}"
        return click.option(names, info.name, default=None, help=text)
    if typing.get_origin(bare) is typing.Literal:
        placeholder = "|".join(map(str, typing.get_args(bare)))
    else:
        listed = typing.get_origin(bare) in {tuple, list}
        placeholder = {int: "N", float: "X", str: "TEXT"}.get(bare, "A,B" if listed else "VALUE")
    flags = (info.short, info.flag) if info.short else (info.flag,)
    return click.option(*flags, info.name, default=None, metavar=placeholder, help=text)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        decode = msgspec.json.decode if path.suffix == ".json" else msgspec.yaml.decode
        values = decode(checked_depth(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise SettingsError(f"settings file {path} cannot be read: {words_of(error)}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(f"settings file {path} holds a {type(values).__name__}, must hold a mapping")
    return {str(key).replace("-", "_"): value for key, value in values.items()}
