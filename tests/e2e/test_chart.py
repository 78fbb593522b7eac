"""The chart held against a real API server: every object with every switch, and what labels do to nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpuslice_demo.ports import free_port
from tests import tools
from tests.chart import CHART, NAMED
from tests.e2e import control_plane
from tests.e2e.control_plane import ControlPlane
from tests.e2e.node import until


def missing() -> str:
    """What of the control plane is not here, in one line."""
    if reason := control_plane.missing():
        return reason
    manager = control_plane.asset("kube-controller-manager")
    return "" if os.access(manager, os.X_OK) else f"there is no {manager}"


pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(missing()), reason=missing())]

NODE = "gpu-1"
EVERYTHING = (
    "webhook.enabled=true,webhook.hami.enabled=true,exporter.enabled=true,extender.replicas=3,"
    "exporter.legacyPort=9445,monitoring.serviceMonitor.enabled=true,monitoring.alerts.enabled=true,"
    "monitoring.dashboards.enabled=true,scheduler.replicas=2,networkPolicy.enabled=true,"
    "monitoring.componentMonitors.enabled=true,monitoring.alerts.runbookUrl=https://git.example/gpuslice,"
    "console.enabled=true,console.ingress.enabled=true"
)
CUSTOM = {
    "cert-manager.io/v1": ("Certificate", "Issuer"),
    "monitoring.coreos.com/v1": ("ServiceMonitor", "PodMonitor", "PrometheusRule"),
}


class Cluster:
    """The API server through kubectl and helm, as a user has them."""

    def __init__(self, plane: ControlPlane) -> None:
        self._kubeconfig = str(plane.kubeconfig)
        self._helm = str(tools.find("helm"))
        self._kubectl = str(tools.find("kubectl"))

    def kubectl(self, *arguments: str, given: str = "") -> str:
        return _run([self._kubectl, "--kubeconfig", self._kubeconfig, *arguments], given)

    def helm(self, *arguments: str) -> str:
        return _run([self._helm, "--kubeconfig", self._kubeconfig, *arguments])

    def render(self, *values: str, namespace: str = "kube-system", words: Sequence[str] = NAMED) -> str:
        """For the version that the cluster has: `helm template` asks none."""
        sets = [word for value in values for word in ("--set", value)]
        version = f"--kube-version=1.{control_plane.minor_version()}.0"
        return self.helm("template", "cgpu", str(CHART), "--namespace", namespace, version, *words, *sets)

    def gpuslice_as(self, token: str, *arguments: str) -> Any:
        """What our own program prints for the holder of `token`; findings are no failure."""
        known = yaml.safe_load(Path(self._kubeconfig).read_text())
        known["users"] = [{"name": each["name"], "user": {"token": token.strip()}} for each in known["users"]]
        program = "from gpuslice.apps.cli.main import main; main()"
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(yaml.safe_dump(known))
            file.flush()
            command = [sys.executable, "-c", program, "--kubeconfig", file.name, *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode in (0, 3), done.stderr
        return json.loads(done.stdout)

    def desired(self) -> dict[str, int]:
        """How many nodes each DaemonSet is wanted on."""
        sets = json.loads(self.kubectl("get", "daemonsets", "-n", "kube-system", "-o", "json"))["items"]
        return {
            each["metadata"]["name"]: each["status"].get("desiredNumberScheduled", -1)
            for each in sets
            if each["status"].get("observedGeneration")
        }


def _run(command: list[str], given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with (
        tempfile.TemporaryDirectory(prefix="gs-chart-") as folder,
        control_plane.api_server(Path(folder)) as plane,
    ):
        found = Cluster(plane)
        for group, kinds in CUSTOM.items():
            for kind in kinds:
                found.kubectl("create", "-f", "-", given=json.dumps(_definition(group, kind)))
        found.kubectl("wait", "--for=condition=established", "--all", "crd", "--timeout=60s")
        command = [control_plane.asset("kube-controller-manager"), f"--kubeconfig={plane.kubeconfig}"]
        command += ["--leader-elect=false", f"--secure-port={free_port()}"]
        command += [control_plane.controllers_flag("daemonset-controller"), "--bind-address=127.0.0.1"]
        # The controller looks at a node's labels anew for pods that a scheduler put there.
        with control_plane.process("controllers", plane.folder, command), control_plane.scheduler(plane, []):
            yield found


def _definition(group_version: str, kind: str) -> dict[str, Any]:
    """A kind as far as the API server needs to know it to take its objects."""
    group, version = group_version.split("/")
    plural = f"{kind.lower()}s"
    shape = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}", "labels": {"kind": kind}},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "versions": [
                {"name": version, "served": True, "storage": True, "schema": {"openAPIV3Schema": shape}}
            ],
        },
    }


SWITCHES = {
    "defaults": ["image.tag="],
    "everything": [EVERYTHING],
    "cert-manager": [
        "webhook.enabled=true,webhook.certificate.source=cert-manager,extender.certificate.source=cert-manager"
    ],
    "cluster issuer": [
        "webhook.enabled=true,webhook.certificate.source=cert-manager,webhook.certificate.issuerName=ca",
        "webhook.certificate.issuerKind=ClusterIssuer",
    ],
    "own secret": [
        "webhook.enabled=true,webhook.certificate.source=secret,webhook.certificate.caBundle=",
        "webhook.failurePolicy=Fail,webhook.protectAnnotations=false,webhook.annotationsAsEnv=never",
    ],
    "open-source label": ["nodeLabel=gpushare,memoryUnit=MiB,runtimeClassName=nvidia"],
    "plain extender": [
        "extender.certificate.source=none,extender.service.type=ClusterIP,networkPolicy.enabled=true"
    ],
    "certificates of a company": [
        "extender.certificate.source=cert-manager,extender.certificate.issuerName=ca",
        "extender.certificate.issuerKind=ClusterIssuer,extender.anonymous={inspect,metrics}",
    ],
    "own registry": [
        "global.imageRegistry=r.example/mirror,imagePullSecrets[0].name=login,devicePlugin.updateStrategy=OnDelete"
    ],
    "hosts' network": [
        "webhook.enabled=true,webhook.hostNetwork=true,webhook.port=9443,extender.hostNetwork=true"
    ],
    "metrics for some": [
        "exporter.enabled=true,exporter.webConfigSecret=web,networkPolicy.enabled=true",
        "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.team=monitoring",
    ],
    "nodes of other makes": [
        "devicePlugin.kubeletDir=/var/lib/k0s/kubelet,devicePlugin.fencingDir=,devicePlugin.seLinuxType=spc_t"
    ],
    "no second scheduler": ["scheduler.enabled=false,extender.hostNetwork=true,wholeCards.enabled=false"],
    "names and pods of one's own": [
        "fullnameOverride=acme,nameOverride=slicer,commonLabels.cost=seven,commonAnnotations.owner=us",
        "podLabels.team=ml,extender.podAnnotations.note=x,podSecurityContext.fsGroup=7,logLevel=debug",
        "extender.topologySpreadConstraints[0].maxSkew=1,extender.topologySpreadConstraints[0].topologyKey=zone",
        "extender.topologySpreadConstraints[0].whenUnsatisfiable=ScheduleAnyway,openshift=true",
        "webhook.enabled=true,exporter.enabled=true,exporter.nodes=all,extender.service.type=ClusterIP",
        "exporter.extraVolumes[0].name=extra,exporter.extraVolumeMounts[0].name=extra",
        "exporter.extraVolumeMounts[0].mountPath=/extra,global.imagePullSecrets[0]=login",
    ],
}
PLATFORMS = {file.stem.removesuffix("-values"): file for file in sorted((CHART / "ci").glob("*.yaml"))}


@pytest.mark.parametrize("values", SWITCHES.values(), ids=SWITCHES.keys())
def test_the_api_server_takes_every_object(cluster: Cluster, values: list[str]) -> None:
    """With strict field validation: a field that is misspelt or in the wrong place is refused.

    And it stores each as it is: what it leaves out or writes otherwise a GitOps tool sets again for ever.
    """
    values = [value.replace("caBundle=", f"caBundle={_authority(cluster)}") for value in values]
    text = cluster.render(*values)
    strict = ("apply", "--dry-run=server", "--validate=strict", "-o", "json")
    stored = json.loads(cluster.kubectl(*strict, "-f", "-", given=text))["items"]
    wanted = [each for each in yaml.safe_load_all(text) if each]
    assert [change for pair in zip(wanted, stored, strict=True) for change in _changed(*pair)] == []


def _changed(wanted: Any, stored: Any, path: str = "") -> Iterator[str]:
    """The fields of `wanted` that are not so in what was stored; more fields may be there, of a list none."""
    if isinstance(wanted, dict) and isinstance(stored, dict):
        path = path or f"{wanted.get('kind')} {wanted.get('metadata', {}).get('name')}"
        for key, value in wanted.items():
            yield from _changed(value, stored[key], f"{path}.{key}") if key in stored else [f"{path}.{key}"]
    elif isinstance(wanted, list) and isinstance(stored, list) and len(wanted) == len(stored):
        for index, pair in enumerate(zip(wanted, stored, strict=True)):
            yield from _changed(*pair, f"{path}[{index}]")
    elif wanted != stored:
        yield f"{path}: {wanted} is {stored}"


@pytest.mark.parametrize("file", PLATFORMS.values(), ids=PLATFORMS.keys())
def test_the_api_server_takes_what_each_platform_is_given(cluster: Cluster, file: Path) -> None:
    text = cluster.render(words=("-f", str(file)))
    answer = cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", given=text)
    wanted = [each for each in yaml.safe_load_all(text) if each]
    assert answer.count("(server dry run)") == len(wanted)


def test_a_namespace_of_its_own_will_do(cluster: Cluster) -> None:
    cluster.kubectl("create", "namespace", "gpu-system")
    text = cluster.render(EVERYTHING, namespace="gpu-system")
    cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", given=text)
    spaces = {each["metadata"].get("namespace", "") for each in yaml.safe_load_all(text) if each}
    assert spaces == {"", "gpu-system", "kube-system"}  # roles for what is kept in kube-system


def _authority(cluster: Cluster) -> str:
    """The base64 of some authority: the API server looks whether it is one."""
    objects = [each for each in yaml.safe_load_all(cluster.render("webhook.enabled=true")) if each]
    (secret,) = [
        each
        for each in objects
        if (each["kind"], each["metadata"]["name"]) == ("Secret", "gpuslice-webhook-tls")
    ]
    found: str = secret["data"]["ca.crt"]
    return found


def test_labels_bring_the_right_programs_to_a_node(cluster: Cluster) -> None:
    """What the vendor's document has a user do, label by label."""
    cluster.helm("install", "cgpu", str(CHART), "--namespace", "kube-system", *NAMED)
    room = {"cpu": "8", "memory": "8Gi", "pods": "20"}
    status = {"capacity": room, "allocatable": room}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "status": status}
    cluster.kubectl("create", "-f", "-", given=json.dumps(node))
    steps = [
        (["cgpu=true"], (1, 1, 0)),
        (["cgpu.disable.isolation=true"], (1, 1, 0)),  # the agent reads this one itself
        (["cgpu=false"], (0, 0, 1)),
        (["cgpu-"], (0, 0, 0)),  # neither shared nor whole: only false brings whole cards back
        (["cgpu=true"], (1, 1, 0)),
    ]
    names = ("gpushare-device-plugin-ds", "device-plugin-evict-ds", "device-plugin-recover-ds")
    for labels, wanted in steps:
        cluster.kubectl("label", "--overwrite", "node", NODE, *labels)
        until(
            lambda wanted=wanted: tuple(cluster.desired().get(name) for name in names) == wanted,  # type: ignore[misc]
            f"{labels} wants {wanted}; {cluster.desired()}",
        )


