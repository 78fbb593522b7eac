"""Where the demo finds its programs and keeps its files."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import gpuslice
from gpuslice.core.errors import GpusliceError, words_of

LONGEST_FOLDER = 46  # a unix socket's path has at most 107 characters, and sockets lie deeper
MARK = "GPUSLICE_DEMO"


class DemoError(GpusliceError):
    """The demo cannot be played; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Places:
    """One story writes only to `folder`; the whole demo only to `root`.

    `native` has the compiled files, `programs` our own commands and kubectl.
    `helm` is the program.
    """

    folder: Path
    root: Path
    native: Path
    examples: Path
    charts: Path
    programs: Path
    helm: Path
    temporary: bool

    @property
    def driver(self) -> Path:
        return self.native / "sim"

    @property
    def library(self) -> Path:
        return self.native / "lib" / "libgpuslice.so"

    @property
    def mark(self) -> str:
        """The line in the environment of every process of this demo."""
        return f"{MARK}={self.root}"

    def below(self, name: str) -> Places:
        """The places of one story."""
        folder = self.root / name
        try:
            (folder / "home").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DemoError(
                f"{folder} cannot be made: {words_of(error)}; --dir names another folder"
            ) from error
        return replace(self, folder=folder)

    def exports(self) -> str:
        """What to type in another shell to use the cluster."""
        return f"export KUBECONFIG={self.kubeconfig}\nexport PATH={self.programs}:{self.helm.parent}:$PATH"

    def environment(self) -> dict[str, str]:
        """For commands that the user types."""
        return {
            "PATH": f"{self.programs}:{self.helm.parent}:{os.environ.get('PATH', '/usr/bin:/bin')}",
            "HOME": str(self.folder / "home"),
            "KUBECONFIG": str(self.kubeconfig),
            "TERM": "dumb",
            "LANG": "C.UTF-8",
            MARK: str(self.root),
        }

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"


def find_places(folder: str = "") -> Places:
    """Raises DemoError if something was not built, or if the folder's name is too long for sockets."""
    root = Path(gpuslice.__file__).parents[2]
    place = Path(folder).absolute() if folder else Path(tempfile.mkdtemp(prefix="gpuslice-"))
    places = Places(
        folder=place,
        root=place,
        native=root / "native" / "build",
        examples=root / "examples",
        charts=root / "charts",
        programs=Path(sys.executable).parent,
        helm=Path(shutil.which("helm", path=f"{root / '.tools'}:{os.environ.get('PATH', '')}") or "helm"),
        temporary=not folder,
    )
    try:
        _check(places)
    except DemoError:
        if places.temporary:
            place.rmdir()
        raise
    return places


def _check(places: Places) -> None:
    if len(str(places.folder)) > LONGEST_FOLDER:
        raise DemoError(
            f"folder {places.folder} has {len(str(places.folder))} characters; unix sockets below it allow "
            f"{LONGEST_FOLDER}: choose another with --dir"
        )
    for path in (places.driver / "libcuda.so.1", places.driver / "nvidia-smi", places.library):
        if not path.exists():
            raise DemoError(f"{path} is not there: build it with `make native`")
    if not (places.programs / "kubectl").exists():
        raise DemoError(f"{places.programs / 'kubectl'} is not there: install it with `make setup`")
    if not places.helm.is_absolute():
        raise DemoError("helm is not there: fetch it with `make tools`, or install it from https://helm.sh")
    if not places.examples.is_dir():
        raise DemoError(f"{places.examples} is not there: the demo runs from a checkout")
