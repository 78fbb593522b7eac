"""`helm test`: gpuslice doctor as the chart runs it, with rights that come and go."""

from __future__ import annotations

from urllib.parse import urlsplit

from gpuslice.apps.cli.doctor import command as doctor_command
from tests.chart import EVERYTHING, render


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


def test_helm_test_trusts_the_authority_that_kube_scheduler_trusts_and_sees_no_key(helm: str) -> None:
    """The extender is no webhook, so the API server does not tell whose certificate it shows."""
    objects = render(
        helm, "--set", "extender.certificate.clientSecret=ours,extender.certificate.source=secret"
    )
    pod = objects["Pod", "gpuslice-test"]["spec"]
    (container,) = pod["containers"]
    (file,) = [each["value"] for each in container["env"] if each["name"] == "SSL_CERT_FILE"]
    (mount,) = [each for each in container["volumeMounts"] if file.startswith(each["mountPath"] + "/")]
    (volume,) = [each for each in pod["volumes"] if each["name"] == mount["name"]]
    assert volume["secret"] == {
        "secretName": "ours",
        "items": [{"key": "ca.crt", "path": file.rpartition("/")[2]}],
    }
    plain = render(helm, "--set", "extender.certificate.source=none")["Pod", "gpuslice-test"]["spec"]
    assert "SSL_CERT_FILE" not in {each["name"] for each in plain["containers"][0]["env"]}


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
    verbs = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    asks = ("subjectaccessreviews", "create")  # a question, which keeps nothing
    assert {verb for _, verb in verbs - {asks}} == {"list"}
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
