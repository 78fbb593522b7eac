"""``gpuslice install-extender``: gives the kube-scheduler of a control-plane node the extender's section.

For kube-schedulers that kubelet runs from a file, as kubeadm and the vendor's clusters do. The file is
changed, kubelet restarts the scheduler, and if that is not healthy in time, the file is restored.
What the file was before is kept beside the manifests, and comes back byte for byte.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import yaml

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import connect
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.resources import DICT, Resource
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.adapters.web.logs import configure_logs
from gpuslice.apps.agent.library import replace_file
from gpuslice.apps.agent.settings import InstallExtenderSettings
from gpuslice.core.errors import GpusliceError
from gpuslice.core.hosts import bracketed

_log = logging.getLogger(__name__)

PODS = Resource("v1", "pods", "Pod", DICT)
BACKUP = "gpuslice.io/backup"
"""Annotation of a manifest that we wrote: the file beside it with what it was before."""
HASH = "kubernetes.io/config.hash"  # kubelet's, of the file that a mirror pod stands for
CONFIGURATION = "/etc/kubernetes/gpuslice"  # as the scheduler sees it, like the next
CERTIFICATES = "/etc/kubernetes/gpuslice-tls"
FILES = ("ca.crt", "tls.crt", "tls.key")

Json = Mapping[str, Any]


class InstallError(GpusliceError):
    """kube-scheduler could not be given the section; the node is as it was before."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A static pod of kube-scheduler, as the file says it."""

    content: bytes
    document: dict[str, Any]

    @classmethod
    def read(cls, content: bytes, name: str) -> Manifest:
        document = yaml.safe_load(content)
        if not isinstance(document, dict) or not document.get("spec", {}).get("containers"):
            raise InstallError(f"{name} holds no pod with containers")
        return cls(content, document)

    @property
    def backup(self) -> str:
        """The name of the file with what this was before; "" where the manifest is not of our making."""
        return str((self.document["metadata"].get("annotations") or {}).get(BACKUP, ""))

    @property
    def pod(self) -> tuple[str, str]:
        """Namespace and name, without the node's that kubelet adds."""
        metadata = self.document["metadata"]
        return metadata.get("namespace", "default"), metadata["name"]

    def flag(self, name: str, default: str = "") -> str:
        container = self.document["spec"]["containers"][0]
        words = [*(container.get("command") or []), *(container.get("args") or [])]
        for word, following in zip(words, [*words[1:], ""], strict=True):
            if word == f"--{name}":
                return str(following)
            if word.startswith(f"--{name}="):
                return str(word.partition("=")[2])
        return default

    @property
    def health_url(self) -> str:
        address = self.flag("bind-address", "0.0.0.0")
        host = "127.0.0.1" if address in ("0.0.0.0", "::") else bracketed(address)
        return f"https://{host}:{self.flag('secure-port', '10259')}/healthz"


def configuration(manifest: Manifest, existing: Json | None, section: Json) -> dict[str, Any]:
    """The scheduler's configuration with the section in it, from the one that it has or from its flags."""
    if existing is None:
        existing = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": manifest.flag("kubeconfig")},
            "leaderElection": {"leaderElect": manifest.flag("leader-elect", "true") == "true"},
        }
    ours = {each["name"] for each in section["managedResources"]}
    others = [
        each
        for each in existing.get("extenders") or []
        if not ours & {managed["name"] for managed in each.get("managedResources") or []}
    ]
    return {"percentageOfNodesToScore": 100, **existing, "extenders": [*others, dict(section)]}


