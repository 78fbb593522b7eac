"""Logs, exec, port-forward and proxy: only the kubelet of the pod's node has them."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import quote

from simcluster.cluster.errors import ApiError, Cause, bad_request
from simcluster.cluster.reads import find
from simcluster.cluster.request import Object, Proxy, Request, Response
from simcluster.cluster.route import Target
from simcluster.cluster.store import Store

KUBELET_URL = "sim.gpuslice.io/kubelet-url"
"""Node annotation with the base URL of a simulated kubelet, whose node shows an address of its own."""


def to_kubelet(store: Store, target: Target, request: Request) -> Response:
    """Where to fetch the answer; ApiError 400 while the pod runs nowhere or has no such container."""
    pod = find(store, target).obj
    part = _container(pod, request.query.get("container", "")) if target.subresource != "portforward" else ""
    url = _kubelet_of(store, pod, part)
    verb = {"log": "containerLogs", "exec": "exec", "portforward": "portForward"}[target.subresource]
    path = "/".join(quote(word) for word in (verb, target.namespace, target.name, part) if word)
    return Response(200, proxy=Proxy(f"{url}/{path}", websocket=verb != "containerLogs"))


def to_pod(store: Store, target: Target) -> Response:
    """``pods/NAME:PORT/proxy/PATH``: a page of a program in the pod, whose address its kubelet knows.

    Where the node has no kubelet, the program is one of this machine.
    """
    name, _, port = target.name.partition(":")
    pod = find(store, replace(target, name=name)).obj
    try:
        kubelet = f"{_kubelet_of(store, pod, '')}/podProxy/{target.namespace}/{name}"
    except ApiError:
        return Response(200, proxy=Proxy(f"http://127.0.0.1:{port or 80}/{target.path}"))
    return Response(200, proxy=Proxy(f"{kubelet}/{port or 80}/{quote(target.path)}"))


def _kubelet_of(store: Store, pod: Object, container: str) -> str:
    name, node_name = pod["metadata"]["name"], pod["spec"].get("nodeName")
    if not node_name:
        raise bad_request(f"pod {name} does not have a host assigned")
    node = store.get("nodes", ("", node_name))
    if node is None:
        raise ApiError(404, "NotFound", f'nodes "{node_name}" not found')
    url = (node.obj["metadata"].get("annotations") or {}).get(KUBELET_URL)
    return str(url).rstrip("/") if url else _real_url(node.obj, container)


def _container(pod: Object, wanted: str) -> str:
    spec, name = pod["spec"], pod["metadata"]["name"]
    names = [item["name"] for item in spec.get("containers") or []]
    init = [item["name"] for item in spec.get("initContainers") or []]
    if not wanted:
        if len(names) == 1:
            return str(names[0])
        listed = f"choose one of: [{' '.join(names)}]" + (
            f" or one of the init containers: [{' '.join(init)}]" if init else ""
        )
        raise bad_request(f"a container name must be specified for pod {name}, {listed}")
    if wanted not in names + init + [item["name"] for item in spec.get("ephemeralContainers") or []]:
        raise bad_request(f"container {wanted} is not valid for pod {name}")
    return wanted


def _real_url(node: Object, container: str) -> str:
    status = node.get("status") or {}
    port = ((status.get("daemonEndpoints") or {}).get("kubeletEndpoint") or {}).get("Port")
    address = next((a["address"] for a in status.get("addresses") or [] if a["type"] == "InternalIP"), None)
    if port and address:
        return f"http://{address}:{port}"
    name = node["metadata"]["name"]
    cause = Cause("", "InternalError", f"node {name} tells no kubelet address")
    message = f"no kubelet is known for container {container} on node {name}"
    raise ApiError(500, "InternalError", message, {"causes": [cause.to_dict()]})
