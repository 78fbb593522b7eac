"""The image's own recipe, as far as it can be held without a container engine."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def constraints() -> list[str]:
    """What the recipe's own shell line makes of the lock."""
    line = re.search(r"^ && (grep .* requirements\.lock .*) > /tmp/constraints\.txt", _recipe(), re.MULTILINE)
    assert line is not None
    made = subprocess.run(["sh", "-c", line[1]], cwd=ROOT, check=True, capture_output=True, text=True)
    return made.stdout.splitlines()


def _recipe() -> str:
    return (ROOT / "images/Dockerfile").read_text()


def supported() -> list[str]:
    """The Pythons that the package says it is for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]


def test_the_image_ships_a_python_that_is_supported() -> None:
    shipped = set(re.findall(r"^FROM python:(\d+\.\d+)", _recipe(), re.MULTILINE))
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


def test_everything_that_is_copied_in_is_there() -> None:
    sources = re.findall(r"^COPY (?!--from)(.*) \S+$", _recipe(), re.MULTILINE)
    assert sources
    assert [name for line in sources for name in line.split() if not (ROOT / name).exists()] == []
