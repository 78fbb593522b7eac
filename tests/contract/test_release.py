"""What a release consists of: the plan, wheels with the library, archives of the OCI, notes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from packaging.utils import parse_wheel_filename
from release import build, oci, wheels
from release.image_base import base_image, image_config, python_of
from release.sbom import bill_of_materials

from gpuslice import __version__
from tests import tools

EPOCH = 1_700_000_000


def made(out: Path, *words: str) -> str:
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)}
    command = [sys.executable, "-m", "release.build", "--out", str(out), *words]
    done = subprocess.run(command, cwd=build.ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_build_nothing_is_made_and_the_plan_says_what_is_missing(tmp_path: Path) -> None:
    told = made(tmp_path / "dist")
    for step in build.STEPS:
        assert step.name in told
    assert "left out: no --base" in told
    assert "left out: no --key" in told
    assert "Nothing is made yet" in told
    assert not (tmp_path / "dist").exists()


def test_a_base_for_a_machine_that_nobody_has_is_refused() -> None:
    done = CliRunner().invoke(build.main, ["--base", "sparc=/srv/base"])
    assert done.exit_code == 2
    assert "sparc must be one of x86_64, aarch64" in done.output


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--base", "{tmp}/absent"], "there is no {tmp}/absent"),
        (["--base", "{tmp}/text"], "Error: image: {tmp}/text is neither a folder nor an OCI archive"),
        (["--base", "{tmp}/old.tar"], "Error: image: {tmp}/old.tar is no OCI archive: it has no index.json"),
        (["--base", "{tmp}/closed"], "Error: image: {tmp}/closed/shadow of the base cannot be read"),
        (["--url", "registry.example.com"], "registry.example.com is no address"),
    ],
)
def test_what_nothing_can_be_made_of_is_refused_with_a_sentence(
    tmp_path: Path, options: list[str], sentence: str
) -> None:
    (tmp_path / "text").write_text("no archive\n")
    with tarfile.open(tmp_path / "old.tar", "w") as archive:
        archive.add(tmp_path / "text", "manifest.json")
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "shadow").write_text("")
    (tmp_path / "closed" / "shadow").chmod(0)
    if "closed" in options[-1] and os.access(tmp_path / "closed" / "shadow", os.R_OK):
        pytest.skip("root may read everything")
    words = [each.format(tmp=tmp_path) for each in options]
    arch = ["--arch", os.uname().machine, "--only", "image"]
    done = CliRunner().invoke(build.main, ["--build", "--out", str(tmp_path / "dist"), *arch, *words])
    assert done.exception.__class__ is SystemExit, done.output
    assert sentence.format(tmp=tmp_path) in " ".join(done.output.split())


# -- wheels ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheels")
    made(out, "--build", "--only", "wheels", "--arch", os.uname().machine)
    (found,) = out.glob("*linux*.whl")
    return found


def test_a_wheel_for_a_platform_holds_the_library_and_says_where_it_runs(wheel: Path) -> None:
    tags = {tag.platform for tag in parse_wheel_filename(wheel.name)[3]}
    machine = os.uname().machine
    assert tags == {f"{name}_{machine}" for name in ("manylinux_2_17", "manylinux2014", "musllinux_1_1")}
    with zipfile.ZipFile(wheel) as archive:
        library = archive.getinfo(wheels.INSIDE)
        assert archive.read(library).startswith(b"\x7fELF")
        assert library.external_attr >> 16 & 0o111
        (record,) = (name for name in archive.namelist() if name.endswith("/RECORD"))
        recorded = [line.rsplit(",", 2) for line in archive.read(record).decode().splitlines()]
        assert {name for name, _, _ in recorded} == set(archive.namelist())
        sizes = {name: int(size) for name, _, size in recorded if size}
        assert sizes == {
            each.filename: each.file_size for each in archive.infolist() if each.filename in sizes
        }
        (told,) = (archive.read(name).decode() for name in archive.namelist() if name.endswith("/WHEEL"))
    assert "Root-Is-Purelib: false" in told
    assert {line[5:] for line in told.splitlines() if line.startswith("Tag: ")} == {
        f"py3-none-{tag}" for tag in tags
    }


def test_pip_takes_the_wheel_and_gpuslice_run_finds_the_library_in_it(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
    ]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    program = f"import sys; sys.path.insert(0, {str(site)!r})\n"
    program += "import gpuslice.apps.cli.run as run; print(*run.LIBRARIES, sep='\\n')"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert str(site / wheels.INSIDE) in told.stdout.splitlines()
    assert (site / "share/man/man1/gpuslice-top.1").is_file()
    assert (site / wheels.INSIDE).exists()


def test_the_library_asks_for_nothing_that_an_old_system_lacks(wheel: Path, tmp_path: Path) -> None:
    if shutil.which("readelf") is None:
        pytest.skip("readelf is not on this machine (Debian: binutils)")
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract(wheels.INSIDE, tmp_path)
    told = subprocess.run(["readelf", "-VW", library], capture_output=True, text=True, check=True).stdout
    asked = {tuple(map(int, version.split("."))) for version in re.findall(r"GLIBC_([0-9.]+)", told)}
    assert asked
    assert max(asked) <= (2, 17)


@pytest.mark.parametrize("architecture", sorted(set(oci.ARCHITECTURES) - {os.uname().machine}))
def test_the_library_of_the_other_architecture_is_built_where_there_is_a_compiler(architecture: str) -> None:
    if wheels.compiler(architecture) is None:
        pytest.skip(f"{architecture}-linux-gnu-gcc is not here")
    machine = {"x86_64": 62, "aarch64": 183}[architecture]
    for name in ("libgpuslice.so", "gpuslice-limits-hook"):
        built = wheels.built(architecture, name).read_bytes()
        assert (built[:4], int.from_bytes(built[18:20], "little")) == (b"\x7fELF", machine)


def test_one_folder_serves_all_pythons_and_machines(tmp_path: Path) -> None:
    modules = [f"_core.cpython-{each}-linux-gnu.so" for each in ("311-x86_64", "311-aarch64", "313-x86_64")]
    for number, name in enumerate(modules):
        package = tmp_path / str(number) / "msgspec"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("the same")
        (package / name).write_text(name)
    merged = wheels.merged(tmp_path / "all", [tmp_path / str(number) for number in range(3)])
    assert {path.name for path in (merged / "msgspec").iterdir()} == {"__init__.py", *modules}

    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "one_name.abi3.so").write_text("x86-64")
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "one_name.abi3.so").write_text("aarch64")
    with pytest.raises(FileExistsError, match=r"one_name.abi3.so is another one for another"):
        wheels.merged(tmp_path / "all", [tmp_path / "3", tmp_path / "4"])


def test_a_command_that_fails_is_told_with_its_own_words(tmp_path: Path) -> None:
    if shutil.which("gpg") is None or shutil.which("cosign"):
        pytest.skip("gpg is not on this machine, or cosign is and would be asked first")
    words = [
        "--build",
        "--out",
        str(tmp_path),
        "--only",
        "checksums",
        "--only",
        "signature",
        "--key",
        "nobody",
    ]
    done = CliRunner().invoke(build.main, words)
    assert (done.exit_code, done.exception.__class__) == (1, SystemExit)
    assert "Error: signature: gpg" in done.output
    assert "No secret key" in done.output


def test_every_package_that_is_installed_is_held_by_the_lock(tmp_path: Path) -> None:
    lines = wheels.constraints(tmp_path).read_text().splitlines()
    assert any(line.startswith("msgspec==") for line in lines)
    assert not [line for line in lines if "--hash" in line or "\\" in line]


# -- archives ----------------------------------------------------------------------------------------------


@pytest.fixture
def base(tmp_path: Path) -> Path:
    root = tmp_path / "base"
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/python3.12").write_text("a program")
    (root / "usr/bin/python3").symlink_to("python3.12")
    return root


ABOUT = {"org.opencontainers.image.version": "1.2.3"}


def opened(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {entry.name: tar.extractfile(entry).read() for entry in tar}  # type: ignore[union-attr]


def blob(files: dict[str, bytes], descriptor: dict[str, Any]) -> bytes:
    content = files[f"blobs/{descriptor['digest'].replace(':', '/')}"]
    assert f"sha256:{hashlib.sha256(content).hexdigest()}" == descriptor["digest"]
    assert len(content) == descriptor["size"]
    return content


def test_an_image_is_what_the_specification_says(base: Path, tmp_path: Path) -> None:
    below = base_image(base, "x86_64", EPOCH)
    top = oci.layer([("usr/local/bin/gpuslice", base / "usr/bin/python3.12")], EPOCH)
    config = image_config({"Env": ["PATH=/opt/bin", "LANG=C"], "Cmd": ["bash"], "User": "root"})
    images = [oci.Image("x86_64", (*below.layers, top), config), oci.Image("aarch64", below.layers, config)]
    digest = oci.image_archive(tmp_path / "image.tar", images, "2023-11-14T22:13:20Z", ABOUT)
    files = opened(tmp_path / "image.tar")
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    (named,) = json.loads(files["index.json"])["manifests"]
    assert named["digest"] == digest
    assert named["annotations"]["org.opencontainers.image.ref.name"] == "1.2.3"
    index = json.loads(blob(files, named))
    assert [each["platform"]["architecture"] for each in index["manifests"]] == ["amd64", "arm64"]
    manifest = json.loads(blob(files, index["manifests"][0]))
    kept = json.loads(blob(files, manifest["config"]))
    assert kept["config"]["User"] == "65532:65532"
    assert kept["config"]["Env"][:2] == ["LANG=C", "PATH=/opt/bin"]
    assert kept["config"]["Entrypoint"] == ["/usr/local/bin/gpuslice"]
    assert len(kept["rootfs"]["diff_ids"]) == len(kept["history"]) == len(manifest["layers"]) == 2
    for layer, diff_id in zip(manifest["layers"], kept["rootfs"]["diff_ids"], strict=True):
        plain = __import__("gzip").decompress(blob(files, layer))
        assert f"sha256:{hashlib.sha256(plain).hexdigest()}" == diff_id
        with tarfile.open(fileobj=io.BytesIO(plain)) as tar:
            assert {(entry.uid, entry.gid, entry.uname) for entry in tar} == {(0, 0, "")}
            assert all(entry.mtime <= EPOCH for entry in tar)


def test_an_image_stands_on_one_that_was_written(base: Path, tmp_path: Path) -> None:
    below = base_image(base, "aarch64", EPOCH)
    image = oci.Image("aarch64", below.layers, {"Env": ["PATH=/bin"]})
    oci.image_archive(tmp_path / "base.tar", [image], "2023-11-14T22:13:20Z", ABOUT)
    read = base_image(tmp_path / "base.tar", "aarch64", EPOCH)
    assert read == image
    assert python_of(read) == "3.12"
    with pytest.raises(LookupError, match="holds no image for amd64"):
        base_image(tmp_path / "base.tar", "x86_64", EPOCH)


def test_a_base_without_python_is_refused(base: Path) -> None:
    (base / "usr/bin/python3.12").unlink()
    with pytest.raises(LookupError, match=r"none of python3\.11, python3\.12, python3\.13"):
        python_of(base_image(base, "x86_64", EPOCH))


def test_the_same_input_makes_the_same_bytes(base: Path, tmp_path: Path) -> None:
    archives = []
    for turn in ("one", "two"):
        copy = tmp_path / turn
        shutil.copytree(base, copy, symlinks=True)
        os.utime(copy / "usr/bin/python3.12", (EPOCH + 5, EPOCH + 5))
        layers = base_image(copy, "x86_64", EPOCH).layers
        oci.image_archive(tmp_path / f"{turn}.tar", [oci.Image("x86_64", layers, {})], "then", ABOUT)
        archives.append((tmp_path / f"{turn}.tar").read_bytes())
    assert archives[0] == archives[1]


def test_the_chart_is_packed_as_helm_packs_it_and_twice_the_same(tmp_path: Path) -> None:
    helm = str(tools.find("helm"))
    for turn in ("one", "two"):
        made(tmp_path / turn, "--build", "--only", "chart")
    first, second = (
        sorted(path.read_bytes() for path in (tmp_path / turn).iterdir()) for turn in ("one", "two")
    )
    assert first == second
    packed = str(tmp_path / "one" / f"gpuslice-{__version__}.tgz")
    values = ("--set", "image.repository=r.example/gpuslice")
    from_package = subprocess.run([helm, "template", packed, *values], capture_output=True, check=True).stdout
    assert b"gpushare-schd-extender" in from_package
    with tarfile.open(packed) as tar:
        names = tar.getnames()
    assert names[0] == "gpuslice/Chart.yaml"
    assert not [name for name in names if "/ci/" in name]
    files = opened(tmp_path / "one" / f"gpuslice-{__version__}-chart.oci.tar")
    (named,) = json.loads(files["index.json"])["manifests"]
    manifest = json.loads(blob(files, named))
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.helm.config.v1+json"
    assert json.loads(blob(files, manifest["config"]))["name"] == "gpuslice"
    assert blob(files, manifest["layers"][0]) == Path(packed).read_bytes()


# -- what goes with it -------------------------------------------------------------------------------------


def test_the_bill_of_materials_names_what_is_installed() -> None:
    lock = (build.ROOT / "requirements.lock").read_text()
    site = Path(sys.modules["yaml"].__file__ or "").parents[1]
    bill = bill_of_materials(site, "gpuslice", __version__, "2023-11-14T22:13:20Z", lock)
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
    parts = {each["name"]: each for each in bill["components"]}
    assert parts["msgspec"]["purl"].startswith("pkg:pypi/msgspec@")
    assert parts["msgspec"]["properties"]
    assert "gpuslice" not in parts
    assert set(bill["dependencies"][0]["dependsOn"]) == {each["bom-ref"] for each in bill["components"]}
    again = bill_of_materials(site, "gpuslice", __version__, "2023-11-14T22:13:20Z", lock)
    assert again == bill


def test_the_plugins_manifest_is_one_that_krew_takes() -> None:
    manifest = build.krew("https://r.example/a.tar.gz", "0" * 64)
    assert manifest["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2"
    assert manifest["spec"]["version"] == f"v{__version__}"
    (platform,) = manifest["spec"]["platforms"]
    assert platform["bin"] in {each["from"] for each in platform["files"]}
    linked = "kubectl-" + manifest["metadata"]["name"].replace(
        "-", "_"
    )  # krew's link, which kubectl looks for
    assert linked == platform["bin"]  # and which says to the program which one it is
    assert yaml.safe_load(yaml.safe_dump(manifest)) == manifest


def test_the_notes_are_the_changelogs_section_of_the_version() -> None:
    changelog = "# Changelog\n\n## Unreleased\n\nnew\n\n## [1.1.0] - 2026-01-01\n\nold\n\n## 1.0.0\n\nfirst\n"
    assert build.notes(changelog, "1.1.0") == "# gpuslice 1.1.0\n\nold\n"
    assert build.notes(changelog, "1.0.0") == "# gpuslice 1.0.0\n\nfirst\n"
    assert build.notes(changelog, "2.0.0") == "# gpuslice 2.0.0\n\nnew\n"


def test_the_provenance_names_what_was_made_from_what_and_is_summed(tmp_path: Path) -> None:
    base, out = tmp_path / "base.tar", tmp_path / "dist"
    base.write_bytes(b"a root file system")
    only = [word for name in ("notes", "provenance", "checksums") for word in ("--only", name)]
    arguments = [
        "--build",
        "--out",
        str(out),
        "--base",
        f"x86_64={base}",
        "--builder",
        "https://ci.example/1",
    ]
    told = CliRunner().invoke(build.main, [*arguments, *only], env={"SOURCE_DATE_EPOCH": str(EPOCH)})
    assert told.exit_code == 0, told.output
    (made,) = out.glob("*.intoto.json")
    statement = json.loads(made.read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    (notes,) = statement["subject"]
    told_of = out / notes["name"]
    assert notes["digest"] == {"sha256": hashlib.sha256(told_of.read_bytes()).hexdigest()}
    source, lock, below = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    head = subprocess.run(
        ["git", "-C", str(build.ROOT), "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    )
    assert source["digest"] == {"gitCommit": head.stdout.strip()}
    assert lock["name"] == "requirements.lock"
    assert below["digest"] == {"sha256": hashlib.sha256(base.read_bytes()).hexdigest()}
    run = statement["predicate"]["runDetails"]
    assert run["builder"] == {"id": "https://ci.example/1"}
    assert f"  {made.name}\n" in (out / "SHA256SUMS").read_text()


def test_the_sums_are_those_of_the_files_and_a_key_signs_them(tmp_path: Path) -> None:
    gpg = shutil.which("gpg")
    if gpg is None:
        pytest.skip("gpg is not on this machine (Debian: gnupg)")
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    environ = {**os.environ, "GNUPGHOME": str(home), "SOURCE_DATE_EPOCH": str(EPOCH)}
    quick = [gpg, "--batch", "--passphrase", "", "--quick-generate-key", "release@example.com", "ed25519"]
    subprocess.run(quick, env=environ, check=True, capture_output=True)
    out = tmp_path / "dist"
    only = [word for name in ("notes", "checksums", "signature") for word in ("--only", name)]
    command = [sys.executable, "-m", "release.build", "--build", "--out", str(out), *only]
    subprocess.run(
        [*command, "--key", "release@example.com"],
        cwd=build.ROOT,
        env=environ,
        check=True,
        capture_output=True,
    )
    for line in (out / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((out / name).read_bytes()).hexdigest() == digest
    verify = [gpg, "--verify", str(out / "SHA256SUMS.asc"), str(out / "SHA256SUMS")]
    assert subprocess.run(verify, env=environ, check=False, capture_output=True).returncode == 0
    subprocess.run(["gpgconf", "--kill", "all"], env=environ, check=False)
