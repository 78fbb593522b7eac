"""Limits on a real card: what is refused, what is told, and whether the driver counts as the library does."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

from tests.gpu.driver import FOLDERS, Skip
from tests.gpu.stage import MIB, ROOT, SIMULATED, Box, Seen, Stage, Worker, in_host_namespace

KINDS = (
    *("plain", "pitch", "managed", "async", "pool", "physical"),
    *("mapped", "array", "array3d", "mipmap", "graph"),
)
WAYS = (
    *(("dlsym", 12020), ("dlvsym", 12020), ("proc", 11030), ("proc2", 12020)),
    *(("proc2", 13000), ("proc2-own", 12020)),
)
NAMES = (("cuMemAlloc", 0), ("cuMemAllocAsync", 2), ("cuMemCreate", 0), ("cuMemAlloc_v2", 0))
OUT_OF_MEMORY = "error 2"
TAKES = re.compile(r"Alloc|Create|Import|Map|Retain|Instantiate")
GRAPHICS = re.compile(r"cu(GL|EGL|VDPAU|D3D|Graphics)")
"""In headers of their own; what they register was taken by another library."""
HELD = re.compile(r"(\d+)MiB\s*/\s*(\d+)MiB")
PROCESS_ROW = re.compile(r"^\|.*\s\d+MiB\s*\|$")


def documented_story(stage: Stage) -> Seen:
    """4 units: most of it fits, nvidia-smi shows used and limit, another 1200 MiB are refused."""
    limit = stage.units_mib(4)
    box = stage.box("app", limit)
    with Worker(box) as worker:
        worker.ok("start 0")
        assert worker.ok("total 0") == [limit * MIB], "cuDeviceTotalMem is not the limit"
        worker.ok(f"alloc 0 plain {(limit - 1200) * MIB}")
        used, shown = box.used_mib(), None if stage.card.divided else _smi_in(box, worker.pid)
        if shown is not None:
            assert abs(shown[0] - used) <= 1, f"nvidia-smi shows {shown}, counted {used}"
            assert shown[1] == limit, f"nvidia-smi shows {shown}, the limit is {limit}"
        assert worker.ask(f"alloc 1 plain {1200 * MIB}") == OUT_OF_MEMORY
        worker.ok(f"alloc 2 plain {16 * MIB}")
        free, total = worker.ok("info")
        assert total == limit * MIB
        assert free <= (limit - used) * MIB, f"{free} bytes told to be free, {limit - used} MiB are"
    table = f"{shown[0]}MiB / {shown[1]}MiB" if shown else "nothing that was looked at"
    return Seen(f"nvidia-smi in the container showed {table}; the next 1200 MiB were refused, 16 MiB granted")


def _smi_in(box: Box, pid: int) -> tuple[int, int] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    table = box.run("nvidia-smi")
    found = HELD.search(table)
    assert found, f"no memory in nvidia-smi's table:\n{table}"
    rows = [line for line in table.partition("Processes:")[2].splitlines() if PROCESS_ROW.match(line)]
    # By a way of its own nvidia-smi finds processes that its PID namespace shows; never a neighbour's.
    assert all(str(pid) in row.split() for row in rows), f"nvidia-smi lists others than {pid}: {rows}"
    return int(found[1]), int(found[2])


def to_the_byte(stage: Stage) -> Seen:
    """The last page fits, and not one more."""
    box = stage.box("app", 4096)
    with Worker(box) as worker:
        worker.ok("start 0")
        left = 4096 * MIB - box.usage().used_bytes
        whole = left // (2 * MIB) * 2 * MIB
        worker.ok(f"alloc 0 plain {whole}")
        assert worker.ask(f"alloc 1 plain {2 * MIB}") == OUT_OF_MEMORY
        free = worker.ok("info")[0]
        assert free < 2 * MIB, f"{free} bytes told to be free"
        worker.ok("free 0")
        worker.ok(f"alloc 0 plain {whole}")
        own = box.usage().processes[0].own_bytes // MIB
    text = f"{whole} bytes fitted beside the context ({own} MiB), {2 * MIB} more did not"
    return Seen(f"{text}; freed memory came back", figures={"context_mib": own})


def every_kind(stage: Stage) -> Seen:
    """Each kind of allocation is refused past the limit, and given back when it is freed."""
    box = stage.box("app", 3072)
    odd = []
    with Worker(box) as worker:
        worker.ok("start 0")
        worker.ok("sync")
        start = box.used_mib()
        for kind in KINDS:
            odd += [f"{kind}: {what}" for what in _try(worker, kind)]
        worker.ok("info")
        kept = box.used_mib() - start
    assert not odd, "; ".join(odd)
    assert kept <= 256, f"{kept} MiB stayed behind"
    return Seen(f"{', '.join(KINDS)}: all refused past the limit; {kept} MiB stayed in pools at the end")


def _try(worker: Worker, kind: str) -> list[str]:
    odd = []
    granted = worker.ask(f"alloc 0 {kind} {128 * MIB}")
    if granted != "ok":
        odd.append(f"128 MiB answered {granted}")
    refused = worker.ask(f"alloc 1 {kind} {4096 * MIB}")
    if refused != OUT_OF_MEMORY:
        odd.append(f"4096 MiB answered {refused}")
    if granted == "ok" and (answer := worker.ask("free 0")) != "ok":
        odd.append(f"free answered {answer}")
    worker.ask("sync")
    if kind == "pool":
        worker.ask("trim")
    return odd


def every_way(stage: Stage) -> Seen:
    """However a program comes to the driver's functions, the limit is in the way."""
    known = stage.nvml.cuda_version()
    ways = [(way, version) for way, version in WAYS if version <= known]
    for way, version in ways:
        box = stage.box(f"{way}-{version}", 2048)
        with Worker(box, way, version) as worker:
            worker.ok("start 0")
            worker.ok(f"alloc 0 plain {256 * MIB}")
            for kind in ("plain", "async", "physical"):
                answer = worker.ask(f"alloc 1 {kind} {4096 * MIB}")
                accepted = {OUT_OF_MEMORY} | ({"absent"} if version < 11020 else set())
                assert answer in accepted, f"{way} {version}, {kind}: {answer}"
    by_name = _led_to(stage.box("names", 2048), min(known, 12020))
    names = ", ".join(f"{way} ({version})" for way, version in ways)
    return Seen(f"{names}: all refused past the limit; cuGetProcAddress finds {by_name} in the library")


