"""A whole cluster on this machine, as a user has one: chart, image, kube-scheduler from a file, pod networks.

etcd, kube-apiserver, kube-controller-manager, kubelet, containerd and runc are real, kube-scheduler is a
static pod of that kubelet, and every program of ours runs from the image of the release script. Only the
cards are simulated, and kube-proxy is left out: the API server finds webhooks by their endpoints.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from gpuslice import __version__
from gpuslice_demo.ports import free_port
from tests import tools
from tests.chart import CHART
from tests.e2e import control_plane, node
from tests.e2e.control_plane import ControlPlane
from tests.e2e.kubelet_rig import CUDA, DRIVER, NODE, cuda_files, make_cards
from tests.e2e.node import Api, Places, Service, until

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "localhost/gpuslice"
ENOUGH = "--timeout=900s"  # where a busy disk makes every container wait for a copy of its image
SCHEDULER_IMAGE = "registry.k8s.io/kube-scheduler:e2e"
CONTROLLERS = (
    "deployment-controller",
    "replicaset-controller",
    "statefulset-controller",
    "daemonset-controller",
    "job-controller",
    "serviceaccount-controller",
    "root-ca-certificate-publisher-controller",
    "endpoints-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
    "namespace-controller",
)
MANIFEST = """\
# As kubeadm writes it; this line and the  odd spacing  must come back.
apiVersion: v1
kind: Pod
metadata:
  name: kube-scheduler
  namespace: kube-system
  labels: {{component: kube-scheduler, tier: control-plane}}
spec:
  hostNetwork: true
  priorityClassName: system-node-critical
  containers:
  - name: kube-scheduler
    image: {image}
    imagePullPolicy: Never
    command:
    - kube-scheduler
    - --authentication-kubeconfig={kubeconfig}
    - --authorization-kubeconfig={kubeconfig}
    - --bind-address=127.0.0.1
    - --kubeconfig={kubeconfig}
    - --leader-elect=true
    - --secure-port={port}
    livenessProbe:
      httpGet: {{host: 127.0.0.1, path: /healthz, port: {port}, scheme: HTTPS}}
      failureThreshold: 8
    volumeMounts:
    - {{mountPath: {kubeconfig}, name: kubeconfig, readOnly: true}}
  volumes:
  - {{hostPath: {{path: {kubeconfig}, type: File}}, name: kubeconfig}}
"""
# A pod gets a wire of its own to this machine, which is its gateway. The address comes from its id.
WIRE = """\
#!/bin/sh -e
id=$(printf %s "$CNI_CONTAINERID" | cut -c1-8)
address=10.201.$((0x$(printf %s "$id" | cut -c1-2))).$((0x$(printf %s "$id" | cut -c3-4) % 254 + 1))
wire=gs{mark}$(printf %s "$id" | cut -c1-6)
case "$CNI_COMMAND" in
ADD)
  nsenter --net="$CNI_NETNS" ip link set lo up
  case "$0" in *loopback) echo '{{"cniVersion": "0.4.0"}}'; exit ;; esac
  nsenter --net="$CNI_NETNS" ip link add eth0 type veth peer name "$wire" netns $$
  ip link set "$wire" up
  ip address add {gateway}/32 dev "$wire"
  ip route add "$address/32" dev "$wire"
  nsenter --net="$CNI_NETNS" sh -ec "
    ip address add $address/32 dev eth0; ip link set eth0 up
    ip route add {gateway}/32 dev eth0; ip route add default via {gateway}"
  printf '{{"cniVersion": "0.4.0", "ips": [{{"version": "4", "address": "%s/32"}}]}}' "$address" ;;