def test_the_vendors_way_to_see_the_installation_lists_it(cluster: Cluster) -> None:
    manifest = cluster.helm("get", "manifest", "cgpu", "--namespace", "kube-system")
    listed = cluster.kubectl("get", "-f", "-", given=manifest)
    for name in (
        "serviceaccount/gpushare-device-plugin",
        "serviceaccount/gpushare-schd-extender",
        "clusterrole.rbac.authorization.k8s.io/gpushare-device-plugin",
        "clusterrolebinding.rbac.authorization.k8s.io/gpushare-schd-extender",
        "daemonset.apps/device-plugin-evict-ds",
        "daemonset.apps/device-plugin-recover-ds",
        "daemonset.apps/gpushare-device-plugin-ds",
        "deployment.apps/gpushare-schd-extender",
    ):
        assert name in listed
    assert "12345:32766/TCP" in listed


def test_the_rights_of_helm_test_are_all_that_doctor_needs(cluster: Cluster) -> None:
    """Run as its service account, it meets nothing that it may not read but Secrets."""
    rendered = yaml.safe_load_all(cluster.render(namespace="gpu-system"))
    wanted = [each for each in rendered if each and each["metadata"]["name"] == "gpuslice-test"]
    (pod,) = [each for each in wanted if each["kind"] == "Pod"]
    rights = yaml.safe_dump_all(each for each in wanted if each["kind"] != "Pod")
    cluster.kubectl("apply", "-f", "-", given=rights)
    token = cluster.kubectl("create", "token", "gpuslice-test", "-n", "gpu-system")
    not_here = ("--answers=", "--patience-s=")  # nobody answers, and without kubelets waiting changes nothing
    arguments = [word for word in pod["spec"]["containers"][0]["args"] if not word.startswith(not_here)]
    found = cluster.gpuslice_as(token, *arguments, "-o", "json")["findings"]
    cluster.kubectl("delete", "-f", "-", given=rights)
    assert found
    hidden = [each["where"] for each in found if "may not be read" in each["what"]]
    assert not [where for where in hidden if not where.startswith("Secret ")]


