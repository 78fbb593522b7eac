"""The chart, rendered by the real helm."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from gpuslice.apps.agent.command import command as agent_command
from gpuslice.apps.agent.command import keep_off as keep_off_command
from gpuslice.apps.agent.command import switch as switch_command
from gpuslice.apps.webhook.command import command as webhook_command
from gpuslice.core import hami
from tests.chart import CHART, KUBE_SCHEDULER, NAMED, WEBHOOKS, render


def test_lint_finds_nothing(helm: str) -> None:
    subprocess.run([helm, "lint", "--strict", str(CHART), *NAMED], check=True, capture_output=True)


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
    assert pod["spec"].get("hostNetwork", False) is (kind == "DaemonSet")


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


@pytest.mark.parametrize(
    ("version", "tag", "told"),
    [
        ("1.32.4", "", False),  # it does not know the gate, and would not start
        ("1.33.0", "", True),
        ("1.36.2", "", True),
        ("1.37.0", "", False),  # it may not let it be changed any more
        ("1.30.0", "v1.34.1-eks-1", True),
        ("1.34.0", "v1.32.9", False),
    ],
)
def test_a_kube_scheduler_that_would_ignore_its_back_off_is_told_not_to(
    helm: str, version: str, tag: str, told: bool
) -> None:
    objects = render(helm, f"--kube-version={version}", f"--set=scheduler.tag={tag}")
    (container,) = objects["Deployment", "gpuslice-scheduler"]["spec"]["template"]["spec"]["containers"]
    assert ("--feature-gates=SchedulerPopFromBackoffQ=false" in container["command"]) is told


def test_neutral_names_are_one_value(helm: str) -> None:
    objects = render(helm, "--set", "resourceNames=gpuslice.io")
    config = yaml.safe_load(objects["ConfigMap", "gpuslice-scheduler"]["data"]["config.yaml"])
    assert [each["name"] for each in config["extenders"][0]["managedResources"]] == ["gpuslice.io/memory"]
    for kind, name in (("DaemonSet", "gpushare-device-plugin-ds"), ("Deployment", "gpuslice-webhook")):
        (container,) = objects[kind, name]["spec"]["template"]["spec"]["containers"]
        assert "--resource-names=gpuslice.io" in container["args"]
    hook = objects["MutatingWebhookConfiguration", "gpuslice-mutate"]["webhooks"][0]
    for name in ("aliyun.com/gpu-mem", "gpuslice.io/memory", "gpuslice.io/compute"):
        assert f"'{name}'" in hook["matchConditions"][0]["expression"]


def test_kais_annotations_are_sent_to_the_webhook_where_it_takes_them(helm: str) -> None:
    for words, asked in (((), False), (("--set", "webhook.kai.enabled=true,webhook.kai.cardUnits=80"), True)):
        objects = render(helm, *words)
        hook = objects["MutatingWebhookConfiguration", "gpuslice-mutate"]["webhooks"][0]
        condition = hook["matchConditions"][0]["expression"]
        assert ("'gpu-fraction'" in condition) is asked
        (container,) = objects["Deployment", "gpuslice-webhook"]["spec"]["template"]["spec"]["containers"]
        assert ({"--accept-kai", "--kai-card-units=80"} <= set(container["args"])) is asked


def test_hamis_annotations_beside_whole_cards_are_sent_to_the_webhook_that_warns_of_them(helm: str) -> None:
    for words, asked in (((), False), (("--set", "webhook.hami.enabled=true"), True)):
        objects = render(helm, "--set", "webhook.enabled=true", *words)
        hook = objects["MutatingWebhookConfiguration", "gpuslice-mutate"]["webhooks"][0]
        condition = hook["matchConditions"][0]["expression"]
        assert [f"'{name}'" in condition for name in hami.ANNOTATIONS] == [asked] * len(hami.ANNOTATIONS)


def test_what_your_own_scheduler_is_told_is_what_the_second_one_has(helm: str) -> None:
    command = [helm, "install", "cgpu", str(CHART), "--dry-run=client", "--namespace", "kube-system", *NAMED]
    command += ["--set", "scheduler.enabled=false"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    section = printed[printed.index("     extenders:") :].partition("\n\n")[0]
    (told,) = yaml.safe_load(section)["extenders"]
    (ours,) = yaml.safe_load(render(helm)["ConfigMap", KUBE_SCHEDULER]["data"]["config.yaml"])["extenders"]
    assert told.pop("urlPrefix") == "https://127.0.0.1:32766/gpushare-scheduler"
    ours.pop("urlPrefix")
    assert told == ours


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
    objects = render(helm, "--set", "nodeLabel=gpushare,runtimeClassName=nvidia")
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
    assert kinds == {"gpushare-device-plugin-ds", "gpushare-device-plugin-ack-ds"}


def test_nvidias_plugin_is_kept_off_by_two_jobs_that_may_change_it_alone(helm: str) -> None:
    assert not [name for _, name in render(helm) if "keep-off" in name]
    objects = render(helm, "--set", "wholeCards.daemonSet=gpu/nvidia-device-plugin")
    (rule,) = objects["Role", "gpuslice-keep-off"]["rules"]
    assert objects["Role", "gpuslice-keep-off"]["metadata"]["namespace"] == "gpu"
    assert (rule["resourceNames"], rule["verbs"]) == (["nvidia-device-plugin"], ["get", "patch"])
    for name, hook, back in (
        ("gpuslice-keep-off", "post-install,post-upgrade,post-rollback", False),
        ("gpuslice-keep-off-back", "pre-delete", True),
    ):
        job = objects["Job", name]
        assert job["metadata"]["annotations"]["helm.sh/hook"] == hook
        (container,) = job["spec"]["template"]["spec"]["containers"]
        parsed = keep_off_command.make_context("keep-off", list(container["args"][1:])).params
        assert (parsed["daemon_set"], parsed["back"] or False) == ("gpu/nvidia-device-plugin", back)


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
    condition, *more = hook["matchConditions"]
    assert [each["name"] for each in more] == ["changes-what-is-read"] * (verb == "validate")
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
        [helm, "template", str(CHART), *NAMED, *settings], capture_output=True, text=True, check=False
    )
    assert "set webhook.certificate.caBundle" in refused.stderr
    objects = render(helm, *settings, "--set", "webhook.certificate.caBundle=QUJD")
    hook = objects["ValidatingWebhookConfiguration", "gpuslice-validate"]["webhooks"][0]
    assert hook["clientConfig"]["caBundle"] == "QUJD"
