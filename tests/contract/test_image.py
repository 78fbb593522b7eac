"""The image's own recipe, as far as it can be held without a container engine."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def locked(*names: str) -> str:
    """What the recipe's own program takes of the lock."""
    command = [sys.executable, "images/locked.py", "requirements.lock", *names]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def constraints() -> list[str]:
    return [line.rstrip(" \\") for line in locked().splitlines() if "==" in line]


def _recipe() -> str:
    return (ROOT / "images/Dockerfile").read_text()


def supported() -> list[str]:
    """The Pythons that the package says it is for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]


def test_the_image_ships_a_python_that_is_supported() -> None:
    shipped = set(re.findall(r"^ARG BASE=\S*python:(\d+\.\d+)", _recipe(), re.MULTILINE))
    assert len(shipped) == 1
    assert shipped <= set(supported())


@pytest.mark.parametrize("python", supported())
def test_every_package_is_held_to_one_version(python: str) -> None:
    """Two versions of one package for two Pythons are two lines in the lock: their conditions must stay."""
    requirements = pytest.importorskip("packaging.requirements")
    parsed = [requirements.Requirement(line) for line in constraints()]
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    names = [each.name for each in parsed if each.marker is None or each.marker.evaluate(environment)]
    assert "numpy" in names
    assert len(names) == len(set(names))


def test_every_package_of_the_image_is_held_to_its_hash() -> None:
    for name in ((), ("hatchling",)):
        for entry in re.split(r"\n(?=[a-z0-9])", locked(*name).strip()):
            assert "--hash=sha256:" in entry, entry
    assert not re.search(r"pip install (?!.*(--require-hashes|--no-index))", _recipe())


def test_what_only_development_needs_stays_out_of_the_image() -> None:
    names = {line.partition("==")[0] for line in constraints()}
    assert {"msgspec", "numpy", "uvloop", "grpclib"} <= names
    assert not names & {"aiohttp", "pytest", "mypy", "hypothesis", "trustme", "hatchling"}
    assert any(line.startswith("hatchling==") for line in locked("hatchling").splitlines())


def test_the_base_is_one_image_and_not_whatever_a_tag_says() -> None:
    """A build needs no argument; the name is whole, as podman does not look for short ones everywhere."""
    (base,) = re.findall(r"^ARG (.*)", _recipe(), re.MULTILINE)
    assert re.fullmatch(r"BASE=docker\.io/library/python:[\w.-]+@sha256:[0-9a-f]{64}", base)
    assert set(re.findall(r"^FROM (\S+)", _recipe(), re.MULTILINE)) == {"${BASE}"}


def test_nobody_is_root_by_the_image_alone() -> None:
    *_, last = re.findall(r"^USER (\S+)$", _recipe(), re.MULTILINE)
    assert last == "65532:65532"


def test_everything_that_is_copied_in_is_there() -> None:
    sources = re.findall(r"^COPY (?!--from)(.*) \S+$", _recipe(), re.MULTILINE)
    assert sources
    assert [name for line in sources for name in line.split() if not (ROOT / name).exists()] == []
