"""The chart's pods: what they may, how they are looked after, and how they are replaced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpuslice.apps.agent.command import command as agent_command
from gpuslice.apps.extender.command import command as extender_command
from gpuslice.core.contract import LABEL_LEADER
from tests.chart import KUBE_SCHEDULER, render


def pods(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    kinds = ("DaemonSet", "Deployment")
    return {name: o["spec"]["template"]["spec"] for (kind, name), o in objects.items() if kind in kinds}


AGENT = "gpushare"
EVERYTHING = "webhook.enabled=true,exporter.enabled=true,extender.replicas=2,scheduler.replicas=2"


READY: dict[str | tuple[str, str], str] = {
    KUBE_SCHEDULER: "/healthz",
    "gpushare-schd-extender": "/prepared",
    # kubelet need not know of these, see /readyz
    ("device-plugin-recover-ds", "gpushare"): "/healthz",
    ("device-plugin-recover-ack-ds", "gpushare"): "/healthz",
}


def test_every_container_is_held_short_and_looked_after(helm: str) -> None:
    found = pods(render(helm, "--set", EVERYTHING))
    assert len(found) == 10
    for name, spec in found.items():
        assert spec["priorityClassName"] in ("system-node-critical", "system-cluster-critical"), name
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True, name
            if container["name"] == AGENT:  # it mounts for others
                assert context == {"privileged": True, "readOnlyRootFilesystem": True, "runAsUser": 0}
            else:
                assert context["allowPrivilegeEscalation"] is False, name
                assert context["capabilities"] == {"drop": ["ALL"]}, name
                assert context["seccompProfile"] == {"type": "RuntimeDefault"}, name
            assert container["livenessProbe"]["httpGet"]["path"] == "/healthz", name
            ready = READY.get((name, container["name"]), READY.get(name, "/readyz"))
            assert container["readinessProbe"]["httpGet"]["path"] == ready, name
            assert "memory" in container["resources"]["requests"], name
            assert name == KUBE_SCHEDULER or "memory" in container["resources"]["limits"], name


def test_an_agent_that_mounts_nothing_needs_no_privileges(helm: str) -> None:
    """It has root's way past the modes of files alone: a tenant's files have any owner and mode."""
    for value, mounts in (("true", "Bidirectional"), ("false", None)):
        found = pods(render(helm, "--set", f"devicePlugin.regionFileSystem={value}"))
        (agent,) = found["gpushare-device-plugin-ds"]["containers"]
        (files,) = (each for each in agent["volumeMounts"] if each["name"] == "host-files")
        assert files.get("mountPropagation") == mounts
        assert ("--region-file-system" in agent["args"]) is (value == "true")
    context = agent["securityContext"]
    assert context["capabilities"] == {"drop": ["ALL"], "add": ["DAC_OVERRIDE", "FOWNER"]}
    assert context["allowPrivilegeEscalation"] is False
    assert "privileged" not in context


@pytest.mark.parametrize(("value", "by_driver"), [("auto", False), ("false", False), ("true", True)])
def test_the_driver_sets_limits_for_a_privileged_agent_alone(helm: str, value: str, by_driver: bool) -> None:
    plugin = (
        f"devicePlugin.driverLimits={value},devicePlugin.regionFileSystem=false,devicePlugin.watchdog=off"
    )
    found = pods(render(helm, "--set", plugin))
    for name in ("gpushare-device-plugin-ds", "device-plugin-recover-ds"):
        (agent,) = (each for each in found[name]["containers"] if each["name"] == AGENT)
        assert ("--no-driver-limits" in agent["args"]) is not by_driver
        assert agent["securityContext"].get("privileged", False) is by_driver
        assert found[name].get("hostPID", False) is by_driver
        mounts = {each["name"]: each["mountPath"] for each in agent["volumeMounts"]}
        assert mounts.get("cgroups") == ("/sys/fs/cgroup" if by_driver else None)
        assert mounts.get("cdi") == ("/var/run/cdi" if by_driver else None)


@pytest.mark.parametrize("action", ["off", "warn", "stop"])
def test_the_watchdog_sees_the_hosts_processes(helm: str, action: str) -> None:
    values = f"devicePlugin.watchdog={action},devicePlugin.regionFileSystem=false"
    found = pods(render(helm, "--set", values))
    for name in ("gpushare-device-plugin-ds", "device-plugin-recover-ds"):
        (agent,) = (each for each in found[name]["containers"] if each["name"] == AGENT)
        assert f"--watchdog={action}" in agent["args"]
        assert found[name].get("hostPID", False) is (action != "off")
        assert ("KILL" in agent["securityContext"]["capabilities"]["add"]) is (action == "stop")


def test_the_exporter_sees_what_agents_mount(helm: str) -> None:
    spec = pods(render(helm, "--set", EVERYTHING))["gpuslice-exporter"]
    (files,) = (each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "host-files")
    assert files["mountPropagation"] == "HostToContainer"


@pytest.mark.parametrize("allowed", ["true", "false"])
def test_whether_containers_may_be_without_a_limit_is_one_value(helm: str, allowed: str) -> None:
    found = pods(render(helm, "--set", f"{EVERYTHING},allowCgpuDisable={allowed}"))
    (agent,) = found["gpushare-device-plugin-ds"]["containers"]
    (webhook,) = found["gpuslice-webhook"]["containers"]
    assert ("--allow-cgpu-disable" in agent["args"]) is (allowed == "true")
    assert ("--allow-cgpu-disable" in webhook["args"]) is (allowed == "true")


def test_a_slow_start_is_no_reason_to_start_again(helm: str) -> None:
    for name, spec in pods(render(helm, "--set", EVERYTHING)).items():
        for container in spec["containers"]:
            probe = container["startupProbe"]
            assert probe["periodSeconds"] * probe["failureThreshold"] >= 120, name
            assert probe["httpGet"] == container["livenessProbe"]["httpGet"], name
            assert container["livenessProbe"]["timeoutSeconds"] > 1, name


def test_probes_of_an_exporter_with_passwords_need_none(helm: str) -> None:
    objects = render(helm, "--set", "exporter.enabled=true,exporter.webConfigSecret=web")
    (container,) = pods(objects)["gpuslice-exporter"]["containers"]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[kind]["tcpSocket"] == {"port": "metrics"}


def test_the_next_agent_starts_beside_the_one_that_serves(helm: str) -> None:
    """Ports of the host would keep it off the node, and the update would stand still."""
    daemon_set = render(helm)["DaemonSet", "gpushare-device-plugin-ds"]["spec"]
    strategy = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "10%", "maxUnavailable": 0}}
    assert daemon_set["updateStrategy"] == strategy
    pod = daemon_set["template"]["spec"]
    assert pod["hostNetwork"] is True
    assert "ports" not in pod["containers"][0]
    by_hand = render(helm, "--set", "devicePlugin.updateStrategy=OnDelete")
    assert by_hand["DaemonSet", "gpushare-device-plugin-ds"]["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_nodes_of_other_makes_are_provided_for(helm: str) -> None:
    """kubelet's folder of device plugins does not follow its root; some /etc cannot be written."""
    values = (
        "devicePlugin.kubeletDir=/var/lib/k0s/kubelet,devicePlugin.fencingDir=,devicePlugin.seLinuxType=spc_t"
    )
    found = pods(render(helm, "--set", f"{EVERYTHING},{values}"))
    agent = found["gpushare-device-plugin-ds"]
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in agent["volumes"]}
    assert paths == {
        "device-plugins": "/var/lib/kubelet/device-plugins",
        "pod-resources": "/var/lib/k0s/kubelet/pod-resources",
        "host-files": "/var/lib/gpuslice",
        "cdi": "/var/run/cdi",
        "cgroups": "/sys/fs/cgroup",
    }
    assert {each["name"] for each in agent["containers"][0]["volumeMounts"]} == set(paths)
    for name, spec in found.items():
        uses_host = any("hostPath" in volume for volume in spec.get("volumes", []))
        context = spec["containers"][0]["securityContext"]
        assert context.get("seLinuxOptions") == ({"type": "spc_t"} if uses_host else None), name


