"""The chart, rendered by the real helm."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml
from cryptography import x509

from gpuslice.apps.agent.command import command as agent_command
from gpuslice.apps.agent.command import switch as switch_command
from gpuslice.apps.cli.doctor import command as doctor_command
from gpuslice.apps.webhook.command import command as webhook_command
from tests import tools

KUBE_SCHEDULER = "gpuslice-scheduler"  # no program of ours: it has no /readyz in old versions
CHART = Path(__file__).resolve().parents[2] / "charts" / "gpuslice"


@pytest.fixture(scope="module")
def helm() -> str:
    return str(tools.find("helm"))


def render(helm: str, *arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    command = [helm, "template", "cgpu", str(CHART), "--namespace", "kube-system", *arguments]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {(o["kind"], o["metadata"]["name"]): o for o in yaml.safe_load_all(text) if o}


def test_lint_finds_nothing(helm: str) -> None:
    subprocess.run([helm, "lint", "--strict", str(CHART)], check=True, capture_output=True)


def test_the_vendors_names_are_kept(helm: str) -> None:
    objects = render(helm)
    for kind in ("ServiceAccount", "ClusterRole", "ClusterRoleBinding"):
        assert (kind, "gpushare-schd-extender") in objects
        assert (kind, "gpushare-device-plugin") in objects
    assert ("DaemonSet", "gpushare-device-plugin-ds") in objects
    assert ("Deployment", "gpushare-schd-extender") in objects


def test_the_service_is_the_vendors_node_port(helm: str) -> None:
    service = render(helm)["Service", "gpushare-schd-extender"]["spec"]
    assert service["type"] == "NodePort"
    assert [(port["port"], port["nodePort"]) for port in service["ports"]] == [(12345, 32766)]


@pytest.mark.parametrize(
    ("kind", "name", "labels"),
    [
        (
            "DaemonSet",
            "gpushare-device-plugin-ds",
            {"app": "gpushare", "component": "gpushare-device-plugin", "name": "gpushare-device-plugin-ds"},
        ),
        (
            "Deployment",
            "gpushare-schd-extender",
            {"app": "gpushare", "component": "gpushare-schd-extender"},
        ),
    ],
)
def test_pods_are_found_by_the_labels_people_know(
    helm: str, kind: str, name: str, labels: dict[str, str]
) -> None:
    """`kubectl get po -l name=gpushare-device-plugin-ds -o wide` shows the node's own address."""
    pod = render(helm)[kind, name]["spec"]["template"]
    assert labels.items() <= pod["metadata"]["labels"].items()
    assert pod["spec"]["hostNetwork"] is (kind == "DaemonSet")


@pytest.mark.parametrize("label", ["cgpu", "gpushare"])
def test_the_node_label_is_a_value(helm: str, label: str) -> None:
    daemon_set = render(helm, "--set", f"nodeLabel={label}")["DaemonSet", "gpushare-device-plugin-ds"]
    assert daemon_set["spec"]["template"]["spec"]["nodeSelector"] == {label: "true"}


def test_nobody_is_cluster_admin(helm: str) -> None:
    objects = render(helm)
    roles = [o["roleRef"]["name"] for (kind, _), o in objects.items() if kind == "ClusterRoleBinding"]
    assert "cluster-admin" not in roles
    rules = [rule for (kind, _), o in objects.items() if kind == "ClusterRole" for rule in o["rules"]]
    assert rules
    assert not any("*" in rule[part] for rule in rules for part in ("verbs", "resources", "apiGroups"))


def test_the_second_scheduler_calls_the_extender_for_every_node(helm: str) -> None:
    objects = render(helm)
    config = yaml.safe_load(objects["ConfigMap", "gpuslice-scheduler"]["data"]["config.yaml"])
    (extender,) = config["extenders"]
    assert extender["urlPrefix"].endswith(":12345/gpushare-scheduler")
    assert extender["nodeCacheCapable"] is True
    assert extender["ignorable"] is False
    assert extender["managedResources"] == [{"name": "aliyun.com/gpu-mem", "ignoredByScheduler": False}]
    assert extender["preemptVerb"] == "preempt"
    assert config["percentageOfNodesToScore"] == 100


