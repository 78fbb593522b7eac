"""What a tenant leaves in its folder is removed whatever it is, in bounded time."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.owner import Owner
from gpuslice.apps.agent.region_file_system import RegionFileSystemError, shared
from gpuslice.apps.agent.removal import remove_tree
from tests import HANG_S

IDS = ["GPU-a-_-0"]
FOR_EVER = float("inf")


def nest(folder: Path, depth: int) -> None:
    """`depth` folders in one another: deeper than a path may be long, so made from inside."""
    here = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("deeper", dir_fd=here)
        below = os.open("deeper", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)


def test_folders_in_folders_need_no_recursion(tmp_path: Path) -> None:
    hostile = tmp_path / "var"
    hostile.mkdir()
    nest(hostile, 2500)
    assert remove_tree(hostile, FOR_EVER)
    assert not hostile.exists()


def test_the_work_stops_at_its_deadline_and_goes_on_the_next_time(tmp_path: Path) -> None:
    hostile = tmp_path / "var"
    hostile.mkdir()
    for number in range(1000):
        (hostile / f"{number}").touch()
    ticks = iter(range(10**6))
    assert not remove_tree(hostile, 300, lambda: next(ticks))
    assert 0 < len(list(hostile.iterdir())) <= 700
    assert not remove_tree(hostile, 600, lambda: next(ticks))
    assert remove_tree(hostile, FOR_EVER)


def test_no_link_is_followed(tmp_path: Path) -> None:
    precious, hostile = tmp_path / "precious", tmp_path / "var"
    precious.mkdir()
    (precious / "file").touch()
    hostile.mkdir()
    (hostile / "folder").symlink_to(precious)
    (hostile / "file").symlink_to(precious / "file")
    assert remove_tree(hostile, FOR_EVER)
    link = tmp_path / "link"
    link.symlink_to(precious)
    assert remove_tree(link, FOR_EVER)
    assert (precious / "file").exists()
    assert not link.is_symlink()
    assert remove_tree(tmp_path / "nothing", FOR_EVER)


NAMES = st.text(st.characters(exclude_characters="/\0", codec="utf-8"), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 200
)
TREES = st.recursive(
    st.sampled_from(["file", "pipe", "link"]),
    lambda below: st.dictionaries(NAMES, below, max_size=4),
    max_leaves=30,
)


def grow(place: Path, tree: object) -> None:
    if isinstance(tree, dict):
        place.mkdir()
        for name, below in tree.items():
            grow(place / name, below)
    elif tree == "pipe":
        os.mkfifo(place)
    elif tree == "link":
        place.symlink_to("/")
    else:
        place.write_text("x")


@given(st.dictionaries(NAMES, TREES, max_size=5))
def test_any_tree_is_removed(tree: dict[str, object]) -> None:
    place = Path(f"/tmp/gpuslice-removal-{os.getpid()}")
    grow(place, tree)
    try:
        assert remove_tree(place, FOR_EVER)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    assert not place.exists()


# -- a container's folder ----------------------------------------------------------------------------------
def test_a_start_takes_as_long_whatever_was_left_in_the_folder(tmp_path: Path) -> None:
    """It is moved out of the way, and removed by and by."""
    folders = Folders(tmp_path, boot="this")
    var = tmp_path / "containers" / folders.prepare(IDS) / "var"
    nest(var, 2500)
    owner = Owner(IDS, "uid", "default", "p", "main")
    folders.start(IDS, [], owner)
    assert [each.name for each in var.iterdir()] == ["region"]
    assert folders.empty_trash(60) is True
    assert [name for name, *_ in folders.owners()] == [folders.current(IDS)]


def test_nobody_but_root_gets_below_the_containers_folder(tmp_path: Path) -> None:
    """A tenant may leave programs there that run as their owner, and files for devices."""
    folders = Folders(tmp_path, boot="this")
    content = tmp_path / "libgpuslice.so"
    content.write_bytes(b"library")
    folders.library.install(str(content))
    folders.grant(IDS, limits_compute=True)
    assert (tmp_path / "containers").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cards").stat().st_mode & 0o777 == 0o700


def test_what_cannot_be_removed_keeps_nothing_else(tmp_path: Path) -> None:
    folders = Folders(tmp_path, boot="this")
    folders.discard(folders.prepare(IDS))
    assert folders.empty_trash(0) is False, "no time"
    assert folders.empty_trash(60) is True
    assert folders.empty_trash(60) is True, "nothing is left"


# -- a file system of its own ------------------------------------------------------------------------------
MOUNTINFO = r"""1 0 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
2 1 0:1 / /var/lib/gpuslice rw,nosuid - ext4 /dev/sda1 rw
3 1 0:2 / /var/lib/with\040space rw shared:7 master:1 - ext4 /dev/sda1 rw
"""


@pytest.mark.parametrize(
    ("place", "reaches"),
    [
        ("/opt/gpuslice", True),
        ("/var/lib/gpuslice", False),
        ("/var/lib/gpuslice/containers", False),
        ("/var/lib/gpuslice2", True),
        ("/var/lib/with space/x", True),
    ],
)
def test_whether_a_mount_reaches_the_node_is_read_from_where_it_lies(place: str, reaches: bool) -> None:
    assert shared(Path(place), MOUNTINFO) is reaches


INSIDE = """
import os, subprocess, sys, time
from pathlib import Path
from gpuslice.apps.agent.folders import Folders
from gpuslice.apps.agent.limit_entries import entries
from gpuslice.apps.agent.owner import Owner
from gpuslice.core.grant import CardLimit
from gpuslice.core.model import Card

