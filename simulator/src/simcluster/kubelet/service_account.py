"""A pod's service account: a kubeconfig with its token, as programs here do not see a real pod's folder."""

from __future__ import annotations

import json
from pathlib import Path

from simcluster.cluster.amounts import Object
from simcluster.cluster.users import token_of
from simcluster.kubelet.settings import KubeletSettings


def environment(settings: KubeletSettings, pod: Object, folder: Path) -> dict[str, str]:
    """Writes the file into the pod's `folder`; nothing where the pod wants none or no server is known."""
    spec, metadata = pod["spec"], pod["metadata"]
    if not settings.api_server or spec.get("automountServiceAccountToken") is False:
        return {}
    account = spec.get("serviceAccountName") or "default"
    token = token_of(metadata["namespace"], account, metadata["name"], settings.name, metadata["uid"])
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "pod",
        "clusters": [{"name": "cluster", "cluster": {"server": settings.api_server}}],
        "users": [{"name": "account", "user": {"token": token}}],
        "contexts": [
            {
                "name": "pod",
                "context": {"cluster": "cluster", "user": "account", "namespace": metadata["namespace"]},
            }
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "kubeconfig"
    file.write_text(json.dumps(config))
    return {"KUBECONFIG": str(file)}