def test_what_your_own_scheduler_is_told_is_what_the_second_one_has(helm: str) -> None:
    command = [helm, "install", "cgpu", str(CHART), "--dry-run=client", "--set", "scheduler.enabled=false"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    section = printed[printed.index("     extenders:") :].partition("\n\n")[0]
    (told,) = yaml.safe_load(section)["extenders"]
    (ours,) = yaml.safe_load(render(helm)["ConfigMap", KUBE_SCHEDULER]["data"]["config.yaml"])["extenders"]
    assert told.pop("urlPrefix") == "http://127.0.0.1:32766/gpushare-scheduler"
    ours.pop("urlPrefix")
    assert told == ours


def test_without_a_second_scheduler_only_the_vendors_objects_are_left(helm: str) -> None:
    names = {name for _, name in render(helm, "--set", "scheduler.enabled=false")}
    switches = {"device-plugin-evict-ds", "device-plugin-recover-ds"}
    extender, lease = "gpushare-schd-extender", "gpushare-schd-extender-lease"
    ours = {extender, lease, "gpushare-device-plugin", "gpushare-device-plugin-ds", *switches}
    assert names == ours | {
        "gpuslice-test",  # of `helm test`, which nobody need call
        "gpuslice-agent-own-node",  # what an agent's account may write
    }


@pytest.mark.parametrize(
    ("name", "label", "mode"),
    [("device-plugin-evict-ds", "true", "shared"), ("device-plugin-recover-ds", "false", "exclusive")],
)
def test_the_plugin_of_whole_cards_follows_the_label(helm: str, name: str, label: str, mode: str) -> None:
    spec = render(helm)["DaemonSet", name]["spec"]["template"]["spec"]
    assert spec["nodeSelector"] == {"cgpu": label}
    container, *agents = spec["containers"]
    parsed = switch_command.make_context("switch", [*container["args"][1:], "--node-name=n"]).params
    assert parsed["to"] == mode
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert {str(Path(parsed["manifest"]).parent), parsed["backup_folder"]} == mounts
    assert [each["name"] for each in agents] == (["gpushare"] if mode == "exclusive" else [])


def test_beside_the_way_back_to_whole_cards_an_agent_serves_who_still_holds_parts(helm: str) -> None:
    objects = render(helm, "--set", "nodeLabel=gpushare,devicePlugin.runtimeClassName=nvidia")
    leaving = objects["DaemonSet", "device-plugin-recover-ds"]["spec"]["template"]["spec"]
    sharing = objects["DaemonSet", "gpushare-device-plugin-ds"]["spec"]["template"]["spec"]
    (usual,) = sharing["containers"]
    agent = leaving["containers"][1]
    parsed = agent_command.make_context("agent", [*agent["args"][1:], "--node-name=n"]).params
    assert parsed["new_pods"] is False
    own = {"--no-new-pods"} ^ {"--node-label=gpushare"}
    assert set(agent["args"]) ^ set(usual["args"]) == own
    same = usual.keys() - {"args", "readinessProbe"}
    assert {name: agent[name] for name in same} == {name: usual[name] for name in same}
    assert leaving["runtimeClassName"] == sharing["runtimeClassName"]
    assert all(volume in leaving["volumes"] for volume in sharing["volumes"])


def test_whole_cards_may_be_left_to_somebody_else(helm: str) -> None:
    kinds = {name for kind, name in render(helm, "--set", "wholeCards.enabled=false") if kind == "DaemonSet"}
    assert kinds == {"gpushare-device-plugin-ds"}


def test_config_maps_are_read_and_written_in_one_namespace_only(helm: str) -> None:
    objects = render(helm, "--namespace", "gpu-system")
    for (kind, name), each in objects.items():
        resources = {item for rule in each.get("rules", []) for item in rule["resources"]}
        if kind == "ClusterRole":
            assert not resources & {"configmaps", "secrets", "leases"}, name
        elif "configmaps" in resources and name == "gpuslice-test":
            assert all(rule["verbs"] == ["list"] for rule in each["rules"])
        elif "configmaps" in resources:
            assert each["metadata"]["namespace"] == "kube-system", name


WEBHOOKS = [("MutatingWebhookConfiguration", "mutate"), ("ValidatingWebhookConfiguration", "validate")]


@pytest.mark.parametrize(
    ("settings", "there"),
    [
        ((), True),
        (("--set", "scheduler.enabled=false"), False),
        (("--set", "scheduler.enabled=false,webhook.enabled=true"), True),
        (("--set", "webhook.enabled=false"), False),
        (("--kube-version", "1.28.0-eks-1"), True),
        (("--kube-version", "1.27.16"), False),
        (("--kube-version", "1.27.16", "--set", "webhook.enabled=true"), True),
    ],
)
def test_the_webhook_is_there_where_pods_need_another_schedulers_name(
    helm: str, settings: tuple[str, ...], there: bool
) -> None:
    objects = render(helm, *settings)
    assert {kind for kind, _ in objects if "Webhook" in kind} == {kind for kind, _ in WEBHOOKS if there}
    assert (("Deployment", "gpuslice-webhook") in objects) is there


@pytest.mark.parametrize(("kind", "verb"), WEBHOOKS)
def test_the_webhook_cannot_lock_a_cluster_out(helm: str, kind: str, verb: str) -> None:
    objects = render(helm, "--namespace", "gpu-system", "--set", "webhook.enabled=true")
    (hook,) = objects[kind, f"gpuslice-{verb}"]["webhooks"]
    assert hook["failurePolicy"] == "Ignore"
    names, labels = hook["namespaceSelector"]["matchExpressions"]
    assert names["key"] == "kubernetes.io/metadata.name"
    assert names["operator"] == "NotIn"
    assert set(names["values"]) == {"kube-system", "gpu-system"}
    assert labels == {"key": "gpuslice.io/webhook", "operator": "NotIn", "values": ["ignore"]}
    (condition,) = hook["matchConditions"]
    assert "aliyun.com/gpu-mem" in condition["expression"]
    assert "nvidia.com/gpumem" not in condition["expression"]


def test_no_pod_can_opt_out_by_itself(helm: str) -> None:
    objects = render(helm, "--set", "webhook.enabled=true")
    for kind, verb in WEBHOOKS:
        assert "objectSelector" not in objects[kind, f"gpuslice-{verb}"]["webhooks"][0]


@pytest.mark.parametrize(("kind", "verb"), WEBHOOKS)
def test_what_the_api_server_trusts_signed_what_the_webhook_shows(
    helm: str, kind: str, verb: str, tmp_path: Path
) -> None:
    objects = render(helm, "--set", "webhook.enabled=true")
    secret = objects["Secret", "gpuslice-webhook-tls"]["data"]
    client = objects[kind, f"gpuslice-{verb}"]["webhooks"][0]["clientConfig"]
    assert client["caBundle"] == secret["ca.crt"]
    authority = x509.load_pem_x509_certificate(base64.b64decode(secret["ca.crt"]))
    shown = x509.load_pem_x509_certificate(base64.b64decode(secret["tls.crt"]))
    shown.verify_directly_issued_by(authority)
    names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    service = client["service"]
    assert f"{service['name']}.{service['namespace']}.svc" in names.get_values_for_type(x509.DNSName)


def test_cert_manager_may_make_and_renew_the_certificate(helm: str) -> None:
    settings = ("--set", "webhook.enabled=true,webhook.certificate.source=cert-manager")
    objects = render(helm, *settings)
    certificate = objects["Certificate", "gpuslice-webhook"]["spec"]
    assert certificate["secretName"] == "gpuslice-webhook-tls"
    assert certificate["issuerRef"] == {"kind": "Issuer", "name": "gpuslice-webhook"}
    assert ("Secret", "gpuslice-webhook-tls") not in objects
    for kind, verb in WEBHOOKS:
        hook = objects[kind, f"gpuslice-{verb}"]
        annotations = hook["metadata"]["annotations"]
        assert annotations["cert-manager.io/inject-ca-from"] == "kube-system/gpuslice-webhook"
        assert "caBundle" not in hook["webhooks"][0]["clientConfig"]


def test_the_arguments_of_the_webhook_are_its_settings(helm: str) -> None:
    values = "webhook.enabled=true,webhook.hami.enabled=true,webhook.hami.models={A100,T4}"
    deployment = render(helm, "--set", values)["Deployment", "gpuslice-webhook"]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert container["args"][0] == "webhook"
    parsed = webhook_command.make_context("webhook", list(container["args"][1:])).params
    assert parsed["scheduler_name"] == "gpuslice-scheduler"
    assert parsed["hami_models"] == "A100,T4"
    assert parsed["accept_hami"] is True


def test_a_secret_of_ones_own_needs_its_authority(helm: str) -> None:
    settings = ["--set", "webhook.enabled=true,webhook.certificate.source=secret"]
    refused = subprocess.run(
        [helm, "template", str(CHART), *settings], capture_output=True, text=True, check=False
    )
    assert "set webhook.certificate.caBundle" in refused.stderr
    objects = render(helm, *settings, "--set", "webhook.certificate.caBundle=QUJD")
    hook = objects["ValidatingWebhookConfiguration", "gpuslice-validate"]["webhooks"][0]
    assert hook["clientConfig"]["caBundle"] == "QUJD"


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
    ],
)
def test_a_wrong_value_is_refused_by_name(helm: str, setting: str, named: str) -> None:
    command = [helm, "template", str(CHART), "--set", setting]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert named in refused.stderr


