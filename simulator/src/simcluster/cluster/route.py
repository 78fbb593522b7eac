"""A path into what it addresses: group, version, resource, namespace, name and subresource."""

from __future__ import annotations

from dataclasses import dataclass

from simcluster.cluster.errors import no_such_path
from simcluster.cluster.resources import Catalog, Resource


@dataclass(frozen=True, slots=True)
class Target:
    """One resource (``name`` empty for a collection)."""

    resource: Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""
    path: str = ""  # behind ``/proxy/``


def parse_target(catalog: Catalog, path: str) -> Target:
    """What ``/api/v1/…`` or ``/apis/GROUP/VERSION/…`` addresses; ApiError 404 if nothing does."""
    parts = [part for part in path.split("/") if part]
    if parts[0] == "api" and len(parts) >= 3:
        return _target(catalog, "", parts[1], parts[2:])
    if parts[0] == "apis" and len(parts) >= 4:
        return _target(catalog, parts[1], parts[2], parts[3:])
    raise no_such_path()


def _target(catalog: Catalog, group: str, version: str, rest: list[str]) -> Target:
    namespace = ""
    if rest[0] == "namespaces" and len(rest) >= 3 and catalog.find(group, version, rest[2]) is not None:
        namespace, rest = rest[1], rest[2:]
    resource = catalog.find(group, version, rest[0])
    if resource is None or (namespace and not resource.namespaced):
        raise no_such_path()
    if len(rest) > 3 and rest[2] != "proxy":
        raise no_such_path()
    name, subresource = [*rest[1:3], "", ""][:2]
    target = Target(resource, namespace, name, subresource, "/".join(rest[3:]))
    if target.subresource and target.subresource not in resource.subresources:
        raise no_such_path()
    return target
