"""`make test-gpu` against the simulated driver: what is played on a rented card must not rot in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import HANG_S
from tests.integration.isolation_rig import BUILD

RUN = Path(__file__).resolve().parents[1] / "gpu" / "run.py"


def play(
    folder: Path, *words: str, build: Path = BUILD, card: str = "", **environment: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, Any]]]:
    command = [sys.executable, str(RUN), "--simulated", "--page", str(folder / "page.md")]
    done = subprocess.run(
        [*command, *(["--card", card] if card else []), *words],
        env={**os.environ, "OUT": str(folder), "GPUSLICE_NATIVE_BUILD": str(build), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    written = folder / "gpu-isolation.jsonl"
    lines = [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []
    return done, {line["title"]: line for line in lines}


def test_every_case_passes_or_says_why_not(tmp_path: Path) -> None:
    done, lines = play(tmp_path, "--without", "load")
    assert done.returncode == 0, done.stdout + done.stderr
    skipped = {title for title, line in lines.items() if line["verdict"] == "skipped"}
    assert {line["verdict"] for line in lines.values()} == {"passed", "skipped"}
    assert all(lines[title]["sentence"] for title in skipped)
    assert skipped >= {"PyTorch's allocators", "programs built by nvcc"}
    played = {"the documented story", "every kind of allocation", "a share of compute", "hardware counters"}
    assert not skipped & played
    page = (tmp_path / "page.md").read_text()
    assert all(f"| {title} | {line['verdict']} |" in page for title, line in lines.items())
    assert (tmp_path / "gpu-isolation.md").read_text() == page


def test_the_limits_of_a_new_driver_are_tried(tmp_path: Path) -> None:
    done, lines = play(tmp_path, "limits that", card="H200@615")
    line = lines["limits that the driver enforces"]
    if "cgroups of version 2" not in line["sentence"]:  # and root, which this user is not
        assert line["verdict"] == "passed", done.stdout
        assert done.returncode == 0


def test_the_load_is_judged_to_its_end(tmp_path: Path) -> None:
    """On a busy machine the figures may part; that they are compared is what counts here."""
    _, lines = play(tmp_path, "gpuslice load")
    line = lines["gpuslice load"]
    assert line["verdict"] == "passed" or "parted at" in line["sentence"], line["account"]
    assert "DCGM_FI_PROF_GR_ENGINE_ACTIVE" in line["sentence"]


def test_in_a_pid_namespace_the_cards_growth_stands_in_for_the_process_list(tmp_path: Path) -> None:
    done, lines = play(tmp_path, "counted", "processes by", NVIDIA_VISIBLE_DEVICES="all")
    assert done.returncode == 0, done.stdout
    assert "0 MiB apart, by the card's growth" in lines["counted as the driver counts"]["sentence"]
    assert "NVML lists no process here" in lines["processes by NVML"]["sentence"]


def test_a_device_of_a_divided_card_is_played_like_a_card(tmp_path: Path) -> None:
    words = ("documented", "byte", "every kind", "kill", "gpuslice run", "counters")
    done, lines = play(tmp_path, "--card", "A100-SXM4-80GB:3g.40gb", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MIG 3g.40gb, 40192 MiB" in done.stdout
    assert {title for title, line in lines.items() if line["verdict"] == "skipped"} == {"hardware counters"}


def test_a_case_that_fails_leaves_an_account_and_the_others_go_on(tmp_path: Path) -> None:
    """With a library that limits nothing."""
    build = tmp_path / "build"
    (build / "lib").mkdir(parents=True)
    for name in ("sim", "tests"):
        (build / name).symlink_to(BUILD / name)
    empty = ["cc", "-shared", "-x", "c", "-o", str(build / "lib/libgpuslice.so"), "/dev/null"]
    subprocess.run(empty, check=True)
    done, lines = play(tmp_path, "documented", "functions", build=build)
    assert done.returncode == 1
    assert [line["verdict"] for line in lines.values()] == ["failed", "skipped"]
    told = lines["the documented story"]["account"]
    assert "Traceback" in told
    assert "box app: 'gpuslice 1" in told
    assert "processes by NVML" in told
    assert told in done.stdout


def test_without_a_card_it_says_what_was_looked_for(tmp_path: Path) -> None:
    command = [sys.executable, str(RUN), "--page", str(tmp_path / "page.md")]
    environment = {**os.environ, "GPUSLICE_NATIVE_BUILD": str(BUILD)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert done.returncode == 2
    assert "test-gpu cannot begin: no card here: libnvidia-ml.so.1 is neither" in done.stderr
