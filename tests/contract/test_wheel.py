"""The product's wheel in an environment that has what it asks for, and nothing of the simulation."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from gpuslice.apps.cli.main import COMMANDS
from simcluster.apiserver import ApiServer
from simcluster.cluster.cluster import Cluster

ROOT = Path(__file__).parents[2]
FOREIGN = ("simcluster", "gpuslice_demo", "aiohttp")


def required(name: str, found: set[str]) -> set[str]:
    """The distribution `name` and what it needs here, transitively; extras left out."""
    if name not in found:
        found.add(name)
        for line in distribution(name).requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                required(requirement.name, found)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def program(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """``gpuslice`` from the wheel, beside links to the distributions that it names."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    for name in required("gpuslice", set()) - {"gpuslice"}:
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top not in {"..", "__pycache__"} and not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return [str(folder / "bin" / "python"), "-I", "-c", "from gpuslice.apps.cli.main import main; main()"]


def ended(program: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    return subprocess.run([*program, *words], env=environ, capture_output=True, text=True, check=False)


def test_the_wheel_holds_the_product_alone_and_asks_for_nothing_of_the_simulation(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        folders = {name.partition("/")[0] for name in archive.namelist()}
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    assert {name for name in folders if not name.endswith(".dist-info")} == {"gpuslice"}
    asked = {Requirement(line.partition(": ")[2]).name for line in lines if line.startswith("Requires-Dist")}
    assert asked
    assert asked & set(FOREIGN) == set()


def test_every_command_but_the_demo_explains_itself(program: list[str]) -> None:
    own = [entry.name for entry in COMMANDS if entry.module]
    for words in (["--help"], *([name, "--help"] for name in own)):
        told = ended(program, *words)
        assert (told.returncode, told.stderr) == (0, ""), words


def test_the_demo_says_how_to_get_it(program: list[str]) -> None:
    told = ended(program, "demo")
    assert told.returncode == 1
    assert "demo is not part of this installation: in a checkout of gpuslice, `make demo`" in told.stderr


def test_every_module_can_be_imported(program: list[str]) -> None:
    """What a process imports is installed with it, whatever it imports late."""
    walk = (
        "import gpuslice, importlib, pkgutil\n"
        "for one in pkgutil.walk_packages(gpuslice.__path__, 'gpuslice.'):\n"
        "    if not one.name.endswith(('__main__', '.generate')): importlib.import_module(one.name)\n"
    )
    told = ended([*program[:2], "-c", walk])
    assert (told.returncode, told.stderr) == (0, "")


async def test_the_doctor_examines_a_cluster(program: list[str], tmp_path: Path) -> None:
    async with ApiServer(Cluster()) as server:
        (tmp_path / "config").write_text(server.kubeconfig())
        told = await asyncio.to_thread(ended, program, "--kubeconfig", str(tmp_path / "config"), "doctor")
    assert "Traceback" not in told.stderr
    assert "extender" in told.stdout, told
