"""A master's kube-scheduler is given the extender's section, and back; kubelet and scheduler are played."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from gpuslice.adapters.kube.client import KubeClient
from gpuslice.adapters.kube.config import Connection
from gpuslice.adapters.kube.errors import KubeError
from gpuslice.adapters.kube.transport import HttpTransport
from gpuslice.apps.agent.install_extender import (
    HASH,
    PODS,
    InstallError,
    Manifest,
    configuration,
    install,
)
from gpuslice.apps.agent.settings import InstallExtenderSettings
from gpuslice.apps.settings import SettingsError
from simcluster.apiserver.server import ApiServer
from simcluster.cluster.cluster import Cluster

SECTION = {
    "urlPrefix": "https://127.0.0.1:32766/gpushare-scheduler",
    "managedResources": [{"name": "aliyun.com/gpu-mem", "ignoredByScheduler": False}],
}
MANIFEST = """\
# written by kubeadm; a comment and  odd   spacing must come back
apiVersion: v1
kind: Pod
metadata: {{name: kube-scheduler, namespace: kube-system}}
spec:
  hostNetwork: true
  containers:
  - name: kube-scheduler
    image: registry.k8s.io/kube-scheduler:v1.36.0
    command: [kube-scheduler, --kubeconfig=/etc/kubernetes/scheduler.conf, --leader-elect=true,
              --bind-address=127.0.0.1, --secure-port={port}{more}]
    volumeMounts: [{{mountPath: /etc/kubernetes/scheduler.conf, name: kubeconfig, readOnly: true}}]
  volumes: [{{hostPath: {{path: /etc/kubernetes/scheduler.conf}}, name: kubeconfig}}]
