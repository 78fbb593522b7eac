"""dcgm-exporter's own settings file: what it says is in force, what is not understood is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.adapters.gpu.nvml import NvmlSource
from gpuslice.adapters.gpu.telemetry import NvmlTelemetry
from gpuslice.apps.exporter.command import command
from gpuslice.apps.exporter.flags import read_upstream_file, with_upstream_file
from gpuslice.apps.exporter.main import Exporter
from gpuslice.apps.exporter.settings import ExporterSettings
from gpuslice.apps.settings import load

FIELDS = """
version: 1
metrics:
  fields:
    - {name: DCGM_FI_DEV_GPU_UTIL, prometheusType: gauge, help: "How busy, in percent"}
    - {name: DCGM_FI_DRIVER_VERSION, prometheusType: label, help: Driver}
    - {name: DCGM_FI_DEV_NONESUCH, prometheusType: gauge, help: Nothing}
"""


def settings_for(path: Path, *arguments: str) -> ExporterSettings:
    flags = command.make_context("exporter", ["--config-file", str(path), *arguments]).params
    return load(ExporterSettings, flags, with_upstream_file(flags, {}))


@pytest.mark.parametrize(
    ("collection", "milliseconds"),
    [
        ("{interval: 30s}", 30_000),
        (
            "{interval: 1m30s, watchGroups: [{name: fast, interval: 500ms, fields: [DCGM_FI_DEV_FB_USED]}]}",
            500,
        ),
        ("{interval: 1ms}", 100),
        ("{}", 1000),
    ],
)
def test_all_is_read_at_the_pace_of_the_fastest(tmp_path: Path, collection: str, milliseconds: int) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"version: 1\nmetrics: {{file: /etc/counters.csv}}\ncollection: {collection}\n")
    settings = settings_for(path)
    assert settings.collect_interval == milliseconds
    assert settings.collectors == "/etc/counters.csv"
    assert settings_for(path, "-c", "2000", "-f", "mine.csv").collectors == "mine.csv"
    assert settings_for(path, "-c", "2000").collect_interval == 2000


def test_counters_named_one_by_one_are_in_force(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(FIELDS)
    exporter = Exporter(settings_for(path), NvmlTelemetry(), NvmlSource())
    counters = {each.name: each for each in exporter.state.counters.file.counters}
    assert list(counters) == ["DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DRIVER_VERSION"]
    assert counters["DCGM_FI_DEV_GPU_UTIL"].help == "How busy, in percent"
    assert exporter.state.counters.file.problems == ('line 3: "DCGM_FI_DEV_NONESUCH" is no DCGM field',)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("version: 2\ncollections: []\n", "version is 2, only 1 is understood"),
        ("just words", "version is None, only 1 is understood"),
        ("version: 1\nmetrics: {files: x}\n", "metrics.files is not understood"),
        ("version: 1\nserver: {address: x}\n", "server is not understood"),
        ("version: 1\ncollection: {interval: soon}\n", 'interval is "soon", must be e.g. 30s or 500ms'),
        ("version: 1\nmetrics: {fields: 3}\n", "Expected `array`, got `int`"),
        ("a: [", "while parsing"),
    ],
)
def test_what_is_not_understood_is_said_and_stops_nothing(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert any(problem in each for each in read_upstream_file(str(path)).problems)
    assert settings_for(path).collect_interval == 1000


def test_a_file_that_is_not_there_stops_nothing(tmp_path: Path) -> None:
    assert settings_for(tmp_path / "none.yaml").collectors == ""


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_no_file_is_too_strange_to_be_read(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "strange.yaml"
    path.write_bytes(content)
    assert isinstance(read_upstream_file(str(path)).problems, tuple)