def pointed(manifest: Manifest, folder: Path, backup: str) -> bytes:
    """The manifest with the configuration and the certificates of a folder of the node."""
    document = yaml.safe_load(manifest.content)
    document["metadata"].setdefault("annotations", {})[BACKUP] = backup
    container = document["spec"]["containers"][0]
    container["command"] = _without_config(container.get("command") or [])
    if container.get("args"):
        container["args"] = _without_config(container["args"])
    container["command"].append(f"--config={CONFIGURATION}/config.yaml")
    volume = {"name": "gpuslice", "hostPath": {"path": str(folder), "type": "Directory"}}
    document["spec"]["volumes"] = [*(document["spec"].get("volumes") or []), volume]
    mounts = [
        {"name": "gpuslice", "mountPath": path, "readOnly": True} for path in (CONFIGURATION, CERTIFICATES)
    ]
    container["volumeMounts"] = [*(container.get("volumeMounts") or []), *mounts]
    written: bytes = yaml.safe_dump(document, sort_keys=False, encoding="utf-8")
    return written


def _without_config(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and word != "--config" and not word.startswith("--config="):
            kept.append(word)
        skip = word == "--config"
    return kept


class MasterFiles:
    """What of kube-scheduler lies on one node, below /etc/kubernetes there."""

    def __init__(self, settings: InstallExtenderSettings) -> None:
        self._settings = settings
        folder = Path(settings.folder)
        self.path = folder / "manifests" / settings.manifest
        self._backups = folder / "manifests-backup"
        self._versions = folder / "gpuslice"

    def read(self) -> Manifest:
        try:
            return Manifest.read(self.path.read_bytes(), str(self.path))
        except (FileNotFoundError, yaml.YAMLError) as error:
            raise InstallError(
                f"{self.path} must be the manifest of a kube-scheduler that kubelet runs from a file: {error}"
            ) from error

    def before(self, found: Manifest) -> Manifest:
        """What the manifest was before us: itself where we have not changed it."""
        if not found.backup:
            return found
        return Manifest.read((self._backups / found.backup).read_bytes(), found.backup)

    def with_section(self, found: Manifest) -> bytes:
        """Write down what the scheduler will read, and answer its manifest; it knows nothing yet."""
        before = self.before(found)
        section = yaml.safe_load(Path(self._settings.section).read_bytes())
        given = Path(self._settings.certificates)
        certificates = {name: (given / name).read_bytes() for name in FILES if (given / name).exists()}
        existing = None
        if path := before.flag("config"):
            if not Path(path).is_relative_to(self._settings.folder):
                raise InstallError(
                    f"--config of kube-scheduler is {path}; it must be below {self._settings.folder}"
                )
            existing = yaml.safe_load(Path(path).read_bytes())
            if not isinstance(existing, dict) or existing.get("kind") != "KubeSchedulerConfiguration":
                raise InstallError(f"{path} must hold a KubeSchedulerConfiguration")
        config = yaml.safe_dump(configuration(before, existing, section)).encode()
        digest = hashlib.sha256(b"\0".join((before.content, config, *certificates.values()))).hexdigest()[:16]
        folder = self._versions / digest
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in {"config.yaml": config, **certificates}.items():
            replace_file(folder / name, content, 0o600, lasting=True)
        backup = found.backup
        if not backup:  # the manifest is kept beside the others, by the vendor's names
            self._backups.mkdir(parents=True, exist_ok=True)
            backup = f"{self.path.stem}.ori.yaml"
            kept = self._backups / backup
            if kept.exists() and kept.read_bytes() != found.content:
                backup = f"{self.path.stem}-{time.strftime('%Y%m%d%H%M%S', time.gmtime())}.yaml"
            replace_file(self._backups / backup, found.content, 0o600, lasting=True)
        return pointed(before, folder, backup)

    def write(self, content: bytes) -> None:
        """From here on kubelet restarts the scheduler."""
        replace_file(self.path, content, self.path.stat().st_mode & 0o777, lasting=True)

    def sweep(self) -> None:
        """Remove what no manifest points to any more: older versions, after the way back everything."""
        found = self.read()
        used = {
            Path(each.get("hostPath", {}).get("path", ""))
            for each in found.document["spec"].get("volumes") or []
        }
        for version in self._versions.glob("*/"):
            if version not in used:
                shutil.rmtree(version)
        if not found.backup and self._versions.exists():
            self._versions.rmdir()


async def install(settings: InstallExtenderSettings, client: KubeClient) -> str:
    """Change the kube-scheduler, unless it is so already; answers what was done. Raises `InstallError`."""
    files = MasterFiles(settings)
    found = files.read()
    if settings.back and not found.backup:
        return "kube-scheduler is as it was: its manifest is not of our making."
    wanted = files.before(found).content if settings.back else files.with_section(found)
    known = _hash(await _mirror(client, settings, found))
    if wanted != found.content:
        files.write(wanted)
    problem = await _unhealthy(client, settings, found, known if wanted != found.content else "")
    if problem and wanted != found.content:
        files.write(found.content)
        files.sweep()
        again = await _unhealthy(client, settings, found, "")
        after = f"; it is not healthy again yet: {again}" if again else " and is healthy again"
        raise InstallError(
            f"kube-scheduler on {settings.node_name} {problem}; its manifest was put back{after}"
        )
    if problem:
        raise InstallError(f"kube-scheduler on {settings.node_name} {problem}; nothing was changed")
    files.sweep()
    if wanted == found.content:
        return "kube-scheduler calls the extender already."
    return "kube-scheduler is as it was." if settings.back else "kube-scheduler calls the extender."


def _hash(pod: Json) -> str:
    return str((pod.get("metadata", {}).get("annotations") or {}).get(HASH, ""))


async def _mirror(client: KubeClient, settings: InstallExtenderSettings, manifest: Manifest) -> Json:
    """The pod that kubelet shows for the file; nothing while it shows none, or the API server is away."""
    namespace, name = manifest.pod
    try:
        return await client.get(PODS, f"{name}-{settings.node_name}", namespace)
    except KubeError as error:
        _log.info("the scheduler's pod cannot be read yet", extra={"error": str(error)})
        return {}


async def _unhealthy(
    client: KubeClient, settings: InstallExtenderSettings, manifest: Manifest, before: str
) -> str:
    """Wait until the scheduler of the new file has answered for a while; else what is wrong with it.

    `before`: the hash of the file whose scheduler does not count.
    """
    end = time.monotonic() + settings.timeout_s
    steady: tuple[object, float] | None = None
    problem = "was not restarted by kubelet"
    while time.monotonic() < end:
        pod = await _mirror(client, settings, manifest)
        (container, *_) = pod.get("status", {}).get("containerStatuses") or [{}]
        found = _hash(pod)
        if found and found != before:
            healthy = await asyncio.to_thread(_answers, manifest.health_url)
            life = (found, container.get("containerID"), container.get("restartCount"))
            if not healthy or "running" not in container.get("state", {}):
                steady, problem = None, f"is not healthy: {_said(container)}"
            elif steady is None or steady[0] != life:
                steady = life, time.monotonic()
            elif time.monotonic() - steady[1] >= settings.steady_s:
                return ""
        await asyncio.sleep(min(1.0, settings.steady_s / 2))
    return problem


def _said(container: Json) -> str:
    """What kubelet reports about a container that does not run."""
    ends = [container.get(when, {}).get("terminated") for when in ("state", "lastState")]
    messages = [end.get("message") or f"it ended with code {end.get('exitCode')}" for end in ends if end]
    waiting = container.get("state", {}).get("waiting")
    messages += [waiting.get("message") or waiting.get("reason", "")] if waiting else []
    return " ".join(str(messages[0] if messages else "it does not answer").split())


def _answers(url: str) -> bool:
    unverified = ssl.create_default_context()
    unverified.check_hostname = False
    unverified.verify_mode = ssl.CERT_NONE  # of its own making; and nothing is believed but that it answers
    try:
        with urllib.request.urlopen(url, timeout=5, context=unverified) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as error:
        error.close()  # it is the answer, whose socket stays open otherwise
        return False
    except (OSError, HTTPException):
        return False


def start(settings: InstallExtenderSettings) -> None:
    """The whole command."""

    async def main() -> None:
        async with HttpTransport(connect(os.environ, kubeconfig=settings.kubeconfig)) as transport:
            _log.info(await install(settings, KubeClient(transport, manager="gpuslice-install-extender")))

    configure_logs(settings.log_level)
    asyncio.run(main())