"""


@dataclass
class Master:
    """A control-plane node: its files, and what kubelet would do about them."""

    settings: InstallExtenderSettings
    client: KubeClient
    port: int
    starts: Callable[[dict[str, Any]], bool] = lambda config: True  # whether a scheduler runs with this
    serving: bool = True

    @property
    def manifest(self) -> Path:
        return Path(self.settings.folder) / "manifests" / "kube-scheduler.yaml"

    def config(self) -> dict[str, Any]:
        """What the scheduler reads, through the mounts of its pod."""
        document = yaml.safe_load(self.manifest.read_bytes())
        flags = dict(
            word.removeprefix("--").split("=", 1)
            for word in document["spec"]["containers"][0]["command"]
            if "=" in word
        )
        if "config" not in flags:
            return {}
        folder = {each["name"]: each["hostPath"]["path"] for each in document["spec"]["volumes"]}
        for mount in document["spec"]["containers"][0]["volumeMounts"]:
            if flags["config"].startswith(f"{mount['mountPath']}/"):
                file = Path(folder[mount["name"]]) / Path(flags["config"]).name
                found: dict[str, Any] = yaml.safe_load(file.read_bytes())
                return found
        own: dict[str, Any] = yaml.safe_load(Path(flags["config"]).read_bytes())
        return own

    async def kubelet(self) -> None:
        """Shows the pod of the file, and runs its scheduler or fails to."""
        before = b""
        while True:
            content = self.manifest.read_bytes()
            if content != before:
                before = content
                self.serving = self.starts(self.config())
                state = {"running": {}} if self.serving else {"waiting": {"reason": "CrashLoopBackOff"}}
                await self._show(hashlib.sha256(content).hexdigest(), state)
            await asyncio.sleep(0.01)

    async def _show(self, digest: str, state: dict[str, Any]) -> None:
        name, namespace = f"kube-scheduler-{self.settings.node_name}", "kube-system"
        with contextlib.suppress(KubeError):
            await self.client.delete(PODS, name, namespace, grace_s=0)
        spec = {"containers": [{"name": "kube-scheduler", "image": "x"}]}
        meta = {"name": name, "namespace": namespace, "annotations": {HASH: digest}}
        await self.client.create(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
        ended = {"terminated": {"exitCode": 1, "message": "no such file"}}
        runs = "running" in state
        status = {"name": "kube-scheduler", "ready": runs, "restartCount": 0, "image": "x", "imageID": ""}
        status |= {"containerID": digest[:8], "state": state, "lastState": {} if runs else ended}
        await self.client.patch_status(PODS, name, {"containerStatuses": [status]}, namespace)


@contextlib.asynccontextmanager
async def master(folder: Path, more: str = "", **settings: Any) -> AsyncIterator[Master]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    async with ApiServer(Cluster()) as server, HttpTransport(Connection(server.url)) as transport:
        found: Master | None = None

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            code = b"200 OK" if found is not None and found.serving else b"500 Not"
            writer.write(b"HTTP/1.1 " + code + b"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            await writer.drain()
            writer.close()

        health = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
        port = health.sockets[0].getsockname()[1]
        kubernetes, given = folder / "kubernetes", folder / "given"
        (kubernetes / "manifests").mkdir(parents=True)
        given.mkdir()
        for name in ("ca.crt", "tls.crt", "tls.key"):
            (given / name).write_text(name)
        (given / "section.yaml").write_text(yaml.safe_dump(SECTION))
        (kubernetes / "manifests" / "kube-scheduler.yaml").write_text(MANIFEST.format(port=port, more=more))
        wanted = InstallExtenderSettings(
            **{
                "node_name": "master-1",
                "section": str(given / "section.yaml"),
                "certificates": str(given),
                "folder": str(kubernetes),
                "timeout_s": 20.0,
                "steady_s": 0.05,
                **settings,
            }
        )
        found = Master(wanted, KubeClient(transport), port)
        kubelet = asyncio.create_task(found.kubelet())
        try:
            yield found
        finally:
            kubelet.cancel()
            health.close()


def back(settings: InstallExtenderSettings) -> InstallExtenderSettings:
    return InstallExtenderSettings(
        node_name="master-1", folder=settings.folder, back=True, timeout_s=20, steady_s=settings.steady_s
    )


@pytest.mark.parametrize(
    ("bound", "asked"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "[::1]")],
)
def test_the_scheduler_is_asked_where_it_listens(bound: str, asked: str) -> None:
    text = MANIFEST.format(port=10259, more="").replace(
        "--bind-address=127.0.0.1", f'"--bind-address={bound}"'
    )
    assert Manifest.read(text.encode(), "it").health_url == f"https://{asked}:10259/healthz"


async def test_the_scheduler_calls_the_extender_and_comes_back_byte_for_byte(tmp_path: Path) -> None:
    async with master(tmp_path) as node:
        before = node.manifest.read_bytes()
        node.manifest.chmod(0o600)
        assert "is not of our making" in await install(back(node.settings), node.client)
        assert await install(node.settings, node.client) == "kube-scheduler calls the extender."
        config = node.config()
        assert config["extenders"] == [SECTION]
        assert config["clientConnection"]["kubeconfig"] == "/etc/kubernetes/scheduler.conf"
        assert config["percentageOfNodesToScore"] == 100
        written = node.manifest.read_bytes()
        assert "already" in await install(node.settings, node.client)
        assert node.manifest.read_bytes() == written
        (version,) = (tmp_path / "kubernetes" / "gpuslice").iterdir()
        assert {path.name for path in version.iterdir()} == {"config.yaml", "ca.crt", "tls.crt", "tls.key"}
        assert version.joinpath("tls.key").stat().st_mode & 0o777 == 0o600
        backup = tmp_path / "kubernetes" / "manifests-backup" / "kube-scheduler.ori.yaml"
        assert backup.read_bytes() == before
        assert await install(back(node.settings), node.client) == "kube-scheduler is as it was."
        assert node.manifest.read_bytes() == before
        assert node.manifest.stat().st_mode & 0o777 == 0o600
        assert not (tmp_path / "kubernetes" / "gpuslice").exists()


async def test_a_scheduler_that_does_not_become_healthy_gets_its_old_manifest_back(tmp_path: Path) -> None:
    async with master(tmp_path, timeout_s=5.0) as node:
        before = node.manifest.read_bytes()
        node.starts = lambda config: not config
        with pytest.raises(InstallError, match=r"master-1 is not healthy: no such file; .* healthy again$"):
            await install(node.settings, node.client)
        assert node.manifest.read_bytes() == before
        assert not list((tmp_path / "kubernetes" / "gpuslice").glob("*"))


async def test_a_new_certificate_starts_the_scheduler_anew_and_the_old_one_goes(tmp_path: Path) -> None:
    async with master(tmp_path) as node:
        before = node.manifest.read_bytes()
        await install(node.settings, node.client)
        (tmp_path / "given" / "tls.crt").write_text("renewed")
        assert await install(node.settings, node.client) == "kube-scheduler calls the extender."
        (version,) = (tmp_path / "kubernetes" / "gpuslice").iterdir()
        assert (version / "tls.crt").read_text() == "renewed"
        await install(back(node.settings), node.client)
        assert node.manifest.read_bytes() == before


async def test_a_manifest_that_an_upgrade_of_kubernetes_wrote_is_the_one_that_comes_back(
    tmp_path: Path,
) -> None:
    async with master(tmp_path) as node:
        await install(node.settings, node.client)
        newer = MANIFEST.format(port=node.port, more=", --v=3").encode()
        node.manifest.write_bytes(newer)
        assert await install(node.settings, node.client) == "kube-scheduler calls the extender."
        names = {path.name for path in (tmp_path / "kubernetes" / "manifests-backup").iterdir()}
        assert len(names) == 2
        assert "kube-scheduler.ori.yaml" in names
        await install(back(node.settings), node.client)
        assert node.manifest.read_bytes() == newer


async def test_a_configuration_that_is_there_keeps_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "kubernetes" / "own.yaml"
    async with master(tmp_path, more=f", --config={file}") as node:
        stale = {**SECTION, "urlPrefix": "http://old:1"}
        own = {
            "kind": "KubeSchedulerConfiguration",
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "percentageOfNodesToScore": 30,
            "extenders": [{"urlPrefix": "http://other"}, stale],
        }
        file.write_text(yaml.safe_dump(own))
        await install(node.settings, node.client)
        assert node.config() == {**own, "extenders": [{"urlPrefix": "http://other"}, SECTION]}
        file.write_text("kind: Policy\n")
        with pytest.raises(InstallError, match="must hold a KubeSchedulerConfiguration"):
            await install(node.settings, node.client)


async def test_a_configuration_out_of_reach_and_a_master_without_such_a_file_are_told(tmp_path: Path) -> None:
    async with master(tmp_path, more=", --config=/opt/x.yaml") as node:
        with pytest.raises(
            InstallError, match=r"--config of kube-scheduler is /opt/x.yaml; it must be below"
        ):
            await install(node.settings, node.client)
    node.manifest.unlink()
    with pytest.raises(InstallError, match="must be the manifest of a kube-scheduler"):
        await install(node.settings, node.client)


def test_the_section_is_in_it_once_however_often_it_is_put_there() -> None:
    manifest = Manifest.read(MANIFEST.format(port=1, more="").encode(), "m")
    once = configuration(manifest, None, SECTION)
    assert configuration(manifest, once, SECTION) == once


def test_without_a_section_there_is_only_the_way_back() -> None:
    with pytest.raises(SettingsError, match="unless --back"):
        InstallExtenderSettings(node_name="n")
