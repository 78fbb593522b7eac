"""Images of containers, made of busybox and of files that the host has."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path


def needed_libraries(program: Path) -> tuple[Path, ...]:
    """The loader and the shared libraries of a program or library, as the host has them."""
    found = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
    return tuple(dict.fromkeys(Path(name) for name in re.findall(r"(/\S+) \(0x", found.stdout)))


def write_image(target: Path, name: str, command: list[str], files: Mapping[str, Path]) -> None:
    """Write an image archive of one layer: busybox with its usual names, and `files` by their path in it."""
    busybox = shutil.which("busybox")
    assert busybox is not None
    layer = _layer(Path(busybox), files)
    digest = hashlib.sha256(layer).hexdigest()
    config = {
        "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
        "os": "linux",
        "config": {"Cmd": command, "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(target, "w") as archive:
        _add(archive, "config.json", json.dumps(config).encode())
        _add(archive, "layer.tar", layer)
        _add(archive, "manifest.json", json.dumps(manifest).encode())


def _layer(busybox: Path, files: Mapping[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        _add(archive, "bin/busybox", busybox.read_bytes(), 0o755)
        for name in ("sh", "sleep", "cat", "env", "ls", "echo", "id", "touch"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
        for path, source in files.items():
            _add(archive, path.lstrip("/"), source.read_bytes(), 0o755)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    archive.addfile(member, io.BytesIO(content))
