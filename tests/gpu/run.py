"""What only a real card can show: `make test-gpu`. Needs a card, PyTorch, nvcc and gcc; no network.

Runs the stories of the documentation on the card, compares what the library counts with what the driver says,
and measures what the library costs, with and without it in turns. Writes docs/results/gpu-isolation.md.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(ROOT / "src")]

from gpuslice.adapters.region.limits import CardLimit, write_limits  # noqa: E402
from gpuslice.adapters.region.reader import CardUsage, prepare_region, read_region  # noqa: E402
from gpuslice.core.units import card_units, limit_mib  # noqa: E402

MIB = 1 << 20
BUILD = ROOT / "native" / "build"
PAGE = ROOT / "docs" / "results" / "gpu-isolation.md"
ROUNDS = 3
AIM = 0.01


@dataclass(frozen=True)
class GpuCard:
    """The card the stories are played on."""

    uuid: str
    name: str
    memory_mib: int
    driver: str


@dataclass
class Report:
    """What was found: one line a story, and the figures."""

    lines: list[tuple[str, str, str]] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)

    def failures(self) -> int:
        return sum(verdict == "failed" for _, verdict, _ in self.lines)


class Box:
    """A container's files in a folder."""

    def __init__(self, folder: Path, card: GpuCard, memory_mib: int, share: int | None = None) -> None:
        self.folder = folder
        for part in ("usr/lib", "etc/gpuslice", "var/lib/gpuslice"):
            (folder / part).mkdir(parents=True)
        (folder / "usr/lib/gpuslice").symlink_to(BUILD / "lib")
        write_limits(folder / "etc/gpuslice/limits", [CardLimit(card.uuid, memory_mib * MIB, share)])
        prepare_region(folder / "var/lib/gpuslice/region")
        preload = str(folder / "usr/lib/gpuslice/libgpuslice.so")
        self.environment = {**os.environ, "LD_PRELOAD": preload, "CUDA_VISIBLE_DEVICES": card.uuid}

    def usage(self) -> CardUsage:
        reading = read_region(self.folder / "var/lib/gpuslice/region")
        if reading is None:
            raise AssertionError("nobody has opened the region: the library was not in the program")
        return reading.cards[0]

    def run(self, *command: str, timeout_s: float = 300) -> str:
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        if done.returncode:
            raise AssertionError(f"{command[0]} ended with {done.returncode}: {done.stderr[-800:]}")
        return done.stdout


