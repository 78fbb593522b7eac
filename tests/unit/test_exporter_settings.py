"""The exporter's command line: dcgm-exporter's, as it is written in the wild."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bcrypt
import pytest

from gpuslice.adapters.web.webconfig import WebConfigError, WebConfigFile
from gpuslice.apps.exporter.command import command
from gpuslice.apps.exporter.counters import Counters
from gpuslice.apps.exporter.dcgm_entities import patterns_of
from gpuslice.apps.exporter.fields import load as load_fields
from gpuslice.apps.exporter.flags import IDLE, IDLE_GIVEN, translated, translated_environment
from gpuslice.apps.exporter.owners import hidden_processes
from gpuslice.apps.exporter.settings import Chosen, ExporterSettings, parse_address, parse_devices
from gpuslice.apps.settings import SettingsError, load


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (["-f", "x.csv"], ["--collectors", "x.csv"]),
        (["-f=x.csv"], ["--collectors=x.csv"]),
        (["--collectors", "x.csv"], ["--collectors", "x.csv"]),
        (["-collect-interval=1000"], ["--collect-interval=1000"]),
        (["-k=false"], ["--no-kubernetes"]),
        (["--kubernetes=true"], ["--compat-pod-labels=exclusive", "--kubernetes"]),
        (["-n"], ["--no-hostname"]),
        (["-r", "localhost:5555", "-o"], ["--use-old-namespace"]),
        (["--enable-dcgm-log", "--dcgm-log-level=DEBUG"], []),
    ],
)
def test_command_lines_of_dcgm_exporter(written: list[str], meant: list[str]) -> None:
    assert translated(written)[0] == meant


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
    ("text", "chosen"),
    [
        ("f", Chosen()),
        ("g", Chosen(divided=False)),
        ("g:0,2-3", Chosen(divided=False, cards=frozenset({0, 2, 3}))),
        ("i", Chosen(whole=False)),
        ("i:1", Chosen(whole=False, instances=frozenset({1}))),
    ],
)
def test_which_cards(text: str, chosen: Chosen) -> None:
    assert parse_devices(text) == chosen


@pytest.mark.parametrize("text", ["x", "g:", "g:a", "f:0", "i:"])
def test_a_selection_that_cannot_be_honoured_stops_the_start(text: str) -> None:
    with pytest.raises(SettingsError, match="devices"):
        ExporterSettings(devices=text)


@pytest.mark.parametrize("text", ["g:0-99999999999", "i:5000", "g:0,4096"])
def test_a_range_that_no_node_has_is_refused_and_not_counted_out(text: str) -> None:
    with pytest.raises(SettingsError, match="must not go past 4095"):
        ExporterSettings(devices=text)


# Every flag of dcgm-exporter's releases 2.4 to 4.8, with a value where it takes one.
UPSTREAM = {
    "collectors": "/tmp/x.csv",
    "address": ":9400",
    "collect-interval": "30000",
    "kubernetes": "",
    "use-old-namespace": "",
    "cpu-devices": "g",
    "configmap-data": "ns:name",
    "remote-hostengine-info": "localhost:5555",
    "kubernetes-enable-pod-labels": "",
    "kubernetes-enable-pod-uid": "",
    "kubernetes-gpu-id-type": "device-name",
    "kubernetes-pod-label-allowlist-regex": "app,team",
    "devices": "g:0",
    "no-hostname": "",
    "switch-devices": "g",
    "fake-gpus": "",
    "web-config-file": "/tmp/web.yaml",
    "web-systemd-socket": "",
    "xid-count-window-size": "300000",
    "replace-blanks-in-model-name": "",
    "debug": "",
    "clock-events-count-window-size": "300000",
    "enable-dcgm-log": "",
    "dcgm-log-level": "DEBUG",
    "log-format": "text",
    "pod-resources-kubelet-socket": "/tmp/kubelet.sock",
    "hpc-job-mapping-dir": "/tmp/jobs",
    "nvidia-resource-names": "nvidia.com/a100",
    "kubernetes-virtual-gpus": "",
    "dump-enabled": "",
    "dump-directory": "/tmp",
    "dump-retention": "24",
    "dump-compression": "",
    "kubernetes-enable-dra": "",
    "disable-startup-validate": "",
    "enable-gpu-bind-unbind-watch": "",
    "gpu-bind-unbind-poll-interval": "2s",
    "enable-pprof": "",
    "config-file": "/tmp/c.yaml",
    "web-read-timeout": "10s",
    "web-write-timeout": "10s",
    "container-labels": "",
    "container-runtime-socket": "/run/docker.sock",
    "enable-exporter-metrics": "",
    "max-concurrent-scrapes": "8",
    "watch-max-keep-age": "5m",
    "watch-max-keep-samples": "0",
    "health-require-gpus": "",
}


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("name", UPSTREAM)
def test_no_flag_of_dcgm_exporter_stops_the_start(name: str, joined: bool) -> None:
    value = UPSTREAM[name]
    written = [f"--{name}"] if not value else [f"--{name}={value}"] if joined else [f"--{name}", value]
    context = command.make_context("exporter", written)
    load(ExporterSettings, context.params, {})
    assert context.meta[IDLE_GIVEN] == ({name: value} if name in IDLE else {})


def test_variables_without_an_effect_are_said_to_be_so_unless_they_ask_for_nothing(caplog: Any) -> None:
    environ = {"DCGM_REMOTE_HOSTENGINE_INFO": "dcgm:5555", "DCGM_EXPORTER_OTHER_DEVICES_STR": "f"}
    environ |= {"DCGM_EXPORTER_DUMP_ENABLED": "false", "DCGM_EXPORTER_CPU_DEVICES_STR": "g"}
    translated_environment(environ)
    assert {record.__dict__["setting"] for record in caplog.records} == {
        "DCGM_REMOTE_HOSTENGINE_INFO",
        "DCGM_EXPORTER_CPU_DEVICES_STR",
    }


@pytest.mark.parametrize(
    ("arguments", "environ", "labels"),
    [
        ([], {}, "auto"),
        (["-k"], {}, "exclusive"),
        (["-k=false"], {}, "auto"),
        (["--compat-pod-labels=off", "--kubernetes=true"], {}, "off"),
        ([], {"DCGM_EXPORTER_KUBERNETES": "true"}, "exclusive"),
        ([], {"DCGM_EXPORTER_KUBERNETES": "T", "DCGM_EXPORTER_DEVICES_STR": "f"}, "exclusive"),
        ([], {"DCGM_EXPORTER_KUBERNETES": "f"}, "auto"),
        ([], {"DCGM_EXPORTER_KUBERNETES": "true", "GPUSLICE_COMPAT_POD_LABELS": "off"}, "off"),
    ],
)
def test_who_asks_for_kubernetes_as_of_dcgm_exporter_gets_its_pod_labels(
    arguments: list[str], environ: dict[str, str], labels: str
) -> None:
    flags = command.make_context("exporter", arguments).params
    settings = load(ExporterSettings, flags, translated_environment(environ))
    assert settings.compat_pod_labels == labels


def test_an_expression_that_cannot_be_read_is_left_out_and_the_others_stand(caplog: Any) -> None:
    (pattern,) = patterns_of(["app", "("])
    assert pattern.search("app.kubernetes.io/name")
    assert [record.__dict__["expression"] for record in caplog.records] == ["("]


@pytest.mark.parametrize("text", ["name", "ns:", ":name"])
def test_a_config_map_needs_its_namespace_and_name(text: str) -> None:
    with pytest.raises(SettingsError, match="NAMESPACE:NAME"):
        ExporterSettings(configmap_data=text)


def test_a_counter_file_that_is_not_there_leaves_the_built_in_ones(tmp_path: Path) -> None:
    config = Counters(str(tmp_path / "default-counters.csv"), load_fields())
    config.poll()
    assert not config.ok
    assert len(config.file.counters) == 26


def test_every_default_counter_is_a_known_field() -> None:
    config = Counters("", load_fields())
    assert config.file.problems == ()
    assert len(config.file.counters) == 26


def test_a_file_that_is_gone_leaves_its_counters_in_force(tmp_path: Path) -> None:
    path = tmp_path / "counters.csv"
    path.write_text("DCGM_FI_DEV_GPU_TEMP, gauge, x\n")
    config = Counters(str(path), load_fields())
    config.poll()
    path.unlink()
    config.poll()
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
        (
            "tls_server_config: {client_ca_file: a, client_auth_type: RequireAndVerifyClientCert}",
            "cert_file",
        ),
        ("tls_server_config: {min_version: TLS13}", "cert_file"),
        ("nonsense: 1", "nonsense"),
    ],
)
def test_a_web_config_that_cannot_be_honoured_is_refused_by_name(
    text: str, named: str, tmp_path: Path
) -> None:
    path = tmp_path / "web.yaml"
    path.write_text(text)
    with pytest.raises(WebConfigError, match=named):
        WebConfigFile(path)


def test_a_web_config_that_never_ends_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WebConfigError, match="/dev/zero must be a plain file"):
        WebConfigFile(Path("/dev/zero"))
    large = tmp_path / "web.yaml"
    with large.open("wb") as file:
        file.truncate(2 << 20)
    with pytest.raises(WebConfigError, match="must not be larger than 1 MiB"):
        WebConfigFile(large)


def test_a_web_config_names_files_beside_itself(tmp_path: Path) -> None:
    hashed = bcrypt.hashpw(b"x", bcrypt.gensalt(rounds=4)).decode()
    path = tmp_path / "web.yaml"
    path.write_text(
        "tls_server_config: {cert_file: tls.crt, key_file: tls.key, client_ca_file: ca.crt, "
        f"client_auth_type: RequireAndVerifyClientCert}}\nbasic_auth_users: {{a: {hashed}}}\n"
    )
    config = WebConfigFile(path).current()
    assert config.tls.certificate == str(tmp_path / "tls.crt")
    assert config.tls.must_show
    assert set(config.users) == {"a"}


def test_each_setting_without_an_effect_is_documented_with_what_it_does_not_do() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "reference" / "dcgm-exporter.md"
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| `--")]
    told = {row[1].removesuffix(" |"): row[0].removeprefix("| ").split(", ") for row in rows}
    for name, idle in IDLE.items():
        assert f"`--{name}`" in told[idle.why]
