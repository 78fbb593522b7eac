"""What the chart lets people set: every workload takes the same, and a wrong value is refused by name."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from gpuslice.apps.agent.command import command as agent_command
from gpuslice.apps.webhook.command import command as webhook_command
from tests.chart import CHART, EVERYTHING, KUBE_SCHEDULER, NAMED, WEBHOOKS, render


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("memoryUnit=TiB", "memoryUnit"),
        ("extender.replicas=0", "replicas"),
        ("nodeLable=x", "nodeLable"),
        ("devicePlugin.port=0", "port"),
        ("devicePlugin.hostDir=relative", "hostDir"),
        ("wholeCards.manifest=a/b", "manifest"),
        ("webhook.failurePolicy=Maybe", "failurePolicy"),
        ("extender.replicas=two", "got string, want integer"),
        ("imagePullSecrets=login", "got string, want array"),
        ("devicePlugin.tolerations[0].operater=Exists", "operater"),
        ("devicePlugin.maxSurge=0", "maxSurge"),
        ("extender.resources.limit.cpu=1", "limit"),
        ("image.digest=abc", "digest"),
        ("test.failOn=note", "failOn"),
        (f"fullnameOverride={'a' * 40}", "fullnameOverride"),  # a Service's name ends at 63
        ("scheduler.name=Second_One", "scheduler/name"),
        ("scheduler.name=", "scheduler/name"),
        ("scheduler.name=default-scheduler", "both would place the same pods"),
        ("scheduler.image=registry.k8s.io/kube-scheduler:v1.36.2", "is named without its tag"),
        ("image.repository=localhost:5000/gpuslice:latest", "is named without its tag"),
        ("image.repository=localhost:5000/gpuslice@sha256:abc", "is named without its tag"),
        ("wholeCards.serviceAccount.name=own", "serviceAccount"),
        ("test.serviceAccount.name=own", "serviceAccount"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm: str, setting: str, named: str) -> None:
    assert named in refusal(helm, setting)


def refusal(helm: str, setting: str) -> str:
    """What helm says of a value with which it renders nothing."""
    command = [helm, "template", str(CHART), *NAMED, "--set", setting]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    return refused.stderr


def test_every_value_is_in_the_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def unknown(value: dict[str, Any], shape: dict[str, Any], path: str) -> list[str]:
        known = shape.get("properties")
        if known is None:
            return []
        here = [f"{path}{key}" for key in value if key not in known]
        deeper = [
            name
            for key, inner in value.items()
            if isinstance(inner, dict)
            for name in unknown(inner, known[key], f"{path}{key}.")
        ]
        return here + deeper

    assert unknown(values, schema, "") == []


def test_every_value_of_the_schema_is_shown_with_its_default() -> None:
    """But for what every workload takes: that is shown once. Names of other charts are not values."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    everywhere = {f"#/definitions/workload/properties/{key}" for key in _workload_keys(schema)}

    def hidden(value: dict[str, Any], shape: dict[str, Any], path: str) -> list[str]:
        found = []
        for key, inner in shape.get("properties", {}).items():
            if key not in value:
                shown = inner.get("$ref") in everywhere or "const" in inner
                found += [] if shown else [f"{path}{key}"]
            elif isinstance(value[key], dict):
                found += hidden(value[key], inner, f"{path}{key}.")
        return found

    assert hidden(values, schema, "") == []


MAY_BE_EMPTY = {"resources", "tolerations", "priorityClassName", "labels", "cardLabels", "exemptNamespaces"}
MAY_BE_EMPTY |= {"fencingDir", "legacyPort"}
ALL_PARTS = (
    "exporter.enabled=true,exporter.nodes=all,console.enabled=true,networkPolicy.enabled=true,dra.enabled=true,"
    "monitoring.serviceMonitor.enabled=true,monitoring.componentMonitors.enabled=true,monitoring.alerts.enabled=true,"
    "extender.certificate.source=cert-manager,webhook.certificate.source=cert-manager,openshift=true"
)


