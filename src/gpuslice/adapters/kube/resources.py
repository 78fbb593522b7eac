"""Where the kinds of objects live in the API, and how each is decoded.

A kind needs one line here only if several modules speak of it; any other is ``Resource("group/v1", "things",
"Thing", dict)`` on the spot, custom resources included.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from gpuslice.adapters.kube import objects

T = TypeVar("T")
_quoted = lru_cache(maxsize=1024)(quote)  # a pod is written to twice when it is bound


@dataclass(frozen=True, slots=True)
class Resource(Generic[T]):
    """One resource of the API. `type` is what its objects are decoded to: a struct of `objects`, or dict."""

    api_version: str
    plural: str
    kind: str
    type: type[T]
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """The URL path of the collection, or of one object, or of its subresource.

        `namespace` is left empty for all namespaces. ValueError when one object of a namespaced resource is
        meant without saying in which namespace: the server would answer a 404 that explains nothing.
        """
        if self.namespaced and name and not namespace:
            raise ValueError(f"{self.plural} {name}: which namespace?")
        root = "/api/" if "/" not in self.api_version else "/apis/"
        parts = [root + self.api_version]
        if self.namespaced and namespace:
            parts += ["namespaces", _quoted(namespace, "")]
        parts.append(self.plural)
        parts += [_quoted(name, "")] if name else []
        parts += [_quoted(subresource, "/")] if subresource else []
        return "/".join(parts)

    def as_dict(self) -> Resource[dict[str, Any]]:
        """The same resource with objects as plain dicts, for what must be written back whole."""
        return Resource(self.api_version, self.plural, self.kind, dict, self.namespaced)


PODS = Resource("v1", "pods", "Pod", objects.Pod)
NODES = Resource("v1", "nodes", "Node", objects.Node, namespaced=False)
CONFIG_MAPS = Resource("v1", "configmaps", "ConfigMap", objects.ConfigMap)
EVENTS = Resource("v1", "events", "Event", objects.Event)
LEASES = Resource("coordination.k8s.io/v1", "leases", "Lease", objects.Lease)

DICT: type[dict[str, Any]] = dict
NAMESPACES = Resource("v1", "namespaces", "Namespace", DICT, namespaced=False)
SERVICES = Resource("v1", "services", "Service", DICT)
QUOTAS = Resource("v1", "resourcequotas", "ResourceQuota", DICT)
LIMIT_RANGES = Resource("v1", "limitranges", "LimitRange", DICT)
SECRETS = Resource("v1", "secrets", "Secret", DICT)
LIVING = "status.phase!=Succeeded,status.phase!=Failed"
"""Field selector of the pods that have not ended."""
ACCESS_REVIEWS = Resource(
    "authorization.k8s.io/v1", "subjectaccessreviews", "SubjectAccessReview", DICT, namespaced=False
)

# of dynamic resource allocation, GA in Kubernetes 1.34
RESOURCE_CLAIMS = Resource("resource.k8s.io/v1", "resourceclaims", "ResourceClaim", objects.ResourceClaim)
RESOURCE_CLAIM_TEMPLATES = Resource(
    "resource.k8s.io/v1", "resourceclaimtemplates", "ResourceClaimTemplate", DICT
)
RESOURCE_SLICES = Resource("resource.k8s.io/v1", "resourceslices", "ResourceSlice", DICT, namespaced=False)
