"""The admission webhook as a pod of the simulated cluster, as `helm install` would add it."""

from __future__ import annotations

import base64
from typing import Any

import trustme
import yaml

from gpuslice.core.contract import LABEL_CLAIMS, SYSTEM_NAMESPACE
from gpuslice_demo.install import IMAGE

NAME = "gpuslice-webhook"
_LABELS = {"app": "gpushare", "component": NAME}


def webhook_manifests(port: int) -> str:
    """The manifest; the API server reaches the webhook at `port` of this machine."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    files = {"tls.crt": issued.cert_chain_pems[0].bytes(), "tls.key": issued.private_key_pem.bytes()}
    about = {"name": NAME, "namespace": SYSTEM_NAMESPACE}
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": about,
        "type": "kubernetes.io/tls",
        "data": {name: base64.b64encode(data).decode() for name, data in files.items()},
    }
    container = {
        "name": "webhook",
        "image": IMAGE,
        "args": [
            "webhook",
            "--host=127.0.0.1",
            f"--port={port}",
            "--tls-certificate=/etc/gpuslice/tls/tls.crt",
            "--tls-key=/etc/gpuslice/tls/tls.key",
        ],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": port, "scheme": "HTTPS"}},
        "volumeMounts": [{"name": "tls", "mountPath": "/etc/gpuslice/tls", "readOnly": True}],
    }
    spec = {
        "hostNetwork": True,
        "containers": [container],
        "volumes": [{"name": "tls", "secret": {"secretName": NAME}}],
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": about,
        "spec": {
            "selector": {"matchLabels": _LABELS},
            "template": {"metadata": {"labels": _LABELS}, "spec": spec},
        },
    }
    bundle = base64.b64encode(authority.cert_pem.bytes()).decode()
    claim = _hook("claim", ["CREATE"], port, bundle)  # first: only what it keeps of a pod matters to others
    claim["namespaceSelector"]["matchExpressions"].append(
        {"key": LABEL_CLAIMS, "operator": "In", "values": ["true"]}
    )
    mutate = _hook("mutate", ["CREATE"], port, bundle)
    validate = _hook("validate", ["CREATE", "UPDATE"], port, bundle)
    hooks = [
        _configuration("mutate", "MutatingWebhookConfiguration", [claim, mutate]),
        _configuration("validate", "ValidatingWebhookConfiguration", [validate]),
    ]
    return yaml.safe_dump_all([secret, deployment, *hooks], sort_keys=False)


def _hook(verb: str, operations: list[str], port: int, bundle: str) -> dict[str, Any]:
    return {
        "name": f"{verb}.gpuslice.io",
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "timeoutSeconds": 5,
        "failurePolicy": "Ignore",
        "clientConfig": {"url": f"https://127.0.0.1:{port}/{verb}", "caBundle": bundle},
        "rules": [
            {
                "apiGroups": [""],
                "apiVersions": ["v1"],
                "resources": ["pods"],
                "scope": "Namespaced",
                "operations": operations,
            }
        ],
        "namespaceSelector": {
            "matchExpressions": [
                {"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": [SYSTEM_NAMESPACE]}
            ]
        },
    }


def _configuration(verb: str, kind: str, hooks: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": kind,
        "metadata": {"name": f"gpuslice-{verb}"},
        "webhooks": hooks,
    }
