"""Mutual TLS between kube-scheduler and the extender, as the chart sets it up."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509

from gpuslice.apps.extender.command import command as extender_command
from tests.chart import CHART, EVERYTHING, KUBE_SCHEDULER, NAMED, printed, render


def extender_of(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    """Of the extender: what its container is told, its Service, and how it is spoken to."""
    extender = objects["Deployment", "gpushare-schd-extender"]["spec"]["template"]["spec"]["containers"][0]
    config = yaml.safe_load(objects["ConfigMap", KUBE_SCHEDULER]["data"]["config.yaml"])
    parsed = extender_command.make_context("extender", list(extender["args"][1:])).params
    return {
        "arguments": parsed,
        "probe": extender["readinessProbe"]["httpGet"]["scheme"],
        "section": config["extenders"][0],
        "service": objects["Service", "gpushare-schd-extender"]["spec"],
    }


def certificate_of(secret: dict[str, Any]) -> x509.Certificate:
    return x509.load_pem_x509_certificate(base64.b64decode(secret["data"]["tls.crt"]))


def test_kube_scheduler_and_extender_show_each_other_certificates_of_one_authority(helm: str) -> None:
    objects = render(helm)
    server, client = (objects["Secret", f"gpushare-schd-extender-{each}"] for each in ("tls", "client"))
    assert server["data"]["ca.crt"] == client["data"]["ca.crt"]
    authority = x509.load_pem_x509_certificate(base64.b64decode(server["data"]["ca.crt"]))
    for each in (server, client):
        certificate_of(each).verify_directly_issued_by(authority)
    found = extender_of(objects)
    names = certificate_of(server).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [found["section"]["tlsConfig"]["serverName"]]
    (shown,) = certificate_of(client).subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
    assert found["arguments"]["tls_client_names"] == shown.value
    assert found["section"]["enableHTTPS"] is True
    assert found["probe"] == "HTTPS"
    for kind, mount in (("gpushare-schd-extender", "/etc/gpuslice/tls"), (KUBE_SCHEDULER, "gpuslice-tls")):
        pod = objects["Deployment", kind]["spec"]["template"]["spec"]
        (mounted,) = [each for each in pod["containers"][0]["volumeMounts"] if mount in each["mountPath"]]
        (volume,) = [each for each in pod["volumes"] if each["name"] == mounted["name"]]
        assert ("Secret", volume["secret"]["secretName"]) in objects
    files = {Path(found["section"]["tlsConfig"][each]).name for each in ("caFile", "certFile", "keyFile")}
    assert files == client["data"].keys()


def test_a_new_authority_starts_both_sides_anew(helm: str) -> None:
    """kube-scheduler reads the authority at its start alone; each rendering without a cluster makes one."""
    first = render(helm)
    printed.cache_clear()
    second = render(helm)
    for name in ("gpushare-schd-extender", KUBE_SCHEDULER):
        annotations = [
            each["Deployment", name]["spec"]["template"]["metadata"]["annotations"]
            for each in (first, second)
        ]
        assert annotations[0] != annotations[1]


def test_cert_manager_may_make_and_renew_what_the_extender_and_kube_scheduler_show(helm: str) -> None:
    objects = render(helm, "--set", "extender.certificate.source=cert-manager")
    names = {"gpushare-schd-extender-tls": "server auth", "gpushare-schd-extender-client": "client auth"}
    for name, usage in names.items():
        spec = objects["Certificate", name]["spec"]
        assert (spec["secretName"], spec["usages"][-1]) == (name, usage)
        assert spec["issuerRef"] == {"kind": "Issuer", "name": "gpushare-schd-extender"}
        assert len(spec["dnsNames"]) == 1
        assert "commonName" not in spec  # cert-manager takes 64 characters, and a namespace may have 63
        assert ("Secret", name) not in objects
    assert (
        objects["Issuer", "gpushare-schd-extender"]["spec"]["ca"]["secretName"]
        == "gpushare-schd-extender-root"
    )
    others = render(
        helm, "--set", "extender.certificate.source=cert-manager,extender.certificate.issuerName=company",
        "--set", "extender.certificate.issuerKind=ClusterIssuer",
    )  # fmt: skip
    company = {"kind": "ClusterIssuer", "name": "company"}
    assert {others["Certificate", name]["spec"]["issuerRef"] == company for name in names} == {True}
    assert not any(kind == "Issuer" and "extender" in name for kind, name in others)


def test_without_certificates_of_helm_each_rendering_is_the_same(helm: str) -> None:
    """Or a tool that renders without asking the cluster, as Argo CD does, would never come to rest."""
    sources = "webhook.certificate.source=cert-manager,extender.certificate.source=cert-manager"
    command = (helm, "template", "cgpu", str(CHART), *NAMED, "--set", f"{EVERYTHING},{sources}")
    first, second = (subprocess.run(command, capture_output=True, check=True).stdout for _ in range(2))
    assert first == second
    assert b"kind: Certificate" in first


def test_plain_http_is_a_value_that_the_notes_warn_of(helm: str) -> None:
    plain = ("--set", "extender.certificate.source=none")
    objects = render(helm, *plain)
    found = extender_of(objects)
    assert found["arguments"]["tls_client_ca"] is None
    assert (found["section"]["enableHTTPS"], found["section"].get("tlsConfig")) == (False, None)
    assert found["section"]["urlPrefix"].startswith("http://")
    assert found["probe"] == "HTTP"
    assert not any(kind == "Secret" and "extender" in name for kind, name in objects)
    told = {}
    for name, values in {"plain": plain, "default": ()}.items():
        command = [helm, "install", "cgpu", str(CHART), "--dry-run=client", *NAMED, *values]
        told[name] = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "WARNING: extender.certificate.source is none" in told["plain"]
    assert "WARNING" not in told["default"].partition("NOTES")[2]


def test_the_extender_may_be_kept_within_the_cluster(helm: str) -> None:
    service = extender_of(render(helm, "--set", "extender.service.type=ClusterIP"))["service"]
    assert service["type"] == "ClusterIP"
    assert not any("nodePort" in port for port in service["ports"])


def test_prometheus_shows_the_extender_kube_schedulers_certificate(helm: str) -> None:
    objects = render(helm, "--set", "monitoring.componentMonitors.enabled=true,extender.anonymous={inspect}")
    assert extender_of(objects)["arguments"]["anonymous"] == "inspect"
    (endpoint,) = objects["PodMonitor", "gpushare-schd-extender"]["spec"]["podMetricsEndpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["cert"]["secret"]["name"] == "gpushare-schd-extender-client"
