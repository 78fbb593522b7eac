"""What is served: ``/version``, group and resource lists, and their aggregated form."""

from __future__ import annotations

from simcluster.cluster.request import JSON, Object, Request, Response, json_response
from simcluster.cluster.resources import Catalog, Resource

VERSION: Object = {
    "major": "1",
    "minor": "36",
    "gitVersion": "v1.36.2",
    "gitCommit": "simulated",
    "gitTreeState": "clean",
    "buildDate": "2026-06-01T00:00:00Z",
    "goVersion": "go1.26",
    "compiler": "gc",
    "platform": "linux/amd64",
}

_AGGREGATED = f"{JSON};g=apidiscovery.k8s.io;v={{version}};as=APIGroupDiscoveryList"
_PARTS = {  # subresource -> (group, version, kind, verbs)
    "status": ("", "", "", ["get", "patch", "update"]),
    "scale": ("autoscaling", "v1", "Scale", ["get", "patch", "update"]),
    "binding": ("", "v1", "Binding", ["create"]),
    "eviction": ("policy", "v1", "Eviction", ["create"]),
    "exec": ("", "v1", "PodExecOptions", ["create", "get"]),
    "portforward": ("", "v1", "PodPortForwardOptions", ["create", "get"]),
    "proxy": ("", "v1", "PodProxyOptions", ["get"]),
    "log": ("", "", "", ["get"]),
    "finalize": ("", "", "", ["update"]),
    "token": ("authentication.k8s.io", "v1", "TokenRequest", ["create"]),
    "ephemeralcontainers": ("", "", "", ["get", "patch", "update"]),
    "resize": ("", "", "", ["get", "patch", "update"]),
}


def api_versions() -> Response:
    addresses = [{"clientCIDR": "0.0.0.0/0", "serverAddress": "127.0.0.1"}]
    return json_response({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": addresses})


def group_list(catalog: Catalog) -> Response:
    groups = [_group(group, version) for group, version in catalog.group_versions() if group]
    return json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})


def _group(group: str, version: str) -> Object:
    entry = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [entry], "preferredVersion": entry}


def one_group(catalog: Catalog, group: str) -> Response | None:
    found = [version for name, version in catalog.group_versions() if name == group]
    if not found:
        return None
    return json_response({"kind": "APIGroup", "apiVersion": "v1"} | _group(group, found[0]))


def resource_list(catalog: Catalog, group: str, version: str) -> Response | None:
    found = catalog.of(group, version)
    if not found:
        return None
    rows = [row for resource in found for row in _rows(resource)]
    group_version = f"{group}/{version}" if group else version
    return json_response(
        {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": rows}
    )


def _rows(resource: Resource) -> list[Object]:
    own: Object = {
        "name": resource.plural,
        "singularName": resource.singular,
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": list(resource.verbs),
    }
    if resource.short_names:
        own["shortNames"] = list(resource.short_names)
    if resource.categories:
        own["categories"] = list(resource.categories)
    rows = [own]
    for part in resource.subresources:
        group, version, kind, verbs = _PARTS[part]
        row: Object = {
            "name": f"{resource.plural}/{part}",
            "singularName": "",
            "namespaced": resource.namespaced,
            "kind": kind or resource.kind,
            "verbs": verbs,
        }
        rows.append(row | ({"group": group, "version": version} if kind and version and group else {}))
    return rows


def wants_aggregated(request: Request) -> str:
    """The version of the aggregated form that is wanted, or an empty string."""
    for option in request.accept.split(","):
        if "as=APIGroupDiscoveryList" in option:
            return "v2" if "v=v2;" in option or option.endswith("v=v2") else "v2beta1"
    return ""


def aggregated(catalog: Catalog, core: bool, version: str) -> Response:
    """All groups with all resources at once: of ``/api`` (core) or of ``/apis``."""
    groups = []
    for group, number in catalog.group_versions():
        if (group == "") is core:
            rows = [_aggregated_resource(resource) for resource in catalog.of(group, number)]
            metadata: Object = {"creationTimestamp": None}
            if group:
                metadata["name"] = group
            groups.append(
                {
                    "metadata": metadata,
                    "versions": [{"version": number, "resources": rows, "freshness": "Current"}],
                }
            )
    body = {
        "kind": "APIGroupDiscoveryList",
        "apiVersion": f"apidiscovery.k8s.io/{version}",
        "metadata": {},
        "items": groups,
    }
    return json_response(body, content_type=_AGGREGATED.format(version=version))


def _aggregated_resource(resource: Resource) -> Object:
    row: Object = {
        "resource": resource.plural,
        "responseKind": _kind(resource.group, resource.version, resource.kind),
        "scope": "Namespaced" if resource.namespaced else "Cluster",
        "singularResource": resource.singular,
        "verbs": list(resource.verbs),
    }
    if resource.short_names:
        row["shortNames"] = list(resource.short_names)
    if resource.categories:
        row["categories"] = list(resource.categories)
    parts = []
    for part in resource.subresources:
        group, version, kind, verbs = _PARTS[part]
        kind_of_part = _kind(group, version, kind) if kind else row["responseKind"]
        parts.append({"subresource": part, "responseKind": kind_of_part, "verbs": verbs})
    return row | ({"subresources": parts} if parts else {})


def _kind(group: str, version: str, kind: str) -> Object:
    return {"group": group, "version": version, "kind": kind}
