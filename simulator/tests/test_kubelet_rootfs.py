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
