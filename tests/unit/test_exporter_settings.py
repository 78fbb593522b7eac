"""The exporter's command line: dcgm-exporter's, as it is written in the wild."""

from __future__ import annotations

from pathlib import Path

import bcrypt
import pytest

from gpuslice.adapters.web.webconfig import WebConfigError, read_web_config
from gpuslice.apps.exporter.config import CounterConfig
from gpuslice.apps.exporter.fields import load as load_fields
from gpuslice.apps.exporter.flags import translated
from gpuslice.apps.exporter.privilege import hidden_processes
from gpuslice.apps.exporter.settings import ExporterSettings, parse_address, parse_devices
from gpuslice.apps.settings import SettingsError, load


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (["-f", "x.csv"], ["--collectors", "x.csv"]),
        (["-f=x.csv"], ["--collectors=x.csv"]),
        (["--collectors", "x.csv"], ["--collectors", "x.csv"]),
        (["-collect-interval=1000"], ["--collect-interval=1000"]),
        (["-k=false"], ["--no-kubernetes"]),
        (["--kubernetes=true"], ["--kubernetes"]),
        (["-n"], ["--no-hostname"]),
        (["-r", "localhost:5555", "-o"], ["--use-old-namespace"]),
        (["--enable-dcgm-log", "--dcgm-log-level=DEBUG"], []),
    ],
)
def test_command_lines_of_dcgm_exporter(written: list[str], meant: list[str]) -> None:
    assert list(translated(written)) == meant


def test_its_environment_has_the_same_meaning() -> None:
    environ = {
        "DCGM_EXPORTER_LISTEN": "[::1]:9401",
        "DCGM_EXPORTER_INTERVAL": "5000",
        "DCGM_EXPORTER_KUBERNETES": "true",
        "NVIDIA_RESOURCE_NAMES": "nvidia.com/a100,nvidia.com/h100",
    }
    settings = load(ExporterSettings, {}, environ)
    assert parse_address(settings.address) == ("::1", 9401)
    assert settings.interval_s == 5
    assert settings.nvidia_resource_names == ("nvidia.com/a100", "nvidia.com/h100")


@pytest.mark.parametrize(
    ("text", "cards"), [("f", None), ("g", None), ("g:0,2-3", frozenset({0, 2, 3})), ("g:1", frozenset({1}))]
)
def test_which_cards(text: str, cards: frozenset[int] | None) -> None:
    assert parse_devices(text) == cards


@pytest.mark.parametrize("text", ["x", "g:", "g:a", "i:0"])
def test_a_selection_that_cannot_be_honoured_stops_the_start(text: str) -> None:
    with pytest.raises(SettingsError, match="devices"):
        ExporterSettings(devices=text)


def test_every_default_counter_is_a_known_field() -> None:
    config = CounterConfig("", load_fields())
    assert config.file.problems == ()
    assert len(config.file.counters) == 26


def test_a_file_that_is_gone_leaves_its_counters_in_force(tmp_path: Path) -> None:
    path = tmp_path / "counters.csv"
    path.write_text("DCGM_FI_DEV_GPU_TEMP, gauge, x\n")
    config = CounterConfig(str(path), load_fields())
    config.look()
    path.unlink()
    config.look()
    assert not config.ok
    assert [counter.name for counter in config.file.counters] == ["DCGM_FI_DEV_GPU_TEMP"]


def test_outside_kubernetes_processes_are_the_hosts() -> None:
    assert hidden_processes("/proc", {}) == ""
    assert hidden_processes("/host/proc", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == ""


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("tls_server_config: {cert_file: a}", "key_file"),
        ("basic_auth_users: {a: plain}", "bcrypt"),
        ("tls_server_config: {cert_file: a, key_file: b, cipher_suites: [x]}", "cipher_suites"),
        ("tls_server_config: {client_auth_type: RequireAndVerifyClientCert}", "client_ca_file"),
        ("nonsense: 1", "nonsense"),
    ],
)
def test_a_web_config_that_cannot_be_honoured_is_refused_by_name(
    text: str, named: str, tmp_path: Path
) -> None:
    path = tmp_path / "web.yaml"
    path.write_text(text)
    with pytest.raises(WebConfigError, match=named):
        read_web_config(path)


def test_a_web_config_names_files_beside_itself(tmp_path: Path) -> None:
    hashed = bcrypt.hashpw(b"x", bcrypt.gensalt(rounds=4)).decode()
    path = tmp_path / "web.yaml"
    path.write_text(
        "tls_server_config: {cert_file: tls.crt, key_file: tls.key, client_ca_file: ca.crt, "
        f"client_auth_type: RequireAndVerifyClientCert}}\nbasic_auth_users: {{a: {hashed}}}\n"
    )
    config = read_web_config(path)
    assert config.certificate == str(tmp_path / "tls.crt")
    assert config.must_show
    assert set(config.users) == {"a"}
