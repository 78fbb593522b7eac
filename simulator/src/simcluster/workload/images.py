"""The simulated registry: which local program stands for which image.

An image is a small set of files placed into the container's root folder, and the command that it starts.
Unknown images cannot be pulled, with an error like a real registry's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

FRAMEWORKS = ("vllm/vllm-openai", "nvcr.io/nvidia/tritonserver", "pytorch/pytorch", "rayproject/ray")
SEEDS = "registry.cn-shanghai.aliyuncs.com/tensorflow-samples"


class PullError(Exception):
    """The image cannot be pulled; the text is shown in the container's status."""


@dataclass(frozen=True, slots=True)
class Image:
    """`programs` maps a path in the container to the host's file; `entrypoint` and `command` as in Docker.

    `paths`: environment variables that tell the program where a path of its container lies on this machine.
    """

    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, Path] = field(default_factory=dict)
    paths: Mapping[str, str] = field(default_factory=dict)
    working_dir: str = ""


class ImageRegistry:
    """Finds images by reference. `native` is the folder with the compiled sample programs."""

    def __init__(self, native: Path, extra: Mapping[str, Image] | None = None) -> None:
        # images without a GPU that manifests commonly name; each sleeps unless a command is given
        idle = Image(("sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"))
        shell = Image(command=("sh",))
        names = {"nginx": idle, "pause": idle, "httpd": idle, "redis": idle}
        shells = ("busybox", "alpine", "debian", "ubuntu", "centos", "bash")
        python = Image(command=("python3",), programs=python_program())
        cuda_malloc = {"/usr/local/bin/cuda_malloc": native / "cuda_malloc"}
        self._images = {
            **names,
            **dict.fromkeys(shells, shell),
            "python": python,
            "cuda": shell,  # nvidia/cuda and nvcr.io/nvidia/cuda; every container has nvidia-smi
            "nvcr.io/nvidia/k8s/cuda-sample:vectoradd-cuda12.5.0": _python_image("vector_add.py"),
            f"{SEEDS}/cuda-malloc:3G": Image(("cuda_malloc", "3G"), programs=cuda_malloc),
            f"{SEEDS}/cuda-malloc:6G": Image(("cuda_malloc", "6G"), programs=cuda_malloc),
            f"{SEEDS}/tensorflow-gpu-mem:10.0-runtime-centos7": _python_image("tensorflow_gpu_mem.py"),
            "k8s.gcr.io/cuda-vector-add:v0.1": _python_image("vector_add.py"),
            "cheyang/gpu-player:v2": _python_image("gpu_player.py", "run_gpu_player.sh"),
            "tensorflow/tensorflow:1.4.1-gpu-py3": _python_image("notebook.py"),
            "quay.io/jupyter/pytorch-notebook": _python_image("notebook.py"),
            **dict.fromkeys(FRAMEWORKS, _python_image("framework.py")),
            **(extra or {}),
        }

    def pull(self, reference: str) -> Image:
        """The image for a reference: exact, then without tag or registry. Raises PullError."""
        repository = strip_tag(reference)
        image = self._images.get(reference) or self._images.get(repository)
        image = image or self._images.get(reference.rpartition("/")[2])
        image = image or self._images.get(repository.rpartition("/")[2])
        if image is None:
            raise PullError(
                f'failed to pull and unpack image "{reference}": '
                f'failed to resolve reference "{reference}": {reference}: not found'
            )
        return image


def strip_tag(reference: str) -> str:
    """``host:5000/name:tag@digest`` without its tag and digest."""
    name = reference.partition("@")[0]
    head, separator, last = name.rpartition("/")
    return f"{head}{separator}{last.partition(':')[0]}"


def _python_image(main: str, script: str = "") -> Image:
    """A Python program at /app/main.py, started by `script` if given."""
    paths = {"/app/main.py": _program(main), "/app/cuda.py": _program("cuda.py"), **python_program()}
    if not script:
        return Image(("python3", "/app/main.py"), programs=paths)
    return Image(("sh", "/app/run.sh"), programs={**paths, "/app/run.sh": _program(script)})


def python_program() -> dict[str, Path]:
    return {"/usr/bin/python3": Path(os.path.realpath(sys.executable))}


def _program(name: str) -> Path:
    return Path(str(files("simcluster.workload") / "programs" / name))