def test_every_image_may_come_from_one_registry(helm: str) -> None:
    login = "imagePullSecrets[0].name=login,image.digest=sha256:" + "0" * 64
    found = pods(render(helm, "--set", f"global.imageRegistry=r.example/mirror,{EVERYTHING},{login}"))
    for name, spec in found.items():
        for container in spec["containers"]:
            assert container["image"].startswith("r.example/mirror/"), name
            assert container["image"].count("/") == 2, name
            assert name == KUBE_SCHEDULER or "/gpuslice@sha256:000" in container["image"], name
        assert spec["imagePullSecrets"] == [{"name": "login"}], name


def test_a_network_policy_leaves_each_pod_its_one_port(helm: str) -> None:
    assert "NetworkPolicy" not in {kind for kind, _ in render(helm, "--set", EVERYTHING)}
    objects = render(helm, "--set", f"{EVERYTHING},networkPolicy.enabled=true")
    doors = {name: each["spec"] for (kind, name), each in objects.items() if kind == "NetworkPolicy"}
    del doors["gpuslice-egress"]
    assert set(doors) == {"gpushare-schd-extender", "gpuslice-webhook", KUBE_SCHEDULER, "gpuslice-exporter"}
    for name, spec in doors.items():
        kind = "DaemonSet" if name == "gpuslice-exporter" else "Deployment"
        labels = objects[kind, name]["spec"]["template"]["metadata"]["labels"]
        assert spec["podSelector"]["matchLabels"].items() <= labels.items()
    assert doors["gpuslice-webhook"]["policyTypes"] == ["Ingress", "Egress"]
    assert "egress" not in doors["gpuslice-webhook"]


