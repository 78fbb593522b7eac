"""Makes a release: ``make release`` shows what it would make, ``make release ARGS=--build`` makes it.

Nothing is pushed anywhere. What needs a program or a package that is not here is left out, and said so.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import yaml

from gpuslice import __version__
from release import oci, wheels
from release.image_base import START, base_image, image_config, python_of
from release.provenance import provenance, sha256_of
from release.sbom import bill_of_materials

ROOT = wheels.ROOT
CHART = ROOT / "charts" / "gpuslice"
KREW_PROGRAM = "kubectl-inspect"


@dataclass
class Release:
    """What is wanted, and what has been made of it so far."""

    out: Path
    architectures: tuple[str, ...]
    bases: dict[str, Path]  # architecture → folder, tar or OCI archive with Python
    url: str  # where the files will be downloaded from
    key: str
    builder: str
    epoch: int
    work: Path = field(default_factory=Path)
    wheels: dict[str, Path] = field(default_factory=dict)

    @property
    def created(self) -> str:
        return datetime.datetime.fromtimestamp(self.epoch, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    @cached_property
    def pure(self) -> Path:
        return wheels.pure_wheel(self.out, self.epoch)

    def wheel(self, architecture: str) -> Path:
        """The wheel with the library of this architecture, made once."""
        if architecture not in self.wheels:
            built = wheels.built(architecture)
            self.wheels[architecture] = wheels.platform_wheel(self.pure, built, architecture, self.epoch)
        return self.wheels[architecture]


Made = Iterator[Path]


# -- the steps -----------------------------------------------------------------------------------------------


def make_wheels(release: Release) -> Made:
    yield release.pure
    for architecture in release.architectures:
        if wheels.compiler(architecture):
            yield release.wheel(architecture)


def make_zipapp(release: Release) -> Made:
    """The command line as one file, for the Pythons that are supported, on Linux of both architectures."""
    sites = [
        wheels.installed(
            release.work / f"zipapp-{python}-{architecture}", release.pure, "", python, architecture
        )
        for python in wheels.PYTHONS
        for architecture in oci.ARCHITECTURES
    ]
    site = wheels.merged(release.work / "zipapp", sites)
    made = release.out / f"gpuslice-{__version__}.pyz"
    command = [sys.executable, "-m", "shiv", "--reproducible", "--compressed", "-o", str(made)]
    command += [
        "-p",
        "/usr/bin/env python3",
        "-e",
        "gpuslice.apps.cli.program:main_by_name",
        "--site-packages",
        str(site),
    ]
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(release.epoch)}
    subprocess.run(command, check=True, env=environ, capture_output=True)
    yield made


def make_image(release: Release) -> Made:
    """One OCI archive with an image for each base that was given."""
    images = []
    for architecture, base in release.bases.items():
        below = base_image(base, architecture, release.epoch)
        python = python_of(below)
        root = release.work / f"image-{architecture}"
        site = root / "opt/gpuslice/python"
        site.mkdir(parents=True)
        wheels.installed(site, release.wheel(architecture), "[daemons,fast]", python, architecture)
        start = root / "usr/local/bin/gpuslice"
        start.parent.mkdir(parents=True)
        start.write_text(START)
        start.chmod(0o755)
        library = root / "usr/share/gpuslice/lib/libgpuslice.so"
        library.parent.mkdir(parents=True)
        shutil.move(site / wheels.INSIDE, library)
        shutil.copy(
            wheels.built(architecture, "gpuslice-limits-hook"), library.with_name("gpuslice-limits-hook")
        )
        layers = (*below.layers, oci.layer(oci.tree(root), release.epoch))
        images.append(oci.Image(architecture, layers, image_config(below.config)))
        bill = release.out / f"gpuslice-{__version__}-{architecture}.cdx.json"
        lock = (ROOT / "requirements.lock").read_text()
        bill.write_text(
            json.dumps(bill_of_materials(site, "gpuslice", __version__, release.created, lock), indent=1)
        )
        yield bill
    made = release.out / f"gpuslice-{__version__}-image.tar"
    about = {
        "org.opencontainers.image.title": "gpuslice",
        "org.opencontainers.image.version": __version__,
        "org.opencontainers.image.description": "Fractions of a GPU for containers, with limits that hold",
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.created": release.created,
    }
    digest = oci.image_archive(made, images, release.created, about)
    made.with_suffix(".digest").write_text(f"{digest}\n")
    yield made
    yield made.with_suffix(".digest")


def make_chart(release: Release) -> Made:
    """The chart as Helm packs it, and as it lies in a registry."""
    ignored = (CHART / ".helmignore").read_text().split()
    kept = [
        (name, path)
        for name, path in oci.tree(CHART, "gpuslice/")
        if path.is_file()
        and not any(f"/{each.rstrip('/*')}" in f"/{name}" for each in ignored if each.endswith("/"))
        and path.name != ".helmignore"
    ]
    first = [each for each in kept if each[0] == "gpuslice/Chart.yaml"]  # where Helm looks first
    package = oci.packed([*first, *(each for each in kept if each not in first)], release.epoch)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    packed = release.out / f"gpuslice-{chart['version']}.tgz"
    packed.write_bytes(package)
    yield packed
    artifact = release.out / f"gpuslice-{chart['version']}-chart.oci.tar"
    oci.chart_archive(artifact, chart, package)
    yield artifact


def make_krew(release: Release) -> Made:
    """An archive and a manifest of the kubectl plugin; its program is the zipapp by another name."""
    zipapp = release.out / f"gpuslice-{__version__}.pyz"
    packed = release.out / f"{KREW_PROGRAM}-{__version__}.tar.gz"
    packed.write_bytes(oci.packed([(KREW_PROGRAM, zipapp), ("LICENSE", ROOT / "LICENSE")], release.epoch))
    yield packed
    manifest = release.out / f"krew-{__version__}.yaml"
    described = krew(f"{release.url}/{packed.name}", sha256_of(packed))
    manifest.write_text(yaml.safe_dump(described, sort_keys=False))
    yield manifest


def krew(uri: str, digest: str) -> dict[str, Any]:
    """The plugin's manifest.

    krew links the program as kubectl-NAME, with an underscore for each hyphen of NAME: only a plugin
    ``inspect`` answers to ``kubectl inspect cgpu``.
    """
    platform = {
        "selector": {"matchLabels": {"os": "linux"}},
        "uri": uri,
        "sha256": digest,
        "bin": KREW_PROGRAM,
        "files": [{"from": KREW_PROGRAM, "to": "."}, {"from": "LICENSE", "to": "."}],
    }
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": KREW_PROGRAM.removeprefix("kubectl-")},
        "spec": {
            "version": f"v{__version__}",
            "shortDescription": "Show what is allocated on which shared GPU",
            "description": "Lists the shared cards of each node and the pods that hold their memory.",
            "caveats": "Use it as `kubectl inspect cgpu`. Needs python3 on PATH, 3.11 to 3.13.",
            "platforms": [platform],
        },
    }


def make_notes(release: Release) -> Made:
    """The changelog's section of this version, or while it has none what is unreleased."""
    made = release.out / f"notes-{__version__}.md"
    made.write_text(notes((ROOT / "CHANGELOG.md").read_text(), __version__))
    yield made


