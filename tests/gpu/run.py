"""What only a real card can show: `make test-gpu`, or `python3 tests/gpu/run.py [OPTIONS] [WORD ...]`.

Needs a card, its driver and a C compiler; uses PyTorch, nvcc and nvidia-smi where they are. No network, no
package. Each case is a process of its own with a time limit. Results are written as they come: the page
docs/results/gpu-isolation.md and, where the environment variable OUT names a folder, there a copy of it and
a line of JSON a case. `--simulated` plays on the simulated driver. Words choose cases by their titles.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path[:] = [str(ROOT / "src"), str(ROOT), *(place for place in sys.path if place != str(HERE))]

from tests.gpu.driver import Card, NoDriverError, Nvml, Skip, make_findable  # noqa: E402
from tests.gpu.page import Line, write_page  # noqa: E402

PAGE = ROOT / "docs" / "results" / "gpu-isolation.md"
BUILD = Path(os.environ.get("GPUSLICE_NATIVE_BUILD", ROOT / "native" / "build"))


@dataclass(frozen=True)
class Case:
    """A title, where its function is, and how long it may take."""

    title: str
    function: str
    limit_s: float = 45


CASES = (
    Case("how the driver names us", "memory_cases.named"),
    Case("the documented story", "memory_cases.documented_story"),
    Case("the limit to the byte", "memory_cases.to_the_byte"),
    Case("every kind of allocation", "memory_cases.every_kind"),
    Case("every way to the driver", "memory_cases.every_way", 60),
    Case("counted as the driver counts", "memory_cases.books_and_driver"),
    Case("neighbours", "memory_cases.neighbours"),
    Case("two processes, one limit", "memory_cases.two_processes"),
    Case("kill -9", "memory_cases.killed"),
    Case("memory opened twice", "memory_cases.shared"),
    Case("recording beside other threads", "memory_cases.recording_beside"),
    Case("streams in turn under a limit", "order_cases.streams_in_turn"),
    Case("refused beside long work", "order_cases.refused_at_once"),
    Case("the end of a context beside launches", "order_cases.ends_of_contexts"),
    Case("a free that waits", "order_cases.frees_that_wait"),
    Case("a descriptor keeps memory", "kept_cases.descriptors"),
    Case("a dead process's descriptor", "kept_cases.orphans"),
    Case("imported memory exported again", "kept_cases.exported_again"),
    Case("a dead process's pool", "kept_cases.pool_descriptor"),
    Case("a green context", "kept_cases.green"),
    Case("arrays as the card lays them out", "kept_cases.arrays"),
    Case("a first thread that ended", "kept_cases.first_thread"),
    Case("libraries closed and opened again", "kept_cases.reopened"),
    Case("files of the driver's name tried in turn", "probing_cases.candidates"),
    Case("a program without CUDA", "probing_cases.without_cuda"),
    Case("many processes start at once", "probing_cases.starting_at_once", 120),
    Case("a forked child", "kept_cases.forked"),
    Case("limits that the driver enforces", "limit_cases.by_cgroup"),
    Case("parked and woken", "park_cases.moved", 120),
    Case("functions of this driver", "memory_cases.known_functions"),
    Case("programs built by nvcc", "program_cases.nvcc_programs", 90),
    Case("PyTorch's allocators", "program_cases.torch_memory", 120),
    Case("PyTorch's graphs", "program_cases.torch_graph", 60),
    Case("PyTorch's processes", "program_cases.torch_processes", 90),
    Case("PyTorch's start and libraries", "program_cases.torch_start", 90),
    Case("frameworks side by side", "framework_cases.side_by_side", 150),
    Case("NVIDIA's tools", "framework_cases.tools", 120),
    Case("under MPS", "framework_cases.under_mps", 60),
    Case("a share of compute", "share_cases.one_share", 90),
    Case("compute divided, capped", "share_cases.capped", 120),
    Case("compute divided, lent", "share_cases.lent", 120),
    Case("turns beside another build", "share_cases.turns", 200),
    Case("who worked, by NVML's samples", "share_cases.samples", 60),
    Case("by the card's clock, unlimited", "clock_cases.unlimited", 60),
    Case("by the card's clock, capped alone", "clock_cases.capped_alone", 60),
    Case("by the card's clock, capped", "clock_cases.capped", 90),
    Case("by the card's clock, queued and lent", "clock_cases.lent_queued", 90),
    Case("by the card's clock, waiting and lent", "clock_cases.lent_waiting", 90),
    Case("by the card's clock, many streams", "clock_cases.streams", 45),
    Case("by the card's clock, interactive", "clock_cases.interactive", 75),
    Case("by the card's clock, strangers", "clock_cases.strangers", 60),
    Case("by the card's clock, stopped in launches", "clock_cases.stalls", 75),
    Case("by the card's clock, kernels of a second", "clock_cases.long_kernels", 60),
    Case("by the card's clock, prices of launches", "clock_cases.prices", 100),
    Case("odd programs beside a share", "odd_cases.beside_odd", 270),
    Case("overhead under PyTorch", "speed_cases.overhead_torch", 180),
    Case("overhead at the driver", "speed_cases.overhead_driver", 120),
    Case("the price of a share", "speed_cases.share_price", 45),
    Case("telemetry beside nvidia-smi", "telemetry_cases.conversions", 60),
    Case("hardware counters", "telemetry_cases.counters", 60),
    Case("processes by NVML", "telemetry_cases.processes", 45),
    Case("the exporter", "telemetry_cases.exporter", 60),
    Case("gpuslice run", "program_cases.command_line", 60),
    Case("gpuslice load", "program_cases.load_program", 75),
)


# ---- one case, in its process


def play(case: Case, folder: Path, uuid: str, result: Path) -> None:
    """Plays a case here and writes its Line to `result`."""
    faulthandler.register(signal.SIGUSR1)
    from tests.gpu.stage import Seen, Stage

    nvml = Nvml()
    card = next(card for card in nvml.cards() if card.uuid == uuid)
    module, _, name = case.function.partition(".")
    settle(nvml, uuid)
    began = time.monotonic()
    try:
        seen: Seen = getattr(importlib.import_module(f"tests.gpu.{module}"), name)(Stage(folder, card, nvml))
        line = Line(case.title, "passed", seen.sentence, seen.table, seen.figures)
    except Skip as reason:
        line = Line(case.title, "skipped", str(reason))
    except Exception as error:
        traceback.print_exc()
        line = Line(case.title, "failed", f"{type(error).__name__}: {error}")
    line.took_s = round(time.monotonic() - began, 1)
    result.write_text(json.dumps(asdict(line)))


def settle(nvml: Nvml, uuid: str) -> None:
    """Until the driver has taken back what the case before held."""
    until, before = time.monotonic() + 3, -1
    while (now := nvml.used_bytes(uuid)) != before and time.monotonic() < until:
        before = now
        time.sleep(0.05)


# ---- all of them


def supervise(case: Case, folder: Path, card: Card, left_s: float) -> Line:
    """The case in a process of its own; an account of everything if it fails."""
    if left_s < 5:
        return Line(case.title, "not run", "no time was left")
    folder.mkdir(parents=True)
    result, log = folder / "result.json", folder / "case.out"
    limit_s, began = min(case.limit_s, left_s), time.monotonic()
    command = [
        sys.executable,
        str(HERE / "run.py"),
        "--play",
        case.title,
        str(folder),
        card.uuid,
        str(result),
    ]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # where it hangs, into its output
            time.sleep(0.5)
    late = process.poll() is None
    end_session(process)
    if result.exists():
        line = Line(**json.loads(result.read_text()))
    else:
        why = f"did not end within {limit_s:.0f} s" if late else f"ended with {process.returncode}, no result"
        line = Line(case.title, "failed", why, took_s=round(time.monotonic() - began, 1))
    if line.verdict == "failed":
        line.account = accounted(folder, log)
    return line


def end_session(process: subprocess.Popen[bytes]) -> None:
    """What a case started goes with it: a program left behind would hold memory of the card."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def accounted(folder: Path, log: Path) -> str:
    from tests.gpu.stage import account

    try:
        more = account(folder)
    except Exception as error:
        more = f"no account: {error!r}"
    return f"{log.read_text(errors='replace')[-4000:]}\n{more}"