def _led_to(box: Box, version: int) -> str:
    """The names that this driver answers to; each must lead to us."""
    found = []
    with Worker(box) as worker:
        worker.ok("start 0")
        for name, flags in NAMES:
            library = worker.ask(f"proc {name} {version} {flags}").split()[3]
            assert library == "-" or "libgpuslice" in library, f"{name} with flags {flags} leads to {library}"
            found += [name] if library != "-" else []
    return ", ".join(found)


def named(stage: Stage) -> Seen:
    """How NVML speaks of a process here, on which it depends how a context's own memory is counted."""
    box = stage.box("app", 8192)
    before = stage.nvml.used_bytes(stage.card.uuid)
    strangers = set(stage.nvml.processes(stage.card.uuid))
    with Worker(box) as worker:
        worker.ok("start 0")
        worker.ok("sync")
        listed = stage.nvml.processes(stage.card.uuid)
        grown = (stage.nvml.used_bytes(stage.card.uuid) - before) // MIB
        own = box.usage().processes[0].own_bytes // MIB
        how, figure = _how_named(worker.pid, listed, strangers)
    where = "the host's PID namespace" if in_host_namespace() else "a PID namespace of its own"
    text = f"in {where} {how}; the card lost {grown} MiB to a context, the library counts {own} MiB"
    low, high = min(grown, figure or grown), max(grown, figure or grown)
    assert low - 64 <= own <= high + 64, text
    return Seen(text, figures={"grown_mib": grown, "own_mib": own, "figure_mib": figure})


def _how_named(pid: int, listed: dict[int, int | None], strangers: set[int]) -> tuple[str, int | None]:
    new = {number: used for number, used in listed.items() if number not in strangers}
    if pid in new:
        used = new[pid]
        told = "no figure" if used is None else f"{used // MIB} MiB"
        return f"NVML lists a process by its own number, with {told}", None if used is None else used // MIB
    if new:
        return f"NVML lists a process by another number ({new}, it is {pid})", None
    return "NVML lists no process of ours", None