EVERYTHING = "webhook.enabled=true,exporter.enabled=true,nodeLabel=gpushare"


def test_helm_test_is_a_pod_of_our_image_whose_flags_exist(helm: str) -> None:
    objects = render(helm, "--set", EVERYTHING)
    pod = objects["Pod", "gpuslice-test"]
    (container,) = pod["spec"]["containers"]
    extender = objects["Deployment", "gpushare-schd-extender"]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == extender["image"]
    assert container["args"][0] == "doctor"
    asked = doctor_command.make_context("doctor", container["args"][1:]).params
    assert (asked["fail_on"], asked["node_label"]) == ("error", "gpushare")
    assert (asked["want_cards"], asked["patience_s"]) == (True, 60)
    assert [urlsplit(url).hostname for url in asked["urls"]] == [
        f"{name}.kube-system.svc"
        for name in ("gpushare-schd-extender", "gpuslice-webhook", "gpuslice-exporter")
    ]


def test_helm_test_can_go_without_cards_and_without_waiting(helm: str) -> None:
    objects = render(helm, "--set", "test.wantCards=false,test.patienceSeconds=0")
    (container,) = objects["Pod", "gpuslice-test"]["spec"]["containers"]
    asked = doctor_command.make_context("doctor", container["args"][1:]).params
    assert (asked["want_cards"], asked["patience_s"]) == (False, 0)