def test_where_a_namespace_denies_everything_each_pod_still_reaches_what_it_asks(helm: str) -> None:
    """The API server has no labels: who asks it may connect to anywhere, the webhook to nowhere."""
    parts = (
        "console.enabled=true,dra.enabled=true,wholeCards.daemonSet=nvidia/plugin,networkPolicy.enabled=true"
    )
    objects = render(helm, "--set", f"{EVERYTHING},{parts}", "--kube-version=1.36.0")
    policies = [each["spec"] for (kind, _), each in objects.items() if kind == "NetworkPolicy"]
    (leaving,) = (each for each in policies if "egress" in each)
    assert (leaving["policyTypes"], leaving["egress"]) == (["Egress"], [{}])
    (silent,) = leaving["podSelector"]["matchExpressions"]
    assert (silent["operator"], silent["values"]) == ("NotIn", ["gpuslice-webhook"])
    entered = {each["podSelector"]["matchLabels"].get("component") for each in policies}
    for (kind, name), each in objects.items():
        pod = each if kind == "Pod" else each["spec"].get("template") if "spec" in each else None
        if pod is None or "containers" not in pod.get("spec", {}) or pod["spec"].get("hostNetwork"):
            continue
        assert leaving["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items(), name
        ports = [port for container in pod["spec"]["containers"] for port in container.get("ports", [])]
        component = pod["metadata"]["labels"]["component"]
        assert component in entered or not ports or component == "gpushare-device-plugin", name


def test_the_extenders_door_is_open_to_the_charts_scheduler_and_who_is_named(helm: str) -> None:
    """Where a kube-scheduler is that is not the chart's nobody knows: the operator names it, or all may."""
    named = "networkPolicy.extenderFrom[0].ipBlock.cidr=10.0.0.0/28"
    scraping = "networkPolicy.metricsFrom[0].podSelector.matchLabels.app=prometheus"

    def peers(*values: str) -> Any:
        objects = render(helm, "--set", ",".join(("networkPolicy.enabled=true", *values)))
        (ingress,) = objects["NetworkPolicy", "gpushare-schd-extender"]["spec"]["ingress"]
        assert [each["port"] for each in ingress["ports"]] == [12345]
        return [json.dumps(each, sort_keys=True) for each in ingress.get("from", [])]

    scheduler = '{"podSelector": {"matchLabels": {"app": "gpushare", "component": "gpuslice-scheduler"}}}'
    cidr = '{"ipBlock": {"cidr": "10.0.0.0/28"}}'
    prometheus = '{"podSelector": {"matchLabels": {"app": "prometheus"}}}'
    assert peers("test.enabled=false") == [scheduler]
    assert peers("test.enabled=false", named, scraping) == [cidr, scheduler, prometheus]
    assert peers("test.enabled=false", "scheduler.enabled=false", named) == [cidr]
    assert peers("test.enabled=false", "scheduler.enabled=false") == []


def test_the_hosts_own_preload_file_is_out_of_reach(helm: str) -> None:
    """A wrong line in it would break every program of the host; ours lies in a folder of our own."""
    for name, spec in pods(render(helm, "--set", EVERYTHING)).items():
        for volume in spec.get("volumes", []):
            path = (volume.get("hostPath") or {}).get("path", "/nowhere")
            assert path not in ("/", "/etc", "/usr", "/usr/lib", "/lib"), name
            assert "ld.so" not in path, name


def test_extenders_that_stand_by_may_not_all_be_drained_at_once(helm: str) -> None:
    budget = ("PodDisruptionBudget", "gpushare-schd-extender")
    assert budget not in render(helm)
    assert render(helm, "--set", "extender.replicas=2")[budget]["spec"]["maxUnavailable"] == 1


def test_an_update_of_several_extenders_ends(helm: str) -> None:
    """Who stands by is ready; the Service finds the one that answers by a label that is its own doing."""
    objects = render(helm, "--set", "extender.replicas=3")
    deployment = objects["Deployment", "gpushare-schd-extender"]["spec"]
    assert deployment["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    (container,) = deployment["template"]["spec"]["containers"]
    parsed = extender_command.make_context("extender", [*container["args"][1:], "--lease-identity=p"]).params
    assert parsed["leader_elect"] is parsed["label_leader"] is True
    selector = objects["Service", "gpushare-schd-extender"]["spec"]["selector"]
    labels = deployment["template"]["metadata"]["labels"]
    assert selector.items() - labels.items() == {(LABEL_LEADER, "true")}


@pytest.mark.parametrize("name", ["extender", "webhook"])
def test_on_the_hosts_network_the_old_pod_leaves_its_port_first(helm: str, name: str) -> None:
    objects = render(helm, "--set", f"webhook.enabled=true,{name}.hostNetwork=true")
    deployment = "gpushare-schd-extender" if name == "extender" else "gpuslice-webhook"
    strategy = objects["Deployment", deployment]["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_the_arguments_of_the_agent_are_its_settings(helm: str) -> None:
    spec = pods(render(helm, "--set", "nodeLabel=gpushare,devicePlugin.port=1234"))
    (container,) = spec["gpushare-device-plugin-ds"]["containers"]
    parsed = agent_command.make_context("agent", [*container["args"][1:], "--node-name=n"]).params
    assert parsed["node_label"] == "gpushare"
    assert int(parsed["port"]) == container["livenessProbe"]["httpGet"]["port"] == 1234