class Worker:
    """The tests' worker program, on the real driver."""

    def __init__(self, box: Box, way: str = "dlsym", version: int = 12020) -> None:
        self.process = subprocess.Popen(
            [str(BUILD / "tests/worker"), way, str(version)],
            env=box.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.line()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.line()

    def ok(self, command: str) -> list[int]:
        answer = self.ask(command).split()
        if answer[:1] != ["ok"]:
            raise AssertionError(f"{command}: {' '.join(answer)}")
        return [int(word) for word in answer[1:]]

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def smi(*fields: str, of: str = "gpu") -> list[list[str]]:
    query = ["nvidia-smi", f"--query-{of}={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=True)
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def find_card() -> GpuCard:
    uuid, name, memory, driver = smi("uuid", "name", "memory.total", "driver_version")[0]
    return GpuCard(uuid, name, int(memory), driver)


def share_mib(card: GpuCard, units: int) -> int:
    return limit_mib(card.memory_mib, units, card_units(card.memory_mib))


def by_driver_mib(pid: int) -> int | None:
    """The driver's figure for one process; None where a PID namespace hides it."""
    found = {int(number): memory for number, memory in smi("pid", "used_memory", of="compute-apps")}
    memory = found.get(pid)
    return int(memory) if memory is not None and memory.isdigit() else None


# ---- stories: each returns a sentence, or fails an assertion


def seeds_story(folder: Path, card: GpuCard) -> str:
    """4 units: 3 GiB fit, nvidia-smi shows used and limit, another 1 GiB is refused, the program goes on."""
    limit = share_mib(card, 4)
    box = Box(folder, card, limit)
    with Worker(box) as worker:
        worker.ok("start 0")
        assert worker.ok("total 0") == [limit * MIB]
        worker.ok(f"alloc 0 plain {(limit - 1200) * MIB}")
        shown = box.run("nvidia-smi")
        used = box.usage().used_bytes // MIB
        assert f"{used}MiB / {limit:>6}MiB".replace(" ", "") in shown.replace(" ", ""), shown
        assert worker.ask(f"alloc 1 plain {1200 * MIB}") == "error 2"
        worker.ok(f"alloc 2 plain {16 * MIB}")
    return f"nvidia-smi in the container showed {used}MiB / {limit}MiB; the next 1200 MiB were refused"


def to_the_byte(folder: Path, card: GpuCard) -> str:
    """The last page fits, and not one byte more."""
    box = Box(folder, card, 4096)
    with Worker(box) as worker:
        worker.ok("start 0")
        left = 4096 * MIB - box.usage().used_bytes
        whole = left // (2 * MIB) * 2 * MIB
        worker.ok(f"alloc 0 plain {whole}")
        assert worker.ask(f"alloc 1 plain {2 * MIB}") == "error 2"
        assert worker.ok("info")[0] < 2 * MIB
        worker.ok("free 0")
        worker.ok(f"alloc 0 plain {whole}")
    return f"{whole} bytes fitted beside the context, {2 * MIB} more did not; freed memory could be had again"


def every_kind(folder: Path, card: GpuCard) -> str:
    """Each kind of allocation is refused past the limit, and given back when it is freed."""
    box = Box(folder, card, 3072)
    kinds = (
        "plain",
        "pitch",
        "managed",
        "async",
        "pool",
        "physical",
        "mapped",
        "array",
        "array3d",
        "mipmap",
        "graph",
    )
    with Worker(box) as worker:
        worker.ok("start 0")
        worker.ok("sync")
        for kind in kinds:
            worker.ok(f"alloc 0 {kind} {128 * MIB}")
            held = worker.ask(f"alloc 1 {kind} {4096 * MIB}")
            assert held == "error 2", f"{kind}: {held}"
            worker.ok("free 0")
            if kind == "pool":
                worker.ok("sync")
                worker.ok("trim")
            worker.ok("sync")
        left = box.usage().used_bytes
        worker.ok("info")
    return f"{', '.join(kinds)}: all refused past the limit; {left // MIB} MiB in use at the end"


def books_and_driver(folder: Path, card: GpuCard) -> str:
    """What the library counts for a process is what the driver says."""
    box = Box(folder, card, 8192)
    gaps = []
    with Worker(box) as worker:
        worker.ok("start 0")
        for number, (kind, size) in enumerate(
            (("plain", 1000), ("async", 512), ("mapped", 256), ("array", 64))
        ):
            worker.ok(f"alloc {number} {kind} {size * MIB}")
            worker.ok("sync")
            driver = by_driver_mib(worker.process.pid)
            if driver is None:
                return "skipped: the driver does not show this process by its pid here"
            gaps.append(f"{kind}: {box.usage().used_bytes // MIB} counted, {driver} by the driver")
            assert abs(box.usage().used_bytes // MIB - driver) <= 64, gaps[-1]
        own = box.usage().processes[0].own_bytes // MIB
    return f"{'; '.join(gaps)} (MiB); a context took {own} MiB"


def neighbours(folder: Path, card: GpuCard) -> str:
    """Two containers on one card: one runs into its limit again and again, the other never notices."""
    greedy, quiet = Box(folder / "greedy", card, 3072), Box(folder / "quiet", card, 6144)
    with Worker(greedy) as one, Worker(quiet) as two:
        one.ok("start 0")
        two.ok("start 0")
        for _ in range(50):
            assert one.ask(f"alloc 0 plain {8192 * MIB}") == "error 2"
        two.ok(f"alloc 0 plain {5000 * MIB}")
    return f"{greedy.usage().refused} refusals beside an allocation of 5000 MiB that was granted"


def killed(folder: Path, card: GpuCard) -> str:
    """kill -9 returns a process's memory to its container."""
    box = Box(folder, card, 4096)
    with Worker(box) as survivor:
        survivor.ok("start 0")
        with Worker(box) as victim:
            victim.ok("start 0")
            victim.ok(f"alloc 0 plain {1500 * MIB}")
            assert survivor.ask(f"alloc 0 plain {2000 * MIB}") == "error 2"
        deadline = time.monotonic() + 20
        while survivor.ask(f"alloc 0 plain {2000 * MIB}") != "ok":
            assert time.monotonic() < deadline, "not returned within 20 s"
            time.sleep(0.05)
    return "2000 MiB that did not fit beside the victim fitted after its death"


def nvcc_program(folder: Path, card: GpuCard) -> str:
    """A program with the static CUDA runtime, unchanged."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    if not Path(nvcc).exists():
        return "skipped: no nvcc"
    folder.mkdir(parents=True)
    built = []
    for streams in ("legacy", "per-thread"):
        program = folder / f"program-{streams}"
        command = [nvcc, f"--default-stream={streams}", "-o", str(program), str(HERE / "program.cu")]
        subprocess.run(command, check=True, capture_output=True)
        told = Box(folder / streams, card, 4096).run(str(program)).split("\n")[:5]
        assert told == ["total 4096 property 4096", "half 0", "whole 2", "async 2", "work 1000"], told
        built.append(streams)
    return f"{' and '.join(built)} streams: saw 4096 MiB, got half, was refused the whole, computed rightly"


def torch_case(box: Box | None, case: str, card: GpuCard) -> dict[str, float]:
    plain = {**os.environ, "CUDA_VISIBLE_DEVICES": card.uuid}
    done = subprocess.run(
        [sys.executable, str(HERE / "torch_cases.py"), case],
        env=box.environment if box else plain,
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-800:]
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def torch_memory(folder: Path, card: GpuCard) -> str:
    """PyTorch is told its share, is refused past it and goes on."""
    found = torch_case(Box(folder, card, 8192), "memory", card)
    assert found["total_mib"] == found["property_mib"] == 8192, found
    assert found["refused"], found
    assert found["went_on"], found
    assert found["got_mib"] <= 8192, found
    told = f"told {found['total_mib']} MiB, free {found['free_mib']} at the start"
    return f"{told}; got {found['got_mib']}, then OutOfMemoryError, and went on"


def compute_share(folder: Path, card: GpuCard) -> str:
    """A share of 30 % gives about 30 % of the work."""
    whole = torch_case(Box(folder / "whole", card, 8192), "busy", card)["products_per_second"]
    box = Box(folder / "part", card, 8192, 30)
    part = torch_case(box, "busy", card)["products_per_second"]
    percent = 100 * part / whole
    assert 22 <= percent <= 38, f"{percent:.1f} %"
    waited = box.usage().throttled_ns / 1e9
    return f"{percent:.1f} % of the work of an unlimited run; launches waited {waited:.1f} s of 6"


STORIES: tuple[tuple[str, Callable[[Path, GpuCard], str]], ...] = (
    ("the documented story", seeds_story),
    ("the limit to the byte", to_the_byte),
    ("every kind of allocation", every_kind),
    ("counted as the driver counts", books_and_driver),
    ("neighbours", neighbours),
    ("kill -9", killed),
    ("programs built by nvcc", nvcc_program),
    ("PyTorch", torch_memory),
    ("a share of compute", compute_share),
)


def overhead(folder: Path, card: GpuCard, report: Report) -> None:
    """Seconds with the library over seconds without it, in turns."""
    box = Box(folder, card, card.memory_mib)
    bare: dict[str, list[float]] = {}
    held: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for target, where in ((bare, None), (held, box)):
            for name, value in torch_case(where, "speed", card).items():
                target.setdefault(name, []).append(value)
    rows = ["| work | without | with | ratio |", "| --- | --- | --- | --- |"]
    slow = []
    for name, without_all in bare.items():
        without, with_library = min(without_all), min(held[name])
        ratio = with_library / without
        spread = statistics.pstdev(without_all) / without
        rows.append(
            f"| {name} | {without * 1e6:.2f} µs | {with_library * 1e6:.2f} µs"
            f" | {ratio:.4f} (± {spread:.3f}) |"
        )
        if ratio > 1 + AIM and ratio > 1 + 2 * spread:
            slow.append(f"{name} {ratio:.3f}")
    report.tables.append("\n".join(rows))
    verdict = f"beyond {1 + AIM}: {', '.join(slow)}" if slow else f"all within {1 + AIM}, or within the noise"
    report.lines.append(("overhead", "passed", verdict))


def play(report: Report, name: str, story: Callable[[], str]) -> None:
    try:
        sentence = story()
        verdict = "skipped" if sentence.startswith("skipped") else "passed"
    except Exception as error:
        traceback.print_exc()
        sentence, verdict = f"{type(error).__name__}: {error}"[:400], "failed"
    report.lines.append((name, verdict, sentence))
    print(f"{verdict:8} {name}: {sentence}", flush=True)


def write_page(card: GpuCard, report: Report) -> None:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    today = time.strftime("%Y-%m-%d", time.gmtime())
    stories = [
        (name, verdict, seen.replace("|", "/").replace("\n", " ")) for name, verdict, seen in report.lines
    ]
    lines = [
        "# Isolation on a real card",
        "",
        f"Written by `make test-gpu` on {today}, commit {commit or 'unknown'}.",
        "",
        f"- card: {card.name}, {card.memory_mib} MiB; driver {card.driver}",
        f"- machine: {platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "- command: `make test-gpu`",
        "",
        "| story | verdict | what was seen |",
        "| --- | --- | --- |",
        *(f"| {name} | {verdict} | {seen} |" for name, verdict, seen in stories),
        "",
        "Overhead: best of the rounds, with and without the library in turns; the aim is a ratio of 1.01.",
        "",
        *report.tables,
        "",
    ]
    target = Path(os.environ.get("GPUSLICE_GPU_PAGE", PAGE))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("\n".join(lines))
    print(f"written: {target}")


def main() -> int:
    if shutil.which("nvidia-smi") is None:
        print("no nvidia-smi: this machine has no NVIDIA driver", file=sys.stderr)
        return 2
    card, report = find_card(), Report()
    only = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        for number, (title, story) in enumerate(STORIES):
            if not only or any(word in title for word in only):
                play(report, title, lambda story=story, number=number: story(Path(name) / str(number), card))  # type: ignore[misc]
        if not only or "overhead" in only:
            try:
                overhead(Path(name) / "overhead", card, report)
                print(report.lines[-1], *report.tables, sep="\n")
            except Exception as error:
                report.lines.append(("overhead", "failed", str(error)[:400]))
                print(report.lines[-1])
    write_page(card, report)
    return 1 if report.failures() else 0


if __name__ == "__main__":
    sys.exit(main())
