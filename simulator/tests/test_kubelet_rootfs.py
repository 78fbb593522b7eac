"""A container's root folder of the simulated kubelet."""

from __future__ import annotations

from pathlib import Path

from simcluster.kubelet.rootfs import Mount, build


def test_a_mounted_file_is_no_symbolic_link_and_stays_the_one_that_was_mounted(tmp_path: Path) -> None:
    """Like a bind mount: the library opens no claim of a neighbour by a link, and a file that is replaced
    stays what it was in containers that run.
    """
    host = tmp_path / "host"
    (host / "folder").mkdir(parents=True)
    (host / "claim").write_text("first")
    mounts = [Mount("/run/gpuslice/own/claim", host / "claim"), Mount("/data", host / "folder")]
    root = build(tmp_path / "root", {}, mounts)

    claim = root.path / "run/gpuslice/own/claim"
    assert not claim.is_symlink()
    claim.write_text("written")
    assert (host / "claim").read_text() == "written"
    (host / "next").write_text("second")
    (host / "next").rename(host / "claim")
    assert claim.read_text() == "written"
    (host / "folder/new").write_text("")
    assert (root.path / "data/new").exists()


def test_a_mount_below_another_is_seen_wherever_it_stands_in_the_list(tmp_path: Path) -> None:
    """Real runtimes sort mounts by depth: an emptyDir at /etc hides nothing of the agent's."""
    host = tmp_path / "host"
    for folder in ("etc/other", "agent/limits"):
        (host / folder).mkdir(parents=True)
    for file in ("etc/hosts", "etc/ld.so.preload", "agent/preload", "agent/limits/main"):
        (host / file).write_text(file)
    inner = [
        Mount("/etc/ld.so.preload", host / "agent/preload"),
        Mount("/etc/gpuslice/limits", host / "agent/limits"),
        Mount("/etc/other/deep", host / "agent/limits"),
    ]
    for number, mounts in enumerate(
        ([*inner, Mount("/etc", host / "etc")], [Mount("/etc", host / "etc"), *inner])
    ):
        root = build(tmp_path / f"root{number}", {}, mounts).path
        assert (root / "etc/ld.so.preload").read_text() == "agent/preload"
        assert (root / "etc/gpuslice/limits/main").read_text() == "agent/limits/main"
        assert (root / "etc/other/deep/main").exists()
        assert (root / "etc/hosts").read_text() == "etc/hosts"
    assert sorted(each.name for each in (host / "etc").iterdir()) == ["hosts", "ld.so.preload", "other"]
    assert not any((host / "etc/other").iterdir())
    assert (host / "etc/ld.so.preload").read_text() == "etc/ld.so.preload"


def test_of_two_mounts_at_one_path_the_later_one_is_seen(tmp_path: Path) -> None:
    """kubelet names a pod's own mounts after those of device plugins, so a pod can hide them."""
    for name in ("agent", "own"):
        (tmp_path / name).write_text(name)
    mounts = [Mount("/etc/ld.so.preload", tmp_path / name) for name in ("agent", "own")]
    assert (build(tmp_path / "root", {}, mounts).path / "etc/ld.so.preload").read_text() == "own"