def notes(changelog: str, version: str) -> str:
    sections = dict(
        re.findall(r"^## \[?([^\]\n ]+)\]?[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    )
    section = sections.get(version) or sections.get("Unreleased") or ""
    return f"# gpuslice {version}\n\n{section.strip()}\n"


def make_provenance(release: Release) -> Made:
    """From what all of it was made. It is among the files that are summed and signed."""
    made = release.out / f"gpuslice-{__version__}.intoto.json"
    statement = provenance(
        [path for path in _files(release) if path != made],
        ROOT,
        bases=release.bases,
        parameters={"version": __version__, "architectures": list(release.architectures), "url": release.url},
        builder=release.builder,
        created=release.created,
    )
    made.write_text(json.dumps(statement, indent=1) + "\n")
    yield made


def make_checksums(release: Release) -> Made:
    made = release.out / "SHA256SUMS"
    made.write_text("".join(f"{sha256_of(path)}  {path.name}\n" for path in _files(release)))
    yield made


def _files(release: Release) -> list[Path]:
    """All but the checksums and their signature."""
    files = (path for path in release.out.iterdir() if not path.name.startswith("SHA256SUMS"))
    return sorted(path for path in files if path.is_file())


def make_signature(release: Release) -> Made:
    """Of the checksums, and by them of everything: with cosign for a key file or a KMS, else with GnuPG."""
    sums = release.out / "SHA256SUMS"
    if shutil.which("cosign") and (Path(release.key).exists() or "://" in release.key):
        made = sums.with_suffix(".sig")
        command = [
            "cosign",
            "sign-blob",
            "--yes",
            "--key",
            release.key,
            "--output-signature",
            str(made),
            str(sums),
        ]
    else:
        made = sums.with_suffix(".asc")
        command = ["gpg", "--batch", "--yes", "--armor", "--local-user", release.key]
        command += ["--output", str(made), "--detach-sign", str(sums)]
    subprocess.run(command, check=True, capture_output=True)
    yield made


@dataclass(frozen=True)
class Step:
    """One part of a release: what it makes, how, and why it cannot be made here ("" when it can)."""

    name: str
    what: str
    make: Callable[[Release], Made]
    missing: Callable[[Release], str] = lambda _: ""


def _no_shiv(release: Release) -> str:
    return "" if find_spec("shiv") else "the package shiv is not installed (.venv/bin/pip install shiv)"


STEPS = (
    Step("wheels", "the package alone, and with libgpuslice for each architecture", make_wheels),
    Step("zipapp", "the command line as one file", make_zipapp, _no_shiv),
    Step(
        "image",
        "an OCI archive with an image for each base, and what is in it (CycloneDX)",
        make_image,
        lambda release: "" if release.bases else "no --base: a folder or an OCI archive with Python in it",
    ),
    Step("chart", "the chart as .tgz and as an OCI artifact", make_chart),
    Step(
        "krew",
        "archive and manifest of the kubectl plugin",
        make_krew,
        lambda release: (
            _no_shiv(release) or ("" if release.url else "no --url: where the files will be found")
        ),
    ),
    Step("notes", "the changelog's section", make_notes),
    Step("provenance", "from what it was made: in-toto, SLSA v1", make_provenance),
    Step("checksums", "SHA256SUMS of all files", make_checksums),
    Step(
        "signature",
        "of the checksums",
        make_signature,
        lambda release: (
            "no --key"
            if not release.key
            else ""
            if shutil.which("cosign") or shutil.which("gpg")
            else "neither cosign nor gpg is here"
        ),
    ),
)


def plan(release: Release) -> Iterator[str]:
    for step in STEPS:
        missing = step.missing(release)
        yield f"{step.name:10} {step.what}" + (f"\n{'':10} left out: {missing}" if missing else "")
    for architecture in release.architectures:
        found = wheels.compiler(architecture)
        yield f"library    {architecture}: {found or f'no compiler: {architecture}-linux-gnu-gcc'}"


def _base(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> dict[str, Path]:
    found = {}
    for value in values:
        architecture, _sign, path = value.rpartition("=")
        found[architecture or os.uname().machine] = Path(path)
    if unknown := set(found) - set(oci.ARCHITECTURES):
        raise click.BadParameter(f"{', '.join(unknown)} must be one of {', '.join(oci.ARCHITECTURES)}")
    if absent := [str(path) for path in found.values() if not path.exists()]:
        raise click.BadParameter(f"there is no {', '.join(absent)}")
    return found


def _url(_: click.Context, __: click.Parameter, value: str) -> str:
    if value and not value.startswith(("https://", "http://")):
        raise click.BadParameter(f"{value} is no address: it begins with https://")
    return value


@click.command()
@click.option("--build", is_flag=True, help="Make it; without this only say what would be made.")
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "dist", help="Folder for the files.")
@click.option(
    "--only", multiple=True, type=click.Choice([step.name for step in STEPS]), help="These steps alone."
)
@click.option(
    "--arch", "architectures", multiple=True, type=click.Choice([*oci.ARCHITECTURES]), help="Default: both."
)
@click.option(
    "--base",
    "bases",
    multiple=True,
    callback=_base,
    metavar="[ARCH=]PATH",
    help="What the image stands on: a root file system as a folder, or an OCI archive. It has Python.",
)
@click.option("--url", default="", callback=_url, help="Where the files will be downloaded from, for krew.")
@click.option(
    "--key", default="", help="Key that signs the checksums: cosign's file or KMS, or GnuPG's name."
)
@click.option(
    "--builder",
    default="urn:gpuslice:make-release",
    show_default=True,
    metavar="URI",
    help="Who builds, for the provenance: the address of your build service.",
)
def main(build: bool, out: Path, only: tuple[str, ...], architectures: tuple[str, ...], **rest: Any) -> None:
    """Make a release of gpuslice, or say what would be made. Nothing is pushed anywhere."""
    release = Release(out, architectures or tuple(oci.ARCHITECTURES), **rest, epoch=_epoch())
    if not build:
        click.echo("\n".join(plan(release)))
        click.echo(f"\nNothing is made yet: --build makes it in {out}.")
        return
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpuslice-release-") as work:
        release.work = Path(work)
        for step in STEPS:
            if only and step.name not in only:
                continue
            if missing := step.missing(release):
                click.echo(f"left out: {step.name}: {missing}")
                continue
            try:
                for made in step.make(release):
                    click.echo(f"{made.stat().st_size:>12,}  {made}")
            except oci.NoBase as error:
                raise click.ClickException(f"{step.name}: {error}") from error
            except subprocess.CalledProcessError as error:
                told = error.stderr.decode() if isinstance(error.stderr, bytes) else error.stderr
                command = " ".join(map(str, error.cmd))
                raise click.ClickException(
                    f"{step.name}: {command} failed: {(told or '').strip()}"
                ) from error


def _epoch() -> int:
    """The time of the last commit, unless SOURCE_DATE_EPOCH says another."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
