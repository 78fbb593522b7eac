"""A container's environment: the plugins' variables first, then the pod's own, which win.

Kubernetes 1.36 appends the pod's variables to those of the device plugins, so a pod can override them; the
expansion of ``$(NAME)`` sees only what the pod itself defines.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Mapping
from typing import Any

from simcluster.cluster.amounts import Object, amounts_of

_REFERENCE = re.compile(r"\$(\$|\(([A-Za-z_.-][A-Za-z0-9_.-]*)\))")


class ConfigError(Exception):
    """A variable cannot be resolved: the container waits with CreateContainerConfigError."""


ReadData = Callable[[str, str], Mapping[str, str] | None]
"""(kind, name) → the data of a ConfigMap or, decoded, of a Secret of the pod's namespace; None if missing."""


def environment(
    pod: Object,
    container: Object,
    plugin_env: Mapping[str, str],
    read: ReadData,
    *,
    host_ip: str,
    pod_ip: str,
) -> dict[str, str]:
    """Raises ConfigError, naming what is missing."""
    fields = _fields(pod, host_ip, pod_ip)
    own: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        kind = "configmap" if "configMapRef" in source else "secret"
        reference = source["configMapRef" if kind == "configmap" else "secretRef"]
        data = read(kind, reference["name"])
        if data is None and not reference.get("optional"):
            raise ConfigError(f'{kind} "{reference["name"]}" not found')
        own.update([(source.get("prefix", "") + key, value) for key, value in (data or {}).items()])
    for variable in container.get("env") or ():
        value = _value(variable, container, fields, read)
        if value is not None:
            own[variable["name"]] = expand(value, own)
    return {"HOSTNAME": pod["metadata"]["name"], **plugin_env, **own}


def expand(text: str, values: Mapping[str, str]) -> str:
    """Kubernetes' ``$(NAME)``; ``$$`` is one dollar and an unknown name stays as it is."""

    def one(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return values.get(match[2], match[0])

    return _REFERENCE.sub(one, text)


def _value(
    variable: Mapping[str, Any], container: Object, fields: Mapping[str, str], read: ReadData
) -> str | None:
    source = variable.get("valueFrom")
    if not source:
        return variable.get("value") or ""
    if "fieldRef" in source:
        return field(source["fieldRef"]["fieldPath"], fields)
    if "resourceFieldRef" in source:
        asked = source["resourceFieldRef"]
        part, _, name = asked["resource"].partition(".")
        amount = amounts_of((container.get("resources") or {}).get(part)).get(name, 0)
        divisor = amounts_of({name: asked.get("divisor") or "1"})[name] or 1
        return str(-(-amount // divisor))  # whole units of it, rounded up
    kind = "configmap" if "configMapKeyRef" in source else "secret"
    reference = source["configMapKeyRef" if kind == "configmap" else "secretKeyRef"]
    data = read(kind, reference["name"])
    if data is not None and reference["key"] in data:
        return data[reference["key"]]
    if reference.get("optional"):
        return None
    if data is None:
        raise ConfigError(f'{kind} "{reference["name"]}" not found')
    raise ConfigError(f"couldn't find key {reference['key']} in {kind.capitalize()} {reference['name']}")


def field(path: str, fields: Mapping[str, str]) -> str:
    """The downward API's value at `path`; a missing label or annotation is empty."""
    if path in fields:
        return fields[path]
    if path.startswith(("metadata.labels[", "metadata.annotations[")):
        return ""
    raise ConfigError(f"unsupported fieldPath: {path}")


def downward_fields(pod: Object) -> dict[str, str]:
    """Fields that do not need the node's or pod's address."""
    return _fields(pod, "", "")


def _fields(pod: Object, host_ip: str, pod_ip: str) -> dict[str, str]:
    metadata, spec = pod["metadata"], pod["spec"]
    maps = {
        f"metadata.{kind}['{key}']": value
        for kind in ("labels", "annotations")
        for key, value in (metadata.get(kind) or {}).items()
    }
    return maps | {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", ""),
        "status.hostIP": host_ip,
        "status.podIP": pod_ip,
        "status.podIPs": pod_ip,
    }


def decode_secret(document: Object) -> dict[str, str]:
    return {
        key: base64.b64decode(value).decode(errors="replace")
        for key, value in (document.get("data") or {}).items()
    }