@pytest.mark.parametrize(("phase", "left"), [("Succeeded", []), ("Failed", ["pod/gpuslice-test"])])
def test_helm_test_takes_its_rights_away_again(cluster: Cluster, phase: str, left: list[str]) -> None:
    """The node of its pod is played here, without a kubelet. Of a failed test the pod stays, to be read."""
    space, pod = ("-n", "kube-system"), ("pod", "gpuslice-test", "-n", "kube-system")
    with ThreadPoolExecutor() as threads:
        run = threads.submit(cluster.helm, "test", "cgpu", *space, "--timeout", "60s")
        until(lambda: cluster.kubectl("get", *pod, "--ignore-not-found", "-o", "name") != "", "a pod")
        status = json.dumps({"status": {"phase": phase}})
        cluster.kubectl("patch", *pod, "--subresource=status", "--type=merge", "-p", status)
        assert (run.exception() is None) == (phase == "Succeeded")
    kinds = "pods,serviceaccounts,roles,rolebindings,clusterroles,clusterrolebindings"
    found = cluster.kubectl("get", kinds, *space, "-o", "name").split()
    assert [name for name in found if "gpuslice-test" in name] == left
    cluster.kubectl("delete", *pod, "--ignore-not-found", "--force")


def test_an_upgrade_and_its_rollback_keep_what_cannot_change(cluster: Cluster) -> None:
    """Selectors, the node port and the certificates; then everything goes and nothing is left."""
    space = ("--namespace", "kube-system")
    secrets = ("gpuslice-webhook-tls", "gpushare-schd-extender-tls", "gpushare-schd-extender-client")
    secret = ("get", "secret", *secrets, "-n", "kube-system", "-o", "jsonpath={.items[*].data}")
    cluster.helm("upgrade", "cgpu", str(CHART), *space, *NAMED, "--set", "webhook.enabled=true")
    authority = cluster.kubectl(*secret)
    values = ("--set", "webhook.enabled=true,image.tag=next,extender.replicas=2")
    cluster.helm("upgrade", "cgpu", str(CHART), *space, *NAMED, *values)
    assert cluster.kubectl(*secret) == authority
    cluster.helm("rollback", "cgpu", "2", *space)
    assert cluster.kubectl(*secret) == authority
    image = cluster.kubectl(
        "get", "ds", "gpushare-device-plugin-ds", *space, "-o", "jsonpath={..containers[0].image}"
    )
    assert not image.endswith(":next")
    cluster.helm("uninstall", "cgpu", *space)
    left = cluster.kubectl(
        "get",
        "ds,deploy,svc,cm,secret,sa,pdb,mutatingwebhookconfigurations,validatingwebhookconfigurations",
        "-A",
        "-l",
        "app.kubernetes.io/instance=cgpu",
        "-o",
        "name",
    )
    assert left.strip() == ""


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("ServiceMonitor", "exporter.enabled=true,monitoring.serviceMonitor.enabled=true"),
        ("Certificate", "webhook.enabled=true,webhook.certificate.source=cert-manager"),
    ],
)
def test_where_a_kind_is_not_known_nothing_is_installed_by_halves(
    cluster: Cluster, kind: str, values: str
) -> None:
    """Last here: the kinds do not come back."""
    cluster.kubectl("delete", "crd", "-l", f"kind={kind}", "--wait")
    with pytest.raises(AssertionError, match=f'no matches for kind "{kind}"') as refused:
        cluster.helm("install", "cgpu", str(CHART), "--namespace", "kube-system", *NAMED, "--set", values)
    assert "ensure CRDs are installed first" in str(refused.value)
    left = (
        "get",
        "ds,deploy,svc",
        "-n",
        "kube-system",
        "-l",
        "app.kubernetes.io/instance=cgpu",
        "-o",
        "name",
    )
    assert cluster.kubectl(*left).strip() == ""