DEL) ip link delete "$wire" 2>/dev/null || true ;;
VERSION) echo '{{"cniVersion": "0.4.0", "supportedVersions": ["0.3.1", "0.4.0"]}}' ;;
esac
"""


@dataclass
class Installed:
    """The cluster, and what an administrator asks of it."""

    plane: ControlPlane
    api: Api
    places: Places
    gateway: str  # this machine, as pods see it
    extender_port: int

    @property
    def manifest(self) -> Path:
        return self.places.folder / "kubernetes" / "manifests" / "kube-scheduler.yaml"

    def kubectl(self, *arguments: str, given: str = "", fails: bool = False) -> str:
        return self._run(str(tools.find("kubectl")), *arguments, given=given, fails=fails)

    def helm(self, *arguments: str) -> str:
        return self._run(str(tools.find("helm")), *arguments)

    def gpuslice(self, *arguments: str) -> str:
        """The command line, as a user starts it on a machine of their own."""
        program = "from gpuslice.apps.cli.main import main; main()"
        return self._run(sys.executable, "-c", program, *arguments)

    def _run(self, *command: str, given: str = "", fails: bool = False) -> str:
        environment = {**os.environ, "KUBECONFIG": str(self.plane.kubeconfig)}
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, check=False, timeout=1000, env=environment
        )
        assert (done.returncode != 0) is fails, f"{command}\n{done.stdout}{done.stderr}"
        return done.stderr if fails else done.stdout

    def values(self, **more: object) -> list[str]:
        folder = self.places.folder
        host, port = self.gateway, self.plane.url.rpartition(":")[2]
        extender = f"https://127.0.0.1:{self.extender_port}/gpushare-scheduler"
        given: dict[str, object] = {
            "image.repository": IMAGE,
            "image.tag": __version__,
            "image.pullPolicy": "Never",
            # kube-proxy's part: where the API server is
            "extraEnv[0].name": "KUBERNETES_SERVICE_HOST",
            "extraEnv[0].value": host,
            "extraEnv[1].name": "KUBERNETES_SERVICE_PORT",
            "extraEnv[1].value": port,
            "installers.enabled": "true",
            "installers.masters": 1,
            "installers.kubernetesDir": folder / "kubernetes",
            "installers.extenderUrl": extender,
            "extender.hostNetwork": "true",
            "extender.port": self.extender_port,
            "scheduler.enabled": "false",
            "webhook.enabled": "true",
            "webhook.replicas": 1,
            "wholeCards.manifestDir": folder / "kubernetes" / "manifests",
            "wholeCards.backupDir": folder / "kubernetes" / "manifests-backup",
            "devicePlugin.kubeletDir": self.places.kubelet,
            "devicePlugin.hostDir": folder / "gpuslice",
            "devicePlugin.fencingDir": folder / "fencing",
            # the driver, which the vendor's runtime would bring in
            "devicePlugin.extraArgs[0]": "--nvml-library=/driver/libnvidia-ml.so.1",
            "devicePlugin.extraEnv[0].name": "GPUSLICE_SIM_STATE",
            "devicePlugin.extraEnv[0].value": "/run/gpus/machine",
            "devicePlugin.extraVolumes[0].name": "gpus",
            "devicePlugin.extraVolumes[0].hostPath.path": folder / "gpus",
            "devicePlugin.extraVolumes[1].name": "driver",
            "devicePlugin.extraVolumes[1].hostPath.path": DRIVER,
            "devicePlugin.extraVolumeMounts[0].name": "gpus",
            "devicePlugin.extraVolumeMounts[0].mountPath": "/run/gpus",
            "devicePlugin.extraVolumeMounts[1].name": "driver",
            "devicePlugin.extraVolumeMounts[1].mountPath": "/driver",
            **more,
        }
        strings = ("extraEnv[1].value", "image.tag")
        return [
            word
            for key, value in given.items()
            for word in ("--set-string" if key in strings else "--set", f"{key}={value}")
        ]

    def chart(self, verb: str, **more: object) -> str:
        return self.helm(verb, "cgpu", str(CHART), "--namespace", "kube-system", *self.values(**more))

    def rolled_out(self, *workloads: str) -> None:
        for workload in workloads:
            self.kubectl("rollout", "status", "-n", "kube-system", workload, ENOUGH)


@contextmanager
def cluster(folder: Path) -> Iterator[Installed]:
    places = Places(folder)
    places.make()
    make_cards(folder)
    mark = os.getpid() % 254 + 1
    gateway = f"10.202.{mark}.254"
    _wires(folder, gateway, mark)
    with ExitStack() as stack:
        subprocess.run(["ip", "address", "add", f"{gateway}/32", "dev", "lo"], check=True)
        stack.callback(subprocess.run, ["ip", "address", "del", f"{gateway}/32", "dev", "lo"], check=True)
        plane = stack.enter_context(control_plane.api_server(folder, for_pods=gateway))
        authority = folder / "apiserver" / "apiserver.crt"
        stack.enter_context(
            control_plane.controller_manager(plane, *CONTROLLERS, flags=(f"--root-ca-file={authority}",))
        )
        pid = stack.enter_context(node.containerd(places, shared=True))
        node.load_image(places, node.SANDBOX_IMAGE, ["sleep", "1000000"], {})
        node.load_image(places, CUDA, ["sh"], cuda_files())
        program = {"/usr/local/bin/kube-scheduler": Path(control_plane.asset("kube-scheduler"))}
        node.load_image(places, SCHEDULER_IMAGE, ["kube-scheduler"], program)
        found = Installed(plane, Api(plane), places, gateway, free_port())
        stack.callback(found.api.close)
        for namespace in ("kube-system", "default"):  # some distributions' binaries want a second authority
            extra = {"metadata": {"name": "openshift-service-ca.crt"}, "data": {"service-ca.crt": ""}}
            found.api.create(f"namespaces/{namespace}/configmaps", extra)
        _scheduler_file(found)
        settings = {"staticPodPath": str(found.manifest.parent)}
        kubelet: Service = node.kubelet(plane, places, pid, NODE, "", settings=settings)
        stack.callback(kubelet.stop)
        kubelet.start()
        until(lambda: _scheduler_runs(found), "the scheduler's pod runs", 120)
        labels = {"node-role.kubernetes.io/control-plane": ""}
        found.api.patch(f"nodes/{NODE}", {"metadata": {"labels": labels}, "spec": {"taints": None}})
        yield found


def _wires(folder: Path, gateway: str, mark: int) -> None:
    conf = '{"cniVersion": "0.4.0", "name": "wires", "plugins": [{"type": "wire"}]}'
    (folder / "cni" / "none.conflist").write_text(conf)
    for name in ("wire", "loopback"):  # containerd before 2 calls both
        plugin = folder / "cni" / name
        plugin.write_text(WIRE.format(gateway=gateway, mark=mark))
        plugin.chmod(0o755)


def _scheduler_file(found: Installed) -> None:
    found.manifest.parent.mkdir(parents=True)
    kubeconfig = found.places.folder / "kubernetes" / "scheduler.conf"
    kubeconfig.write_bytes(found.plane.kubeconfig.read_bytes())
    text = MANIFEST.format(image=SCHEDULER_IMAGE, kubeconfig=kubeconfig, port=free_port())
    found.manifest.write_text(text)
    found.manifest.chmod(0o600)


def _scheduler_runs(found: Installed) -> bool:
    pods = found.api.get("namespaces/kube-system/pods")["items"]
    return any(
        each["metadata"]["name"] == f"kube-scheduler-{NODE}" and each["status"].get("phase") == "Running"
        for each in pods
    )
