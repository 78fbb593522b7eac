"""Two releases side by side: upgrade and rollback of each process with containers running, and their files.

Nothing was released yet: the previous release is a commit, and its own code runs. A checkout without history
(a shallow clone, an archive) has none.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpuslice.adapters.region.reader import read_region
from tests.integration.installation import OURS, Release, installed
from tests.integration.isolation_rig import MIB, OUT_OF_MEMORY, container

PREVIOUS = "e1672b60"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def previous(tmp_path_factory: pytest.TempPathFactory) -> Release:
    git = ["git", "-C", str(ROOT), "-c", "safe.directory=*"]
    try:
        subprocess.run([*git, "cat-file", "-e", f"{PREVIOUS}^{{commit}}"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"commit {PREVIOUS}, the previous release, is not in this checkout's history")
    folder = tmp_path_factory.mktemp("previous")
    archive = subprocess.run(
        [*git, "archive", PREVIOUS, "src", "native"], capture_output=True, check=True
    ).stdout
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive, check=True)
    release = Release("previous", folder)
    assert str(folder) in release.python("import gpuslice; print(gpuslice.__file__)")
    return release


@pytest.mark.parametrize("order", [("agent", "webhook", "extender"), ("extender", "webhook", "agent")])
async def test_an_upgrade_and_a_rollback_with_containers_running(
    tmp_path: Path, previous: Release, order: tuple[str, ...]
) -> None:
    """One process after the other, in both orders; after each step a pod comes, and all before it go on."""
    async with installed(tmp_path) as there:
        for name in order:
            await there.upgrade(name, previous)
        await there.run_pod("before")
        for release in (OURS, previous):
            for name in order:
                await there.upgrade(name, release)
                await there.all_holds()
                await there.run_pod(f"{release.name}-{name}")
        await there.all_holds()


# -- the library and its files -----------------------------------------------------------------------------

PREPARE = "import sys; from pathlib import Path; from gpuslice.adapters.region.reader import prepare_region; "
READ = (
    "import sys; from pathlib import Path; from gpuslice.adapters.region.reader import read_region; "
    "print(*(card.used_bytes for card in read_region(Path(sys.argv[1])).cards))"
)
WRITE = (
    "import sys; from pathlib import Path; "
    "from gpuslice.adapters.region.limits import LimitsEntry, write_limits; "
    "write_limits(Path(sys.argv[1]), [LimitsEntry(sys.argv[2], int(sys.argv[3]), 30, None, False)])"
)


@pytest.fixture(scope="module")
def previous_library(previous: Release) -> Release:
    assert previous.folder is not None
    subprocess.run(
        ["make", "-s", "-C", str(previous.folder / "native"), "build/lib/libgpuslice.so"], check=True
    )
    return previous


@pytest.mark.parametrize("theirs", ["library", "agent", "exporter"])
def test_a_library_in_a_container_that_another_release_prepared(
    tmp_path: Path, previous_library: Release, theirs: str
) -> None:
    """Whichever of the three is of the previous release: the limit holds, and what is used is read."""
    releases = dict.fromkeys(("library", "agent", "exporter"), OURS) | {theirs: previous_library}
    with container(tmp_path, memory_mib=1024, share=30) as box:
        (box.root / "usr/lib/gpuslice").unlink()
        (box.root / "usr/lib/gpuslice").symlink_to(releases["library"].library)
        box.region_path.unlink()
        releases["agent"].python(f"{PREPARE} prepare_region(Path(sys.argv[1]))", str(box.region_path))
        box.limits_path.unlink()
        uuid = box.machine.uuid()
        releases["agent"].python(WRITE, str(box.limits_path), uuid, str(1024 * MIB))
        with box.worker() as one, box.worker() as other:
            for worker in (one, other):
                worker.ok("start 0")
                worker.ok(f"alloc 0 plain {300 * MIB}")
            assert one.ask(f"alloc 1 plain {600 * MIB}") == OUT_OF_MEMORY
            told = releases["exporter"].python(READ, str(box.region_path)).split()
            reading = read_region(box.region_path)
            assert reading is not None
            assert sum(map(int, told)) >= 600 * MIB
            other.leave()
            one.ok("free 0")
