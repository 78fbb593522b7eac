"""What our image stands on, and how it starts there."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

from release import oci, wheels

UNPRIVILEGED = "65532:65532"

START = """\
#!/usr/bin/env python3
import sys

sys.path.insert(0, "/opt/gpuslice/python")
from gpuslice.apps.cli.main import main

main()
"""


def base_image(base: Path, architecture: str, epoch: int) -> oci.Image:
    """What the image stands on: an OCI archive's image, or a root file system as a folder."""
    if base.is_dir():
        try:
            return oci.Image(architecture, (oci.layer(oci.tree(base), epoch),), {})
        except PermissionError as error:
            raise oci.NoBase(
                f"{error.filename} of the base cannot be read: run this as its owner, or chmod -R a+rX {base}"
            ) from error
    return oci.read_archive(base, architecture)


def python_of(below: oci.Image) -> str:
    """The version of the base's python3. NoBase where there is none that we support."""
    names: set[str] = set()
    for layer in below.layers:
        with tarfile.open(fileobj=io.BytesIO(layer.content)) as archive:
            names |= set(archive.getnames())
    for python in wheels.PYTHONS:
        if {f"usr/bin/python{python}", f"usr/local/bin/python{python}"} & {
            name.removeprefix("./") for name in names
        }:
            return python
    raise oci.NoBase(
        f"the base has none of python{', python'.join(wheels.PYTHONS)} in /usr/bin or /usr/local/bin"
    )


def image_config(below: Any) -> dict[str, Any]:
    """The base's configuration with our program to start, as a user who is not root."""
    path = next((each for each in below.get("Env", []) if each.startswith("PATH=")), f"PATH={DEFAULT_PATH}")
    kept = [each for each in below.get("Env", []) if not each.startswith("PATH=")]
    return {
        **{key: value for key, value in below.items() if key not in ("Env", "Entrypoint", "Cmd", "User")},
        "Env": [*kept, path, "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1"],
        "Entrypoint": ["/usr/local/bin/gpuslice"],
        "Cmd": ["--help"],
        "User": UNPRIVILEGED,
    }


DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