def test_helm_test_asks_for_ports_that_the_services_have(helm: str) -> None:
    objects = render(helm, "--set", EVERYTHING + ",extender.port=7000,exporter.port=7001")
    for argument in objects["Pod", "gpuslice-test"]["spec"]["containers"][0]["args"]:
        if argument.startswith("--answers="):
            url = urlsplit(argument.removeprefix("--answers="))
            name = str(url.hostname).partition(".")[0]
            ports = [port["port"] for port in objects["Service", name]["spec"]["ports"]]
            assert (url.port or 443) in ports


def test_helm_test_asks_for_what_is_installed_alone(helm: str) -> None:
    for setting, count in (("webhook.enabled=false", 1), ("exporter.enabled=true", 3)):
        args = render(helm, "--set", setting)["Pod", "gpuslice-test"]["spec"]["containers"][0]["args"]
        assert sum(argument.startswith("--answers=") for argument in args) == count
    guarded = render(helm, "--set", "exporter.enabled=true,exporter.webConfigSecret=web")
    (container,) = guarded["Pod", "gpuslice-test"]["spec"]["containers"]
    assert not any("exporter" in argument for argument in container["args"])


def test_the_rights_of_helm_test_are_for_reading_and_go_with_it(helm: str) -> None:
    ours = {key: o for key, o in render(helm).items() if key[1] == "gpuslice-test"}
    assert {kind for kind, _ in ours} == {
        "Pod", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"
    }  # fmt: skip
    rules = [rule for o in ours.values() for rule in o.get("rules", [])]
    assert {verb for rule in rules for verb in rule["verbs"]} == {"get", "list"}
    assert "secrets" not in {resource for rule in rules for resource in rule["resources"]}
    for (kind, _), each in ours.items():
        notes = each["metadata"]["annotations"]
        assert notes["helm.sh/hook"] == "test"
        assert ("hook-failed" in notes["helm.sh/hook-delete-policy"]) == (kind != "Pod")


def test_helm_test_can_be_left_out(helm: str) -> None:
    assert not any(name == "gpuslice-test" for _, name in render(helm, "--set", "test.enabled=false"))


def test_a_network_policy_lets_helm_test_ask_the_exporter(helm: str) -> None:
    peer = "networkPolicy.metricsFrom[0].podSelector.matchLabels.a=b"
    objects = render(helm, "--set", f"networkPolicy.enabled=true,exporter.enabled=true,{peer}")
    (ingress,) = objects["NetworkPolicy", "gpuslice-exporter"]["spec"]["ingress"]
    labels = objects["Pod", "gpuslice-test"]["metadata"]["labels"]
    selected = [peer["podSelector"]["matchLabels"] for peer in ingress["from"]]
    assert [each.items() <= labels.items() for each in selected] == [False, True]


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
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def hidden(value: dict[str, Any], shape: dict[str, Any], path: str) -> list[str]:
        found = []
        for key, inner in shape.get("properties", {}).items():
            if key not in value:
                found.append(f"{path}{key}")
            elif isinstance(value[key], dict):
                found += hidden(value[key], inner, f"{path}{key}.")
        return found

    assert hidden(values, schema, "") == ["global"]  # Helm's own
