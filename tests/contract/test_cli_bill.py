"""``gpuslice bill`` reads a real Prometheus, which has a day and a half of what the rules record."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from gpuslice.diagnosis import bill
from gpuslice_demo.ports import free_port
from tests import warm_start
from tests.e2e.node import until
from tests.tools import find

GIB = 1 << 30
BEGIN = int(datetime(2026, 1, 5, 12, 30, tzinfo=UTC).timestamp())
HOURS = 36
AT = {"node": "n1", "gpu_uuid": "GPU-a"}
A = AT | {"namespace": "team-a", "pod": "train-0", "container": "main"}
B = AT | {"namespace": "team-b", "pod": "infer-0", "container": "main"}
"""A holds half of an 80 GiB card and uses a quarter; B begins after six hours and borrows."""


def _values(hour: float) -> Iterator[tuple[str, dict[str, str], float]]:
    b = hour >= 6
    yield bill.GUARANTEED, A, 40 * GIB
    yield bill.USED, A, 20 * GIB
    yield bill.BORROWED, A, 0
    yield bill.GUARANTEED, B, 10 * GIB * b
    yield bill.USED, B, 15 * GIB * b
    yield bill.BORROWED, B, 5 * GIB * b
    yield bill.MEMORY.charged, A, 40 * GIB
    yield bill.MEMORY.charged, B, 15 * GIB * b
    yield bill.MEMORY.unattributed, AT, GIB
    yield bill.MEMORY.idle, AT, (39 - 15 * b) * GIB
    yield bill.MEMORY.card, AT, 80 * GIB
    yield bill.SM.charged, A, 0.25
    yield bill.SM.charged, B, 0.5 * b
    yield bill.SM.unattributed, AT, 0
    yield bill.SM.idle, AT, 0.75 - 0.5 * b
    yield bill.SM.card, AT, 1
    yield bill.POWER.charged, A, 100
    yield bill.POWER.charged, B, 200 * b
    yield bill.POWER.unattributed, AT, 0
    yield bill.POWER.idle, AT, 300 - 200 * b
    yield bill.POWER.card, AT, 400


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("prometheus")
    series: dict[str, list[str]] = defaultdict(list)
    for minute in range(HOURS * 60):
        for name, labels, value in _values(minute / 60):
            written = ",".join(f'{key}="{text}"' for key, text in labels.items())
            series[name].append(f"{name}{{{written}}} {value:.2f} {BEGIN + minute * 60}")
    text = "".join(f"# TYPE {name} gauge\n" + "\n".join(lines) + "\n" for name, lines in series.items())
    (folder / "past").write_text(text + "# EOF\n")
    command = [
        find("promtool"),
        "tsdb",
        "create-blocks-from",
        "openmetrics",
        folder / "past",
        folder / "tsdb",
    ]
    subprocess.run([str(each) for each in command], check=True, stdout=subprocess.DEVNULL)
    (folder / "prometheus.yaml").write_text("{}")
    port = free_port()
    command = [
        find("prometheus"),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--storage.tsdb.retention.time=100y",
    ]
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"{url}/-/ready"):
                return True
        except OSError:
            return False

    with subprocess.Popen([str(each) for each in command], stderr=subprocess.DEVNULL) as process:
        try:
            until(answers, "Prometheus answers")
            yield url
        finally:
            process.terminate()


def billed(prometheus: str, *words: str) -> subprocess.CompletedProcess[str]:
    arguments = ["bill", "--prometheus", prometheus, *words]
    return warm_start.run(arguments, {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}, "main")


A_DAY = ("--from", "2026-01-05T12:30", "--to", "2026-01-06T12:30")


def test_parts_in_the_table_add_up_to_the_cards(prometheus: str) -> None:
    told = billed(prometheus, *A_DAY).stdout
    rows = {line.split()[0]: line.split()[1:] for line in told.splitlines() if line}
    assert rows["team-a"] == ["960.00", "0.00", "480.00", "-", "960.00", "6.00", "2.40"]
    assert rows["team-b"] == ["180.00", "90.00", "270.00", "-", "270.00", "9.00", "3.60"]
    assert rows["(idle)"] == [*"----", "666.00", "9.00", "3.60"]
    assert rows["(unattributed)"] == [*"----", "24.00", "0.00", "0.00"]
    assert rows["(card)"] == [*"----", "1920.00", "24.00", "9.60"]
    assert "1 cards" not in told
    assert "1 card measured for 24.0 h." in told


def test_a_namespace_is_shown_by_its_pods(prometheus: str) -> None:
    told = billed(prometheus, *A_DAY, "-n", "team-b").stdout
    assert "infer-0" in told
    assert "(card)" not in told
    assert "team-a" not in told


def test_rows_of_focus_add_up_on_each_day(prometheus: str) -> None:
    """A day and a half, from half past twelve: two periods, each without what is the other's."""
    whole = billed(prometheus, "--from", "2026-01-05T12:30", "--to", "2026-01-07T00:30:00+00:00", "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(whole.stdout)))
    assert {(each["ChargePeriodStart"], each["ChargePeriodEnd"]) for each in rows} == {
        ("2026-01-05T12:30:00Z", "2026-01-06T00:00:00Z"),
        ("2026-01-06T00:00:00Z", "2026-01-07T00:00:00Z"),
        ("2026-01-07T00:00:00Z", "2026-01-07T00:30:00Z"),
    }
    for start, hours in (("2026-01-05T12:30:00Z", 11.5), ("2026-01-06T00:00:00Z", 24)):
        for meter, a_card, unit in (("memory", 80, "GiB-Hours"), ("sm", 1, "Hours"), ("energy", 0.4, "kWh")):
            parts = [
                each
                for each in rows
                if each["ChargePeriodStart"] == start
                and each["SkuId"] in {f"gpu-{meter}-{part}" for part in ("charged", "idle", "unattributed")}
            ]
            assert len(parts) == 4
            assert {each["ConsumedUnit"] for each in parts} == {unit}
            assert sum(float(each["ConsumedQuantity"]) for each in parts) == pytest.approx(a_card * hours)


def test_the_document_has_namespaces_pods_and_cards(prometheus: str) -> None:
    found = json.loads(billed(prometheus, *A_DAY, "-o", "json").stdout)
    assert found["from"] == "2026-01-05T12:30:00Z"
    assert found["namespaces"][1] == {
        "namespace": "team-b",
        "guaranteedGiBHours": 180,
        "borrowedGiBHours": 90,
        "usedGiBHours": 270,
        "chargedGiBHours": 270,
        "smHours": 9,
        "energyKWh": 3.6,
    }
    assert [each["pod"] for each in found["pods"]] == ["train-0", "infer-0"]
    (card,) = found["cards"]
    assert card["card"] == {"chargedGiBHours": 1920, "smHours": 24, "energyKWh": 9.6}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--from", "2026-02-01", "--to", "2026-02-02"), "monitoring/alerts/gpuslice.rules.yaml"),
        (("--from", "2026-02-02", "--to", "2026-02-01"), "--to must be later than --from"),
    ],
)
def test_what_cannot_be_billed_is_said(prometheus: str, words: tuple[str, ...], sentence: str) -> None:
    done = billed(prometheus, *words)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