folders = Folders(Path(sys.argv[1]), boot="this", bound_regions=True)
ids = ["GPU-a-_-0"]
folders.regions.check()
var = Path(sys.argv[1]) / "containers" / folders.prepare(ids) / "var"
assert os.path.ismount(var)
options = next(line for line in Path("/proc/self/mountinfo").read_text().splitlines() if f" {var} " in line)
assert all(each in options for each in ("nosuid", "nodev", "noexec")), options
for limit, fill in (("bytes", lambda: (var / "big").write_bytes(bytes(64 << 20))),
                    ("entries", lambda: [(var / str(number)).touch() for number in range(1000)])):
    try:
        fill()
    except OSError as error:
        assert error.errno == 28, error
    else:
        raise AssertionError(f"no bound on {limit}")
folders.start(ids, [], Owner(ids, "uid", "default", "p", "main"))
assert os.path.ismount(var) and [each.name for each in var.iterdir()] == ["region"]
(var / "region").write_bytes(bytes(1 << 20))
(Path(sys.argv[1]) / "built.so").write_bytes(b"library")
folders.library.install(str(Path(sys.argv[1]) / "built.so"))
folders.grant(ids, limits_compute=True)
meeting = Path(sys.argv[1]) / "cards/GPU-a"
claim = meeting / folders.current(ids) / "claim"
try:
    claim.write_bytes(bytes(64 << 20))
except OSError as error:
    assert error.errno == 28, error
else:
    raise AssertionError("no bound on what containers tell each other")
mounts = folders.grant(["GPU-a-_-1"], limits_compute=True)
neighbour = next(each.host_path for each in mounts if each.host_path.endswith("/claim"))
assert Path(neighbour).read_bytes() == bytes(4096) and claim.stat().st_size == 4096
greedy = f'''
import ctypes, os
libc, file, page = ctypes.CDLL(None), os.open("{claim}", os.O_WRONLY), os.sysconf("SC_PAGESIZE")
while True:  # KEEP_SIZE: beyond the end of the file
    for number in range(1, 300):
        libc.fallocate(file, 1, ctypes.c_long(number * page), ctypes.c_long(page))
'''
taking = subprocess.Popen([sys.executable, "-c", greedy])
while os.statvfs(meeting).f_bfree:
    time.sleep(0.01)
