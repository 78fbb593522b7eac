"""What the person on call reads: each alert as a real Prometheus words it, of series that make it fire."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from monitoring.build import ROOT, RULES
from monitoring.cases import CASES
from monitoring.rules import ALERTS

from gpuslice.apps.exporter import catalogue as c
from gpuslice_demo.ports import free_port
from tests import HANG_S
from tests.tools import find

OF_ALL = {
    "GpuExtenderAskedInVain",
    "GpuExtenderSilent",
    "GpuWebhookSilent",
    "GpuExtenderSampled",
    "GpuSchedulerSilent",
}  # of no one node
_STEPS = re.compile(r"(?P<first>_|-?[\d.]+)(?P<by>[+-][\d.]+)?(?:x(?P<times>\d+))?")


def samples(notation: str, end_s: int) -> Iterator[tuple[int, float]]:
    """Time and value of promtool's notation, one a minute, the last at `end_s`."""
    values: list[float | None] = []
    for part in notation.split():
        found = _STEPS.fullmatch(part)
        assert found is not None, part
        first = None if found["first"] == "_" else float(found["first"])
        times, by = int(found["times"] or 0), float(found["by"] or 0)
        # "_x3" is three gaps, "1x3" is one and three more
        count = times if first is None else times + 1
        values += [None if first is None else first + by * step for step in range(count)]
    for minute, value in enumerate(reversed(values)):
        if value is not None:
            yield end_s - 60 * minute, value


def recorded(now_s: int) -> str:
    """All series that make alerts fire, in OpenMetrics with times."""
    lines: dict[str, list[str]] = {}
    for case, (fires, _) in CASES.items():
        for plain, notation in fires.items():
            name, _, labels = plain.partition("{")
            series = (
                f'{name}{{cluster="{case}",{labels}'  # cases have the same card and pod, with other values
            )
            told = [
                (at, now_s - 300 if name == c.XID_LAST.name else value)
                for at, value in samples(notation, now_s)
            ]
            lines.setdefault(name, []).extend(f"{series} {value} {at}" for at, value in sorted(told))
    families = ["\n".join([f"# TYPE {name} unknown", *each]) for name, each in lines.items()]
    return "\n".join([*families, "# EOF\n"])


@contextmanager
def prometheus(folder: Path, now_s: int) -> Iterator[str]:
    (folder / "series").write_text(recorded(now_s))
    backfill = [str(find("promtool")), "tsdb", "create-blocks-from", "openmetrics"]
    places = [str(folder / "series"), str(folder / "tsdb")]
    subprocess.run([*backfill, *places], check=True, capture_output=True)
    config = {"global": {"evaluation_interval": "1s"}, "rule_files": [str(ROOT / RULES)]}
    (folder / "prometheus.yaml").write_text(json.dumps(config))
    port = free_port()
    command = [
        str(find("prometheus")),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def alerts(url: str) -> dict[str, dict[str, Any]]:
    """By name, once all are there; some only pend: they are worded all the same."""
    deadline = time.monotonic() + HANG_S
    wanted = {alert.name for alert in ALERTS}
    found: dict[str, dict[str, Any]] = {}
    while wanted - found.keys():
        assert time.monotonic() < deadline, f"never seen: {wanted - found.keys()}"
        time.sleep(0.3)
        try:
            with urllib.request.urlopen(f"{url}/api/v1/alerts") as answer:
                listed = json.load(answer)["data"]["alerts"]
        except OSError:
            continue
        found |= {each["labels"]["alertname"]: each for each in listed}
    return found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    find("promtool")
    with prometheus(tmp_path_factory.mktemp("alerts"), int(time.time())) as url:
        return alerts(url)


@pytest.mark.parametrize("name", [alert.name for alert in ALERTS])
def test_an_alert_names_what_it_is_about_and_a_first_step(name: str, told: dict[str, dict[str, Any]]) -> None:
    labels, texts = told[name]["labels"], told[name]["annotations"]
    for text in (texts["summary"], texts["description"]):
        assert not re.search(r"<no value>|<error|\{\{| {2}| of [.,:]|=\W? |%!", text), text
    for label in ("node", "gpu", "namespace", "pod", "container"):
        assert labels.get(label, "") in texts["summary"], f"{label}: {texts['summary']}"
    where = {"n1", "10.0.0.1:9400", "gpuslice-webhook-0"}
    assert name in OF_ALL or any(each in texts["summary"] for each in where)
    assert len(texts["description"]) > 60