def recording_beside(stage: Stage) -> Seen:
    """A stream is recorded while another thread allocates and waits: as without the library."""
    box, found = stage.box("app", 4096), {}
    for bare in (True, False):
        with Worker(box, bare=bare) as worker:
            worker.ok("start 0")
            worker.ok(f"alloc 0 async {64 * MIB}")
            worker.ok("free 0")
            ended, granted, refused, odd = worker.ok(f"capture-beside {300 * MIB}")
            found[bare] = ended, granted, odd
    assert found[True] == found[False], f"without the library {found[True]}, with it {found[False]}"
    assert SIMULATED or refused, "1 TiB was granted"
    ended, granted, odd = found[False]
    text = "ended well" if not ended else f"ended with {ended}, as it does without the library"
    return Seen(f"the recording {text}; the other thread's allocation answered {granted}, its waits {odd}")


def shared(stage: Stage) -> Seen:
    """Memory that two processes have open counts once, also after the driver was asked again."""
    box = stage.box("app", 6144)
    with Worker(box) as maker, Worker(box) as opener:
        maker.ok("start 0")
        opener.ok("start 0")
        maker.ok(f"alloc 0 plain {2000 * MIB}")
        answer = maker.ask("export 0").split()
        if answer[0] != "ok":
            raise Skip(f"no legacy IPC here: {' '.join(answer)}")
        before, figure = box.used_mib(), stage.nvml.processes(stage.card.uuid).get(opener.pid)
        imported = opener.ask(f"import 0 {answer[1]}")
        if imported != "ok":
            raise Skip(f"opening memory of another process answered {imported}")
        for _ in range(4):
            opener.ok(f"alloc 1 plain {2 * MIB}")
            opener.ok("free 1")
            time.sleep(0.6)
        after, later = box.used_mib(), stage.nvml.processes(stage.card.uuid).get(opener.pid)
        assert after - before <= 64, f"{before} MiB were counted, with the same memory open twice {after}"
        opener.ok("close 0")
    grew = "no figure" if figure is None or later is None else f"{(later - figure) // MIB} MiB more"
    return Seen(
        f"2000 MiB open in two processes counted once; NVML gives {grew} for the one that opened them"
    )


def books_and_driver(stage: Stage) -> Seen:
    """What the library counts for a process is what the driver says."""
    box, rows, gaps = stage.box("app", 8192), [], []
    before = stage.nvml.used_bytes(stage.card.uuid)
    with Worker(box) as worker:
        worker.ok("start 0")
        own = box.usage().processes[0].own_bytes // MIB
        steps = (("plain", 1000), ("async", 512), ("mapped", 256), ("array", 64), ("managed", 128))
        for number, (kind, size) in enumerate((("a context alone", 0), *steps)):
            if size:
                worker.ok(f"alloc {number} {kind} {size * MIB}")
            worker.ok("sync")
            driver, how = stage.driver_mib(worker.pid, before)
            counted = box.used_mib()
            rows.append(f"| {kind} | {size} | {counted} | {driver} |")
            # Managed memory comes to the card when it is touched; it is counted when it is asked for.
            gaps.append(0 if kind == "managed" else abs(counted - driver))
    table = "\n".join(
        [f"| and then | MiB | counted | the driver's ({how}) |", "| --- | --- | --- | --- |", *rows]
    )
    assert max(gaps) <= 64, f"counted and the driver's figure part by {max(gaps)} MiB:\n{table}"
    text = f"never more than {max(gaps)} MiB apart, {how}; a context took {own} MiB"
    return Seen(text, table, {"context_mib": own, "gap_mib": max(gaps)})