try:
    for number in range(2, 30):
        more = [f"GPU-a-_-{number}"]
        folders.grant(more, limits_compute=True)
        assert (meeting / folders.current(more) / "claim").stat().st_blocks
finally:
    taking.kill()
    taking.wait()
os.system(f"umount --lazy {meeting}")  # as when the machine was started anew
card = Card(index=0, memory_mib=15360, units=15, uuid="GPU-a")
folders.start(ids, entries([CardLimit(card, 4, 4096, 30)]), Owner(ids))
assert os.path.ismount(meeting) and claim.read_bytes() == bytes(4096)
folders.discard(folders.current(ids))
assert folders.empty_trash(10)
assert str(var) not in Path("/proc/self/mountinfo").read_text()
print("bounded")
"""


def in_a_namespace(program: str, folder: Path, propagation: str) -> subprocess.CompletedProcess[str]:
    command = ["unshare", "--user", "--map-root-user", "--mount", "--propagation", propagation]
    if shutil.which("unshare") is None or subprocess.call([*command, "true"], stderr=subprocess.DEVNULL):
        pytest.skip("namespaces cannot be made on this machine (unshare --user --mount)")
    mount = f'mount -t tmpfs -o mode=755 t "{folder}" && mount --make-{propagation} "{folder}"'
    script = [*command, "sh", "-c", f'{mount} && exec "$0" -c "$1" "{folder}"', sys.executable, program]
    return subprocess.run(script, check=False, capture_output=True, text=True, timeout=60)


def test_a_region_has_a_bound_on_bytes_and_entries(tmp_path: Path) -> None:
    done = in_a_namespace(INSIDE, tmp_path, "shared")
    assert (done.returncode, done.stdout) == (0, "bounded\n"), done.stderr


def test_a_mount_that_would_not_reach_the_node_is_refused_with_a_sentence(tmp_path: Path) -> None:
    program = INSIDE.partition("var = ")[0]
    refused = in_a_namespace(program, tmp_path, "private")
    assert "would not reach the node" in refused.stderr
    assert "Bidirectional" in refused.stderr
    assert RegionFileSystemError.__name__ in refused.stderr


def test_a_removal_in_the_middle_of_writing_ends(tmp_path: Path) -> None:
    """A container that is still there makes files as fast as they are removed."""
    hostile = tmp_path / "var"
    hostile.mkdir()
    program = (
        "import itertools, pathlib, sys\n"
        "for n in itertools.count(): pathlib.Path(sys.argv[1], str(n)).touch()"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, str(hostile)], stderr=subprocess.DEVNULL)
    try:
        began = time.monotonic()
        while time.monotonic() < began + HANG_S and not any(hostile.iterdir()):
            time.sleep(0.01)
        began = time.monotonic()
        with contextlib.suppress(OSError):  # a file came after the last was removed
            remove_tree(hostile, began + 0.2)
        assert time.monotonic() - began < HANG_S
    finally:
        writer.kill()
        writer.wait()
    assert remove_tree(hostile, FOR_EVER)


def test_the_containers_folder_may_be_a_file_system_of_its_own(tmp_path: Path) -> None:
    """As operators made it who wanted a bound before there was one for each container."""
    program = """
import subprocess, sys
from pathlib import Path
from gpuslice.apps.agent.folders import Folders

root = Path(sys.argv[1])
(root / "containers").mkdir()
subprocess.run(["mount", "-t", "tmpfs", "t", root / "containers"], check=True)
folders = Folders(root, boot="this")
folders.discard(folders.prepare(["GPU-a-_-0"]))
assert list(folders.owners()) == [] and folders.empty_trash(10)
print("moved")
"""
    done = in_a_namespace(program, tmp_path, "private")
    assert (done.returncode, done.stdout) == (0, "moved\n"), done.stderr