NEEDED = ("lib/libgpuslice.so", "tests/worker", "tests/clocked")


def built() -> str:
    """A sentence if what the cases need was not built."""
    missing = [name for name in NEEDED if not (BUILD / name).exists()]
    return f"{BUILD} does not hold {' and '.join(missing)}" if missing else ""


def build() -> str:
    """Makes the library and the worker; a sentence when that fails and none are there from before."""
    if "GPUSLICE_NATIVE_BUILD" in os.environ:
        return built()
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    if compiler is None or shutil.which("make") is None:
        why = "there is no make" if compiler else "there is no C compiler"
    else:
        targets = [f"build/{name}" for name in NEEDED]
        command = ["make", "-C", str(ROOT / "native"), f"CC={compiler}", "WARNINGS=", *targets]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
        if done.returncode == 0:
            return ""
        why = f"make failed: {done.stdout[-1500:]}{done.stderr[-1500:]}"
    if built():
        return f"{why}, and {built()} from before"
    print(f"note: {why}; what is in native/build is used")
    return ""


def simulate(folder: Path, name: str) -> None:
    """Everything from here on meets the simulated driver.

    `H200`, `H200:3g.71gb` for a part, `H200@615` with that branch of the driver.
    """
    from simcluster import gpu
    from simcluster.gpu_creation import CardSpec

    name, _, driver = name.partition("@")
    profile, _, instance = name.partition(":")
    spec = CardSpec(profile, mig=[instance] if instance else [])
    cuda = "" if driver else "13.0"
    state = gpu.create(
        folder / "cards", [spec], driver=driver, cuda_version=cuda, seed="test-gpu", kernel_us=5
    )
    os.environ.update(gpu.environment(state, BUILD / "sim", os.environ.get("NVIDIA_VISIBLE_DEVICES")))