def neighbours(stage: Stage) -> Seen:
    """Two containers on one card: one runs into its limit again and again, the other never notices."""
    greedy, quiet = stage.box("greedy", 3072), stage.box("quiet", 6144)
    with Worker(greedy) as one, Worker(quiet) as two:
        one.ok("start 0")
        two.ok("start 0")
        two.say("burn 1500 64 0")
        for _ in range(200):
            assert one.ask(f"alloc 0 plain {8192 * MIB}") == OUT_OF_MEMORY
        launched, failed = (int(word) for word in two.hear().split()[1:])
        assert launched, "the neighbour launched nothing"
        assert not failed, f"{failed} of the neighbour's launches failed"
        two.ok(f"alloc 0 plain {5000 * MIB}")
    return Seen(
        f"{greedy.usage().refused} refusals beside {launched} launches without an error and 5000 MiB granted"
    )


def two_processes(stage: Stage) -> Seen:
    """A container's processes share one limit, both contexts counted; threads cannot overshoot together."""
    box = stage.box("app", 6144)
    with Worker(box) as one, Worker(box) as two:
        one.ok("start 0")
        two.ok("start 0")
        one.ok(f"alloc 0 plain {3000 * MIB}")
        assert two.ask(f"alloc 0 plain {3000 * MIB}") == OUT_OF_MEMORY
        one.say(f"threads 4 100 {900 * MIB}")
        two.say(f"threads 4 100 {900 * MIB}")
        told = [[int(word) for word in each.hear().split()[1:]] for each in (one, two)]
        assert not any(odd for _, _, odd in told), f"granted, refused, odd: {told}"
        peak = box.usage().peak_bytes
        assert peak <= 6144 * MIB, f"{peak} bytes were in use at once"
    granted, refused = (sum(each[place] for each in told) for place in (0, 1))
    return Seen(
        f"8 threads of two processes: {granted} granted, {refused} refused, at most {peak // MIB} of 6144 MiB"
    )


def killed(stage: Stage) -> Seen:
    """kill -9 returns a process's memory to its container. 3,500 MiB do not fit, whatever a context takes."""
    box = stage.box("app", 3400)
    with Worker(box) as survivor:
        survivor.ok("start 0")
        with Worker(box) as victim:
            victim.ok("start 0")
            victim.ok(f"alloc 0 plain {1500 * MIB}")
            assert survivor.ask(f"alloc 0 plain {2000 * MIB}") == OUT_OF_MEMORY
        began = time.monotonic()
        while survivor.ask(f"alloc 0 plain {2000 * MIB}") != "ok":
            assert time.monotonic() < began + 20, "not returned within 20 s"
            time.sleep(0.02)
        took = time.monotonic() - began
    return Seen(f"2000 MiB that did not fit beside the victim fitted {took:.2f} s after its death")


def known_functions(stage: Stage) -> Seen:
    """The driver of this machine exports nothing that takes memory and that we have not decided on."""
    if SIMULATED:
        raise Skip("the simulated driver exports what the headers declare")
    exported = _exported(_path_of("libcuda.so.1"))
    decided = {
        line.partition(":")[0]
        for line in (ROOT / "native/tests/driver_api.txt").read_text().splitlines()
        if not line.startswith("#")
    }
    new = sorted({_base(name) for name in exported} - decided)
    takes = [name for name in new if TAKES.search(name) and not GRAPHICS.match(name)]
    assert not takes, f"exported, may take memory, and no decision of ours: {', '.join(takes)}"
    listed = f": {', '.join(new[:40])}" if new else ""
    return Seen(f"{len(exported)} functions; {len(new)} that cuda.h does not have{listed}")


def _base(symbol: str) -> str:
    return re.sub(r"(_v\d+)?(_ptds|_ptsz)?$", "", symbol)


def _path_of(library: str) -> Path:
    found = [Path(folder) / library for folder in FOLDERS if (Path(folder) / library).exists()]
    if not found:
        raise Skip(f"{library} is in none of the usual folders")
    return found[0]


def _exported(library: Path) -> set[str]:
    tool = shutil.which("nm") or shutil.which("readelf")
    if tool is None:
        raise Skip("neither nm nor readelf here")
    flags = ["-D", "--defined-only"] if tool.endswith("nm") else ["--dyn-syms", "-W"]
    listed = subprocess.run([tool, *flags, str(library)], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\b(cu[A-Z]\w+)", listed))
