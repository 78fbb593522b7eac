"""The simulated registry: the images that a manifest commonly names, and its words for one that it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from simcluster.workload.images import ImageRegistry, PullError

REGISTRY = ImageRegistry(Path("native"))


@pytest.mark.parametrize(
    "reference",
    [
        "nvidia/cuda:13.0.0-base-ubuntu24.04",
        "nvcr.io/nvidia/cuda@sha256:0000",
        "docker.io/library/busybox",
    ],
)
def test_an_image_without_a_program_of_its_own_runs_what_the_manifest_says(reference: str) -> None:
    image = REGISTRY.pull(reference)
    assert (image.entrypoint, image.command) == ((), ("sh",))


def test_nvidias_first_example_runs_its_sample() -> None:
    image = REGISTRY.pull("nvcr.io/nvidia/k8s/cuda-sample:vectoradd-cuda12.5.0")
    assert image.programs["/app/main.py"].name == "vector_add.py"


def test_an_unknown_image_cannot_be_pulled() -> None:
    with pytest.raises(PullError, match=r"registry\.example\.com/nowhere:1: not found"):
        REGISTRY.pull("registry.example.com/nowhere:1")
