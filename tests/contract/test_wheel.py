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

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.resources import NODES, PODS
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.apps.cli.main import COMMANDS
from simcluster.apiserver import ApiServer
from simcluster.cluster.cluster import Cluster
from tests.builders import api_node, api_pod

ROOT = Path(__file__).parents[2]
FOREIGN = ("simcluster", "gpuslice_demo", "aiohttp")


def required(name: str, found: set[str], extra: str = "") -> set[str]:
    """The distribution `name` and what it needs here with this extra, transitively."""
    if name not in found:
        found.add(name)
        for line in distribution(name).requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
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
    """``gpuslice[daemons]`` from the wheel, beside links to the distributions that it names."""
    return environment(wheel, tmp_path_factory.mktemp("environment"), "daemons")


@pytest.fixture(scope="module")
def light(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command line alone: ``pip install gpuslice``."""
    return environment(wheel, tmp_path_factory.mktemp("light"), "")


def environment(wheel: Path, folder: Path, extra: str) -> list[str]:
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    for name in required("gpuslice", set(), extra) - {"gpuslice"}:
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
    words = {"_GPUSLICE_COMPLETE": "bash_complete", "COMP_WORDS": "gpuslice demo --", "COMP_CWORD": "2"}
    tab = subprocess.run(
        program, env=words | {"HOME": "/nowhere"}, capture_output=True, text=True, check=False
    )
    assert "not part of" not in tab.stdout + tab.stderr, "a shell shows what it says while one types"


def test_every_module_can_be_imported(program: list[str]) -> None:
    """What a process imports is installed with it, whatever it imports late."""
    walk = (
        "import gpuslice, importlib, pkgutil\n"
        "for one in pkgutil.walk_packages(gpuslice.__path__, 'gpuslice.'):\n"
        "    if not one.name.endswith(('__main__', '.generate')): importlib.import_module(one.name)\n"
    )
    told = ended([*program[:2], "-c", walk])
    assert (told.returncode, told.stderr) == (0, "")


async def test_the_doctor_examines_a_cluster(light: list[str], tmp_path: Path) -> None:
    async with ApiServer(Cluster()) as server:
        (tmp_path / "config").write_text(server.kubeconfig())
        told = await asyncio.to_thread(ended, light, "--kubeconfig", str(tmp_path / "config"), "doctor")
    assert "Traceback" not in told.stderr
    assert "extender" in told.stdout, told


async def test_the_command_line_alone_reads_a_cluster(light: list[str], tmp_path: Path) -> None:
    async with ApiServer(Cluster()) as server:
        (tmp_path / "config").write_text(server.kubeconfig())
        async with HttpTransport(Connection(server.url)) as transport:
            client = KubeClient(transport)
            node = api_node()
            await client.create(NODES, node)
            await client.patch_status(NODES, "n1", node["status"])
            await client.create(PODS, api_pod("train"))
        for words, wanted in (
            (["inspect"], "n1"),
            (["inspect", "-d"], "n1"),
            (["explain", "train"], "train"),
        ):
            told = await asyncio.to_thread(ended, light, "--kubeconfig", str(tmp_path / "config"), *words)
            assert "Traceback" not in told.stderr, told.stderr
            assert wanted in told.stdout, told


def test_the_command_line_alone_is_small(light: list[str]) -> None:
    """Less than 40 MB with the bytecode that pip makes, which is about as much again."""
    packages = required("gpuslice", set()) - {"gpuslice"}
    files = [
        distribution(name).locate_file(file) for name in packages for file in distribution(name).files or ()
    ]
    kept = [Path(str(file)) for file in files if Path(str(file)).is_file() and "__pycache__" not in str(file)]
    own = sum(path.stat().st_size for path in (ROOT / "src").rglob("*.py"))
    assert sum(path.stat().st_size for path in kept) + own < 20e6


@pytest.mark.parametrize("name", ["extender", "simulate", "agent", "exporter"])
def test_the_command_line_alone_says_what_a_daemon_needs_more(light: list[str], name: str) -> None:
    arguments = ["--node-name=n"] if name in ("agent", "exporter") else []
    told = ended(light, name, *arguments)
    assert told.returncode != 0
    assert "Traceback" not in told.stderr
    assert "pipx install --force '.[daemons]' in a checkout" in told.stderr, told
    assert "install gpuslice" not in told.stderr, "nobody owns that name where pip looks"
