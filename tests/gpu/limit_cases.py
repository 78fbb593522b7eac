"""Limits that the driver itself enforces (R615 and later): what no page of NVIDIA's says exactly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.gpu.driver import MemoryLimits, NoDriverError, Nvml, Skip
from tests.gpu.stage import MIB, ROOT, Seen, Stage, bare_environment

FIRST_BRANCH = 615
LIMIT_MIB = 3000
ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
PROGRAM = """
import ctypes, json, os, sys
from pathlib import Path
(Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
from gpuslice.adapters.gpu.cuda import Cuda, CudaError
def until_refused(allocate, size=64 << 20, most=256):
    for count in range(most):
        try:
            allocate(size)
        except CudaError as error:
            return [count * size >> 20, error.code]
    return [most * size >> 20, 0]
cuda = Cuda()
address = ctypes.c_uint64()
def managed(size):
    cuda._call("cuMemAllocManaged", ctypes.byref(address), ctypes.c_size_t(size), 1)
def pooled(size):
    cuda._call("cuMemAllocAsync", ctypes.byref(address), ctypes.c_size_t(size), None)
    cuda.synchronize()
said = {"memory": [each >> 20 for each in cuda.memory()], "managed": until_refused(managed)}
said["async"] = until_refused(pooled, most=8)
said["plain"] = until_refused(cuda.allocate)
print(json.dumps(said))
"""


@contextmanager
def cgroup() -> Iterator[Path]:
    """One of our own. Raises Skip."""
    root = next((Path(each) for each in ROOTS if (Path(each) / "cgroup.controllers").is_file()), None)
    if root is None or os.geteuid() != 0:
        raise Skip("cgroups of version 2 and root are needed")
    made = root / f"gpuslice-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        raise Skip(f"no cgroup can be made: {error}") from error
    try:
        yield made
    finally:
        with suppress(OSError):
            made.rmdir()


def by_cgroup(stage: Stage) -> Seen:
    """A hard limit of 3000 MiB: read back, shown, and refused past it; managed memory; cleared again."""
    branch = int(stage.card.driver.partition(".")[0])
    if branch < FIRST_BRANCH:
        raise Skip(f"driver {stage.card.driver}: {FIRST_BRANCH} is the first that limits cgroups")
    nvml, uuid = Nvml(), stage.card.uuid
    with cgroup() as place:
        try:
            nvml.set_limits(uuid, str(place), MemoryLimits(0, LIMIT_MIB * MIB))
        except NoDriverError as error:
            raise Skip(f"limits cannot be set: {error}") from error
        found = nvml.limits(uuid, str(place))
        assert (found.soft, found.hard) == (0, LIMIT_MIB * MIB), found
        limited = _told(stage, place)
        nvml.set_limits(uuid, str(place), MemoryLimits(0, None))
        free = _told(stage, place)
    assert limited["plain"][1] == 2, f"not refused with CUDA_ERROR_OUT_OF_MEMORY: {limited}"
    got_mib = limited["plain"][0] + limited["async"][0]
    assert got_mib <= LIMIT_MIB, f"{got_mib} MiB were granted: {limited}"
    assert free["memory"][1] > LIMIT_MIB, f"the limit is still shown once it is cleared: {free}"
    return Seen(
        f"of {LIMIT_MIB} MiB {got_mib} could be allocated beside the context; cuMemGetInfo showed "
        f"{limited['memory'][1]} MiB in all; {limited['managed'][0]} MiB of managed memory were granted too"
    )


def _told(stage: Stage, place: Path) -> dict[str, list[int]]:
    environment = {**bare_environment(stage.card), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(place)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told: dict[str, list[int]] = json.loads(done.stdout)
    return told
