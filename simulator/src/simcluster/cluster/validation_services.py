"""What is wrong with a service."""

from __future__ import annotations

from collections.abc import Iterator

from simcluster.cluster.errors import Cause
from simcluster.cluster.problem import duplicate, invalid_value, required, unsupported
from simcluster.cluster.request import Object

_TYPES = ("ClusterIP", "ExternalName", "LoadBalancer", "NodePort")


def check_service(service: Object) -> Iterator[Cause]:
    spec = service["spec"]
    if spec["type"] not in _TYPES:
        yield unsupported("spec.type", spec["type"], _TYPES)
    ports = spec.get("ports") or []
    if not ports and spec["type"] != "ExternalName" and spec.get("clusterIP") != "None":
        yield required("spec.ports")
    seen: set[tuple[object, object]] = set()
    for index, port in enumerate(ports):
        where = f"spec.ports[{index}]"
        if not port.get("name") and len(ports) > 1:
            yield required(f"{where}.name")
        if not 0 < port.get("port", 0) < 65536:
            yield invalid_value(
                f"{where}.port", port.get("port", 0), "must be between 1 and 65535, inclusive"
            )
        if port.get("nodePort") and not 30000 <= port["nodePort"] <= 32767:
            text = "provided port is not in the valid range. The range of valid ports is 30000-32767"
            yield invalid_value(f"{where}.nodePort", port["nodePort"], text)
        identity = (port.get("port"), port.get("protocol"))
        if identity in seen:
            yield duplicate(where, port)
        seen.add(identity)


def check_service_update(old: Object, new: Object) -> Iterator[Cause]:
    held, wanted = old["spec"].get("clusterIP"), new["spec"].get("clusterIP")
    if held and held != wanted and "ExternalName" not in (old["spec"]["type"], new["spec"]["type"]):
        yield invalid_value("spec.clusterIPs[0]", wanted or [], "may not change once set")