def read_ahead() -> subprocess.Popen[bytes] | None:
    """PyTorch's files come from a cold disk while the first cases run, which do not need them."""
    from tests.gpu.stage import torch_python

    try:
        command = [torch_python(), "-c", "import torch"]
    except Skip:
        return None
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def chosen(words: list[str], without: list[str]) -> list[Case]:
    def named(case: Case, by: list[str]) -> bool:
        return any(word.lower() in case.title.lower() for word in by)

    return [case for case in CASES if (not words or named(case, words)) and not named(case, without)]


def report(lines: list[Line], card: Card, arguments: argparse.Namespace) -> None:
    """The page, after every case: nothing is lost if we are ended."""
    out = os.environ.get("OUT", "")
    folder = [Path(out)] if out and Path(out).is_dir() else []
    if lines and folder:
        with (folder[0] / "gpu-isolation.jsonl").open("a") as file:
            file.write(json.dumps(asdict(lines[-1])) + "\n")
    for page in (arguments.page, *(each / "gpu-isolation.md" for each in folder)):
        write_page(page, card, lines)


def tell(line: Line) -> None:
    print(f"{line.verdict:8}{line.took_s:6.1f} s  {line.title}: {line.sentence}", flush=True)
    if line.table:
        print(line.table, flush=True)
    if line.account:
        print(f"---- account of {line.title}\n{line.account}\n----", flush=True)


def arguments_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="only cases whose titles contain one of them"
    )
    parser.add_argument("--without", action="append", default=[], metavar="WORD", help="none of these")
    parser.add_argument("--simulated", action="store_true", help="on the simulated driver")
    parser.add_argument(
        "--card", default="H200", help="which card to simulate, PROFILE or PROFILE:MIG [H200]"
    )
    parser.add_argument(
        "--within", type=float, default=1500, metavar="SECONDS", help="for all of them [1500]"
    )
    parser.add_argument("--page", type=Path, help="where the page is written")
    parser.add_argument("--play", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    whole = not (given.simulated or given.words or given.without)
    given.page = given.page or (PAGE if whole else BUILD / PAGE.name)  # the committed page is a whole run's
    return given


def main() -> int:
    arguments = arguments_given()
    if arguments.play:
        title, folder, uuid, result = arguments.play
        case = next(case for case in CASES if case.title == title)
        play(case, Path(folder), uuid, Path(result))
        return 0
    began = time.monotonic()
    problem = built() if arguments.simulated else build()
    with tempfile.TemporaryDirectory(prefix="test-gpu-") as name:
        if arguments.simulated:
            simulate(Path(name), arguments.card)
        else:
            make_findable()
        try:
            card = Nvml().cards()[0]
        except (NoDriverError, IndexError) as error:
            problem = problem or f"no card here: {error}; --simulated plays without one"
        if problem:
            print(f"test-gpu cannot begin: {problem}", file=sys.stderr)
            return 2
        return play_all(arguments, Path(name), card, began)


def play_all(arguments: argparse.Namespace, folder: Path, card: Card, began: float) -> int:
    print(f"{card.name}, {card.memory_mib} MiB, driver {card.driver}, {card.uuid}", flush=True)
    reading = read_ahead()
    lines: list[Line] = []
    for number, case in enumerate(chosen(arguments.words, arguments.without)):
        left_s = arguments.within - (time.monotonic() - began)
        lines.append(supervise(case, folder / f"{number:02}", card, left_s))
        tell(lines[-1])
        report(lines, card, arguments)
    if reading is not None:
        reading.kill()
        reading.wait()
    counts = {verdict: sum(line.verdict == verdict for line in lines) for verdict in ("passed", "failed")}
    rest = len(lines) - sum(counts.values())
    print(f"written: {arguments.page}")
    print(f"{counts['passed']} passed, {counts['failed']} failed, {rest} skipped")
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main())