def test_an_empty_value_means_none(helm: str, tmp_path: Path) -> None:
    """`imagePullSecrets:` with all of its lines commented out is null, and takes the default away."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def nulls(section: dict[str, Any]) -> dict[str, Any]:
        inner = {key: nulls(value) for key, value in section.items() if value and isinstance(value, dict)}
        return {**inner, **{key: None for key, value in section.items() if value in ("", [], {})}}

    file = tmp_path / "nulls.yaml"
    file.write_text(yaml.safe_dump(nulls(values)))
    parts = ("--set", ALL_PARTS, "--kube-version=1.36.0")
    assert render(helm, "-f", str(file), *parts) == render(helm, *parts)


def test_a_default_that_may_be_taken_away_leaves_a_whole_chart(helm: str, tmp_path: Path) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())

    def nulls(section: dict[str, Any]) -> dict[str, Any]:
        return {
            key: None if key in MAY_BE_EMPTY else nulls(value)
            for key, value in section.items()
            if key in MAY_BE_EMPTY or isinstance(value, dict)
        }

    file = tmp_path / "nulls.yaml"
    file.write_text(yaml.safe_dump(nulls(values)))
    parts = ("--set", ALL_PARTS, "--kube-version=1.36.0")
    assert render(helm, "-f", str(file), *parts).keys() == render(helm, *parts).keys()


@pytest.mark.parametrize(
    ("empty", "named"),
    [("exporter", "missing property 'exporter'"), ("extender.certificate", "missing property 'certificate'")],
)
def test_a_section_without_its_defaults_is_refused_by_name(helm: str, empty: str, named: str) -> None:
    """An empty `exporter:` takes all of them away; so does --reuse-values from before there was a section."""
    assert named in refusal(helm, f"{empty}=null")


def test_what_templates_cannot_do_without_is_required() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def lacking(value: dict[str, Any], shape: dict[str, Any], path: str) -> list[str]:
        if "properties" not in shape:
            shape = schema["definitions"].get(shape.get("$ref", "").rpartition("/")[2], shape)
        known, required = shape.get("properties", {}), shape.get("required", [])
        found = []
        for key, inner in value.items():
            if key not in known or key in MAY_BE_EMPTY or inner in ("", [], {}):
                continue
            found += [] if key in required else [f"{path}{key}"]
            found += lacking(inner, known[key], f"{path}{key}.") if isinstance(inner, dict) else []
        return found

    assert lacking(values, schema, "") == []


def _workload_keys(schema: dict[str, Any]) -> list[str]:
    return list(schema["definitions"]["workload"]["properties"])


WORKLOADS = {
    "devicePlugin": ("DaemonSet", "gpushare-device-plugin-ds"),
    "wholeCards": ("DaemonSet", "device-plugin-evict-ds"),
    "extender": ("Deployment", "gpushare-schd-extender"),
    "scheduler": ("Deployment", KUBE_SCHEDULER),
    "webhook": ("Deployment", "gpuslice-webhook"),
    "exporter": ("DaemonSet", "gpuslice-exporter"),
}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_takes_what_people_set(helm: str, workload: str, tmp_path: Path) -> None:
    own = {
        "podLabels": {"team": "ml"},
        "podAnnotations": {"note": "own"},
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "own", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
        ],
        "priorityClassName": "high",
        "podSecurityContext": {"fsGroup": 7},
        "securityContext": {"runAsGroup": 8},
        "extraArgs": ["--one", "--two"],
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "own"}],
        "extraVolumes": [{"name": "extra", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}],
        "resources": {"requests": {"cpu": "7m"}},
        "serviceAccount": {"name": "theirs", "create": False},
    }
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert {*own, "logLevel"} == set(_workload_keys(schema))
    if workload == "wholeCards":
        del own["serviceAccount"]  # it runs as the device plugin does
    everybody = {
        "podLabels": {"team": "all", "all": "yes"},
        "podAnnotations": {"note": "all", "all": "yes"},
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "all", "operator": "Exists"}],
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "all"}, {"name": "NO_PROXY", "value": "all"}],
        "commonLabels": {"cost": "7"},
        "commonAnnotations": {"owner": "us"},
    }
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({**everybody, workload: own}))
    objects = render(helm, "--set", EVERYTHING, "-f", str(tmp_path / "values.yaml"))
    found = objects[WORKLOADS[workload]]
    assert found["metadata"]["labels"]["cost"] == "7"
    assert found["metadata"]["annotations"]["owner"] == "us"
    meta, spec = found["spec"]["template"]["metadata"], found["spec"]["template"]["spec"]
    assert {"team": "ml", "all": "yes", "cost": "7"}.items() <= meta["labels"].items()
    assert found["spec"]["selector"]["matchLabels"].items() <= meta["labels"].items()
    assert {"note": "own", "all": "yes"}.items() <= meta["annotations"].items()
    assert {"pool": "gpu", "kubernetes.io/os": "linux"}.items() <= spec["nodeSelector"].items()
    assert [each["key"] for each in spec["tolerations"]] == ["own", "all"]
    if workload in {"devicePlugin", "exporter"}:
        del spec["affinity"]["nodeAffinity"]  # they leave nodes whose driver is replaced
    assert spec["affinity"] == {"podAntiAffinity": {}}
    (spread,) = spec["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"].items() <= meta["labels"].items()
    assert spec["priorityClassName"] == "high"
    assert spec["securityContext"] == {"fsGroup": 7}
    container = spec["containers"][0]
    assert container["securityContext"]["runAsGroup"] == 8
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["args"][-2:] == ["--one", "--two"]
    assert {each["name"]: each["value"] for each in container["env"] if "PROXY" in each["name"]} == {
        "HTTPS_PROXY": "own",
        "NO_PROXY": "all",
    }
    assert {"name": "extra", "mountPath": "/extra"} in container["volumeMounts"]
    assert {"name": "extra", "emptyDir": {}} in spec["volumes"]
    assert container["resources"]["requests"]["cpu"] == "7m"
    if "serviceAccount" in own:
        assert spec["serviceAccountName"] == "theirs"
        bound = {
            each["name"]
            for (kind, _), o in objects.items()
            if kind == "ClusterRoleBinding"
            for each in o["subjects"]
        }
        assert "theirs" in bound or workload == "webhook"
        assert ("ServiceAccount", "theirs") not in objects


@pytest.mark.parametrize("workload", [name for name in WORKLOADS if name != "scheduler"])
def test_how_much_is_logged_is_one_value_or_one_for_each(helm: str, workload: str) -> None:
    objects = render(helm, "--set", f"{EVERYTHING},logLevel=warn,{workload}.logLevel=debug")
    for name, key in WORKLOADS.items():
        if name != "scheduler":  # no program of ours
            (container, *_) = objects[key]["spec"]["template"]["spec"]["containers"]
            (level,) = (each["value"] for each in container["env"] if each["name"] == "LOG_LEVEL")
            expected = "debug" if name == workload else "warn"
            assert level == expected, name


def test_the_image_has_no_name_of_ours(helm: str) -> None:
    """A default would point at a name that anybody may take."""
    command = [helm, "template", str(CHART)]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "image.repository is required: the image of gpuslice in your own registry" in refused.stderr


def test_all_names_may_start_with_something_else(helm: str) -> None:
    """And what refers to an object by name follows."""
    objects = render(
        helm, "--set", f"{EVERYTHING},fullnameOverride=acme,nameOverride=slicer,networkPolicy.enabled=true"
    )
    assert not [name for _, name in objects if not name.startswith("acme-")]
    labels = {o["metadata"]["labels"]["app.kubernetes.io/name"] for o in objects.values()}
    assert labels == {"slicer"}
    for (kind, _), each in objects.items():
        if kind.endswith("RoleBinding") or kind == "ClusterRoleBinding":
            for subject in each["subjects"]:
                assert ("ServiceAccount", subject["name"]) in objects
            role = each["roleRef"]
            external = role["name"].startswith(("system:", "extension-"))
            assert external or (role["kind"], role["name"]) in objects
    config = yaml.safe_load(objects["ConfigMap", "acme-scheduler"]["data"]["config.yaml"])
    host = str(urlsplit(config["extenders"][0]["urlPrefix"]).hostname)
    assert ("Service", host.partition(".")[0]) in objects
    args = objects["Pod", "acme-test"]["spec"]["containers"][0]["args"]
    for url in (urlsplit(arg.partition("=")[2]) for arg in args if arg.startswith("--answers=")):
        assert ("Service", str(url.hostname).partition(".")[0]) in objects


def test_roles_may_be_left_to_somebody_else(helm: str) -> None:
    kinds = {kind for kind, _ in render(helm, "--set", f"{EVERYTHING},rbac.create=false")}
    assert not {kind for kind in kinds if "Role" in kind}
    assert "ServiceAccount" in kinds


def test_who_may_view_may_view_nodes_too(helm: str) -> None:
    role = render(helm)["ClusterRole", "gpuslice-viewer"]
    assert role["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    verbs = {verb for rule in role["rules"] for verb in rule["verbs"]}
    assert verbs == {"get", "list", "watch"}


def test_on_openshift_the_namespace_gives_the_user(helm: str) -> None:
    """But root's containers stay root's, and their accounts may use the constraint that lets them."""
    objects = render(helm, "--set", EVERYTHING, "--api-versions", "security.openshift.io/v1")
    for name, key in WORKLOADS.items():
        for container in objects[key]["spec"]["template"]["spec"]["containers"]:
            user = container["securityContext"].get("runAsUser")
            assert user == (0 if key[0] == "DaemonSet" else None), name
    constrained = {
        o["subjects"][0]["name"]
        for o in objects.values()
        if o.get("roleRef", {}).get("name") == "system:openshift:scc:privileged"
    }
    assert constrained == {"gpushare-device-plugin", "gpuslice-exporter"}
    assert not [name for _, name in render(helm, "--set", EVERYTHING) if name.endswith("-scc")]


def test_the_webhook_gives_gpu_pods_the_agents_runtime_class(helm: str) -> None:
    for values, there in (("", True), (",webhook.setRuntimeClass=false", False)):
        objects = render(helm, "--set", f"{EVERYTHING},runtimeClassName=nvidia{values}")
        (container,) = objects["Deployment", "gpuslice-webhook"]["spec"]["template"]["spec"]["containers"]
        parsed = webhook_command.make_context("webhook", list(container["args"][1:])).params
        assert parsed["runtime_class_name"] == ("nvidia" if there else None)
        for key in (WORKLOADS["devicePlugin"], WORKLOADS["exporter"]):
            assert objects[key]["spec"]["template"]["spec"]["runtimeClassName"] == "nvidia"


def test_admission_of_a_platform_may_be_told_to_leave_the_webhook_alone(helm: str, tmp_path: Path) -> None:
    """AKS adds expressions of its own to a webhook's selector, unless an annotation says not to."""
    annotations = {"admissions.enforcer/disabled": "true"}
    own = {"key": "control-plane", "operator": "NotIn", "values": ["true"]}
    webhook = {"enabled": True, "annotations": annotations, "namespaceSelector": [own]}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"webhook": webhook}))
    objects = render(helm, "-f", str(tmp_path / "values.yaml"))
    for kind, verb in WEBHOOKS:
        hook = objects[kind, f"gpuslice-{verb}"]
        assert hook["metadata"]["annotations"] == annotations
        assert own in hook["webhooks"][0]["namespaceSelector"]["matchExpressions"]


