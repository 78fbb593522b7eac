"""`gpuslice demo` as somebody with an empty home would start it, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuslice_demo import guard
from gpuslice_demo.expected import columns, containing, exactly
from gpuslice_demo.stories import STORIES
from tests import HANG_S

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(sys.executable).parent / "gpuslice"
BUILT = [ROOT / "native/build/sim/nvidia-smi", ROOT / "native/build/lib/libgpuslice.so", PROGRAM]
needs_build = pytest.mark.skipif(
    not all(path.exists() for path in BUILT), reason="needs what `make setup` and `make native` install"
)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """A demo with nothing of our surroundings but a path to the system's programs."""
    return subprocess.Popen(
        [PROGRAM, "demo", "--dir", str(folder), *arguments],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(folder / "nowhere")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def start_below(folder: str) -> subprocess.Popen[str]:
    """A demo that makes itself a temporary folder there."""
    return subprocess.Popen(
        [PROGRAM, "demo"],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": folder},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a short name: unix sockets stand below it."""
    path = Path(f"/tmp/gpuslice-test-{os.getpid()}-{time.monotonic_ns() % 100_000}")
    path.mkdir()
    yield path
    guard.end(mark_of(path))
    subprocess.run(["rm", "-rf", path], check=True)


def mark_of(folder: Path) -> bytes:
    return f"GPUSLICE_DEMO={folder}".encode()


@needs_build
@pytest.mark.parametrize("story", list(STORIES))
def test_a_story_comes_out_as_documented(story: str, folder: Path) -> None:
    process = start(folder, "--story", story)
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, output
    steps = len(STORIES[story].steps)
    assert f"{steps} of {steps} outputs are as documented" in output
    assert guard.marked(mark_of(folder)) == []


@needs_build
def test_a_cluster_to_try_things_on_has_pods_of_every_fate_and_ends_with_ctrl_c(folder: Path) -> None:
    process = start(folder, "--keep", "--nodes", "2", "--cards", "3")
    shown = wait_for(process, "export PATH=")
    assert re.search(r"(\d+) of \1 outputs are as documented", shown), shown
    readme = (ROOT / "README.md").read_text()
    (table,) = re.findall(r"^    \$ kubectl get pod -A [^\n]*\n((?:    .*\n)+)", readme, re.MULTILINE)
    said = [line.split()[:4] for line in table.splitlines() if line.strip() != "…"]
    assert [row for row in said if row not in [line.split()[:4] for line in shown.splitlines()]] == []
    kubeconfig = re.search(r"export KUBECONFIG=(\S+)", shown)
    assert kubeconfig is not None, shown
    top = subprocess.run(
        [PROGRAM, "top", "--once", "-o", "json"],
        env={"KUBECONFIG": kubeconfig[1], "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(json.loads(top.stdout)["cards"]) == 6
    explained = subprocess.run(
        [PROGRAM, "explain", "too-large"],
        env={"KUBECONFIG": kubeconfig[1], "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    page = (ROOT / "docs/start/data-scientist.md").read_text()
    (documented,) = re.findall(r"^    \$ gpuslice explain too-large\n((?:    .*\n)+)", page, re.MULTILINE)
    assert [
        line
        for line in documented.split("\n    ")
        if line.strip() not in (*explained.stdout.splitlines(), "…")
    ] == []
    address = re.search(r"in your browser: (\S+)", shown)
    assert address is not None, shown
    deadline, found = time.monotonic() + HANG_S, {}
    while "waiting" not in found and time.monotonic() < deadline:
        with urllib.request.urlopen(f"{address[1]}api/v1/cluster", timeout=HANG_S) as answer:
            found = json.load(answer)
        time.sleep(0.05)
    assert {"idle", "train", "too-large"} <= {row["name"] for row in found["pods"]}
    assert "too-large" in {row["name"] for row in found["waiting"]}
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=HANG_S)
    assert process.returncode == 0
    assert guard.marked(mark_of(folder)) == []


@needs_build
def test_a_ctrl_c_while_it_still_loads_leaves_no_folder_behind() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        process = start_below(folder)
        deadline = time.monotonic() + HANG_S
        while not os.listdir(folder) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.03)  # more than the start of the guard takes, less than loading the rest
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=HANG_S)
        assert process.returncode == 130
        assert os.listdir(folder) == []


@needs_build
def test_a_temporary_folder_too_deep_for_sockets_is_taken_away_again(folder: Path) -> None:
    (deep := folder / ("x" * 30)).mkdir()
    output, _ = start_below(str(deep)).communicate(timeout=HANG_S)
    assert "unix sockets below it allow 46: choose another with --dir" in output
    assert os.listdir(deep) == []


def test_the_stories_have_nodes_of_their_own() -> None:
    told = subprocess.run(
        [PROGRAM, "demo", "--story", "pools", "--nodes", "3"], capture_output=True, text=True, check=False
    )
    assert told.returncode == 2
    assert "--nodes and --cards are for --keep without --story or --dra and for --empty" in told.stderr


@needs_build
def test_a_story_may_be_kept_and_a_killed_demo_leaves_nothing_running(folder: Path) -> None:
    process = start(folder, "--keep", "--story", "pools")
    shown = wait_for(process, "export PATH=")
    kubeconfig = re.search(r"export KUBECONFIG=(\S+)", shown)
    assert kubeconfig is not None, shown
    listed = subprocess.run(
        [PROGRAM.parent / "kubectl", "get", "nodes", "-o", "name"],
        env={"KUBECONFIG": kubeconfig[1], "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert listed.stdout.split() == ["node/cn-shanghai.192.168.7.157", "node/cn-shanghai.192.168.7.158"]
    assert len(guard.marked(mark_of(folder))) > 3
    process.kill()
    process.communicate(timeout=HANG_S)
    deadline = time.monotonic() + HANG_S
    while guard.marked(mark_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert guard.marked(mark_of(folder)) == []


@needs_build
def test_a_folder_too_deep_for_sockets_is_refused_with_a_sentence(folder: Path) -> None:
    process = start(folder / ("x" * 60))
    output, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 1
    assert "unix sockets below it allow 46" in output


def wait_for(process: subprocess.Popen[str], words: str) -> str:
    """What the demo printed up to and including `words`."""
    assert process.stdout is not None
    shown = ""
    for line in process.stdout:
        shown += line
        if words in line:
            return shown
    raise AssertionError(shown)


def test_an_output_fits_when_only_marks_and_lost_blanks_differ() -> None:
    documented = exactly("NAME  AGE\none   «age»\n\nend")
    assert documented.fits("NAME  AGE  \none   3m15s\n\n\nend\n")
    assert not documented.fits("NAME AGE\none   3m15s\n\nend")
    assert columns("a b «n»").fits("a     b  17  ")
    assert not columns("a b «n»").fits("a b c")
    assert containing("two\nthree").fits("one\r\ntwo\r\nthree\r\nfour")


def test_a_difference_shows_what_was_documented_and_what_was_printed() -> None:
    assert exactly("a\nb").difference("a\nc").splitlines()[-2:] == ["-b", "+c"]
