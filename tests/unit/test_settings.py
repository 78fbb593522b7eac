"""Settings come from flags over environment over file, and a wrong one is named."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest
from click.testing import CliRunner

from gpuslice.apps.settings import Settings, SettingsError, about, describe, load, options, shown


class Sample(Settings, frozen=True, kw_only=True):
    port: Annotated[int, about("TCP port.", env=("PORT",), ge=0, le=65535)] = 12345
    timeout_s: Annotated[float, about("How long to wait.", unit="s", ge=0)] = 2.5
    explain: Annotated[bool, about("Say more.")] = False
    policy: Annotated[Literal["binpack", "spread"], about("Which node.")] = "binpack"
    names: Annotated[tuple[str, ...], about("Names.")] = ()
    card: Annotated[str, about("A card.", pattern="GPU-.+")] = "GPU-a"
    token: Annotated[str, about("Secret.", secret=True)] = ""

    def __post_init__(self) -> None:
        if self.policy == "spread" and self.explain:
            raise SettingsError("--explain cannot be used with --policy spread")


class Needy(Settings, frozen=True, kw_only=True):
    node_name: Annotated[str, about("The node this process runs on.", env=("NODE_NAME",))]


def read(environ: dict[str, str] | None = None, **flags: Any) -> Sample:
    return load(Sample, flags, environ or {})


def test_defaults_hold_when_nobody_says_anything() -> None:
    assert read() == Sample()


def test_flags_win_over_environment_and_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("port: 1\ntimeout-s: 7\npolicy: spread\n")
    environ = {"PORT": "2", "GPUSLICE_POLICY": "binpack", "GPUSLICE_CONFIG": str(file)}
    settings = read(environ, port="3")
    assert (settings.port, settings.policy, settings.timeout_s) == (3, "binpack", 7.0)


def test_the_vendors_environment_name_wins_over_ours() -> None:
    assert read({"PORT": "8", "GPUSLICE_PORT": "9"}).port == 8


def test_an_empty_environment_variable_is_not_set() -> None:
    assert read({"PORT": ""}).port == 12345


def test_lists_and_booleans_are_read_from_text() -> None:
    settings = read({"GPUSLICE_NAMES": "a, b,", "GPUSLICE_EXPLAIN": "true"})
    assert (settings.names, settings.explain) == (("a", "b"), True)


@pytest.mark.parametrize(
    ("environ", "flags", "text"),
    [
        (
            {"PORT": "many"},
            {},
            'environment PORT is "many", must be a whole number from 0 to 65535: TCP port.',
        ),
        ({}, {"port": "70000"}, '--port is "70000", must be a whole number from 0 to 65535: TCP port.'),
        ({}, {"timeout_s": "-1"}, '--timeout-s is "-1", must be a number, at least 0: How long to wait.'),
        ({"GPUSLICE_EXPLAIN": "perhaps"}, {}, 'EXPLAIN is "perhaps", must be true or false: Say more.'),
        (
            {"GPUSLICE_TOKEN": "x", "GPUSLICE_POLICY": "best"},
            {},
            'environment GPUSLICE_POLICY is "best", must be one of binpack, spread: Which node.',
        ),
        ({}, {"card": "GPU"}, "matching regex"),
        ({"GPUSLICE_POLICY": "spread"}, {"explain": True}, "--explain cannot be used with --policy spread"),
        ({}, {"config": "/nowhere/x.yaml"}, "settings file /nowhere/x.yaml cannot be read"),
    ],
)
def test_a_wrong_value_names_its_setting(environ: dict[str, str], flags: dict[str, Any], text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(Sample, flags, environ)
    assert text in str(caught.value)


def test_an_unknown_key_of_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"prot": 1}')
    with pytest.raises(SettingsError, match='no setting "prot"; did you mean port'):
        read(config=str(file))


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_bytes(b'{"host": "\xff"}')
    with pytest.raises(SettingsError, match=r"settings file .*settings\.json cannot be read"):
        read(config=str(file))


def test_a_required_setting_says_what_it_is_for() -> None:
    with pytest.raises(SettingsError, match=r"--node-name must be set: The node this process runs on"):
        load(Needy, {}, {})


def test_a_command_gets_one_flag_for_each_setting() -> None:
    @click.command()
    @options(Sample)
    def command(**flags: Any) -> None:
        click.echo(load(Sample, flags, {}))

    answer = CliRunner().invoke(command, ["--port", "7", "--no-explain", "--names", "a,b"])
    assert "Sample(port=7, timeout_s=2.5, explain=False, policy='binpack', names=('a', 'b')" in answer.output
    text = CliRunner().invoke(command, ["--help"]).output
    assert all(info.flag in text for info in describe(Sample))


def test_nobody_is_shown_the_login_of_a_url() -> None:
    assert shown(read(card="GPU-https://me:secret@host/a"))["card"] == "GPU-https://…@host/a"
    with pytest.raises(SettingsError, match='card is "https://…@host"'):
        read(card="https://me:secret@host")


def test_secrets_are_not_shown() -> None:
    assert shown(read(token="hush"))["token"] == "…"