def test_the_extenders_service_need_not_be_a_node_port(helm: str) -> None:
    service = render(helm, "--set", "extender.service.type=ClusterIP")["Service", "gpushare-schd-extender"]
    assert service["spec"]["type"] == "ClusterIP"
    assert "nodePort" not in service["spec"]["ports"][0]


def test_cards_may_be_named_by_cdi(helm: str) -> None:
    objects = render(helm, "--set", "cdiKind=nvidia.com/gpu")
    (agent,) = objects[WORKLOADS["devicePlugin"]]["spec"]["template"]["spec"]["containers"]
    parsed = agent_command.make_context("agent", [*agent["args"][1:], "--node-name=n"]).params
    assert parsed["cdi_kind"] == "nvidia.com/gpu"


REACHED = {  # value → what of it stands in some object
    "devicePlugin.devicePluginsDir=/var/lib/other/device-plugins": "path: /var/lib/other/device-plugins",
    "extender.preemption=false": "--no-preempt",
    "extender.certificate.serverSecret=the-server": "secretName: the-server",
    "extender.certificate.clientSecret=the-client": "name: the-client",
    "extender.certificate.clientName=my-scheduler": "--tls-client-names=my-scheduler",
    "scheduler.apiQps=77": "qps: 77",
    "webhook.exemptNamespaces={quiet}": '"quiet"',
    "webhook.hideCards=false": "--no-hide-cards",
    "webhook.gateGroups=false": "--no-gate-groups",
    "webhook.hami.enabled=true,webhook.hami.modelLabel=a.b/model": "--hami-model-label=a.b/model",
    "dra.enabled=true,dra.cdiDir=/run/cdi": "path: /run/cdi",
    "exporter.intervalMs=250": "--collect-interval=250",
    "exporter.metricTypes=upstream": "--metric-types=upstream",
    "exporter.compatPodLabels=exclusive": "--compat-pod-labels=exclusive",
    "exporter.hostnameLabel=Hostname": "--compat-hostname-label=Hostname",
    "exporter.nodes=all,exporter.cardLabels={example.com/card}": "key: example.com/card",
    "networkPolicy.enabled=true,networkPolicy.extenderFrom[0].ipBlock.cidr=10.0.0.0/28": "cidr: 10.0.0.0/28",
    "console.enabled=true,console.ingress.enabled=true": "kind: Ingress",
    "console.ingress.className=front": "ingressClassName: front",
}


def test_what_somebody_sets_reaches_an_object(helm: str) -> None:
    def rendered(*settings: str) -> str:
        command = [
            helm,
            "template",
            "cgpu",
            str(CHART),
            "--kube-version=1.36.0",
            *NAMED,
            "--set=exporter.enabled=true",
        ]
        return subprocess.run([*command, *settings], capture_output=True, text=True, check=True).stdout

    others = ("--set=webhook.setSchedulerName=false",)
    before, after = rendered(), rendered(*(f"--set={setting}" for setting in REACHED), *others)
    assert [text for text in REACHED.values() if text in before or text not in after] == []
    assert ("--scheduler-name=" in before, "--scheduler-name=" in after) == (True, False)
